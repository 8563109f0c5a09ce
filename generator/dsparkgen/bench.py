"""`bench`: the whole draft step with a cold L2, beside the engine's eager loop and the floor, in one run.

Per model, vocabulary and row count one row::

    {"kernel", "vocab_size", "num_steps", "rank_dim", "tp", "rows",
     "us", "noise_us", "call_us", "eager_us", "fused_us", "floor_us", "pct_of_floor", "inputs"}

``us`` is the chain (or fused loop) alone, ``noise_us`` the noise kernel alone, ``call_us`` both as the sampler launches
them, ``eager_us`` the engine's loop and ``fused_us`` the fused loop, noise included; each is one CUDA-graph replay, in
microseconds. ``pct_of_floor`` is 100 * floor_us / us. A row measured on a throw-away vocabulary carries ``parent``, the
digest of the checked-in kernel of the same templates.

With ``pdl``, rows of the chain also carry ``pdl_us``, what a programmatically launched chain adds behind a kernel that
lets it start early, and ``pdl_off_us``, what the ordinary chain adds there: the latency visible after the producer's end.
"""

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsparkgen import evidence
from dsparkgen.device import DeviceSpec, read_devices
from dsparkgen.gpu import CannotTell, Product, generated_models, harness, load_product, need_cuda, this_device
from dsparkgen.plan import BYTES, floor_us
from dsparkgen.render import render, render_package
from dsparkgen.spec import ModelSpec, read_specs

OK, CANNOT_TELL = 0, 3
ROWS = (1, 4, 8)
PDL_ROWS = (1,)
SWEEP = (32000, 64640, 100352, 129280, 151936, 200064, 248320, 262144)  # vocabularies of served models
HOLD_US = 600.0  # how long the kernel ahead runs: several times what the host needs to launch the chain behind it
INPUT_SETS = 3  # rotated from replay to replay
TEMPERATURE = 0.9
SEED = 20261129


@dataclass(frozen=True)
class Shape:
    """A vocabulary and a number of draft steps to measure."""

    vocab_size: int
    num_steps: int


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
    json_path: Path | None = None,
    plot_path: Path | None = None,
    record: bool = False,
    command: str | None = None,
) -> int:
    """Measure models on this machine's GPU and print a table.

    Args:
        root: The repository: templates/, specs/devices/, tests/harness and benchmarks/.
        models: Names; empty for all.
        out: Source root of the generated code; default root/generated.
        specs: Folder of the specs; default root/specs.
        results: Folder of recorded results; default root/benchmarks/results.
        rows: Request rows of a batch; default 1, 4, 8, or 1 with `pdl`. Above the chain's maximum the row measures the
            fused loop.
        repeats: Rounds; the median is reported.
        shapes: More (vocabulary, draft steps) to measure with throw-away code of the same templates.
        shards: Also the shards of the model's other tensor-parallel sizes, each as a vocabulary of its own on one GPU.
        sweep: Also a range of vocabularies, one request row.
        pdl: Also the latency visible behind a kernel, with and without programmatic dependent launch.
        json_path: Where to write this run as JSON.
        plot_path: Where to write an SVG of the model's rows; the sweep goes beside it as <name>-sweep.svg.
        record: Merge the rows into the checked-in results.
        command: What to record as the command; default: this process's.

    Returns:
        0, or 3 when this machine cannot tell.

    Raises:
        EvidenceError: the checked-in results that should be merged into are not intact.
    """
    command = shlex.join(["dsparkgen", *sys.argv[1:]]) if command is None else command
    rows = rows or (PDL_ROWS if pdl else ROWS)
    out, specs = out or root / "generated", specs or root / "specs"
    results = results or root / "benchmarks" / "results"
    measured: dict[str, list[dict[str, Any]]] = {}
    try:
        need_cuda()
        devices = read_devices(root / "specs" / "devices")
        known = read_specs(specs)
        device = ""
        for model in generated_models(out, models):
            product = load_product(out, model)
            device = this_device(product)
            spec = known[model]
            found = [_row(root, product, devices[device], n, repeats, pdl) for n in rows]
            extra = _extra_shapes(spec, shapes, shards)
            found += _throw_away(root, product, spec, devices, device, extra, rows, repeats, pdl)
            if sweep:
                wanted = [Shape(vocab, spec.draft.num_steps) for vocab in SWEEP]
                done = {(row["vocab_size"], row["num_steps"]) for row in found if row["rows"] == 1}
                missing = [shape for shape in wanted if (shape.vocab_size, shape.num_steps) not in done]
                found += _throw_away(root, product, spec, devices, device, missing, (1,), repeats, pdl)
            measured[model] = found
            if record:
                print(f"recorded {evidence.record(results, device, model, command, rows=found)}", file=sys.stderr)
            if plot_path is not None:
                _plot(root, spec, device, found, plot_path, sweep)
    except CannotTell as error:
        print(f"bench: {error}", file=sys.stderr)
        return CANNOT_TELL
    every = [row for found in measured.values() for row in found]
    if json_path is not None:
        document = {
            "device": device,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            "rows": every,
        }
        json_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(render_table(every))
    if pdl:
        print(render_pdl_table(every))
    return OK


def _extra_shapes(spec: ModelSpec, shapes: Sequence[tuple[int, int]], shards: bool) -> list[Shape]:
    wanted = [Shape(*shape) for shape in shapes]
    if shards:
        widths = [-(-spec.vocabulary.draft // tp) for tp in spec.parallel.tp if tp > 1]
        wanted += [Shape(width, spec.draft.num_steps) for width in widths]
    return wanted


def reshaped(spec: ModelSpec, shape: Shape) -> ModelSpec:
    """The same model with another vocabulary and number of draft steps, on one GPU."""
    values = spec.model_dump()
    vocab = shape.vocab_size
    values["model"]["name"] = f"{spec.model.name}_{vocab}x{shape.num_steps}"
    values["vocabulary"] = {"target": vocab, "draft": vocab, "d2t": False, "sampling_limit": vocab}
    values["draft"]["num_steps"] = shape.num_steps
    values["parallel"]["tp"] = (1,)
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


def _throw_away(
    root: Path,
    parent: Product,
    spec: ModelSpec,
    devices: Mapping[str, DeviceSpec],
    device: str,
    shapes: Sequence[Shape],
    rows: Sequence[int],
    repeats: int,
    pdl: bool,
) -> list[dict[str, Any]]:
    """Measure other shapes of a model with code rendered for this run from the same templates."""
    if not shapes:
        return []
    found = []
    with tempfile.TemporaryDirectory(prefix="dsparkgen-bench-") as folder:
        others = [reshaped(spec, shape) for shape in shapes]
        write_package(others, devices, root / "templates", Path(folder))
        for other in others:
            product = load_product(Path(folder), other.model.name)
            for n in rows:
                row = _row(root, product, devices[device], n, repeats, pdl)
                found.append(row | {"parent": parent.digest(row["kernel"])})
    return found


def _row(root: Path, product: Product, device: DeviceSpec, rows: int, repeats: int, pdl: bool) -> dict[str, Any]:
    """Measure one shape and row count: every variant in the same rounds."""
    torch = need_cuda()
    timing = harness(root, "benchmarks.timing")
    config = product.config
    base, cache = config.BASE_DTYPES[0], config.CACHE_DTYPES[0]
    print(f"{product.model}: {rows} rows", file=sys.stderr)
    with torch.inference_mode():
        calls = _Calls(root, product, rows, base, cache)
        times = timing.time_interleaved(calls.variants, device=calls.device, repeats=repeats)
        visible = _visible_us(root, calls, repeats) if pdl else {}
    us = {name: round(median, 2) for name, median in times.items()}
    floor = floor_us(
        device,
        vocab_size=config.DRAFT_VOCAB_SIZE,
        rank_dim=config.RANK_DIM,
        num_steps=config.NUM_STEPS,
        rows=rows,
        base_bytes=BYTES[base],
        cache_bytes=BYTES[cache],
    )
    alone = us.get("chain", us["fused"])
    return {
        "kernel": calls.kernel,
        "vocab_size": config.DRAFT_VOCAB_SIZE,
        "num_steps": config.NUM_STEPS,
        "rank_dim": config.RANK_DIM,
        "tp": 1,
        "rows": rows,
        "us": alone,
        "noise_us": us.get("noise", 0.0),
        "call_us": us.get("call", us["fused"]),
        "eager_us": us["eager"],
        "fused_us": us["fused"],
        "floor_us": round(floor, 2),
        "pct_of_floor": round(100 * floor / alone, 1),
        "inputs": product.digest(calls.kernel),
    } | visible


def _visible_us(root: Path, calls: "_Calls", repeats: int) -> dict[str, float]:
    """What the chain adds behind a kernel that lets it start early: "pdl_us", "pdl_off_us"; empty without a chain."""
    declined = calls.why_not_pdl()
    if declined is not None:
        print(f"{calls.product.model}: {calls.rows} rows: nothing to time behind a kernel: {declined}", file=sys.stderr)
        return {}
    timing, producer = harness(root, "benchmarks.timing"), harness(root, "benchmarks.producer")
    ahead = producer.Producer(calls.device)
    variants = {"pdl_us": calls.chain_alone(pdl=True), "pdl_off_us": calls.chain_alone(pdl=False)}
    found = timing.time_behind(lambda: ahead.hold(HOLD_US), variants, device=calls.device, repeats=repeats)
    return {name: round(us, 2) for name, us in found.items()}


class _Calls:
    """Everything that is timed for one shape: one call per variant and input set, and the tensors behind them."""

    def __init__(self, root: Path, product: Product, rows: int, base: str, cache: str) -> None:
        torch = need_cuda()
        config = product.config
        self.product, self.rows = product, rows
        self.device = torch.device("cuda", torch.cuda.current_device())
        checks = harness(root, "tests.harness.checks")
        eager = harness(root, "tests.harness.eager")
        subject = checks.random_subject(product, base, cache, self.device, seed=SEED)
        self._weights = subject.weights
        self._options = {"max_reqs": rows, "cache_dtype": checks.DTYPES[cache]}
        self._cases = cases = [
            checks.make_case(subject, rows, seed=SEED + turn, max_reqs=rows, temperatures=(TEMPERATURE,))
            for turn in range(INPUT_SETS)
        ]
        fused = subject.fused_loop(rows)
        self.variants: dict[str, list[Callable[[], None]]] = {
            "eager": [eager.EagerLoop(case) for case in cases],
            "fused": [_sampling(fused, case) for case in cases],
        }
        self.kernel = "fused"
        if product.has("chain") and rows <= config.MAX_ROWS:
            chain = self._sampler()
            self.kernel = "chain"
            self.variants |= {
                "call": [_sampling(chain, case) for case in cases],
                "chain": [_chain_alone(chain, case) for case in cases],
                "noise": [_noise_alone(product, chain, case) for case in cases],
            }

    def _sampler(self, *, pdl: bool = False) -> Any:
        return self.product.module("launch").ChainSampler(*self._weights, **self._options, pdl=pdl)

    def why_not_pdl(self) -> str | None:
        """Why the chain cannot be launched programmatically here, or None."""
        if self.kernel != "chain":
            return "this batch is not the chain's"
        reason = self.product.module("launch").ChainSampler.why_not(*self._weights, **self._options, pdl=True)
        return None if reason is None else str(reason)

    def chain_alone(self, *, pdl: bool) -> list[Callable[[], None]]:
        """One launch of the chain per input set, by a sampler of its own whose noise is drawn."""
        sampler = self._sampler(pdl=pdl)
        for case in self._cases:
            sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
        return [_chain_alone(sampler, case) for case in self._cases]


def _sampling(sampler: Any, case: Any) -> Callable[[], None]:
    return lambda: sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)


def _chain_alone(chain: Any, case: Any) -> Callable[[], None]:
    """The chain's launch on the noise that the other variants leave in the sampler's buffer."""
    variant, arguments = chain.prepare(case.rows, *case.call_arguments, case.query_per_row)
    return lambda: chain.launch(variant, arguments)


def _noise_alone(product: Product, chain: Any, case: Any) -> Callable[[], None]:
    config, draw = product.config, product.module("noise").draw_noise
    state = (case.idx_mapping, case.sample_pos, case.temperature, case.seeds)
    samples = case.rows * config.NUM_STEPS
    return lambda: draw(chain.noise_buffer, *state, num_samples=samples, width=config.DRAFT_VOCAB_SIZE)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bench rows as aligned text, with the ratio to the eager loop (noise on both sides)."""
    columns = ("kernel", "vocab_size", "num_steps", "rows", "us", "noise_us", "call_us", "eager_us", "fused_us")
    header = ("kernel", "vocab", "N", "rows", "us", "noise", "call", "eager", "fused", "floor", "% floor", "eager/call")
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        ratio = f"{row['eager_us'] / row['call_us']:.2f}"
        lines.append((*(str(row[c]) for c in columns), str(row["floor_us"]), str(row["pct_of_floor"]), ratio))
    return _aligned(lines)


def render_pdl_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the chain adds behind a kernel, in microseconds, as aligned text; rows without it are left out."""
    lines: list[tuple[str, ...]] = [("vocab", "N", "rows", "visible us, pdl", "visible us, ordinary", "hidden us")]
    for row in rows:
        if "pdl_us" in row:
            hidden = f"{row['pdl_off_us'] - row['pdl_us']:.2f}"
            names = ("vocab_size", "num_steps", "rows", "pdl_us", "pdl_off_us")
            lines.append((*(str(row[name]) for name in names), hidden))
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _plot(
    root: Path, spec: ModelSpec, device: str, rows: Sequence[Mapping[str, Any]], path: Path, with_sweep: bool
) -> None:
    plot = harness(root, "benchmarks.plot")
    own = [row for row in rows if row["vocab_size"] == spec.vocabulary.draft and row["kernel"] == "chain"]
    if own:
        path.write_text(plot.bars(f"{spec.model.title} on {device}, cold L2", own), encoding="utf-8")
    if with_sweep:
        swept = [row for row in rows if row["rows"] == 1 and row["num_steps"] == spec.draft.num_steps]
        text = plot.sweep(f"{spec.model.title}: one row over the vocabulary, {device}", swept)
        path.with_name(f"{path.stem}-sweep.svg").write_text(text, encoding="utf-8")
