"""`bench`: the whole draft step with a cold L2, beside the engine's eager loop and the floor, in one run.

Per model, vocabulary and row count one row a kernel::

    {"kernel", "vocab_size", "num_steps", "rank_dim", "tp", "rows",
     "us", "noise_us", "call_us", "eager_us", "fused_us", "floor_us", "pct_of_floor", "inputs"}

``us`` is the chain (or fused loop, or loop of step kernels) alone, ``noise_us`` the noise kernel alone, ``call_us`` both as
the sampler launches them, ``eager_us`` the engine's loop and ``fused_us`` the fused loop, noise included; each is one
CUDA-graph replay, in microseconds. ``pct_of_floor`` is 100 * floor_us / us. A row measured on a throw-away vocabulary
carries ``parent``, the digest of the checked-in kernel of the same templates.

- A row of a model with an output transform carries ``plain_us``, the engine's loop without the transform: less than it does.
- A row of the step kernels carries ``gemm_us``, the bias GEMMs of all positions alone, which the eager loop runs too.
- A row of several ranks has their number as ``tp``. Where they are emulated on one GPU it has ``emulated`` and
  ``rank_floor_us``, the floor of a GPU that is one of them. Where every rank is a GPU (rank_timings.py) it has ``nccl_us``,
  the vocabulary-parallel eager loop with all-gathers, and the parts ``shard_us``, ``exchange_us`` and ``tail_us``.
- With ``pdl``, rows of the chain also carry ``pdl_us``, what a programmatically launched chain adds behind a kernel that
  lets it start early, and ``pdl_off_us``, what the ordinary chain adds there: the latency visible after the producer's end.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsparkgen import evidence, pictures, prefill, rank_timings
from dsparkgen.device import DeviceSpec, read_devices
from dsparkgen.gpu import CannotTell, Product, generated_models, load_product, need_cuda, this_device
from dsparkgen.rank_timings import RankJob
from dsparkgen.render import render, render_package
from dsparkgen.spec import ModelSpec, read_specs
from dsparkgen.timings import Job
from dsparkgen.workers import SECONDS, Worker, WorkerFailed

OK, NO, CANNOT_TELL = 0, 1, 3
ROWS = (1, 4, 8)
STEP_ROWS = (16, 64)  # also measured for a model with step kernels
PDL_ROWS = (1,)
SAMPLERS = ("chain", "fused", "step")
STEP_PEERS = ("eager", "plain", "fused")  # loops that the step kernels are compared with
SWEEP = (32000, 64640, 100352, 129280, 151936, 200064, 248320, 262144)  # vocabularies of served models


@dataclass(frozen=True)
class Shape:
    """A vocabulary and a number of draft steps to measure."""

    vocab_size: int
    num_steps: int


@dataclass(frozen=True)
class Asked:
    """What to measure of every model."""

    rows: tuple[int, ...] | None = None  # default: by what a model has
    repeats: int = 35
    shapes: tuple[tuple[int, int], ...] = ()
    shards: bool = False
    sweep: bool = False
    pdl: bool = False
    tp: int | None = None
    emulated: tuple[int, ...] = ()
    seconds: float = SECONDS

    @property
    def alone(self) -> bool:
        """Whether the kernels of one GPU are measured: not where ranks are asked for."""
        return self.tp is None and not self.emulated

    def rows_of(self, product: Product) -> tuple[int, ...]:
        """The row counts to measure of a model."""
        if self.rows is not None:
            return self.rows
        if self.pdl:
            return PDL_ROWS
        return ROWS + (STEP_ROWS if product.has("step") and self.alone else ())


def run_bench(
    root: Path,
    models: Sequence[str],
    *,
    out: Path | None = None,
    specs: Path | None = None,
    results: Path | None = None,
    rows: Sequence[int] | None = None,
    repeats: int = 35,
    shapes: Sequence[tuple[int, int]] = (),
    shards: bool = False,
    sweep: bool = False,
    pdl: bool = False,
    tp: int | None = None,
    emulated: Sequence[int] = (),
    jobs: int | None = None,
    seconds: float = SECONDS,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    record: bool = False,
    command: str | None = None,
) -> int:
    """Measure models on this machine's GPUs and print tables.

    Args:
        root: The repository: templates/, specs/devices/, tests/harness and benchmarks/.
        models: Names; empty for all.
        out: Source root of the generated code; default root/generated.
        specs: Folder of the specs; default root/specs.
        results: Folder of recorded results; default root/benchmarks/results.
        rows: Request rows of a batch; default 1, 4, 8 and with step kernels 16, 64, or 1 with `pdl`. Above the chain's
            maximum the row measures the step kernels, or the fused loop.
        repeats: Rounds; the median is reported.
        shapes: More (vocabulary, draft steps) to measure with throw-away code of the same templates.
        shards: Also the shards of the model's other tensor-parallel sizes, each as a vocabulary of its own on one GPU.
        sweep: Also a range of vocabularies, one request row.
        pdl: Also the latency visible behind a kernel, with and without programmatic dependent launch.
        tp: Instead, the chain over so many ranks, each on a GPU of this machine.
        emulated: Instead, the chain over these numbers of ranks, all on one GPU.
        jobs: Processes that prepare at a time; default: one a core.
        seconds: Bound of each process; what it has not measured by then has failed.
        json_path: Where to write this run as JSON.
        plot_path: Where to write an SVG of each model's rows, as <name>-<model>.svg where there are several; one row over
            vocabularies, where more than one was measured, goes beside it as <name>-sweep.svg.
        record: Merge the rows into the checked-in results.
        command: What to record as the command; default: this process's.

    Returns:
        0; 1 when a model could not be measured; 3 when this machine cannot tell.

    Raises:
        EvidenceError: the checked-in results that should be merged into are not intact.
    """
    command = shlex.join(["dsparkgen", *sys.argv[1:]]) if command is None else command
    out, specs = (out or root / "generated").resolve(), specs or root / "specs"
    results = results or root / "benchmarks" / "results"
    asked = Asked(
        tuple(rows) if rows else None, repeats, tuple(shapes), shards, sweep, pdl, tp, tuple(emulated), seconds
    )
    measured: dict[str, list[dict[str, Any]]] = {}
    failures: list[str] = []
    try:
        need_cuda()
        if tp is not None:
            rank_timings.need_gpus(tp)
        known = read_specs(specs)
        products = {name: load_product(out, name) for name in generated_models(out, models)}
        device = {this_device(product) for product in products.values()}.pop()
        processes = jobs or os.cpu_count() or 1
        if not asked.alone:
            arch = read_devices(root / "specs" / "devices")[device].arch
            prefill.fill(
                out,
                list(products),
                device,
                arch,
                worlds=() if tp is None else (tp,),
                emulated=asked.emulated,
                jobs=processes,
                seconds=seconds,
            )
        with tempfile.TemporaryDirectory(prefix="dsparkgen-bench-") as folder:
            prepared = _prepare(root.resolve(), asked, products, known, device, Path(folder))
            for model, found, failed in _measure(prepared, asked, processes):
                measured[model], failures = found, failures + failed
                if record:
                    _record(results, device, model, command, found)
                if plot_path is not None:
                    path = plot_path if len(products) == 1 else plot_path.with_stem(f"{plot_path.stem}-{model}")
                    _plot(root, known[model], device, found, path)
    except CannotTell as error:
        print(f"bench: {error}", file=sys.stderr)
        return CANNOT_TELL
    every = [{"model": model} | row for model, found in measured.items() for row in found]
    if json_path is not None:
        document = {
            "device": device,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            "rows": every,
        }
        json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(render_tables(every))
    for failure in failures:
        print(f"bench: {failure}", file=sys.stderr)
    return NO if failures else OK


@dataclass
class Prepared:
    """One model's work: jobs for one GPU each, and one for a GPU a rank."""

    model: str
    jobs: list[Job] = field(default_factory=list)
    ranks: RankJob | None = None


def _prepare(
    root: Path,
    asked: Asked,
    products: Mapping[str, Product],
    specs: Mapping[str, ModelSpec],
    device: str,
    folder: Path,
) -> list[Prepared]:
    """The jobs of all models; throw-away code of the same templates is written into `folder`."""
    devices = read_devices(root / "specs" / "devices")
    found: list[Prepared] = []
    throw_away: list[ModelSpec] = []
    for model, product in products.items():
        if not any(map(product.has, SAMPLERS if asked.alone else ("chain",))):
            print(f"{model}: nothing to measure: it has none of these kernels", file=sys.stderr)
            continue
        spec, rows = specs[model], asked.rows_of(product)
        own = Job(
            root=str(root),
            out=str(product.package.parent),
            model=model,
            rows=rows,
            repeats=asked.repeats,
            pdl=asked.pdl,
            alone=asked.alone,
        )
        prepared = Prepared(model)
        if asked.alone:
            prepared.jobs.append(own)
        # A process for each number of ranks, since each compiles kernels of its own.
        prepared.jobs += [replace(own, worlds=(world,)) for world in asked.emulated]
        parents: dict[str, str] = {kernel: product.digest(kernel) for kernel in spec.emit.kernels}
        for shape, counts in _extra_shapes(spec, asked, rows) if asked.alone else ():
            other = reshaped(spec, shape)
            throw_away.append(other)
            prepared.jobs.append(replace(own, out=str(folder), model=other.model.name, rows=counts, parents=parents))
        if asked.tp is not None:
            shard = reshaped(spec, Shape(-(-spec.vocabulary.draft // asked.tp), spec.draft.num_steps))
            throw_away.append(shard)
            prepared.ranks = RankJob(
                root=own.root,
                out=own.out,
                model=model,
                rows=rows,
                repeats=asked.repeats,
                device=device,
                shard_out=str(folder),
                shard_model=shard.model.name,
            )
        found.append(prepared)
    if throw_away:
        write_package(throw_away, devices, root / "templates", folder)
    return found


def _measure(
    prepared: Sequence[Prepared], asked: Asked, parallel: int
) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """Model by model its rows, and what failed in words."""
    jobs = [job for one in prepared for job in one.jobs]
    results = _time(jobs, parallel, asked.seconds)
    for one in prepared:
        rows: list[dict[str, Any]] = []
        failures: list[str] = []
        for _ in one.jobs:
            found, failure = next(results)
            rows += found
            failures += [f"{one.model}: {failure}"] if failure else []
        if one.ranks is not None:
            assert asked.tp is not None
            found, failure = rank_timings.measure(one.ranks, asked.tp, asked.seconds)
            rows += found
            failures += [f"{one.model}: {asked.tp} ranks: {failure}"] if failure else []
        yield one.model, rows, failures


def _time(jobs: Sequence[Job], parallel: int, seconds: float) -> Iterator[tuple[list[dict[str, Any]], str | None]]:
    """Of each job the rows that it measured, and how it failed. Jobs prepare side by side and are timed one by one."""
    for start in range(0, len(jobs), parallel):
        group = jobs[start : start + parallel]
        workers = [Worker("dsparkgen.timings", asdict(job), seconds=seconds) for job in group]
        failed: dict[Worker, str] = {}
        try:
            for worker in workers:
                try:
                    worker.wait_ready()
                except WorkerFailed as error:
                    failed[worker] = str(error)
            for worker in workers:
                failure = failed.get(worker) or worker.work()
                yield worker.lines, failure
        finally:
            for worker in workers:
                worker.kill()


def _record(results: Path, device: str, model: str, command: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Merge rows into the results of the GPUs that they were measured on."""
    places: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        gpus = 1 if row.get("emulated") else row["tp"]
        places.setdefault(evidence.folder(device, gpus), []).append(row)
    for place, own in places.items():
        print(f"recorded {evidence.record(results, place, model, command, rows=own)}", file=sys.stderr)


def _extra_shapes(spec: ModelSpec, asked: Asked, rows: tuple[int, ...]) -> list[tuple[Shape, tuple[int, ...]]]:
    """Shapes that need throw-away code, with the row counts to measure of each: those that the chain takes."""
    steps = spec.draft.num_steps
    rows = tuple(count for count in rows if count <= spec.draft.max_rows)
    wanted = {Shape(*shape): rows for shape in asked.shapes}
    if asked.shards:
        wanted |= {Shape(-(-spec.vocabulary.draft // tp), steps): rows for tp in spec.parallel.tp if tp > 1}
    if asked.sweep:
        done = {*wanted, Shape(spec.vocabulary.draft, steps)} if 1 in rows else set()
        wanted = {Shape(vocab, steps): (1,) for vocab in SWEEP if Shape(vocab, steps) not in done} | wanted
    return list(wanted.items())


def reshaped(spec: ModelSpec, shape: Shape) -> ModelSpec:
    """The same model's chain and fused loop with another vocabulary and number of draft steps, on one GPU."""
    values = spec.model_dump()
    vocab = shape.vocab_size
    values["model"]["name"] = f"{spec.model.name}_{vocab}x{shape.num_steps}"
    values["vocabulary"] = {"target": vocab, "draft": vocab, "d2t": False, "sampling_limit": vocab}
    values["draft"]["num_steps"] = shape.num_steps
    values["parallel"]["tp"] = (1,)
    values["emit"]["kernels"] = tuple(kernel for kernel in spec.emit.kernels if kernel != "step")
    return ModelSpec.model_validate(values)


def write_package(specs: Iterable[ModelSpec], devices: Mapping[str, DeviceSpec], templates: Path, folder: Path) -> None:
    """Render models into a folder, unformatted, for this run alone. The digests are those of formatted code."""
    specs = tuple(specs)
    files = dict(render_package(specs, templates=templates))
    for spec in specs:
        files |= render(spec, devices, templates=templates)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def render_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bench rows as aligned text: of one GPU, of several ranks, and what only some rows have."""
    tables = (
        render_table([row for row in rows if row["tp"] == 1]),
        render_ranks_table([row for row in rows if row["tp"] > 1]),
        render_step_table(rows),
        render_pdl_table(rows),
    )
    return "\n\n".join(filter(None, tables))


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one GPU, with the ratio to the eager loop (noise on both sides)."""
    columns = {
        "model": "model",
        "kernel": "kernel",
        "vocab_size": "vocab",
        "num_steps": "N",
        "rows": "rows",
        "us": "us",
        "noise_us": "noise",
        "call_us": "call",
        "eager_us": "eager",
        "fused_us": "fused",
        "floor_us": "floor",
        "pct_of_floor": "% floor",
    }
    lines = [(*columns.values(), "eager/call")]
    for row in rows:
        lines.append((*(str(row.get(name, "")) for name in columns), f"{row['eager_us'] / row['call_us']:.2f}"))
    return _aligned(lines)


def render_ranks_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of several ranks: real ones with their parts and the loop with all-gathers, emulated ones with both floors."""
    columns = ("us", "noise_us", "call_us", "eager_us", "nccl_us", "shard_us", "exchange_us", "tail_us")
    header = (
        "model",
        "vocab",
        "N",
        "ranks",
        "rows",
        *(name.removesuffix("_us") for name in columns),
        "floor",
        "rank floor",
    )
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        ranks = f"{row['tp']} emulated" if row.get("emulated") else str(row["tp"])
        shape = (row.get("model", ""), str(row["vocab_size"]), str(row["num_steps"]), ranks, str(row["rows"]))
        rest = (str(row.get(name, "-")) for name in (*columns, "floor_us", "rank_floor_us"))
        lines.append((*shape, *rest))
    return _aligned(lines)


def render_step_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the step kernels leave of the loop beside the bias GEMMs that they share with the eager loop."""
    lines: list[tuple[str, ...]] = [
        (
            "model",
            "rows",
            "step",
            "eager",
            "plain",
            "fused",
            "GEMMs",
            "share",
            "floor",
            *(f"{x}/step" for x in STEP_PEERS),
        )
    ]
    for row in rows:
        if "gemm_us" in row:
            us, names = row["call_us"], ("rows", "call_us", "eager_us", "plain_us", "fused_us", "gemm_us")
            ratios = (f"{row[f'{x}_us'] / us:.2f}" if f"{x}_us" in row else "-" for x in STEP_PEERS)
            share = f"{row['gemm_us'] / us:.0%}"
            lines.append(
                (row.get("model", ""), *(str(row.get(x, "-")) for x in names), share, str(row["floor_us"]), *ratios)
            )
    return _aligned(lines)


def render_pdl_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the chain adds behind a kernel, in microseconds; rows without it are left out."""
    lines: list[tuple[str, ...]] = [("vocab", "N", "rows", "visible us, pdl", "visible us, ordinary", "hidden us")]
    for row in rows:
        if "pdl_us" in row:
            hidden = f"{row['pdl_off_us'] - row['pdl_us']:.2f}"
            names = ("vocab_size", "num_steps", "rows", "pdl_us", "pdl_off_us")
            lines.append((*(str(row[name]) for name in names), hidden))
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines in columns; empty where there is a header alone."""
    if len(lines) == 1:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _plot(root: Path, spec: ModelSpec, device: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    for name, text in pictures.of_model(root, spec, device, rows).items():
        path.with_name(f"{path.stem}{name}{path.suffix}").write_text(text, encoding="utf-8")
