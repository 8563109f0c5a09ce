"""The chain over several ranks, a process and a GPU each or emulated on one GPU: results, replays, and ranks that fail.

    python -m tests.harness.ranks --world 2 --batches 1000 --replays 10000
    python -m tests.harness.ranks --world 8 --emulated

Every phase runs in processes of its own, because some end in a trap, and is bounded by a time. All phases run side by side,
which delays their launches as well, but the replays: these have the GPUs to themselves, after the others. The weights have exact dot products, so that every rank's tokens
and whole cache equal the oracle's of the whole vocabulary to the bit. Prints a summary as JSON; the exit code is 0 when every
phase did what it must.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from . import checks
from .cases import Case
from .checks import CheckFailed, EmulatedSubject, RankSubject, Subject

ROOT = Path(__file__).parents[2]
MODULE = "tests.harness.ranks"
SEED = 29
COLLECTIVE_SECONDS = 120  # a rank that is gone ends the others' collectives
SHARE_OF_SHARDS = 10  # one in so many further batches has its head and base logits in shards
FEW_REQS = 2  # request states of the samplers that fail: few builds to compile
PARTS = 4  # processes of a rank among which the batches are shared out
PHASE_SECONDS = 300.0
PREPARE_SECONDS = 300.0
GRACE_SECONDS = 30.0  # for the other processes once one has ended, in a phase where it must not
POLL_SECONDS = 0.1
MARGIN_MS = 3_000  # beyond timeout_ms: until CUDA has reported the trap to the host
LATE_FACTOR = 3  # how many times timeout_ms the late rank sleeps
DELAY_CYCLES = (0, 4_000, 40_000, 400_000)  # before a replay: 0 to about 200 us, around and beyond a chain's length
DIRECTED_SEED = 31


@dataclass(frozen=True)
class Task:
    """What one process of a phase does."""

    phase: str
    world: int
    emulated: bool
    model: str
    generated: str  # source root of the generated code
    batches: int
    replays: int
    timeout_ms: int
    part: int = 0  # of the phase's batches
    parts: int = 1
    store: str = ""  # file that the ranks meet through
    rank: int = 0

    @property
    def name(self) -> str:
        """The phase, with its part where there are several."""
        return self.phase if self.parts == 1 else f"{self.phase} {self.part + 1} of {self.parts}"


@dataclass(frozen=True)
class Place:
    """This process among the ranks."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None  # the CPU group; None with emulated ranks

    @property
    def last(self) -> bool:
        """Whether this is the rank that fails in the phases where one does."""
        return self.rank == self.world - 1

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)


def join(task: Task) -> Place:
    """Join the ranks of a phase. A collective."""
    device = torch.device("cuda", 0 if task.emulated else task.rank)
    torch.cuda.set_device(device)
    if task.emulated:
        return Place(0, task.world, device, None)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.store}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    return Place(task.rank, task.world, device, dist.group.WORLD)


class ShardSubject(RankSubject):
    """A rank that is given its rows of the head and its columns of the base logits alone."""

    def _columns(self) -> tuple[int, int]:
        config = self.product.config
        width = -(-config.DRAFT_VOCAB_SIZE // self.group.size())
        return width * self.group.rank(), min(width * (self.group.rank() + 1), config.DRAFT_VOCAB_SIZE)

    def chain_sampler(self) -> Any:
        first, end = self._columns()
        embed, head = self.weights
        launch, rows = self.product.module("launch"), head[first:end].clone()
        sampler = launch.ChainSampler(embed, rows, **self.sampler_options(), group=self.group)
        reason = sampler.why_not_shard((first, end - first))
        if reason is not None:
            raise CheckFailed({"chain": f"expected the shard to be accepted, got: {reason}"})
        if sampler.accepts_shard((first + 1, end - first)):
            raise CheckFailed({"chain": "expected a shard of other columns to be declined, got True"})
        return sampler

    def samplers(self, case: Case) -> Iterator[tuple[str, checks.Sample]]:
        first, end = self._columns()

        def sample(mine: Case) -> None:
            self._sample_chain(mine.replace(base_logits=mine.base_logits[:, :, first:end]))

        yield "chain", sample


Phase = Generator[None, None, dict[str, Any]]


class Run:
    """One process of a phase. A phase prepares, yields once everything is compiled, and returns what it covered."""

    def __init__(self, task: Task) -> None:
        from dsparkgen.gpu import load_product

        self.task = task
        self.product = load_product(Path(task.generated), task.model)
        self.place = join(task)
        self.launch = self.product.module("launch")

    def pairs(self) -> Sequence[tuple[str, str]]:
        """The dtypes of base logits and cache to run with: every cache dtype with the first base dtype, and the others once."""
        found = checks.dtype_pairs(self.product)
        return [pair for pair in found if pair[0] == found[0][0]] + [pair for pair in found if pair[0] != found[0][0]][
            :1
        ]

    def exact(self, base: str, cache: str) -> Subject:
        """A model on weights with exact dot products, the same on every rank."""
        return checks.exact_subject(self.product, base, cache, self.place.device, seed=SEED)

    def subject(self, base: str, cache: str) -> Subject:
        """The ranks of `exact`."""
        exact = self.exact(base, cache)
        if self.task.emulated:
            return EmulatedSubject.of(exact, self.task.world)
        return RankSubject.of(exact, self.place.group)

    def sampler(self, **options: Any) -> tuple[Any, Subject]:
        """A compiled sampler of this rank for few rows of the first dtypes, and what it runs on."""
        subject = self.exact(*self.pairs()[0])
        fixed: dict[str, Any] = {"max_reqs": FEW_REQS, "group": self.place.group, "timeout_ms": self.task.timeout_ms}
        fixed |= {"cache_dtype": checks.DTYPES[subject.cache]}
        return self.launch.ChainSampler(*subject.weights, **(fixed | options)), subject

    def warm(self, sampler: Any, case: Case) -> None:
        """A good launch of every build and one call, after which all ranks start level: what follows is the wait alone."""
        sampler.warmup()
        torch.cuda.synchronize()
        self.place.meet()
        self.call(sampler, case)
        self.place.meet()

    def few(self, subject: Subject, rows: int = 1) -> Case:
        """Inputs for a sampler of few request states."""
        return checks.make_case(subject, rows, seed=SEED, max_reqs=FEW_REQS)

    def call(self, sampler: Any, case: Case, query_per_row: int | None = None) -> None:
        """One call, waited for."""
        distance = case.query_per_row if query_per_row is None else query_per_row
        sampler.sample(*case.call_arguments, query_per_row=distance)
        sampler.synchronize()

    # ---- phases that end well

    def agree(self) -> Phase:
        """Set-ups that fail on one rank: None on every rank, logged once; then one that succeeds."""
        subject = self.sampler()[1]
        yield
        memory, store = self.product.device_module("rank_memory"), self.product.device_module("kernel_store")
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")

        def broken(*args: Any, **options: Any) -> Any:
            raise RuntimeError("provoked")

        mine = self.place.last
        failing: dict[str, tuple[Any, dict[str, Any], str]] = {
            "compile": (
                mock.patch.object(store, "find_or_compile", broken) if mine else None,
                {},
                "RuntimeError: provoked",
            ),
            "head": (None, {"head": None} if mine else {}, "the Markov head is missing"),
            "allocation": (
                mock.patch.object(symmetric, "empty", broken) if mine else None,
                {},
                "RuntimeError: provoked",
            ),
            "pointers": (
                mock.patch.object(memory, "why_no_pointers", lambda *_: "no pointer") if mine else None,
                {},
                "no pointer",
            ),
            "max_reqs": (None, {"max_reqs": 1} if mine else {}, "max_reqs: expected the same on every rank"),
        }
        options = {"max_reqs": FEW_REQS, "cache_dtype": checks.DTYPES[subject.cache], "group": self.place.group}
        found: dict[str, Any] = {}
        for name, (patch, changes, expected) in failing.items():
            changed = dict(options) | changes
            embed, head = subject.weights
            head = changed.pop("head", head)
            with logged() as lines, patch or nullcontext():
                made = self.launch.ChainSampler.create(embed, head, **changed)
            wanted = 1 if self.place.rank == 0 else 0
            lines = [line for line in lines if "no chain sampler" in line]
            if made is not None or len(lines) != wanted or not all(expected in line for line in lines):
                raise CheckFailed(
                    {"chain": f"{name}: expected None and {wanted} line with {expected!r}, got {made}, {lines}"}
                )
            found[name] = lines
        made = self.launch.ChainSampler.create(*subject.weights, **options)
        if made is None:
            raise CheckFailed({"chain": "expected a sampler where no rank fails, got None"})
        made.warmup()
        return found

    def bitwise(self) -> Phase:
        """Random batches of 1 to the most rows, shared out over the dtypes, and inputs of known trouble."""
        subjects = [self.subject(*pair) for pair in self.pairs()]
        shards = None if self.task.emulated else ShardSubject.of(self.exact(*self.pairs()[0]), self.place.group)
        for subject in filter(None, [*subjects, shards]):
            subject.chain.compile()
        yield
        found, seed = {}, SEED + 2 * self.task.part
        for subject in subjects:
            subject.chain.warmup()
            amount = {"batches": -(-self.task.batches // (len(subjects) * self.task.parts)), "seed": seed}
            found[f"{subject.base}/{subject.cache}"] = checks.check_bitwise(subject, **amount)
            if self.task.part == 0:
                checks.check_directed(subject, seed=DIRECTED_SEED)
        if shards is not None:
            shards.chain.warmup()
            amount = {"batches": -(-self.task.batches // (SHARE_OF_SHARDS * self.task.parts)), "seed": seed + 1}
            found["shards"] = checks.check_bitwise(shards, **amount)
        return found

    def graph(self) -> Phase:
        """A captured graph replayed while the ranks are delayed, each replay and rank differently."""
        subjects = [self.subject(*pair) for pair in self.pairs()[:2]]
        for subject in subjects:
            subject.chain.compile()
        yield
        found = {}
        for subject in subjects:
            amount = {"replays": -(-self.task.replays // len(subjects)), "seed": SEED}
            name = f"{subject.base}/{subject.cache}"
            found[name] = checks.check_graph(subject, **amount, before_replay=self.delay)
        return found

    def delay(self, replay: int) -> None:
        """Let this rank's next launch come late, by turns, by nothing or by more than a whole chain takes."""
        cycles = DELAY_CYCLES[replay // self.task.world % len(DELAY_CYCLES)]
        if not self.task.emulated and replay % self.task.world == self.place.rank and cycles:
            torch.cuda._sleep(cycles)

    # ---- phases in which a rank gives up

    def late(self) -> Phase:
        """The last rank launches too late: every rank ends with the error, none hangs."""
        sampler, subject = self.sampler()
        case = self.few(subject)
        yield
        self.warm(sampler, case)
        if self.place.last:
            time.sleep(LATE_FACTOR * self.task.timeout_ms / 1000)
        # The late rank finds the records of position 0 that the others left before they gave up, and waits for later ones.
        place = (None, None) if self.place.last else (0, self.place.world - 1)
        return self.expect_timeout(lambda: self.call(sampler, case), *place)

    def killed(self) -> Phase:
        """The last rank dies between two launches."""
        sampler, subject = self.sampler()
        case = self.few(subject)
        yield
        self.warm(sampler, case)
        if self.place.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.expect_timeout(lambda: self.call(sampler, case), 0, self.place.world - 1)

    def expect_timeout(self, act: Callable[[], None], position: int | None, peer: int | None) -> dict[str, Any]:
        """The error that names this rank, the row, the position, and the rank that did not come; within the bound.

        None: any position, any other rank.
        """
        started = time.monotonic()
        try:
            act()
        except self.launch.ChainTimeoutError as error:
            took = (time.monotonic() - started) * 1000
            wanted = error.rank == self.place.rank and error.row == 0 and error.peer != error.rank
            wanted = wanted and position in (None, error.position) and peer in (None, error.peer)
            if not wanted or error.what not in ("peer rank", "logits") or took > self.task.timeout_ms + MARGIN_MS:
                raise CheckFailed({"chain": f"timeout after {took:.0f} ms: unexpected {error}"}) from error
            return {"ms": round(took), "message": str(error)}
        raise CheckFailed({"chain": "expected ChainTimeoutError, got results"})

    def differ_rows(self) -> Phase:
        """A debugging build finds that the ranks launch for different row counts."""
        sampler, subject = self.sampler(check_ranks=True)
        one, two = self.few(subject, 1), self.few(subject, 2)
        yield
        self.warm(sampler, one)
        return self.expect_difference("rows", lambda: self.call(sampler, two if self.place.last else one))

    def differ_shape(self) -> Phase:
        """A debugging build finds that the ranks' batches have different shapes."""
        sampler, subject = self.sampler(check_ranks=True)
        case = self.few(subject)
        yield
        self.warm(sampler, case)
        distance = case.query_per_row - self.place.last
        return self.expect_difference("batch shape", lambda: self.call(sampler, case, distance))

    def expect_difference(self, what: str, act: Callable[[], None]) -> dict[str, Any]:
        """The error that names the difference on the ranks that find it; a peer of theirs may run into its timeout."""
        try:
            act()
        except self.launch.RanksDifferError as error:
            if error.what != what or error.rank != self.place.rank or error.expected == error.given:
                raise CheckFailed({"chain": f"expected the {what} to differ, got: {error}"}) from error
            return {"found": True, "message": str(error)}
        except self.launch.ChainTimeoutError as error:
            return {"found": False, "message": str(error)}
        raise CheckFailed({"chain": "expected RanksDifferError, got results"})

    def lone(self) -> Phase:
        """One rank of several, on this GPU with buffers for all of them, whose peers never launch."""
        memory = self.product.device_module("rank_memory")
        group = self.product.device_module("rank_group").RankGroup(None)
        share_of = self.product.device_module("chain_share").share_of
        options = self.product.device_module("chain_share").Options
        subject = self.exact(*self.pairs()[0])
        sampler = self.launch.ChainSampler.__new__(self.launch.ChainSampler)
        share = share_of(self.product.config, self.task.world, 0)

        def buffers(_: Any, size: int, device: torch.device, blank_from: int) -> Any:
            return memory.emulate_buffers(self.task.world, size, device, blank_from)

        with mock.patch.object(memory, "share_buffer", buffers):
            chosen = options(FEW_REQS, checks.DTYPES[subject.cache], timeout_ms=self.task.timeout_ms)
            sampler._set_up(group, share, *subject.weights, None, chosen)
        yield
        case = self.few(subject)
        sampler.draw_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, 1)
        torch.cuda.synchronize()  # compiled: what follows is the wait alone
        return self.expect_timeout(lambda: self.call(sampler, case), 0, None)

    def grid(self) -> Phase:
        """A launch that waits for a CTA too many."""
        subject = self.subject(*self.pairs()[0])
        subject.chain.compile()
        yield
        subject.chain.warmup()
        case = checks.stacked(checks.make_case(subject, 1, seed=SEED), self.task.world)
        variant, arguments = subject.chain.prepare(1, *case.call_arguments, case.query_per_row)
        bound = {"ctas": variant.ctas + 1, "timeout_ns": self.task.timeout_ms * 1_000_000}
        started = time.monotonic()
        subject.chain.launch(variant, arguments | bound)
        try:
            subject.chain.synchronize()
        except self.launch.ChainTimeoutError as error:
            took = (time.monotonic() - started) * 1000
            # Two ranks wait for each other's CTAs alike, and then any rank's missing one may be the first to be missed.
            named = (error.what, error.peer) == ("grid barrier", variant.ctas) or self.task.world == 2
            if not named or error.position != 0 or took > self.task.timeout_ms + MARGIN_MS:
                raise CheckFailed({"chain": f"timeout after {took:.0f} ms: unexpected {error}"}) from error
            return {"ms": round(took), "message": str(error)}
        raise CheckFailed({"chain": f"expected ChainTimeoutError when it waits for CTA {variant.ctas}, got results"})


REAL_PHASES = ("agree", "bitwise", "graph", "late", "killed", "differ_rows", "differ_shape")
EMULATED_PHASES = ("bitwise", "graph", "lone", "grid")
APART = ("graph",)  # phases that have the GPUs to themselves
DEADLY = {"killed": -signal.SIGKILL}  # how the last rank ends


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings that the product logs meanwhile."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("dspark_kernels"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def work(task: Task) -> dict[str, Any]:
    """Do a process's part of a phase; what it covered, or how it failed."""
    from dsparkgen.workers import wait_for_go

    found: dict[str, Any] = {"rank": task.rank, "covered": None, "failure": None}
    started = time.monotonic()
    try:
        with torch.inference_mode():
            phase: Phase = getattr(Run(task), task.phase)()
            next(phase)
            wait_for_go()
            started = time.monotonic()
            next(phase)
    except StopIteration as end:
        found["covered"] = end.value
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    return found | {"seconds": round(time.monotonic() - started, 1)}


class Processes:
    """The processes of one phase: started, then let go, then waited for, each step bounded."""

    def __init__(self, task: Task, folder: Path, seconds: float) -> None:
        from dsparkgen.workers import Worker

        self.task = task
        store = str(folder / task.name.replace(" ", "-"))
        self.tasks = [replace(task, store=store, rank=rank) for rank in range(1 if task.emulated else task.world)]
        # Multicast is not used; torch would bind it where it can.
        environment = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        self.workers = [Worker(MODULE, asdict(one), seconds=seconds, environment=environment) for one in self.tasks]

    def run(self, seconds: float) -> dict[str, Any]:
        """Let all go once all have prepared; what the ranks found, and whether it is what the phase must end with."""
        from dsparkgen.workers import WorkerFailed

        started = time.monotonic()
        clock = threading.Timer(seconds, self.kill)
        clock.daemon = True
        try:
            for worker in self.workers:
                worker.wait_ready()
            started = time.monotonic()
            clock.start()
            for worker in self.workers:
                worker.go()
        except WorkerFailed:
            pass  # `finish` says how each has ended
        ranks = self._finish()
        clock.cancel()
        passed = all(rank["failure"] is None for rank in ranks)
        if passed and self.task.phase.startswith("differ"):
            passed = any(rank["covered"]["found"] for rank in ranks)
        return {"passed": passed, "seconds": round(time.monotonic() - started, 1), "ranks": ranks}

    def kill(self) -> None:
        """End all processes now."""
        for worker in self.workers:
            worker.kill()

    def _finish(self) -> list[dict[str, Any]]:
        done = [False] * len(self.workers)

        def finish(rank: int) -> dict[str, Any]:
            worker, phase = self.workers[rank], self.task.phase
            ended = worker.finish()
            done[rank] = True
            if phase in DEADLY and rank == len(self.workers) - 1:
                right = ended.code == DEADLY[phase]
                failure = None if right else f"expected exit code {DEADLY[phase]}, got: {worker.ending(ended.code)}"
                return {"rank": rank, "covered": {"killed": right}, "failure": failure}
            if ended.code != 0:
                # The others may have collectives and launches that wait for it.
                grace = time.monotonic() + GRACE_SECONDS
                while not all(done) and time.monotonic() < grace:
                    time.sleep(POLL_SECONDS)
                self.kill()
            if ended.lines:
                return ended.lines[-1]
            return {"rank": rank, "covered": None, "failure": worker.ending(ended.code)}

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(finish, range(len(self.workers))))


def run_phases(task: Task, phases: Sequence[str], *, seconds: float = PHASE_SECONDS) -> dict[str, Any]:
    """Every phase, whatever the others come to. `seconds` bounds each phase, once it has prepared."""
    tasks = []
    for phase in phases:
        parts = min(PARTS, max(task.batches, 1)) if phase == "bitwise" else 1
        tasks += [replace(task, phase=phase, part=part, parts=parts) for part in range(parts)]
    apart = [one for one in tasks if one.phase in APART]
    together = [one for one in tasks if one.phase not in APART]
    found: dict[str, Any] = {}

    def run(one: Task) -> None:
        found[one.name] = started[one.name].run(seconds)
        verdict = "passed" if found[one.name]["passed"] else "FAILED"
        print(f"{one.name}: {verdict} in {found[one.name]['seconds']} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        # A worker's whole life: preparing, and waiting for its turn.
        life = PREPARE_SECONDS + seconds * (1 + len(apart))
        started = {one.name: Processes(one, Path(folder), life) for one in tasks}
        try:
            with ThreadPoolExecutor(max(len(together), 1)) as pool:
                list(pool.map(run, together))
            for one in apart:
                run(one)
        finally:
            for processes in started.values():
                processes.kill()
    how = "emulated" if task.emulated else "real"
    summary = {"world": task.world, "ranks": how, "model": task.model, "timeout_ms": task.timeout_ms}
    ordered = {one.name: found[one.name] for one in tasks}
    return summary | {"passed": all(one["passed"] for one in ordered.values()), "phases": ordered}


def parse(arguments: Sequence[str]) -> tuple[Task, Sequence[str], float, str | None]:
    """The command line: a task without its phase, the phases, the seconds of each, and where the summary goes."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="The chain over several ranks.")
    parser.add_argument("--world", type=int, default=2, help="number of ranks; one GPU each unless emulated")
    parser.add_argument("--emulated", action="store_true", help="all ranks in one launch on one GPU")
    parser.add_argument("--model", default="deepseek_v41")
    parser.add_argument("--generated", default=str(ROOT / "generated"), help="source root of the generated code")
    parser.add_argument("--batches", type=int, default=1000, help="random batches, shared out over the dtypes")
    parser.add_argument("--replays", type=int, default=10_000, help="graph replays, shared out over the cache dtypes")
    parser.add_argument("--timeout-ms", type=int, default=2000, help="of the waits that must run out")
    parser.add_argument("--phases", help="comma-separated; by default all that there are")
    parser.add_argument("--phase-seconds", type=float, default=PHASE_SECONDS, help="bound of each phase")
    parser.add_argument("--json", help="file for the summary; by default stdout")
    given = parser.parse_args(arguments)
    known = EMULATED_PHASES if given.emulated else REAL_PHASES
    phases = given.phases.split(",") if given.phases else known
    for phase in phases:
        if phase not in known:
            parser.error(f"--phases: expected some of {', '.join(known)}, got {phase!r}")
    task = Task(
        "", given.world, given.emulated, given.model, given.generated, given.batches, given.replays, given.timeout_ms
    )
    return task, phases, given.phase_seconds, given.json


def main(arguments: Sequence[str]) -> int:
    """Run the phases asked for; or, given a task as JSON, be one process of a phase."""
    if arguments and arguments[0].startswith("{"):
        values: Mapping[str, Any] = json.loads(arguments[0])
        found = work(Task(**values))
        print(json.dumps(found), flush=True)
        # A process whose CUDA context is lost may fail, or hang, in its destructors: nothing is left to do in them.
        os._exit(0 if found["failure"] is None else 1)
    task, phases, seconds, target = parse(arguments)
    summary = run_phases(task, phases, seconds=seconds)
    text = json.dumps(summary, indent=1)
    if target is None:
        print(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
