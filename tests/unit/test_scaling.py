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
V, N = 1600, 5


def row(world: int, us: float, *, vocab: int = V, rows: int = 1, **more: Any) -> dict[str, Any]:
    shape = {"kernel": "chain", "vocab_size": vocab, "num_steps": N, "rank_dim": 256, "tp": world, "rows": rows}
    return shape | {"us": us, "call_us": us + 4, "eager_us": 10 * us, "floor_us": us / 2, "inputs": NOW} | more


SHARDS = [row(1, 46.0), row(1, 26.0, vocab=800), row(1, 19.0, vocab=400), row(1, 16.0, vocab=200)]
OVER_TWO = row(2, 34.0, shard_us=26.0, exchange_us=5.0, tail_us=3.0)
EMULATED = row(4, 60.0, emulated=True)


def found(rows: list[dict[str, Any]]) -> dict[tuple[str, str], scaling.Line]:
    return {(line.ranks, line.how): line for line in scaling.Scaling(V, N, rows).lines()}


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
    # The tail moves 1 - 1/W of the columns, where the recorded one moved a half.
    assert lines["4", "predicted"].us[1] == pytest.approx(19.0 + 5.0 + 3.0 * 0.75 / 0.5)
    # The shard of 16 ranks, 100 columns, lies on the line through those of 200 and 400.
    sixteen = (16.0 - 100 * 3.0 / 200) + 5.0 + 3.0 * (15 / 16) / 0.5
    assert lines["16", "predicted"].us[1] == pytest.approx(sixteen)
    assert lines["16 on two hosts of one NVLink domain", "predicted"].us[1] == pytest.approx(sixteen + N * 0.7)
    assert lines["2", "measured"].us == {1: 34.0, 8: None} and lines["4", "emulated"].floor_us[1] == 30.0


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
    text = "".join(scaling.table(list(scaling.Scaling(V, N, [row(1, 46.0)]).lines())))
    assert "| 1 | measured | 46.0 | 23.0 | 460.0 | - | - | - |" in text


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
        line.endswith("| 46.0 | 10.0 | 50.0 | 9.2 | 60.0 | 10.0 | 64.0 | 9.4 |\n")
        and "| 129280 | 256 | 5 | 66 |" in line
    )
    plan = next(plan for plan in plans if plan.spec.model.name == "deepseek_v41")
    tiles = sum(map(int, models_page.where(plan, "h200", 1).split(" + ")))
    assert tiles == plan.line("h200", 1, 1).tiles and models_page.where(plan, "h200", 3) == "-"


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
    for name in ("docs/models.md", "docs/packs.md", "docs/scaling.md"):
        text = (ROOT / name).read_text()
        assert text == readme.fill(text, ROOT, readme.PAGES[name]), "run `make docs`"
