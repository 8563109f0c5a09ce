"""`verify`: the generated kernels against the oracle on this machine's GPU.

Each pair of base and cache dtypes is checked in a process of its own, several at a time, so that the pairs compile side
by side; so is the wait that must time out, which costs its process the CUDA context. ``record`` writes the evidence.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsparkgen import evidence
from dsparkgen.device import read_devices
from dsparkgen.gpu import CannotTell, Product, generated_models, harness, load_product, need_cuda, this_device

OK, NO, CANNOT_TELL = 0, 1, 3
SEED = 20261129
DIRECTED_SEED = 7
TASK_SECONDS = 540.0
PROBE_TIMEOUT_MS = 200
AGREEMENT_BATCHES = 100  # of up to 8 rows and 5 positions: about 4000 positions
NOISE, CHAIN, FUSED = "noise", "chain", "fused"


@dataclass(frozen=True)
class Task:
    """What one worker process checks of one model."""

    root: str
    out: str
    model: str
    part: str  # "noise", "timeout", or "<base dtype>/<cache dtype>"
    batches: int
    replays: int
    seed: int


@dataclass(frozen=True)
class Finding:
    """One check of one kernel or several: what it covered, or how it failed."""

    check: str
    kernels: tuple[str, ...]
    covered: Any = None
    failure: str | None = None
    seconds: float = 0.0


def run_verify(
    root: Path,
    models: Sequence[str],
    *,
    out: Path | None = None,
    results: Path | None = None,
    batches: int = 200,
    replays: int = 1000,
    seed: int = SEED,
    jobs: int = 6,
    record: bool = False,
    json_path: Path | None = None,
    command: str | None = None,
) -> int:
    """Check models on this machine's GPU and print a table of what was covered.

    Args:
        root: The repository: specs/devices/ and tests/harness.
        models: Names; empty for all.
        out: Source root of the generated code; default root/generated.
        results: Folder of recorded results; default root/benchmarks/results.
        batches: Random batches of each pair of dtypes, and of the noise.
        replays: Replays of each captured graph.
        seed: Of everything random.
        jobs: Worker processes at a time.
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
    everything: dict[str, list[Finding]] = {}
    try:
        need_cuda()
        harness(root.resolve(), "tests.harness.checks")
        for model in generated_models(out, models):
            product = load_product(out, model)
            device = this_device(product)
            tasks = [
                Task(str(root.resolve()), str(out), model, part, batches, replays, seed) for part in _parts(product)
            ]
            findings = _run_tasks(tasks, jobs)
            everything[model] = findings
            if record:
                arch = read_devices(root / "specs" / "devices")[device].arch
                entries = verified_entries(findings, product, arch)
                if entries:
                    path = evidence.record(results, device, model, command, verified=entries)
                    _progress(f"recorded {', '.join(entry['kernel'] for entry in entries)} in {path}")
    except CannotTell as error:
        _progress(f"verify: {error}")
        return CANNOT_TELL
    print(render_table(everything))
    if json_path is not None:
        found = {model: [asdict(finding) for finding in findings] for model, findings in everything.items()}
        json_path.write_text(json.dumps({"command": command, "models": found}, indent=1) + "\n", encoding="utf-8")
    failed = any(finding.failure for findings in everything.values() for finding in findings)
    return NO if failed else OK


def verified_entries(findings: Sequence[Finding], product: Product, arch: str) -> list[dict[str, Any]]:
    """The evidence of the kernels whose every check passed; a kernel that nothing checked has none."""
    entries = []
    for kernel in (NOISE, CHAIN, FUSED):
        own = [finding for finding in findings if kernel in finding.kernels]
        if own and not any(finding.failure for finding in own):
            checks = {finding.check: finding.covered for finding in own}
            entries.append({"kernel": kernel, "arch": arch, "inputs": product.digest(kernel), "checks": checks})
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


def _parts(product: Product) -> list[str]:
    parts = [NOISE] if product.has(NOISE) else []
    if product.has(CHAIN) or product.has(FUSED):
        parts += [f"{base}/{cache}" for base in product.config.BASE_DTYPES for cache in product.config.CACHE_DTYPES]
    return parts + (["timeout"] if product.has(CHAIN) else [])


def _run_tasks(tasks: Sequence[Task], jobs: int) -> list[Finding]:
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return [finding for findings in pool.map(_run_task, tasks) for finding in findings]


def _run_task(task: Task) -> list[Finding]:
    """Run one worker to its end. Whatever happens to it is a finding: a crash or silence fails its part."""
    kernels = (NOISE,) if task.part == NOISE else (CHAIN,) if task.part == "timeout" else (CHAIN, FUSED)
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    started = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "dsparkgen.verify", json.dumps(asdict(task))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=TASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Finding(task.part, kernels, failure=f"no answer within {TASK_SECONDS:.0f} s")]
    seconds = time.monotonic() - started
    _progress(f"{task.model}: {task.part}: {seconds:.0f} s")
    found = []
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            values = json.loads(line)
            found.append(Finding(**(values | {"kernels": tuple(values["kernels"])})))
    if ran.returncode != OK and not any(finding.failure for finding in found):
        found.append(Finding(task.part, kernels, failure=f"the worker ended with exit code {ran.returncode}"))
    return found


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The worker


def work(task: Task) -> bool:
    """Run one task in this process; print one JSON line a check. Returns whether all hold."""
    import torch

    checks = harness(Path(task.root), "tests.harness.checks")
    product = load_product(Path(task.out), task.model)
    device = torch.device("cuda", torch.cuda.current_device())
    both = tuple(kernel for kernel in (CHAIN, FUSED) if product.has(kernel))
    good = True

    def run(name: str, kernels: tuple[str, ...], check: Callable[[], Any]) -> None:
        nonlocal good
        started = time.monotonic()
        failures: Mapping[str, str] = {}
        covered = None
        try:
            covered = check()
        except checks.CheckFailed as error:
            failures, covered = error.failures, error.covered
        except Exception as error:
            failures = dict.fromkeys(kernels, f"{type(error).__name__}: {error}")
        good = good and not failures
        seconds = round(time.monotonic() - started, 2)
        for kernel in kernels:
            failure = failures.get(kernel)
            finding = Finding(name, (kernel,), None if failure else covered, failure, seconds)
            print(json.dumps(asdict(finding)), flush=True)

    if task.part == NOISE:
        run("noise", (NOISE,), lambda: checks.check_noise(product, device, batches=task.batches, seed=task.seed))
        return good
    if task.part == "timeout":
        run("timeout", (CHAIN,), lambda: checks.provoke_timeout(product, device, timeout_ms=PROBE_TIMEOUT_MS))
        return good
    base, cache = task.part.split("/")
    exact = checks.exact_subject(product, base, cache, device, seed=task.seed)
    rough = checks.random_subject(product, base, cache, device, seed=task.seed)
    with torch.inference_mode():
        part = task.part
        run(f"bitwise {part}", both, lambda: checks.check_bitwise(exact, batches=task.batches, seed=task.seed))
        run(f"directed {part}", both, lambda: checks.check_directed(exact, seed=DIRECTED_SEED))
        run(f"independence {part}", both, lambda: checks.check_seed_dependence(exact, seed=DIRECTED_SEED))
        run(f"graph {part}", both, lambda: checks.check_graph(exact, replays=task.replays, seed=task.seed))
        run(f"agreement {part}", both, lambda: checks.check_agreement(rough, batches=AGREEMENT_BATCHES, seed=task.seed))
    return good


def _main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    good = work(task)
    sys.stdout.flush()
    # A process whose CUDA context is lost may fail, or hang, in its destructors: nothing is left to do in them.
    os._exit(OK if good else NO)


if __name__ == "__main__":
    _main()
