"""Chain builds at every residency: a pairwise cover of shapes, dtypes and forced plan lines, and of every feature a few, all to the bit.

    python -m tests.harness.residency [--jobs J] [--only N ...] [--json FILE] [--compile]

Run it in the repository's root on a machine with a GPU. It prints one line a build and a summary, and ends with 0 when every
build equals the oracle, 1 when one does not, 3 where there is no GPU. `--compile` needs no GPU: it compiles the builds for
sm_90a and judges spills and local memory instead.

A build is rendered from tests/specs/residency.toml into a temporary folder by a worker process, several at a time; its plan line
is replaced by the forced one before the sampler is made. A worker that is lost, or does not answer, costs its current build only.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
if str(ROOT / "generator") not in sys.path:  # the command above, where the tool is not installed
    sys.path.insert(0, str(ROOT / "generator"))

from dsparkgen import plan  # noqa: E402
from dsparkgen.device import DeviceSpec, load_devices  # noqa: E402
from dsparkgen.gpu import CannotTell, Product, load_product, need_cuda  # noqa: E402
from dsparkgen.render import render, render_package  # noqa: E402
from dsparkgen.spec import ModelSpec, read_spec  # noqa: E402

SPEC = ROOT / "tests" / "specs" / "residency.toml"
OK, NO, CANNOT_TELL = 0, 1, 3
BUILD_SECONDS = 90.0  # after which a worker counts as hung; a build takes a few
BATCHES = 3
FAILURE_LETTERS = 600  # of a failure that a result keeps
# What leaves a process's CUDA context sound: a comparison that fails, a build that is refused, a mistake in Python.
HARMLESS = (AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
KNOWN_SPILL_BYTES = 128  # a thread, of spills_knowingly
PIECE_ENTRIES = 16  # a base row whose pitch is a multiple of 16 entries is copied in vectors whatever the vocabulary

# 17: two tiles, and CTAs without any; 1000: fewer tiles than CTAs, the last one half full; 40008: a multiple of 8 but not of 16.
VOCABULARIES = (32000, 81920, 100352, 129280, 151936, 200064, 248320, 262144)
RAGGED_VOCABULARIES = (17, 1000, 40008, 50257)

# Chunks a warp holds in registers where a line is forced; plans hold more, but have fewer tiles a warp, each of which costs some.
FORCED_CHUNKS = 8

Places = Iterator[tuple[int, int, int, int, int, int]]


def _all_streamed(tiles: int, chunks: int, ahead: int) -> Places:
    yield from ((0, 0, 0, ring, ahead, tiles // 2) for ring in range(plan.WARPS, 0, -1))


def _all_shared(tiles: int, chunks: int, ahead: int) -> Places:
    yield 0, 0, tiles, 0, ahead, 0


def _all_registers(tiles: int, chunks: int, ahead: int) -> Places:
    register_tiles = -(-tiles // plan.WARPS)
    if register_tiles <= FORCED_CHUNKS:
        yield register_tiles, min(chunks, FORCED_CHUNKS // register_tiles), 0, 0, ahead, 0


def _odd_ring(tiles: int, chunks: int, ahead: int) -> Places:
    yield from ((0, 0, 3, ring, 1, 1) for ring in (5, 3, 1))


def _odd_shared(tiles: int, chunks: int, ahead: int) -> Places:
    yield from ((0, 0, resident, 7, ahead + 1, 1) for resident in range(tiles - 1 - tiles % 2, 0, -2))


def _least_ring(tiles: int, chunks: int, ahead: int) -> Places:
    for ring in range(1, 13):  # a warp's order holds only so many tiles
        yield 1, min(chunks, FORCED_CHUNKS) - 1, 1, ring, 2, 0


# How a forced residency places a CTA's `tiles` of `chunks` each, as plan.Residency's fields: the first that fits is taken.
# `ahead` is what a plan takes for it.
FORCED: Mapping[str, Callable[[int, int, int], Places]] = {
    "all streamed": _all_streamed,
    "all shared": _all_shared,
    "all registers": _all_registers,
    "odd ring, 3 shared": _odd_ring,
    "odd shared, ring of 7": _odd_shared,
    "registers, 1 shared, least ring": _least_ring,
}
PLANNED = "planned"

# What a model does beside adding a bias, as changes of its spec. "d2t" maps the columns into a third as many ids again.
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "sum": {"transform": {"placement": "sum", "multiplier": 0.19611613513818404, "soft_cap": 2.0}},
    "multiplied sum": {"transform": {"placement": "sum", "multiplier": 0.3}},
    "base": {"transform": {"placement": "base", "multiplier": 0.7, "soft_cap": 5.0}},
    "both": {"transform": {"placement": "both", "soft_cap": 3.0}},
    "both, base capped": {"transform": {"placement": "both", "soft_cap": 3.0, "base_capped": True}},
    "limit": {"limit": 13},
    "d2t": {"d2t": True},
    "d2t, limit, sum": {"d2t": True, "limit": 1, "transform": {"placement": "sum", "soft_cap": 4.0}},
    "greedy": {"greedy": True},
    "greedy, d2t, limit": {"greedy": True, "d2t": True, "limit": 1},
    "greedy, both": {"greedy": True, "transform": {"placement": "both", "soft_cap": 3.0}},
}


@dataclass(frozen=True)
class Build:
    """One chain build and the number of request rows it is run with."""

    vocab_size: int
    rank_dim: int
    num_steps: int
    residency: str
    rows: int
    dtypes: str  # "<base>/<cache>"; greedy drafts have no cache
    feature: str = "plain"

    @property
    def title(self) -> str:
        """The build in words, of fixed width."""
        shape = f"V {self.vocab_size:>6}  R {self.rank_dim:>3}  N {self.num_steps:>2}  rows {self.rows}"
        return f"{shape}  {self.dtypes:9}  {self.residency:30}  {self.feature:18}"

    @property
    def columns(self) -> int:
        """Columns of the head that can be drawn; of a mapped vocabulary all of them, whichever the limit leaves out."""
        changes = FEATURES[self.feature]
        return self.vocab_size - (0 if changes.get("d2t") else changes.get("limit", 0))

    @property
    def base(self) -> str:
        """The base logits' dtype."""
        return self.dtypes.split("/")[0]

    @property
    def cache(self) -> str:
        """The cache's dtype, "none" for greedy drafts."""
        return "none" if FEATURES[self.feature].get("greedy") else self.dtypes.split("/")[1]


FACTORS: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": VOCABULARIES + RAGGED_VOCABULARIES,
    "rank_dim": (128, 256, 512, 176),  # of the last one, a head row's last chunk is a half
    "num_steps": (5, 7, 15, 16, 1),
    "residency": (PLANNED, *FORCED),
    "rows": (1, 2, 3, 4, 5, 8),
    "dtypes": ("bf16/bf16", "bf16/fp32", "fp32/bf16", "fp32/fp32"),
}

# What the builds of each feature take in turn: of every row slot count one, small vocabularies, all residencies and dtypes over all.
FEATURE_ROWS = (1, 2, 3, 8)
FEATURE_VOCABULARIES = (1000, 40008, 81920, 50257, 100352)
FEATURE_STEPS = (5, 1, 7)


def spec_of(build: Build) -> ModelSpec:
    """The base spec with the build's vocabulary, rank, number of positions and feature."""
    values, changes = read_spec(SPEC).model_dump(), FEATURES[build.feature]
    target = build.vocab_size + (build.vocab_size // 3 if changes.get("d2t") else 0)
    values["vocabulary"] = {
        "target": target,
        "draft": build.vocab_size,
        "d2t": bool(changes.get("d2t")),
        "sampling_limit": target - changes.get("limit", 0),
    }
    if "transform" in changes:
        values["logits"]["transform"] = changes["transform"]
    if changes.get("greedy"):
        values["logits"]["cache_dtypes"] = ()
        values["emit"]["kernels"] = tuple(kernel for kernel in values["emit"]["kernels"] if kernel != "noise")
    values["markov"]["rank_dim"] = build.rank_dim
    values["draft"]["num_steps"] = build.num_steps
    return ModelSpec.model_validate(values)


def spills_knowingly(line: Any, build: Build) -> bool:
    """Whether the compiler is known to spill in such a build: 8 row slots, fp32 base logits, streamed tiles, 8 or 16 positions. With 5, 7
    or 15 positions it does not; why it does with powers of two was not found."""
    steps = build.num_steps
    streams = plan.layout.residency(line, plan.BYTES[build.base]).ring > 0
    wide = row_slots(build) == plan.WIDE_ROWS and build.base == "fp32"
    return wide and streams and steps >= 8 and steps & (steps - 1) == 0


def row_slots(build: Build) -> int:
    """Row slots of the build that serves the build's rows."""
    return next(slots for slots in plan.ROW_SLOTS if slots >= build.rows)


def forced_line(build: Build, device: DeviceSpec) -> Any | None:
    """A build's plan line with its forced residency, on every streaming multiprocessor. None where it does not fit the device."""
    all_tiles = -(-build.columns // plan.TILE_ROWS)
    tiles = -(-all_tiles // device.sms)
    partial = build.columns % plan.TILE_ROWS != 0
    ahead = min(plan.STAGED_TILES[row_slots(build)], -(-tiles // plan.WARPS))
    for values in FORCED[build.residency](tiles, plan.layout.chunks_of(build.rank_dim), ahead):
        placed = plan.Residency(*values)
        line = plan.PlanLine(
            device=device.name,
            tp=1,
            row_slots=row_slots(build),
            ctas=device.sms,
            warps=plan.WARPS,
            tiles=tiles,
            bf16=placed,
            fp32=placed,
            shared_bytes=0,
            partial=partial,
        )
        # The launcher wants room for either base dtype; fp32 logits take more for the same tiles.
        needed = max(shared_bytes(line, build, base) for base in plan.BYTES)
        items = plan.layout.most_items(line, plan.BYTES[build.base])
        if needed <= device.smem_per_block_bytes and items <= plan.layout.MOST_ITEMS:
            return line._replace(shared_bytes=shared_bytes(line, build, build.base))
    return None


def shared_bytes(line: Any, build: Build, base: str) -> int:
    """Shared memory of a CTA in bytes, with base logits of a dtype."""
    return plan.layout.shared_layout(line, build.rank_dim, build.num_steps, plan.BYTES[base]).total


def line_of(build: Build, device: DeviceSpec) -> Any:
    """The plan line of a build: planned or forced. Raises ValueError where it does not fit the device."""
    if build.residency == PLANNED:
        line = plan.plan_model(spec_of(build), {device.name: device}).line(device.name, 1, row_slots(build))
    else:
        line = forced_line(build, device)
    if line is None:
        raise ValueError(f"{build.title}: expected a build that fits {device.name}")
    return line


def possible_builds(device: DeviceSpec) -> list[Build]:
    """Every combination of the factors that can be built for the device: a plan always can, a forced line where it fits."""
    fits: dict[tuple[Any, ...], bool] = {}
    builds = []
    for values in product(*FACTORS.values()):
        build = Build(*values)
        key = (*values[:4], row_slots(build), build.base)
        if key not in fits:
            fits[key] = build.residency == PLANNED or forced_line(build, device) is not None
        if fits[key]:
            builds.append(build)
    return builds


def pairs_of(build: Build) -> Iterator[tuple[Any, ...]]:
    """The pairs of factor values that a build covers."""
    values = asdict(build)
    for first, second in combinations(FACTORS, 2):
        yield first, values[first], second, values[second]


def cover(possible: Sequence[Build]) -> list[Build]:
    """Some of the possible builds, in which every pair of values that occurs in a possible build occurs. Greedy, repeatable."""
    number: dict[tuple[Any, ...], int] = {}
    pairs = np.array([[number.setdefault(pair, len(number)) for pair in pairs_of(build)] for build in possible])
    missing = np.ones(len(number), dtype=bool)
    chosen = []
    while missing.any():
        best = int(missing[pairs].sum(axis=1).argmax())
        missing[pairs[best]] = False
        chosen.append(possible[best])
    return chosen


# --- one build, in a worker ---


@dataclass(frozen=True)
class ChainOnly:
    """A generated model whose chain kernel alone is checked."""

    product: Product

    @property
    def config(self) -> Any:
        """The model's constants."""
        return self.product.config

    def module(self, name: str) -> Any:
        """A module of the model."""
        return self.product.module(name)

    def has(self, kernel: str) -> bool:
        """Only the chain."""
        return kernel == "chain"


def render_model(spec: ModelSpec, device: DeviceSpec, folder: Path) -> Product:
    """Render a spec, unformatted, for one device into a folder that does not exist yet, and import it."""
    templates = ROOT / "templates"
    files = render(spec, {device.name: device}, templates=templates) | render_package([spec], templates=templates)
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return load_product(folder, spec.model.name)


def product_line(found: Product, line: Any) -> Any:
    """The generator's plan line as the product's own type."""
    module = found.device_module("plan_line")
    parts = {dtype: module.Residency(*getattr(line, dtype)) for dtype in plan.BYTES}
    return module.PlanLine(**(line._asdict() | parts))


def check_build(build: Build, folder: Path) -> str:
    """Render, compile and run one build on this machine's GPU. Returns where its tiles live and what took how long.

    Raises:
        CheckFailed: tokens or caches differ from the oracle's.
        ValueError: the build does not fit this GPU, or another line than the build's was compiled.
    """
    import torch

    started = time.monotonic()
    devices = load_devices(ROOT)
    device = devices[local_device(devices)]
    line = line_of(build, device)
    found = render_model(spec_of(build), device, folder)
    wanted = product_line(found, line)
    found.config.PLANS[line.device, line.tp, line.row_slots] = wanted
    compiled: list[tuple[Any, float]] = []
    os.environ[found.device_module("kernel_store").CACHE_VARIABLE] = str(folder / "cache")  # of this build alone
    chain = found.module("chain")
    compile_chain = chain.compile_chain

    def record(asked: Any, *arguments: Any, **options: Any) -> Any:
        begun = time.monotonic()
        made = compile_chain(asked, *arguments, **options)
        compiled.append((asked, time.monotonic() - begun))
        return made

    chain.compile_chain = record
    with torch.inference_mode():
        check_cases(ChainOnly(found), build, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    if [asked for asked, _ in compiled] != [wanted]:
        raise ValueError(f"expected one build of {wanted}, compiled {compiled}")
    return f"{tiers(line, build)}  compile {compiled[0][1]:.1f} s, all {time.monotonic() - started:.1f} s"


def check_cases(found: Any, build: Build, device: Any) -> None:
    """Compare the build's chain with the oracle on a few batches. `found`: ChainOnly; `device`: a torch.device.

    Raises:
        CheckFailed: tokens or caches differ from the oracle's.
        ValueError: the sampler declines a batch.
    """
    import random

    from . import checks

    seed = build.vocab_size + build.rows
    subject = checks.exact_subject(found, build.base, build.cache, device, seed=seed)
    for batch, case in enumerate(_cases(subject, build.rows, random.Random(seed))):
        declined = subject.chain.why_not_call(case.rows, case.base_logits)
        if declined is not None:
            raise ValueError(f"batch {batch}: expected the chain to take it: {declined}")
        checks.compare(subject, case, f"batch {batch}")
    subject.conclude(None)


def tiers(line: Any, build: Build) -> str:
    """A CTA's tiles in registers, shared memory and the stream, and the stream's slots."""
    placed = plan.layout.residency(line, plan.BYTES[build.base])
    in_registers = min(line.tiles, placed.register_tiles * line.warps)
    resident = min(line.tiles - in_registers, placed.resident)
    streamed = line.tiles - in_registers - resident
    return f"{in_registers:>3} + {resident:>3} + {streamed:>3} tiles, ring {placed.ring:>2}"


def _cases(subject: Any, rows: int, rng: Any) -> Iterator[Any]:
    """Padding rows with misaligned tensors; vector copies up to the last column; whatever comes."""
    from . import checks

    yield checks.make_case(subject, rows, seed=1, padding_rows=rows // 2, layout="odd", query_per_row=1)
    yield _vector_pitch(checks.make_case(subject, rows, seed=2, padding_rows=rows // 3))
    for batch in range(2, BATCHES):
        yield checks.vary(subject, rng, rows, seed=batch)


def _vector_pitch(case: Any) -> Any:
    """The case with base logits and cache in rows of a multiple of 16 entries, so that both are accessed in vectors."""
    import torch

    def padded(tensor: Any) -> Any:
        pitch = -(-tensor.shape[2] // PIECE_ENTRIES) * PIECE_ENTRIES
        wide = torch.zeros(*tensor.shape[:2], pitch, dtype=tensor.dtype, device=tensor.device)
        wide[:, :, : tensor.shape[2]] = tensor
        return wide

    base = padded(case.base_logits)[:, :, : case.draft_vocab_size]
    cache = None if case.logits_cache is None else padded(case.logits_cache)
    return case.replace(base_logits=base, logits_cache=cache)


def local_device(devices: Mapping[str, DeviceSpec]) -> str:
    """The description of this machine's GPU; of several that fit, the one whose name CUDA reports. Raises CannotTell."""
    torch = need_cuda()
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    fitting = [
        name
        for name, device in devices.items()
        if device.compute_capability == (facts.major, facts.minor) and device.sms == facts.multi_processor_count
    ]
    if not fitting:
        raise CannotTell(f"no description in specs/devices fits {facts.name} with {facts.multi_processor_count} SMs")
    return next((name for name in fitting if name in facts.name.lower()), fitting[0])


def compile_build(build: Build, folder: Path) -> str:
    """Compile one build for the H200, without a GPU. Returns its registers; raises ValueError where it spills."""
    from dsparkgen.cubin import read_resources

    device = load_devices(ROOT)["h200"]
    line = line_of(build, device)
    found = render_model(spec_of(build), device, folder)
    compiled = found.module("chain").compile_chain(
        product_line(found, line),
        build.base,
        None if build.cache == "none" else build.cache,
        arch=device.arch,
        options="--keep-cubin",
    )
    used = read_resources(compiled.artifacts.CUBIN)
    allowed = KNOWN_SPILL_BYTES if spills_knowingly(line, build) else 0
    if used.spill_bytes > allowed or (used.local_bytes and not allowed):
        raise ValueError(
            f"{tiers(line, build)}  {used.registers} registers, {used.spill_bytes} bytes of spills, {used.local_bytes} local"
        )
    return f"{tiers(line, build)}  {used.registers} registers"


def _work(verb: str) -> None:
    """Answer builds, one JSON object a line of standard input, with {"detail"} or {"failure", "fatal"} each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # compilers print to it
    action = {"check": check_build, "compile": compile_build}[verb]
    # CuTe DSL leaves the cubins that it keeps in the working directory of its first build.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, line in enumerate(sys.stdin):
            answer: dict[str, Any]
            try:
                answer = {"detail": action(Build(**json.loads(line)), Path(folder) / str(number))}
            except Exception as error:  # whatever it is, the other builds must run
                text = " ".join(f"{type(error).__name__}: {error}".split())
                answer = {"failure": text[:FAILURE_LETTERS], "fatal": not isinstance(error, HARMLESS)}
            print(json.dumps(answer), file=answers, flush=True)


# --- all builds ---


@dataclass(frozen=True)
class Result:
    """What became of a build."""

    number: int
    build: Build
    detail: str
    failure: str | None
    seconds: float

    def __str__(self) -> str:
        verdict, detail = ("FAIL", self.failure) if self.failure else ("ok", self.detail)
        return f"{verdict:4}  {self.number:>3}  {self.build.title}  {detail}"


class Worker:
    """A process that answers one build after the other."""

    def __init__(self, verb: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__, "--worker", verb]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def ask(self, build: Build) -> dict[str, Any]:
        """The worker's answer; a failure where it ends or takes longer than BUILD_SECONDS."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(BUILD_SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(asdict(build)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        code = self.process.wait()
        return {
            "failure": f"the worker ended with code {code}, or was ended after {BUILD_SECONDS:.0f} s",
            "fatal": True,
        }

    def close(self) -> None:
        """End the process. A lost CUDA context may keep it from ending by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(
    builds: Mapping[int, Build], *, jobs: int, verb: str = "check", tell: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Check or compile builds in at most `jobs` worker processes at a time; results by number.

    Args:
        builds: By number, which the results carry.
        verb: "check" on this machine's GPU, or "compile" without one.
        tell: Called with each result as it comes.
    """
    waiting: queue.SimpleQueue[tuple[int, Build]] = queue.SimpleQueue()
    for number, build in sorted(builds.items(), key=lambda item: -_cost(item[1])):
        waiting.put((number, build))
    results: list[Result] = []
    lock = threading.Lock()
    environment = worker_environment(verb)

    def serve() -> None:
        worker: Worker | None = None
        while True:
            try:
                number, build = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(verb, environment)
            started = time.monotonic()
            answer = worker.ask(build)
            seconds = round(time.monotonic() - started, 1)
            result = Result(number, build, answer.get("detail", ""), answer.get("failure"), seconds)
            with lock:
                results.append(result)
                tell(result)
            if answer.get("fatal"):
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(min(jobs, len(builds)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(results, key=lambda result: result.number)


def _cost(build: Build) -> int:
    """Grows with a build's run time, so that long builds start first."""
    return build.rows * build.num_steps * build.vocab_size * build.rank_dim


def worker_environment(verb: str) -> dict[str, str]:
    """The environment of a worker: the tool and the harness are found, and a compiler that has no GPU knows the arch."""
    paths = [str(ROOT), str(ROOT / "generator"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return environment | ({"CUTE_DSL_ARCH": "sm_90a"} if verb == "compile" else {})


def feature_builds(device: DeviceSpec) -> list[Build]:
    """Builds of every feature with every row slot count; where a residency does not fit, the planned one in its place."""
    builds = []
    for turn, (feature, rows) in enumerate(product(list(FEATURES)[1:], FEATURE_ROWS)):
        build = Build(
            vocab_size=FEATURE_VOCABULARIES[turn % len(FEATURE_VOCABULARIES)],
            rank_dim=256,
            num_steps=FEATURE_STEPS[turn % len(FEATURE_STEPS)],
            residency=FACTORS["residency"][turn % len(FACTORS["residency"])],
            rows=rows,
            dtypes=FACTORS["dtypes"][(turn + turn // len(FEATURE_ROWS)) % len(FACTORS["dtypes"])],
            feature=feature,
        )
        fits = build.residency == PLANNED or forced_line(build, device) is not None
        builds.append(build if fits else replace(build, residency=PLANNED))
    return builds


def numbered_cover(device: DeviceSpec) -> dict[int, Build]:
    """All builds by number, from 1: the cover, then those of features."""
    return dict(enumerate([*cover(possible_builds(device)), *feature_builds(device)], start=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check the chain kernel at every residency.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes; default: one a core")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of builds; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--compile", action="store_true", help="compile for sm_90a instead; needs no GPU")
    parser.add_argument("--worker", choices=("check", "compile"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.worker:
        _work(asked.worker)
        return OK
    devices = load_devices(ROOT)
    try:
        device = devices["h200" if asked.compile else local_device(devices)]
    except CannotTell as error:
        print(f"residency: {error}", file=sys.stderr)
        return CANNOT_TELL
    builds = numbered_cover(device)
    if asked.only:
        unknown = sorted(set(asked.only) - set(builds))
        if unknown:
            parser.error(f"--only: expected numbers from 1 to {len(builds)}, got {unknown}")
        builds = {number: builds[number] for number in asked.only}
    started = time.monotonic()
    verb = "compile" if asked.compile else "check"
    results = run(builds, jobs=asked.jobs, verb=verb, tell=lambda result: print(result, flush=True))
    failed = [result for result in results if result.failure]
    seconds = time.monotonic() - started
    print(f"{len(results)} builds on {device.name}, {len(failed)} failed, {seconds:.0f} s")
    for result in failed:
        print(result)
    if asked.json is not None:
        rows = [asdict(result) for result in results]
        asked.json.write_text(json.dumps({"device": device.name, "verb": verb, "builds": rows}, indent=1) + "\n")
    return NO if failed else OK


if __name__ == "__main__":
    sys.exit(main())
