"""Compiles the generated kernels without a GPU and tabulates registers, spills, local and shared memory.

Every build runs in a worker process (compile_worker.py) and its figures are kept in the user's cache directory, keyed by the
digest of the code, the compiler's version, the arch and the variant: what has not changed is not compiled again.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from dsparkgen.device_code import load_device_code
from dsparkgen.digest import kernel_digest
from dsparkgen.locate import InvalidFile, Problem, show_path
from dsparkgen.resources import Build, Record, find_faults, page_sections, tabulate, to_json, to_markdown
from dsparkgen.spec import ModelSpec, read_specs
from dsparkgen.tree import Roots, stale

toolkit = load_device_code("toolkit")

RESOURCES = Path("docs") / "resources.md"
CACHE_FORMAT = 1  # raise when the figures, or how they are read, change meaning
COMPILERS = {"chain": "nvidia-cutlass-dsl", "step": "nvidia-cutlass-dsl", "noise": "triton", "fused": "triton"}
DEVICES = {
    "sm_90a": "h200",
    "sm_100a": "b200",
    "sm_103a": "gb300",
    "sm_120a": "rtx_pro_6000",
}  # whose plan stands for an arch

TABLE_WIDTH = 160  # most columns where the output is no terminal
MESSAGE_LINES = 8  # of a failed process's error output that a message repeats


class WorkerError(RuntimeError):
    """A compiling process that ended without answering for all its builds."""


def select_chain(listing: Mapping[str, Any], arch: str, turn: int, all_: bool) -> list[dict[str, Any]]:
    """The chain variants to compile for one arch: keyword arguments of Build.

    Without `all_`: one device of the arch, its smallest and largest TP size, one with one row and one with the most rows, and one
    dtype pair; and where neither size leaves pad rows in the last shard, but another does, the largest such size with the most rows.
    `turn` (the model's place in the list of models) rotates the pairs, and after each round which size goes with which row count,
    so that the models together cover the combinations. Raises InvalidFile where no device of the arch is described.
    """
    devices = {name for name, capability in listing["devices"].items() if arch_of(capability) == arch}
    if not devices:
        message = (
            f"expected the description of a device with arch {arch}, got {', '.join(listing['devices']) or 'none'}"
        )
        raise InvalidFile([Problem("specs/devices", 1, 1, "arch", message)])
    pairs = [(base, cache) for base in listing["base_dtypes"] for cache in listing["cache_dtypes"] or [None]]
    lines = [tuple(line) for line in listing["plans"] if line[0] in devices]
    if not all_ and lines:
        planned = {line[0] for line in lines}
        device = DEVICES[arch] if DEVICES[arch] in planned else min(planned)
        sizes = [tp for name, tp, _ in lines if name == device]
        slots = [rows for name, _, rows in lines if name == device]
        rows_of_sizes = (max(slots), min(slots)) if turn // len(pairs) % 2 else (min(slots), max(slots))
        corners = set(zip((min(sizes), max(sizes)), rows_of_sizes, strict=True))
        uneven = [tp for tp in sizes if listing["draft_vocab_size"] % tp]
        if uneven and not {min(sizes), max(sizes)} & set(uneven):
            corners.add((max(uneven), max(slots)))
        lines = [(name, tp, rows) for name, tp, rows in lines if name == device and (tp, rows) in corners]
        pairs = [pairs[turn % len(pairs)]]
    return [
        {"device": device, "tp": tp, "row_slots": rows, "base_dtype": base, "cache_dtype": cache}
        for device, tp, rows in lines
        for base, cache in pairs
    ]


def select_triton(names: Sequence[str], turn: int, all_: bool) -> list[dict[str, Any]]:
    """The variants of a Triton kernel to compile: all, or the one that `turn` rotates to. Keyword arguments of Build."""
    return [{"variant": name} for name in (names if all_ else [names[turn % len(names)]])]


def select_step(names: Sequence[str], turn: int, all_: bool) -> list[dict[str, Any]]:
    """The variants of the step kernels to compile: all, or of each kernel, a name's first word, the one that `turn` rotates to."""
    kernels = dict.fromkeys(name.split()[0] for name in names)
    members = [[name for name in names if name.split()[0] == kernel] for kernel in kernels]
    return [variant for group in members for variant in select_triton(group, turn, all_)]


def arch_of(capability: Sequence[int]) -> str:
    """The arch of a compute capability: (9, 0) -> "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}a"


def cache_folder() -> Path:
    """Where figures are kept: $XDG_CACHE_HOME/dsparkgen/compile, or the same under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsparkgen" / "compile"


def cache_path(build: Build, compiler: str) -> Path:
    """The file that keeps this build's figures; `compiler` is a name with its version."""
    key = json.dumps([CACHE_FORMAT, compiler, asdict(build)], sort_keys=True)
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def read_cache(path: Path) -> Record | None:
    """The kept figures, or None where there are none or they cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_cache(path: Path, record: Record) -> None:
    """Keeps figures; a reader sees the whole file or none, also when two processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(record, file)
    os.replace(file.name, path)


def read_sources(out: Path) -> dict[str, str]:
    """The generated package as it is on disk: text by path below its source root `out`."""
    return {path.relative_to(out).as_posix(): path.read_text() for path in out.glob("dspark_kernels/*/*.py")}


def run_builds(out: Path, builds: Sequence[Build], jobs: int, sources: Mapping[str, str]) -> list[Record]:
    """Compiles builds in at most `jobs` processes. Returns one record a build, in order: its figures, or {"error": text}.

    `out` is the package's source root, `sources` the package that the builds' digests were taken from. Once it has changed on disk figures belong to no digest, so
    that they are errors and are not kept.
    """
    compilers = {name: compiler_version(name) for name in set(COMPILERS.values())}
    paths = [cache_path(build, str(compilers[COMPILERS[build.kernel]])) for build in builds]
    records = {index: {**kept, "cached": True} for index, path in enumerate(paths) if (kept := read_cache(path))}
    pending = [(index, build) for index, build in enumerate(builds) if index not in records]
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("compiling", total=len(builds), completed=len(records))

        def run(group: list[tuple[int, Build]]) -> None:
            for index, record in _compile_group(out, group):
                if read_sources(out) != sources:
                    record = {"error": f"{show_path(out)} changed while it was compiled: run again"}
                records[index] = record
                if "error" not in record:
                    write_cache(paths[index], record)
                progress.advance(task)

        list(pool.map(run, group_builds(pending, jobs)))
    return [records[index] for index in range(len(builds))]


def group_builds(pending: Sequence[tuple[int, Build]], jobs: int) -> list[list[tuple[int, Build]]]:
    """Splits numbered builds into groups of one compiler and arch each, enough of them that `jobs` processes have work."""
    by_process: dict[tuple[str, str], list[tuple[int, Build]]] = {}
    for index, build in pending:
        by_process.setdefault((COMPILERS[build.kernel], build.arch), []).append((index, build))
    groups = []
    for members in by_process.values():
        size = math.ceil(len(members) / math.ceil(jobs * len(members) / len(pending)))
        groups += [members[start : start + size] for start in range(0, len(members), size)]
    return groups


def _compile_group(out: Path, group: Sequence[tuple[int, Build]]) -> Iterator[tuple[int, Record]]:
    """Compiles a group in one process after another: one that a compiler ends takes only its current build with it."""
    remaining = dict(group)
    while remaining:
        request = {
            "out": str(out.absolute()),
            "builds": [{"id": index, **asdict(build)} for index, build in remaining.items()],
        }
        try:
            for answer in ask_worker("build", request, arch=group[0][1].arch):
                index = answer.pop("id")
                del remaining[index]
                yield index, answer
            if remaining:
                raise WorkerError(f"the compiling process ended without an answer for {len(remaining)} builds")
        except WorkerError as error:
            index = next(iter(remaining))
            del remaining[index]
            yield index, {"error": str(error)}


def ask_worker(verb: str, request: Mapping[str, Any], arch: str) -> Iterator[Record]:
    """Runs compile_worker.py for one arch and yields its answers as they come. Raises WorkerError where it does not finish."""
    yield from ask_process(("dsparkgen.compile_worker", verb), request, arch)


def ask_process(module: Sequence[str], request: Mapping[str, Any], arch: str) -> Iterator[Record]:
    """Runs a module of this package, with its arguments behind its name, that compiles for one arch: the request goes to its standard
    input, and its answers, a JSON object a line, are yielded as they come. Raises WorkerError where it does not finish."""
    environment = worker_environment(arch)
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as stderr:
        json.dump(request, stdin)
        stdin.seek(0)
        command = [sys.executable, "-m", *module]
        with subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode:
            stderr.seek(0)
            tail = "\n".join(stderr.read().strip().splitlines()[-MESSAGE_LINES:])
            raise WorkerError(f"the compiling process ended with code {process.returncode}: {tail or 'no message'}")


def worker_environment(arch: str) -> dict[str, str]:
    """The environment of a process that compiles for one arch: Triton compiles instead of interpreting, this package is found."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUTE_DSL_ARCH": arch, "TRITON_ALWAYS_COMPILE": "1"}  # the seconds shown are those of a compilation
    paths = [str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def compiler_version(name: str) -> str | None:
    """The installed compiler as "name version", with CuTe DSL's CUDA version behind it, or None."""
    try:
        found = f"{name} {version(name)}"
    except PackageNotFoundError:
        return None
    return f"{found} cu{toolkit.toolkit()}" if name == COMPILERS["chain"] else found


def list_builds(
    out: Path,
    sources: Mapping[str, str],
    specs: Mapping[str, ModelSpec],
    models: Sequence[str],
    archs: Sequence[str] | None,
    all_: bool,
) -> list[Build]:
    """The builds of the checked-in kernels of `models`: the default set, or every one with `all_`.

    Kernels whose compiler is not installed are left out. Raises WorkerError where a model's generated code cannot be imported,
    InvalidFile where no device of an arch is described.
    """
    kernels = {
        model: [kernel for kernel in specs[model].emit.kernels if compiler_version(COMPILERS[kernel])]
        for model in models
    }
    request = {"out": str(out.absolute()), "models": kernels}
    listings = {answer["model"]: answer for answer in ask_worker("list", request, "sm_90a")}
    builds = []
    for model in models:
        turn = sorted(specs).index(model)
        listing = listings[model]
        for kernel in kernels[model]:
            inputs = kernel_digest(sources, model, kernel)
            for arch in archs or specs[model].emit.archs:
                if kernel == "chain":
                    chosen = select_chain(listing, arch, turn, all_)
                elif kernel == "step":
                    chosen = select_step(listing["named"][kernel], turn, all_)
                else:
                    chosen = select_triton(listing["named"][kernel], turn, all_)
                builds += [Build(model, kernel, arch, inputs, **variant) for variant in chosen]
    return builds


def page_remarks(root: Path, builds: Sequence[Build], specs: Collection[str]) -> list[str]:
    """What docs/resources.md does not show of today: models that it lacks, kernels with other code, models without a spec any more."""
    page = (root / RESOURCES).read_text() if (root / RESOURCES).exists() else ""
    sections = page_sections(page)
    absent = sorted({build.model for build in builds} - set(sections))
    earlier = {
        f"{build.model}/{build.kernel}"
        for build in builds
        if build.model in sections and f"{build.kernel} `{build.inputs}`" not in sections[build.model]
    }
    gone = sorted(set(sections) - set(specs))
    remarks = {
        "does not show {} yet": absent,
        "is of earlier code of {}": sorted(earlier),
        "still shows {}, which no spec describes": gone,
    }
    return [f"{RESOURCES} {text.format(', '.join(names))}" for text, names in remarks.items() if names]


def run_compile(
    roots: Roots,
    models: Sequence[str] = (),
    archs: Sequence[str] | None = None,
    all_: bool = False,
    json_path: Path | None = None,
    jobs: int | None = None,
    page: bool = False,
) -> int:
    """Compiles the checked-in kernels, prints their resource table, and judges it.

    Args:
        roots: Where the specs are and what was generated from them.
        models: Model names; empty for every spec.
        archs: Archs to compile for; None for those that each spec names.
        all_: Every plan line, dtype pair and device instead of the default set.
        json_path: Where to write the figures as JSON.
        jobs: Processes at a time; None for one a core.
        page: Also write the figures into the repository's docs/resources.md, unless a build failed.

    Returns:
        0 when every kernel compiled without spills and local memory, 1 when one did not or the code is not what specs and templates
        give, 3 when a compiler is not installed.

    Raises:
        InvalidFile: A spec is invalid or missing, no device is described for an arch, or the page is asked for without all models
            and archs of the repository.
    """
    specs = read_specs(roots.specs)
    root = roots.templates.parent
    private = (roots.specs, roots.out) != (root / "specs", root / "generated")
    if page and (models or archs or private):
        message = "--page: expected every model and arch of the repository, got a choice of them"
        raise InvalidFile([Problem(show_path(root / RESOURCES), 1, 1, "", message)])
    unknown = sorted(set(models) - set(specs))
    if unknown:
        known = ", ".join(specs) or "none"
        raise InvalidFile(
            [
                Problem(f"{show_path(roots.specs)}/{name}.toml", 1, 1, "", f"no such spec; models: {known}")
                for name in unknown
            ]
        )
    names = list(models) or list(specs)
    missing = sorted(
        {
            COMPILERS[kernel]
            for name in names
            for kernel in specs[name].emit.kernels
            if not compiler_version(COMPILERS[kernel])
        }
    )
    progress = Console(stderr=True)
    sources = read_sources(roots.out)
    try:
        builds = list_builds(roots.out, sources, specs, names, archs, all_)
    except WorkerError as error:
        progress.print(
            f"the generated kernels cannot be imported: {error}",
            style="red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 1
    records = run_builds(roots.out, builds, jobs or os.cpu_count() or 1, sources)
    output = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    for name in names:
        rows = [(build, record) for build, record in zip(builds, records, strict=True) if build.model == name]
        output.print(tabulate(name, [build for build, _ in rows], [record for _, record in rows]))
    compilers = sorted(name for name in map(compiler_version, set(COMPILERS.values())) if name)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(to_json(builds, records, compilers), indent=1) + "\n")
    faults = find_faults(builds, records)
    failed = any("error" in record for record in records)
    if page and not (failed or missing):
        (root / RESOURCES).write_text(to_markdown(builds, records, compilers))
    for text in faults:
        progress.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    kept = sum(record.get("cached", False) for record in records)
    progress.print(f"{len(builds)} builds, {kept} of them from the cache, {len(faults)} at fault", highlight=False)
    remarks = [] if private else page_remarks(root, builds, specs)
    for text in remarks:
        progress.print(f"{text}: dsparkgen compile --page", highlight=False, markup=False, soft_wrap=True)
    for name in missing:
        progress.print(
            f"{name} is not installed: its kernels were not compiled (pip install 'dsparkgen[cuda]')",
            highlight=False,
            markup=False,
        )
    outdated = stale(roots, names)
    for text in outdated:
        progress.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    return 1 if faults or outdated else 3 if missing else 0
