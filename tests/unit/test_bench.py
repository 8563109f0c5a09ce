"""`bench` and `verify` without a GPU: throw-away shapes, tables, pictures, and what becomes evidence."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import plot

from dsparkgen import bench, evidence, gpu, prefill, rank_timings, verify
from dsparkgen.device import load_devices
from dsparkgen.spec import read_specs
from dsparkgen.timings import Job
from dsparkgen.verify import Finding, Task

ROOT = Path(__file__).parents[2]
ROW = {
    "kernel": "chain",
    "vocab_size": 129280,
    "num_steps": 5,
    "rank_dim": 256,
    "tp": 1,
    "rows": 1,
    "us": 44.0,
    "noise_us": 6.0,
    "call_us": 50.0,
    "eager_us": 200.0,
    "fused_us": 100.0,
    "floor_us": 24.2,
    "pct_of_floor": 55.0,
    "inputs": "a" * 12,
}


def test_a_reshaped_model_is_valid_and_keeps_the_rest() -> None:
    spec = read_specs(ROOT / "specs")["deepseek_v41"]
    other = bench.reshaped(spec, bench.Shape(64640, 7))
    assert (other.vocabulary.target, other.vocabulary.draft, other.vocabulary.sampling_limit) == (64640, 64640, 64640)
    assert (other.draft.num_steps, other.parallel.tp, other.model.name) == (7, (1,), "deepseek_v41_64640x7")
    assert other.markov == spec.markov and other.noise == spec.noise and other.logits == spec.logits


def test_shards_are_the_other_tensor_parallel_sizes() -> None:
    spec = read_specs(ROOT / "specs")["deepseek_v41"]
    shapes = bench._extra_shapes(spec, bench.Asked(shapes=((262144, 7),), shards=True), (1, 4))
    assert [(shape.vocab_size, shape.num_steps, rows) for shape, rows in shapes] == [
        (262144, 7, (1, 4)),
        (64640, 5, (1, 4)),
        (32320, 5, (1, 4)),
        (16160, 5, (1, 4)),
    ]


def test_a_sweep_leaves_out_what_is_measured_anyway() -> None:
    spec = read_specs(ROOT / "specs")["deepseek_v41"]
    swept = dict(bench._extra_shapes(spec, bench.Asked(sweep=True, shards=True), (1, 8)))
    assert swept[bench.Shape(64640, 5)] == (1, 8) and swept[bench.Shape(262144, 5)] == (1,)
    assert bench.Shape(129280, 5) not in swept
    # Other shapes are for the chain: no rows beyond it, and no step kernels.
    beyond = bench._extra_shapes(spec, bench.Asked(shards=True), (1, 8, 64))
    assert {rows for _, rows in beyond} == {(1, 8)}
    assert bench.reshaped(spec, bench.Shape(64640, 5)).emit.kernels == ("noise", "chain", "fused")
    # Nothing with one row is measured beside it: the sweep measures every vocabulary itself.
    swept = dict(bench._extra_shapes(spec, bench.Asked(sweep=True), (8,)))
    assert swept == {bench.Shape(vocab, 5): (1,) for vocab in bench.SWEEP}


def test_throw_away_code_has_its_own_digests_and_imports_beside_the_product(tmp_path: Path) -> None:
    spec = read_specs(ROOT / "specs")["deepseek_v41"]
    shape = bench.Shape(64640, 5)
    bench.write_package([bench.reshaped(spec, shape)], load_devices(ROOT), ROOT / "templates", tmp_path)
    small = gpu.load_product(tmp_path, "deepseek_v41_64640x5")
    whole = gpu.load_product(ROOT / "generated", "deepseek_v41")
    assert (small.config.VOCAB_SIZE, whole.config.VOCAB_SIZE) == (64640, 129280)
    assert small.digest("chain") != whole.digest("chain")


def test_digests_are_those_of_the_manifest() -> None:
    product = gpu.load_product(ROOT / "generated", "deepseek_v41")
    kernels = json.loads((ROOT / "generated" / "MANIFEST.json").read_text())["kernels"]
    for kernel in ("noise", "chain", "fused"):
        assert product.digest(kernel) == kernels[f"deepseek_v41/{kernel}"]["inputs"]


def test_the_table_shows_the_ratio_with_noise_on_both_sides() -> None:
    header, line = bench.render_table([ROW]).splitlines()
    assert header.split()[-1] == "eager/call" and line.split()[-1] == "4.00"


def test_the_latency_behind_a_kernel_has_a_table_of_its_own() -> None:
    rows = [ROW, ROW | {"vocab_size": 16160, "pdl_us": 12.5, "pdl_off_us": 14.25}]
    header, line = bench.render_pdl_table(rows).splitlines()
    assert header.split()[-2:] == ["hidden", "us"]
    assert line.split() == ["16160", "5", "1", "12.5", "14.25", "1.75"]


class FakeClock:
    """Stands for the GPU's stream: launches add their time, events take it down."""

    def __init__(self) -> None:
        self.us = 0.0
        self.order: list[str] = []

    def launch(self, name: str, us: float) -> None:
        self.order.append(name)
        self.us += us

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        mark = SimpleNamespace()
        mark.record = lambda: setattr(mark, "us", self.us)
        mark.elapsed_time = lambda other: (other.us - mark.us) / 1000
        return mark


def test_what_a_chain_adds_behind_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    timing = gpu.harness(ROOT, "benchmarks.timing")
    clock = FakeClock()
    monkeypatch.setattr(timing.torch.cuda, "Event", clock.Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "Flush", lambda device: lambda: clock.launch("flush", 1000))
    found = timing.time_behind(
        lambda: clock.launch("ahead", 600),
        {
            "on": [lambda: clock.launch("on", 10), lambda: clock.launch("on", 12)],
            "off": [lambda: clock.launch("off", 15)],
        },
        device=None,
        repeats=30,
        warmup_rounds=1,
    )
    assert found == pytest.approx({"on": 11, "off": 15})
    assert clock.order.count("ahead") == 3 * 31 and clock.order.count("on") == clock.order.count("off") == 31
    for before, name in zip(clock.order, clock.order[1:], strict=False):
        assert name not in ("on", "off") or before == "ahead"
        assert name != "ahead" or before == "flush"
    with pytest.raises(ValueError, match="expected at least 30, got 29"):
        timing.time_behind(lambda: None, {}, device=None, repeats=29)


def fake_machine(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """A machine whose GPU takes no time; returns the jobs that it gets."""
    asked: list[Job] = []

    def time(jobs: list[Job], parallel: int, seconds: float) -> Any:
        asked.extend(jobs)
        for job in jobs:
            yield [ROW | {"rows": rows} for rows in job.rows], None

    monkeypatch.setattr(bench, "need_cuda", lambda: None)
    monkeypatch.setattr(bench, "this_device", lambda product: "h200")
    monkeypatch.setattr(bench, "_time", time)
    return asked


def test_rows_default_to_one_behind_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = fake_machine(monkeypatch)
    for options in ({"pdl": True}, {"pdl": True, "rows": (2,)}, {}):
        assert bench.run_bench(ROOT, ["deepseek_v41"], results=tmp_path, **options) == 0
    assert [(job.rows[:3], job.pdl) for job in asked] == [((1,), True), ((2,), True), ((1, 4, 8), False)]


def test_ranks_are_measured_instead_of_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = fake_machine(monkeypatch)
    ranks: list[tuple[rank_timings.RankJob, int]] = []

    def measure(job: rank_timings.RankJob, world: int, seconds: float) -> Any:
        product = gpu.load_product(Path(job.shard_out), job.shard_model)
        assert product.config.VOCAB_SIZE == 64640
        ranks.append((job, world))
        return [ROW | {"rows": rows, "tp": world, "nccl_us": 99.0} for rows in job.rows], None

    filled: list[Any] = []
    monkeypatch.setattr(prefill, "fill", lambda *arguments, **options: filled.append((arguments[1:], options)))
    monkeypatch.setattr(rank_timings, "need_gpus", lambda count: None)
    monkeypatch.setattr(rank_timings, "measure", measure)
    found = tmp_path / "rows.json"
    options: dict[str, Any] = {"rows": (1, 8), "tp": 2, "results": tmp_path, "json_path": found, "record": True}
    assert bench.run_bench(ROOT, ["deepseek_v41"], **options) == 0
    assert jobs == [] and ranks[0][0].rows == (1, 8) and ranks[0][1] == 2
    assert [(row["tp"], row["rows"]) for row in json.loads(found.read_text())["rows"]] == [(2, 1), (2, 8)]
    assert (tmp_path / "h200" / "deepseek_v41.json").exists()
    assert bench.run_bench(ROOT, ["deepseek_v41"], results=tmp_path, emulated=(4, 8)) == 0
    worlds = [(arguments[0], options["worlds"], options["emulated"]) for arguments, options in filled]
    assert worlds == [(["deepseek_v41"], (2,), ()), (["deepseek_v41"], (), (4, 8))]
    assert [(job.alone, job.worlds) for job in jobs] == [(False, (4,)), (False, (8,))] and len(ranks) == 1


def test_a_row_is_recorded_with_the_gpus_that_it_needed(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"tp": 2}, ROW | {"tp": 4}, ROW | {"tp": 8, "emulated": True}]
    bench._record(tmp_path, "h200", "toy", "bench toy", rows)
    found = {path.parent.name: evidence.load(path)["rows"] for path in tmp_path.glob("*/toy.json")}
    assert {place: sorted(row["tp"] for row in own) for place, own in found.items()} == {
        "h200": [1, 2, 8],
        "h200-x4": [4],
    }


def test_a_model_that_fails_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_machine(monkeypatch)
    results = iter([([], "the worker ended with exit code 1"), ([ROW], None)])
    monkeypatch.setattr(bench, "_time", lambda jobs, parallel, seconds: (next(results) for _ in jobs))
    models = list(gpu.generated_models(ROOT / "generated", ()))[:2]
    assert bench.run_bench(ROOT, models, results=tmp_path) == 1
    captured = capsys.readouterr()
    assert f"bench: {models[0]}: the worker ended with exit code 1" in captured.err and "4.00" in captured.out


def rank_line(slow: float) -> dict[str, Any]:
    names = ("chain", "noise", "call", "eager", "fused", "nccl", "shard", "inert", "shard_inert")
    times = dict(zip(names, (34.0, 4.0, 37.0, 200.0, 150.0, 180.0, 26.0, 30.0, 25.0), strict=True))
    return {"times": times | {"chain": 34.0 + slow}, "row": {"kernel": "chain", "tp": 2, "rows": 1, "floor_us": 17.0}}


def test_a_row_of_ranks_is_that_of_the_slowest_and_its_parts_add_up() -> None:
    row = rank_timings.slowest([rank_line(0.0), rank_line(2.0)])
    assert (row["us"], row["call_us"], row["nccl_us"], row["floor_us"]) == (36.0, 37.0, 180.0, 17.0)
    assert (row["shard_us"], row["exchange_us"], row["tail_us"]) == (26.0, 5.0, 5.0)
    assert row["shard_us"] + row["exchange_us"] + row["tail_us"] == row["us"] and row["pct_of_floor"] == 47.2


def test_tables_show_each_kind_of_row_once() -> None:
    row = rank_timings.slowest([rank_line(0.0)]) | {"vocab_size": 129280, "num_steps": 5}
    emulated = ROW | {"tp": 4, "emulated": True, "rank_floor_us": 15.0}
    step = ROW | {"kernel": "step", "gemm_us": 25.0, "rows": 16}
    text = bench.render_tables([ROW | {"model": "m"}, row, emulated, step])
    one, ranks, steps = text.split("\n\n")
    assert one.splitlines()[1].split()[:2] == ["m", "chain"] and len(one.splitlines()) == 3
    assert "4 emulated" in ranks and "180.0" in ranks and len(ranks.splitlines()) == 3
    assert steps.splitlines()[1].split()[-5:] == ["50%", "24.2", "4.00", "-", "2.00"]
    assert bench.render_tables([]) == ""


def test_pictures_are_svg_and_show_every_number() -> None:
    rows = [ROW, ROW | {"rows": 8, "us": 61.0}]
    drawing = ET.fromstring(plot.bars("DeepSeek <V4.1>", rows))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"61", "44", "200", "rows 8", "DeepSeek <V4.1>"} <= set(texts)
    line = ET.fromstring(plot.sweep("sweep", [ROW, ROW | {"vocab_size": 32000, "call_us": 20.0}]))
    points = next(iter(line.iter("{http://www.w3.org/2000/svg}polyline"))).attrib["points"].split()
    (x0, y0), (x1, y1) = ([float(v) for v in point.split(",")] for point in points)
    assert x0 < x1 and y0 > y1  # ordered by vocabulary; more microseconds are higher up, so a smaller y


def test_each_model_has_a_picture_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(prepared: Any, asked: Any, parallel: int) -> Any:
        sizes = {"deepseek_v41": (129280, 5), "kimi_k3": (163840, 7)}
        for one in prepared:
            vocab, steps = sizes[one.model]
            rows = [
                ROW | {"vocab_size": size, "num_steps": steps, "us": us} for size, us in ((vocab, 44.0), (32000, 9.0))
            ]
            yield one.model, rows, []

    fake_machine(monkeypatch)
    monkeypatch.setattr(bench, "_measure", measured)
    target = tmp_path / "plot.svg"
    assert bench.run_bench(ROOT, ["deepseek_v41", "kimi_k3"], results=tmp_path, plot_path=target) == 0
    names = {f"plot-{model}{sweep}.svg" for model in ("deepseek_v41", "kimi_k3") for sweep in ("", "-sweep")}
    assert {path.name for path in tmp_path.iterdir()} == names
    text = (tmp_path / "plot-kimi_k3.svg").read_text()
    assert "163840, N=7" in text and ">44<" in text and "32000" not in text
    assert bench.run_bench(ROOT, ["deepseek_v41"], results=tmp_path, plot_path=target) == 0
    assert "129280, N=5" in target.read_text()


def test_a_median_of_too_few_is_refused() -> None:
    torch = pytest.importorskip("torch")
    timing = gpu.harness(ROOT, "benchmarks.timing")
    with pytest.raises(ValueError, match="expected at least 30, got 29"):
        timing.Interleaved({}, device=torch.device("cpu")).medians_us(repeats=29)


@pytest.mark.parametrize("draw", [plot.bars, plot.sweep])
def test_pictures_of_nothing_are_refused(draw: Any) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        draw("nothing", [])


def test_bench_and_verify_without_a_gpu_say_so(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    def no_gpu() -> None:
        raise gpu.CannotTell(gpu.NO_GPU)

    monkeypatch.setattr(bench, "need_cuda", no_gpu)
    monkeypatch.setattr(verify, "need_cuda", no_gpu)
    target = tmp_path / "rows.json"
    assert bench.run_bench(ROOT, [], json_path=target, results=tmp_path, record=True) == 3
    assert verify.run_verify(ROOT, [], json_path=target, results=tmp_path, record=True) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("needs a CUDA device") == 2
    assert list(tmp_path.iterdir()) == []


def test_models_that_were_not_generated_are_named(tmp_path: Path) -> None:
    with pytest.raises(gpu.CannotTell, match="MANIFEST.json: expected a generated tree"):
        gpu.generated_models(tmp_path, ())
    with pytest.raises(gpu.CannotTell, match="nosuch: expected one of .*deepseek_v41"):
        gpu.generated_models(ROOT / "generated", ("nosuch",))
    with pytest.raises(gpu.CannotTell, match="nosuch: expected generated code"):
        gpu.load_product(ROOT / "generated", "nosuch")
    with pytest.raises(gpu.CannotTell, match="no_such_module"):
        gpu.harness(ROOT, "tests.harness.no_such_module")


def test_only_kernels_whose_every_check_passed_become_evidence() -> None:
    product: Any = SimpleNamespace(digest=lambda kernel: f"digest of {kernel}")
    findings = [
        Finding("noise", ("noise",), covered={"batches": 3}),
        Finding("bitwise", ("chain",), covered={"batches": 3}),
        Finding("bitwise", ("fused",), covered={"batches": 3}),
        Finding("graph", ("chain",), failure="replay 7"),
        Finding("graph", ("fused",), covered={"replays": 9}),
    ]
    entries = verify.verified_entries(findings, product, "sm_90a")
    assert [(entry["kernel"], entry["inputs"]) for entry in entries] == [
        ("noise", "digest of noise"),
        ("fused", "digest of fused"),
    ]
    assert entries[1]["checks"] == {"bitwise": {"batches": 3}, "graph": {"replays": 9}}
    assert verify.verified_entries(findings[1:2], product, "sm_90a")[0]["kernel"] == "chain"
    table = verify.render_table({"toy": findings})
    assert "FAIL  graph" in table and "replay 7" in table


@pytest.mark.parametrize("part", ["noise", "bf16/fp32", "timeout"])
def test_a_worker_that_dies_fails_its_part(tmp_path: Path, part: str) -> None:
    task = Task(str(ROOT), str(tmp_path), "nosuch", part, 1, 1, 1)
    (finding,) = verify._run_task(task)
    assert finding.check == part and "exit code 1" in (finding.failure or "")
