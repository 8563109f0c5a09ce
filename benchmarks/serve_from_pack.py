"""Serves a model from a pack on this machine's GPU without CuTe DSL: bitwise tests, verification, start-up beside the compiler's.

    python -m benchmarks.serve_from_pack PACK.whl [--model deepseek_v41] [--json FILE]

Makes an environment in which `import cutlass` fails and installs the pack into it (tests/harness/without_compiler.py). In it
run, side by side, the tests of tests/kernels that need no kernel beyond the pack, and `dsparkgen verify`; beside them this
Python compiles everything once into an empty cache. Then startup.py runs alone on the GPU: from the pack in a fresh environment
(Triton's cache empty, as the noise kernel and the fused loop are Triton's), again, and from the filled cache of compiled
kernels. An environment without the pack must decline, and say why.

Ends with 0 when all of it holds, else 1. `make docs` quotes the JSON file where it is checked in as
benchmarks/results/<gpu>/startup/<model>.json and its kernels are those of the repository.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.harness import without_compiler
from tests.harness.engine_wheel import CannotFetchError, engine_files

from dspark_kernels._device import kernel_store
from dsparkgen.gpu import load_product

SECONDS = 400  # of each process
PAIRS = tuple(f"{base}/{cache}" for base in ("bf16", "fp32") for cache in ("bf16", "fp32"))
OPERATORS_MODEL = "deepseek_v41"  # test_operators.py is about this one
FIRST, PACK, COLD, WARM = "pack, first start", "pack", "compiler, cold", "compiler, warm"
DECLINES = """
import importlib, json, sys
import torch
from dspark_kernels import load
config, model = importlib.import_module(f"dspark_kernels.{sys.argv[1]}.config"), load(sys.argv[1])
kind = {"dtype": torch.bfloat16, "device": "cuda"}
weights = [torch.zeros(columns, config.RANK_DIM, **kind) for columns in (config.VOCAB_SIZE, config.DRAFT_VOCAB_SIZE)]
sampler = model.DraftSampler(*weights, max_reqs=8, cache_dtype=torch.bfloat16)
print(json.dumps({"declined": sampler.declined, "instead": sampler.path(1)[0]}))
"""

Found = dict[str, Any]
Command = Sequence[object]


class Run:
    """One run: its environments and caches, all below a folder that is empty at first."""

    def __init__(self, model: str, packs: Sequence[Path], work: Path) -> None:
        self.model, self.work = model, work
        self.packed = without_compiler.make_environment(work / "with-pack", packs)
        self.bare = without_compiler.make_environment(work / "without-pack")
        self.unused = work / "unused"  # the cache of compiled kernels of processes that have no compiler

    def without_compiler(self, triton_cache: str = "triton") -> dict[str, str]:
        """Variables of a process in an environment without the compiler."""
        return self._variables(self.unused, triton_cache)

    def with_compiler(self) -> dict[str, str]:
        """Variables of a process that compiles, and finds what an earlier one compiled."""
        paths = os.pathsep.join([*map(str, without_compiler.SOURCES), os.environ.get("PYTHONPATH", "")])
        return self._variables(self.work / "compiled", "compiled-triton") | {"PYTHONPATH": paths}

    def _variables(self, kernels: Path, triton_cache: str) -> dict[str, str]:
        caches = {"DSPARK_KERNELS_CACHE": str(kernels), "TRITON_CACHE_DIR": str(self.work / triton_cache)}
        return without_compiler.environment(**caches)

    # --- checks ---

    def environment(self) -> Found:
        """The environment has no compiler, and has the pack."""
        found = without_compiler.survey(self.packed)
        good = found["import cutlass"] is not None and found["compiler"] is None and any(found["packs"].values())
        return found | {"passed": good}

    def declines(self) -> Found:
        """Without the pack, chain and step kernels say what is missing, and the fused loop draws."""
        answer = last_object(execute([self.bare, "-c", DECLINES, self.model], self.without_compiler()))
        reasons = [answer.get("declined", {}).get(kernel, "") for kernel in ("chain", "step")]
        wanted = "in no installed pack (installed: none), and CuTe DSL is missing"
        return answer | {"passed": all(wanted in reason for reason in reasons) and answer["instead"] == "fused"}

    def tests(self) -> dict[str, tuple[str, str]]:
        """Test files and what to select of them, by a title; each is run by a process of its own."""
        own, pairs = self.model, " or ".join(PAIRS)
        found = {f"kernels {pair}": ("test_kernels.py", f"{own} and {pair}") for pair in PAIRS}
        found["kernels"] = ("test_kernels.py", f"{own} and not ({pairs})")
        found["step kernels"] = ("test_step.py", own)
        found["programmatic launches"] = ("test_programmatic.py", own)
        if own == OPERATORS_MODEL:
            found["operators"] = ("test_operators.py", "")
        try:
            engine_files()
        except CannotFetchError as error:
            print(f"the engine's hook is left out: {error}", file=sys.stderr)
        else:
            found["engine's hook"] = ("test_engine.py", own)
        return found

    def test(self, title: str) -> Found:
        """Run the tests of one title from the pack: how many passed, failed and were skipped, and why."""
        file, select = self.tests()[title]
        report = self.work / f"{title.replace('/', '-')}.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *(["-k", select] if select else [])]
        output = execute([self.packed, "-m", "pytest", *options, f"tests/kernels/{file}"], self.without_compiler())
        if not report.is_file():
            return {"passed": False, "output": output[-4000:]}
        found = outcome(report)
        return found if found["passed"] else found | {"output": output[-4000:]}

    def verify(self, batches: int, replays: int) -> Found:
        """`dsparkgen verify` from the pack: which kernels each check was about, and how one failed."""
        report = self.work / "verify.json"
        amounts = ["--batches", batches, "--replays", replays, "--json", report]
        command = [self.packed, "-m", "dsparkgen", "verify", self.model, *amounts]
        output = execute(command, self.without_compiler())
        if not report.is_file():
            return {"passed": False, "output": output[-4000:]}
        findings = json.loads(report.read_text())["models"][self.model]
        checks: dict[str, list[str]] = {}
        for one in findings:
            checks.setdefault(one["check"], []).extend(one["kernels"])
        failures = [one["failure"] for one in findings if one["failure"]]
        return {"passed": not failures, "batches": batches, "replays": replays, "checks": checks, "failures": failures}

    # --- start-up ---

    def start(self, way: str) -> Found:
        """One start of the model's sampler, in one of the ways FIRST, PACK, COLD and WARM."""
        python = self.packed if way in (FIRST, PACK) else Path(sys.executable)
        variables = {FIRST: lambda: self.without_compiler("triton-first"), PACK: self.without_compiler}.get(
            way, self.with_compiler
        )
        return last_object(execute([python, "-m", "benchmarks.startup", self.model], variables()))

    def starts(self, cold: Found, repeats: int) -> dict[str, Found]:
        """Every way by its name, medians of the repeats; `cold` is the start into the empty cache."""
        ways = {FIRST: [self.start(FIRST)], COLD: [cold]}
        for way in (PACK, WARM):
            ways[way] = [self.start(way) for _ in range(repeats)]
        return {way: medians(ways[way]) | {"passed": comes_from(ways[way], way)} for way in (FIRST, PACK, COLD, WARM)}


def execute(command: Command, variables: Mapping[str, str]) -> str:
    """The output of a process, to its end or to the end of its time."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": without_compiler.ROOT}
    with subprocess.Popen(list(map(str, command)), env=dict(variables), **options) as process:
        try:
            return str(process.communicate(timeout=SECONDS)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{process.communicate()[0]}\nno end within {SECONDS} s"


def last_object(output: str) -> Found:
    """The JSON object in the last line of an output; without one, the output's end under "output"."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1] if lines else "")
    except json.JSONDecodeError:
        return {"output": output[-4000:]}
    return dict(found)


def outcome(report: Path) -> Found:
    """Counts of a JUnit report, its failures, and the reasons of what was skipped. Passed: nothing failed, and something ran."""
    cases = list(ET.parse(report).iter("testcase"))
    names = {case: f"{case.get('classname')}::{case.get('name')}" for case in cases}
    failed = [names[case] for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [str(mark.get("message")) for case in cases if (mark := case.find("skipped")) is not None]
    ran = len(cases) - len(skipped)
    reasons = {reason: skipped.count(reason) for reason in dict.fromkeys(skipped)}
    return {"passed": ran > 0 and not failed, "ran": ran, "failed": failed, "skipped": reasons}


def medians(starts: Sequence[Found]) -> Found:
    """Starts of one way as one: medians of what was timed, and everything else of the first."""
    first = starts[0]
    if any("output" in start for start in starts):
        return next(start for start in starts if "output" in start)

    def median(*path: str) -> float:
        return statistics.median(_at(start, path) for start in starts)

    calls = {rows: call | {"us": median("calls", rows, "us")} for rows, call in first["calls"].items()}
    timed = {key: median(key) for key in ("first_draw_s", "warm_s", "launch_us") if first[key] is not None}
    return first | timed | {"calls": calls, "starts": len(starts)}


def _at(found: Any, path: Sequence[str]) -> Any:
    for key in path:
        found = found[key]
    return found


def comes_from(starts: Sequence[Found], way: str) -> bool:
    """Whether the kernels of every start came from where they should."""
    wanted = {FIRST: "pack", PACK: "pack", COLD: "compiled", WARM: "cache"}[way]
    return all({origin.split()[0] for origin in start.get("origins", {})} == {wanted} for start in starts)


def table(starts: Mapping[str, Found]) -> str:
    """Markdown: a line for each way."""
    lines = [
        "| kernels from | to the first draw, s | to a warm sampler, s | launch, us | call, us |",
        "|---|---|---|---|---|",
    ]
    for way, start in starts.items():
        calls = ", ".join(f"{call['us']:.1f} ({rows} rows, {call['kernel']})" for rows, call in start["calls"].items())
        launch = "" if start["launch_us"] is None else f"{start['launch_us']:.1f}"
        lines.append(f"| {way} | {start['first_draw_s']:.1f} | {start['warm_s']:.1f} | {launch} | {calls} |")
    return "\n".join(lines)


def subject(model: str) -> Found:
    """What a run is about: the kernels' digests, as evidence has them, and what they ran with."""
    product = load_product(without_compiler.ROOT / "generated", model)
    kernels = {kernel: product.digest(kernel) for kernel in ("noise", "chain", "fused", "step") if product.has(kernel)}
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    found = {"model": model, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "kernels": kernels}
    return found | {"versions": versions | {"compiler": kernel_store.compiler_version()}}


def everything(run: Run, *, batches: int, replays: int, repeats: int) -> Found:
    """All checks, then all timings."""
    found = subject(run.model) | {"environment": run.environment(), "without pack": run.declines()}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        cold = pool.submit(run.start, COLD)
        verified = pool.submit(run.verify, batches, replays)
        tests = {title: pool.submit(run.test, title) for title in run.tests()}
    found["verify"] = verified.result()
    found["tests"] = {title: test.result() for title, test in tests.items()}
    found["startup"] = run.starts(cold.result(), repeats)
    found["nothing cached"] = {"passed": not run.unused.exists()}
    return found


def verdicts(found: Any) -> list[bool]:
    """Every "passed" in a tree of dictionaries."""
    if not isinstance(found, dict):
        return []
    own = [found["passed"]] if isinstance(found.get("passed"), bool) else []
    return own + [verdict for inner in found.values() for verdict in verdicts(inner)]


def main() -> int:
    """Run, write the JSON, print what failed and the table of start-ups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", nargs="+", type=Path, metavar="PACK.whl")
    parser.add_argument("--model", default=OPERATORS_MODEL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, default=40, help="random batches of each check of verify")
    parser.add_argument("--replays", type=int, default=500, help="graph replays of verify")
    parser.add_argument("--repeats", type=int, default=3, help="starts from the pack, and from the filled cache")
    asked = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dspark-pack-") as work:
        run = Run(asked.model, [pack.resolve() for pack in asked.packs], Path(work))
        found = everything(run, batches=asked.batches, replays=asked.replays, repeats=asked.repeats)
    good = all(verdicts(found))
    found |= {"passed": good, "packs": [pack.name for pack in asked.packs], "seconds": round(time.monotonic() - begun)}
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not good:
        print(json.dumps(found, indent=1))
    for title, test in found["tests"].items():
        print(
            f"{title}: {test.get('ran', 0)} ran, {len(test.get('failed', []))} failed, skipped {test.get('skipped', {})}"
        )
    if all("calls" in start for start in found["startup"].values()):
        print(table(found["startup"]))
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
