"""`verify`: the generated kernels against the oracle on this machine's GPUs.

Each pair of base and cache dtypes of each model is checked in a process of its own, several at a time, so that they compile
side by side; so is the wait that must time out, which costs its process the CUDA context. ``record`` writes the evidence.

Over several ranks the chain alone is checked: emulated, all ranks in one process; real, a process and a GPU each, every rank
with the same inputs and each comparing its own outputs.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dsparkgen import evidence, prefill, rank_timings
from dsparkgen.device import read_devices
from dsparkgen.gpu import CannotTell, Product, generated_models, harness, load_product, need_cuda, this_device
from dsparkgen.workers import Worker, finish_together, start_ranks

OK, NO, CANNOT_TELL = 0, 1, 3
SEED = 20261129
DIRECTED_SEED = 7
TASK_SECONDS = 540.0
PROBE_TIMEOUT_MS = 200
AGREEMENT_BATCHES = 100  # of up to 8 rows and 5 positions: about 4000 positions
DELAY_CYCLES = 100_000  # of one rank before a replay, 50 us: a whole chain
NOISE, CHAIN, FUSED, STEP = KERNELS = ("noise", "chain", "fused", "step")


@dataclass(frozen=True)
class Task:
    """What one worker process, or one a rank, checks of one model."""

    root: str
    out: str
    model: str
    part: str  # "noise", "timeout", or "<base dtype>/<cache dtype>"; several joined by +, the timeout last
    batches: int
    replays: int
    seed: int
    rows: tuple[int, ...] | None = None  # request rows of the random batches; None: all
    world: int = 1  # ranks of the chain
    emulated: bool = False  # on one GPU
    seconds: float = TASK_SECONDS  # of the worker's whole life

    @property
    def title(self) -> str:
        """The part, with the ranks where there are several."""
        return self.part if self.world == 1 else f"{self.part} over {self.ranks} ranks"

    @property
    def ranks(self) -> str:
        """The number of ranks in words."""
        return f"{self.world} emulated" if self.emulated else str(self.world)


@dataclass(frozen=True)
class Finding:
    """One check of one kernel: what it covered, or how it failed."""

    check: str
    kernels: tuple[str, ...]
    covered: Any = None
    failure: str | None = None
    seconds: float = 0.0
    world: int = 1
    emulated: bool = False


@dataclass(frozen=True)
class Asked:
    """What to check of every model."""

    batches: int
    replays: int
    seed: int
    rows: tuple[int, ...] | None
    tp: int | None
    emulated: tuple[int, ...]
    dtypes: tuple[str, ...] = ()  # pairs of dtypes; all where empty
    seconds: float = TASK_SECONDS


def run_verify(
    root: Path,
    models: Sequence[str],
    *,
    out: Path | None = None,
    results: Path | None = None,
    batches: int = 200,
    replays: int = 1000,
    rows: Sequence[int] | None = None,
    tp: int | None = None,
    emulated: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    seconds: float = TASK_SECONDS,
    seed: int = SEED,
    jobs: int | None = None,
    record: bool = False,
    json_path: Path | None = None,
    command: str | None = None,
) -> int:
    """Check models on this machine's GPUs and print a table of what was covered.

    Args:
        root: The repository: specs/devices/ and tests/harness.
        models: Names; empty for all.
        out: Source root of the generated code; default root/generated.
        results: Folder of recorded results; default root/benchmarks/results.
        batches: Random batches of each pair of dtypes, and of the noise.
        replays: Replays of each captured graph.
        rows: Request rows of the random batches; default: 1 to the model's maximum, and for the step kernels up to 128.
        tp: Instead, the chain over so many ranks, each on a GPU of this machine.
        emulated: Instead, the chain over these numbers of ranks, all on one GPU.
        dtypes: Pairs to check, such as "bf16/fp32" for bf16 base logits and an fp32 cache; default: all that a model takes.
        seconds: Bound of each process; what is not checked by then has failed.
        seed: Of everything random.
        jobs: Worker processes at a time; default: one a core.
        record: Write the evidence, where every check of a kernel passed.
        json_path: Where to write the findings as JSON.
        command: What to record as the command; default: this process's.

    Returns:
        0 when everything holds, 1 when a check fails, 3 when this machine cannot tell.

    Raises:
        EvidenceError: the checked-in results that should be merged into are not intact.
    """
    command = shlex.join(["dsparkgen", *sys.argv[1:]]) if command is None else command
    out = (root / "generated" if out is None else out).resolve()
    results = root / "benchmarks" / "results" if results is None else results
    asked = Asked(batches, replays, seed, tuple(rows) if rows else None, tp, tuple(emulated), tuple(dtypes), seconds)
    everything: dict[str, list[Finding]] = {}
    try:
        need_cuda()
        if tp is not None:
            rank_timings.need_gpus(tp)
        harness(root.resolve(), "tests.harness.checks")
        products = {name: load_product(out, name) for name in generated_models(out, models)}
        device = {this_device(product) for product in products.values()}.pop()
        arch = read_devices(root / "specs" / "devices")[device].arch
        processes = max(1, jobs or os.cpu_count() or 1)
        together = sum(len(_parts(product, asked.dtypes)) for product in products.values()) > processes
        tasks = {
            name: _tasks(root.resolve(), out, product, asked, together=together) for name, product in products.items()
        }
        if tp is not None or emulated:
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
        with ThreadPoolExecutor(max_workers=processes) as pool:
            # All models' parts share the processes; a run over real ranks has the GPUs to itself, after the others.
            alone = {
                pool.submit(_run_task, task): task for own in tasks.values() for task in own if not _takes_all(task)
            }
            found: dict[Task, list[Finding]] = {}
            left = {model: set(own) for model, own in tasks.items()}
            for task, findings in chain(
                ((alone[future], future.result()) for future in as_completed(alone)),
                ((task, _run_task(task)) for own in tasks.values() for task in own if _takes_all(task)),
            ):
                found[task] = findings
                left[task.model].discard(task)
                if left[task.model]:
                    continue
                # This model is done: whatever becomes of the others, what it gave is shown and kept.
                everything[task.model] = [one for own in tasks[task.model] for one in found[own]]
                print(render_table({task.model: everything[task.model]}), flush=True)
                if record:
                    _record(results, device, arch, products[task.model], command, everything[task.model])
    except CannotTell as error:
        _progress(f"verify: {error}")
        return CANNOT_TELL
    if json_path is not None:
        values = {model: [asdict(finding) for finding in findings] for model, findings in everything.items()}
        json_path.write_text(json.dumps({"command": command, "models": values}, indent=1) + "\n", encoding="utf-8")
    failed = any(finding.failure for findings in everything.values() for finding in findings)
    return NO if failed else OK


def verified_entries(findings: Sequence[Finding], product: Product, arch: str) -> list[dict[str, Any]]:
    """The evidence of the kernels whose every check passed, for each number of ranks; a kernel that nothing checked has none."""
    entries = []
    for world, emulated in sorted({(finding.world, finding.emulated) for finding in findings}):
        ranks = ({"tp": world} if world > 1 else {}) | ({"emulated": True} if emulated else {})
        for kernel in KERNELS:
            own = [f for f in findings if kernel in f.kernels and (f.world, f.emulated) == (world, emulated)]
            if own and not any(finding.failure for finding in own):
                checks = {finding.check: finding.covered for finding in own}
                entry = {"kernel": kernel, "arch": arch, "inputs": product.digest(kernel), "checks": checks}
                entries.append(entry | ranks)
    return entries


def render_table(everything: Mapping[str, Sequence[Finding]]) -> str:
    """One line a check: ok or FAIL, the kernels, seconds, and what was covered or what failed."""
    lines = []
    for model, findings in everything.items():
        for found in findings:
            verdict = "FAIL" if found.failure else "ok"
            detail = found.failure or json.dumps(found.covered)
            kernels = "+".join(found.kernels)
            lines.append(f"{model}  {verdict:4}  {found.check:24}  {kernels:12}  {found.seconds:6.1f} s  {detail}")
    return "\n".join(lines)


def _tasks(root: Path, out: Path, product: Product, asked: Asked, *, together: bool = False) -> list[Task]:
    """What to run for one model; `together`: one process does all its parts, where other models occupy the other cores."""
    whole = Task(
        str(root),
        str(out),
        product.model,
        "",
        asked.batches,
        asked.replays,
        asked.seed,
        asked.rows,
        seconds=asked.seconds,
    )
    if asked.tp is None and not asked.emulated:
        parts = _parts(product, asked.dtypes)
        return [replace(whole, part=part) for part in (["+".join(parts)] if together else parts)]
    if not product.has(CHAIN):
        return []
    pairs = _dtype_pairs(product, asked.dtypes)
    tasks = [replace(whole, part=part, world=world, emulated=True) for world in asked.emulated for part in pairs]
    if asked.tp is not None:
        tasks.append(replace(whole, part="+".join(pairs), world=asked.tp))
    return tasks


def _parts(product: Product, dtypes: Sequence[str]) -> list[str]:
    parts = _dtype_pairs(product, dtypes) if any(map(product.has, (CHAIN, FUSED, STEP))) else []
    parts += [NOISE] if product.has(NOISE) else []
    return parts + (["timeout"] if product.has(CHAIN) else [])


def _dtype_pairs(product: Product, dtypes: Sequence[str]) -> list[str]:
    """The pairs of dtypes that a model takes and that are asked for; all of the model's where none of them are."""
    config = product.config
    pairs = [f"{base}/{cache}" for base in config.BASE_DTYPES for cache in config.CACHE_DTYPES or ("none",)]
    return [pair for pair in pairs if pair in dtypes] or pairs


def _takes_all(task: Task) -> bool:
    """Whether a task needs several GPUs."""
    return task.world > 1 and not task.emulated


def _record(results: Path, device: str, arch: str, product: Product, command: str, findings: Sequence[Finding]) -> None:
    """Merge what was verified into the results of the GPUs that it ran on."""
    places: dict[str, list[dict[str, Any]]] = {}
    for entry in verified_entries(findings, product, arch):
        gpus = 1 if entry.get("emulated") else entry.get("tp", 1)
        places.setdefault(evidence.folder(device, gpus), []).append(entry)
    for place, entries in places.items():
        path = evidence.record(results, place, product.model, command, verified=entries)
        _progress(f"recorded {', '.join(entry['kernel'] for entry in entries)} in {path}")


def _run_task(task: Task) -> list[Finding]:
    """Run one task's workers to their end. Whatever happens to one is a finding: a crash or silence fails its part."""
    started = time.monotonic()
    if _takes_all(task):
        workers = start_ranks("dsparkgen.verify", asdict(task), task.world, seconds=task.seconds)
    else:
        workers = [Worker("dsparkgen.verify", asdict(task), seconds=task.seconds)]
    ended = finish_together(workers)
    _progress(f"{task.model}: {task.title}: {time.monotonic() - started:.0f} s")
    found: dict[tuple[str, tuple[str, ...]], Finding] = {}
    for rank, (worker, end) in enumerate(zip(workers, ended, strict=True)):
        prefix = f"rank {rank}: " if _takes_all(task) else ""
        own = [Finding(**(line | {"kernels": tuple(line["kernels"])})) for line in end.lines]
        if end.code != OK and not any(finding.failure for finding in own):
            own.append(_finding(task, task.part, _kernels(task), failure=worker.ending(end.code)))
        for finding in own:
            key = (finding.check, finding.kernels)
            if key not in found or (finding.failure and not found[key].failure):
                failure = f"{prefix}{finding.failure}" if finding.failure else None
                found[key] = Finding(**(vars(finding) | {"failure": failure}))
    return list(found.values())


def _kernels(task: Task) -> tuple[str, ...]:
    """The kernels that a task's part is about, as far as its name says."""
    if task.part == "timeout" or task.world > 1:
        return (CHAIN,)
    return {NOISE: (NOISE,)}.get(task.part, KERNELS if NOISE in task.part else (CHAIN, FUSED, STEP))


def _finding(task: Task, check: str, kernels: tuple[str, ...], **values: Any) -> Finding:
    return Finding(check, kernels, world=task.world, emulated=task.emulated, **values)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The worker


class Checker:
    """One worker process: runs the parts of its task and prints one JSON line a check and kernel."""

    def __init__(self, task: Task) -> None:
        import torch

        self.task, self.good = task, True
        self.checks = harness(Path(task.root), "tests.harness.checks")
        self.product = load_product(Path(task.out), task.model)
        self.ranks = harness(Path(task.root), "benchmarks.ranks").open_ranks() if _takes_all(task) else None
        self.device = torch.device("cuda", torch.cuda.current_device())

    def run(self, name: str, kernels: tuple[str, ...], check: Callable[[], Any]) -> None:
        """Run one check and print what it found."""
        started = time.monotonic()
        failures: Mapping[str, str] = {}
        covered = None
        try:
            covered = check()
        except self.checks.CheckFailed as error:
            failures, covered = error.failures, error.covered
        except Exception as error:
            failures = dict.fromkeys(kernels, f"{type(error).__name__}: {error}")
        self.good = self.good and not failures
        seconds = round(time.monotonic() - started, 2)
        # A kernel that only stood beside the others appears where it failed.
        for kernel in dict.fromkeys([*kernels, *failures]):
            failure = failures.get(kernel)
            values = {"covered": None if failure else covered, "failure": failure, "seconds": seconds}
            print(json.dumps(asdict(_finding(self.task, name, (kernel,), **values))), flush=True)

    def part(self, part: str) -> None:
        """Run one part."""
        task, checks, product, device = self.task, self.checks, self.product, self.device
        if part == NOISE:
            check = partial(checks.check_noise, product, device, batches=task.batches, seed=task.seed)
            self.run("noise", (NOISE,), check)
        elif part == "timeout":
            check = partial(checks.provoke_timeout, product, device, timeout_ms=PROBE_TIMEOUT_MS)
            self.run("timeout", (CHAIN,), check)
        else:
            base, cache = part.split("/")
            exact = checks.exact_subject(product, base, cache, device, seed=task.seed)
            if task.world == 1:
                self._pair(part, exact, checks.random_subject(product, base, cache, device, seed=task.seed))
            elif self.ranks is None:
                self._exact(part, checks.EmulatedSubject.of(exact, task.world), (CHAIN,))
            else:
                subject = checks.RankSubject.of(exact, self.ranks.group)
                late = partial(_delay_by_turns, self.ranks.rank, self.ranks.world)
                self._exact(part, subject, (CHAIN,), before_replay=late)

    def _exact(self, part: str, subject: Any, kernels: tuple[str, ...], **graph: Any) -> None:
        """What is held to the oracle to the bit."""
        task, checks = self.task, self.checks
        amount = {"batches": task.batches, "seed": task.seed, "rows": _chain_rows(task, self.product)}
        self.run(f"bitwise {part}", kernels, partial(checks.check_bitwise, subject, **amount))
        trouble = {"seed": DIRECTED_SEED, "beyond": task.rows is None}
        self.run(f"directed {part}", kernels, partial(checks.check_directed, subject, **trouble))
        replays = {"replays": task.replays, "seed": task.seed, "warm": task.rows is None} | graph
        self.run(f"graph {part}", kernels, partial(checks.check_graph, subject, **replays))

    def _pair(self, part: str, exact: Any, rough: Any) -> None:
        """All kernels of one GPU for a pair of dtypes: with exact weights, and with random ones beside the engine's loop."""
        task, checks = self.task, self.checks
        kernels = tuple(kernel for kernel in (CHAIN, FUSED, STEP) if self.product.has(kernel))
        if STEP in kernels and exact.step_sampler(checks.MAX_REQS) is None:
            kernels = tuple(kernel for kernel in kernels if kernel != STEP)
        self._exact(part, exact, kernels)
        self.run(f"independence {part}", kernels, partial(checks.check_seed_dependence, exact, seed=DIRECTED_SEED))
        amount = {"batches": AGREEMENT_BATCHES, "seed": task.seed}
        self.run(f"agreement {part}", kernels, partial(checks.check_agreement, rough, **amount))
        if STEP in kernels:
            rows = {"rows": task.rows or checks.EAGER_ROWS, "seed": task.seed}
            self.run(f"eager {part}", (STEP,), partial(checks.check_step_loop, rough, **rows))


def work(task: Task) -> bool:
    """Run one task in this process. Returns whether all its checks hold."""
    import torch

    checker = Checker(task)
    with torch.inference_mode():
        for part in task.part.split("+"):
            checker.part(part)
    return checker.good


def _chain_rows(task: Task, product: Product) -> tuple[int, ...] | None:
    """The row counts asked for that the chain takes; None where none were asked for."""
    if task.rows is None:
        return None
    return tuple(rows for rows in task.rows if rows <= product.config.MAX_ROWS) or (1,)


def _delay_by_turns(rank: int, world: int, replay: int) -> None:
    """Let one rank after another come late."""
    import torch

    if replay % world == rank:
        torch.cuda._sleep(DELAY_CYCLES)


def _main() -> None:
    values = json.loads(sys.argv[1])
    rows = values.pop("rows")
    good = work(Task(**values, rows=None if rows is None else tuple(rows)))
    sys.stdout.flush()
    # A process whose CUDA context is lost may fail, or hang, in its destructors: nothing is left to do in them.
    os._exit(OK if good else NO)


if __name__ == "__main__":
    _main()
