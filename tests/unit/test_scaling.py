"""The tables that recorded runs fill: time over numbers of GPUs, and all models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsparkgen import evidence, models_page, scaling
from dsparkgen.device import load_devices
from dsparkgen.plan import plan_model
from dsparkgen.spec import read_specs

ROOT = Path(__file__).parents[2]
NOW = "a" * 12
V, N, HOP_US = 1600, 5, 0.9


def row(world: int, us: float, *, vocab: int = V, rows: int = 1, **more: Any) -> dict[str, Any]:
    shape = {"kernel": "chain", "vocab_size": vocab, "num_steps": N, "rank_dim": 256, "tp": world, "rows": rows}
    return shape | {"us": us, "call_us": us + 4, "eager_us": 10 * us, "floor_us": us / 2, "inputs": NOW} | more


SHARDS = [row(1, 46.0), row(1, 26.0, vocab=800), row(1, 19.0, vocab=400), row(1, 16.0, vocab=200)]
OVER_TWO = row(2, 34.0, shard_us=26.0, exchange_us=5.0, tail_us=3.0)
EMULATED = row(4, 60.0, emulated=True)


def found(rows: list[dict[str, Any]]) -> dict[tuple[str, str], scaling.Line]:
    return {(line.ranks, line.how): line for line in scaling.Scaling(V, N, HOP_US, rows).lines()}


def test_predictions_are_the_sum_of_recorded_parts() -> None:
    lines = found([*SHARDS, OVER_TWO, EMULATED])
    assert list(lines) == [
        ("1", "measured"),
        ("2", "measured"),
        ("4", "emulated"),
        ("4", "predicted"),
        ("8", "predicted"),
        ("16", "predicted"),
        ("16 on two hosts of one NVLink domain", "predicted"),
    ]
    # The tail moves 1 - 1/W of the columns, where the recorded one moved a half. Four ranks exchange in two stages.
    assert lines["4", "predicted"].us[1] == pytest.approx(19.0 + 5.0 + 0.7 + 3.0 * 0.75 / 0.5)
    # The shard of 16 ranks, 100 columns, lies on the line through those of 200 and 400.
    sixteen = (16.0 - 100 * 3.0 / 200) + 5.0 + 0.7 + 3.0 * (15 / 16) / 0.5
    assert lines["16", "predicted"].us[1] == pytest.approx(sixteen)
    assert lines["16 on two hosts of one NVLink domain", "predicted"].us[1] == pytest.approx(sixteen + N * HOP_US)
    assert lines["2", "measured"].us == {1: 34.0, 8: None} and lines["4", "emulated"].floor_us[1] == 30.0


def test_predictions_are_for_the_host_of_the_run_over_ranks() -> None:
    """Whose shard alone took a tenth longer than the same shard on the host of the runs on one GPU."""
    slower = row(2, 36.6, shard_us=28.6, exchange_us=5.0, tail_us=3.0, nccl_us=99.0)
    recorded = scaling.Scaling(V, N, HOP_US, [*SHARDS, slower])
    assert recorded.host_factor(1) == pytest.approx(1.1) and recorded.host_factor(8) is None
    # Its own run is the sum of its parts: nothing was lost on the way to other numbers of ranks.
    assert recorded.predicted_us(2, 1) == pytest.approx(36.6)
    assert recorded.predicted_us(4, 1) == pytest.approx(1.1 * 19.0 + 5.0 + 0.7 + 3.0 * 0.75 / 0.5)
    lines = {(line.ranks, line.how): line for line in recorded.lines()}
    assumed = lines["4", "predicted"].assumes
    assert "1.10 times as long as recorded, as on the host of the run over 2 GPUs" in assumed
    assert "+0.7 us for one in two stages" in assumed and lines["8", "predicted"].assumes == "as for 4"
    assert lines["2", "measured"].nccl_us[1] == 99.0 and lines["4", "predicted"].nccl_us[1] is None
    # Without the same shard on one GPU nothing tells how the hosts compare.
    others = [entry for entry in SHARDS if entry["vocab_size"] != 800]
    assert scaling.Scaling(V, N, HOP_US, [*others, slower]).predicted_us(4, 1) is None


def test_two_stages_count_by_rows_and_positions_and_only_over_a_direct_run() -> None:
    eight = [entry | {"rows": 8} for entry in (*SHARDS, OVER_TWO)]
    assert scaling.Scaling(V, N, HOP_US, eight).predicted_us(4, 8) == pytest.approx(19.0 + 5.0 - 0.8 + 4.5)
    ten = [entry | {"num_steps": 2 * N} for entry in (*SHARDS, OVER_TWO)]
    assert scaling.Scaling(V, 2 * N, HOP_US, ten).predicted_us(4, 1) == pytest.approx(19.0 + 5.0 + 1.4 + 4.5)
    four = row(4, 30.0, shard_us=19.0, exchange_us=6.0, tail_us=4.5)
    said = [line.assumes for line in scaling.Scaling(V, N, HOP_US, [*SHARDS, four]).lines() if line.how == "predicted"]
    assert said and not any("two stages" in text for text in said)


def test_a_run_over_ranks_that_nobody_verified_is_called_a_timing(tmp_path: Path) -> None:
    kernels = {"toy/chain": {"inputs": NOW, "earlier": ["b" * 12]}}
    rows = [*SHARDS, OVER_TWO, EMULATED, row(8, 20.0)]
    lines = list(scaling.Scaling(V, N, HOP_US, rows).lines())

    def verify(device: str, inputs: str = NOW, **ranks: Any) -> str:
        entry = {"kernel": "chain", "arch": "sm_90a", "inputs": inputs, "checks": {}} | ranks
        evidence.record(tmp_path, device, "toy", "verify toy", verified=[entry])
        return "".join(scaling.unverified(lines, tmp_path, "h200", "toy", kernels))

    assert verify("h200", tp=2, inputs="b" * 12).endswith("numbers of GPUs: 1, 2, 4 emulated, 8.\n")
    assert verify("h200").endswith(": 2, 4 emulated, 8.\n")
    assert verify("h200", tp=4).endswith(": 2, 4 emulated, 8.\n")  # four GPUs say nothing of four emulated ranks
    assert verify("h200", tp=4, emulated=True).endswith(": 2, 8.\n")
    assert verify("h200-x8", tp=8).endswith(": 2.\n")
    assert verify("h200", tp=2) == ""


def test_a_real_run_takes_the_place_of_a_prediction_and_feeds_the_others() -> None:
    four = row(4, 30.0, shard_us=19.0, exchange_us=6.0, tail_us=4.5)
    lines = found([*SHARDS, OVER_TWO, four])
    assert ("4", "predicted") not in lines and lines["4", "measured"].us[1] == 30.0
    assert lines["8", "predicted"].us[1] == pytest.approx(16.0 + 6.0 + 4.5 * 0.875 / 0.75)


def test_nothing_is_predicted_from_nothing() -> None:
    assert list(found([])) == []
    assert list(found([row(1, 46.0)])) == [("1", "measured")]
    # Without the parts of a run over ranks there is nothing to add to the shards.
    assert list(found([*SHARDS, EMULATED])) == [("1", "measured"), ("4", "emulated")]
    text = "".join(scaling.table(list(scaling.Scaling(V, N, HOP_US, [row(1, 46.0)]).lines())))
    header, rule, line = text.splitlines()
    assert line.startswith("| 1 | measured | 46.0 | 23.0 | 460.0 | - | - | - |")
    assert header.count("|") == rule.count("|") == line.count("|")


def test_runs_of_one_kind_of_gpu_count_whatever_their_number(tmp_path: Path) -> None:
    kernels = {"toy/chain": {"inputs": NOW, "earlier": []}}
    for device, world in (("h200", 2), ("h200-x4", 4), ("h200-x8", 8), ("h200nvl", 2), ("b200", 2)):
        evidence.record(tmp_path, device, "toy", "bench toy", rows=[row(world, 30.0)])
    stale = row(2, 1.0, rows=8) | {"inputs": "b" * 12}
    evidence.record(tmp_path, "h200", "toy", "bench toy", rows=[stale])
    rows = scaling.recorded(tmp_path, "h200", "toy", kernels)
    assert [(entry["tp"], entry["us"]) for entry in rows] == [(2, 30.0), (4, 30.0), (8, 30.0)]


def test_every_model_has_a_line_with_its_residency_and_its_own_timings() -> None:
    devices = load_devices(ROOT)
    plans = [plan_model(spec, devices) for spec in read_specs(ROOT / "specs").values()]
    own = row(1, 46.0, vocab=129280)
    rows = {
        "deepseek_v41": [row(1, 1.0, vocab=64640), row(2, 2.0, vocab=129280), own, row(1, 60.0, vocab=129280, rows=8)]
    }
    header, rule, *lines = models_page.models_table(plans, "h200", rows)
    assert header.count("|") == rule.count("|") == lines[0].count("|") and len(lines) == len(plans)
    (line,) = [line for line in lines if line.startswith("| deepseek_v41 |")]
    assert (
        "| 46.0 | 10.0 | 50.0 | 9.2 | 60.0 | 10.0 | 64.0 | 9.4 | [svg]" in line and "| 129280 | 256 | 5 | 66 |" in line
    )
    assert line.endswith("(../benchmarks/results/h200/deepseek_v41.svg) |\n")
    assert all(other.endswith("| - | - |\n") for other in lines if other != line)
    plan = next(plan for plan in plans if plan.spec.model.name == "deepseek_v41")
    tiles = sum(map(int, models_page.where(plan, "h200", 1).split(" + ")))
    assert tiles == plan.line("h200", 1, 1).tiles and models_page.where(plan, "h200", 3) == "-"


def test_models_below_the_targets_are_named() -> None:
    """A head of 66 MB is to be drawn in 1 / 3.5 of the engine's time, one of 134 MB in 1 / 2.1."""
    specs = list(read_specs(ROOT / "specs").values())

    def of(ratio: float, **more: Any) -> dict[str, Any]:
        return row(1, 10.0, vocab=129280) | {"eager_us": 10.0 * ratio} | more

    def said(small: float, large: float) -> str:
        wide = of(large, vocab_size=262144, num_steps=7)
        rows = {"deepseek_v41": [of(small), of(1.0, rows=8), of(1.0, vocab_size=64640)], "gemma4_12b": [wide]}
        return "".join(models_page.misses(specs, rows))

    assert f"2 of {len(specs)} models are recorded; none of them is below that." in said(3.5, 2.1)
    assert said(3.49, 2.09).endswith("below that: deepseek_v41 (3.49 of 3.5), gemma4_12b (2.09 of 2.1).\n")
    assert said(2.2, 2.2).endswith("below that: deepseek_v41 (2.20 of 3.5).\n")
    assert "at most 80 MB, 2.1 times where it is larger" in said(4.0, 4.0)
    assert "".join(models_page.misses(specs, {})) == ""


def test_a_batch_shows_the_kernel_that_it_takes() -> None:
    step = row(1, 90.0, rows=8) | {"kernel": "step", "gemm_us": 45.0, "call_us": 90.0, "fused_us": 180.0}
    assert list(models_page._timing([step], 8)) == ["90.0 (step)", "10.0"] * 2
    assert list(models_page._timing([step, row(1, 60.0, rows=8)], 8)) == ["60.0", "10.0", "64.0", "9.4"]
    assert list(models_page._timing([step], 1)) == ["-"] * 4
    *_, line = models_page.step_table({"toy": [step]})
    assert line == "| toy | 8 | 90 | 45 | 50% | 45 | 900 | 10.00 | - | - | 180 | 2.00 |\n"
    header, _, line = "".join(models_page.step_table({"toy": [step | {"plain_us": 450.0}]})).splitlines()
    assert line.count("|") == header.count("|") and "| 450 | 5.00 |" in line
    assert list(models_page.step_table({"toy": [row(1, 60.0)]})) == []


def test_pages_are_current() -> None:
    from dsparkgen import readme

    assert json.loads((ROOT / "generated" / "MANIFEST.json").read_text())["kernels"]
    for name, parts in readme.PAGES.items():
        text = (ROOT / name).read_text()
        assert text == readme.fill(text, ROOT, parts), f"{name}: run `make docs`"
