"""What verbs print: text for people, JSON for programs, annotations for CI."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dsparkgen import __version__
from dsparkgen.device_code import load_device_code
from dsparkgen.evidence import KernelState, render_table
from dsparkgen.locate import MISSING, InvalidFile, Problem, read_document, show_path
from dsparkgen.spec import ModelSpec, read_spec
from dsparkgen.tree import MANIFEST, PACKAGE, RUFF_VERSION, Change, Roots, Tree, formatter_version

toolkit = load_device_code("toolkit")

FEW_TOKENS = 1024  # a smaller target vocabulary is more likely a count in thousands
LIST_WIDTH = 120  # characters where no terminal says how wide it is

Style = Literal["text", "github"]


def problems(found: Sequence[Problem], style: Style = "text") -> None:
    """Errors of files on stderr, one a line, or on stdout as GitHub annotations."""
    for problem in found:
        if style == "github":
            _annotate(problem.file, str(problem), line=problem.line, column=problem.column)
        else:
            print(problem, file=sys.stderr)


def new_spec(path: Path) -> None:
    """What `new` wrote, what its reader says, and what comes next."""
    print(f"{'wrote':<9}{show_path(path)}")
    document = read_document(path)
    found: tuple[Problem, ...] = ()
    try:
        read_spec(path)
    except InvalidFile as error:
        found = error.problems
    title = document.problem(("model", "title"), "the name for people; so far that of the package")
    wrong = [problem for problem in found if problem.message != MISSING]
    for heading, listed in (
        ("to fill in:", sorted({title, *found} - {*wrong})),
        ("what today's kernels and this format do not take:", wrong),
    ):
        if listed:
            print("\n".join([heading, *map(str, listed)]))
    left = document.data.get("provenance", {}).get("unknown", ())
    if left:
        print(f"unknown: {', '.join(left)}")
    first = "resolve the errors above" if found else "check the values"
    print(f"next: {first}, state the public source under [provenance], then run: dsparkgen generate {path.stem}")


def written(done: Sequence[Change], tree: Tree, roots: Roots) -> None:
    """What `generate` did."""
    words = {"missing": "wrote", "changed": "updated", "edited by hand": "restored", "orphaned": "deleted"}
    for change in done:
        print(f"{words[change.kind]:<9}{show_path(roots.out / change.path)}")
    deleted = sum(change.kind == "orphaned" for change in done)
    gone = f", {deleted} deleted" if deleted else ""
    print(
        f"{len(done) - deleted} of {_count(len(tree.files), 'file')} changed{gone}, {_count(len(tree.specs), 'model')}"
    )
    for name, spec in tree.specs.items():
        if spec.vocabulary.target < FEW_TOKENS:
            file = show_path(roots.specs / f"{name}.toml")
            print(f"{file}: vocabulary.target: {spec.vocabulary.target} tokens; in thousands?", file=sys.stderr)


def checked(
    changes: Sequence[Change],
    faults: Sequence[str],
    evidence: Sequence[KernelState],
    tree: Tree,
    roots: Roots,
    style: Style = "text",
) -> None:
    """The answer of `check`: the evidence table, what differs and why, and last the faults of recorded runs."""
    if evidence:
        print(render_table(evidence))
    for change in changes:
        path = show_path(roots.out / change.path)
        if style == "github":
            _annotate(path, "; ".join((change.kind, *change.causes)))
        else:
            print(f"{path}: {change.kind}")
            for cause in change.causes:
                print(f"    {cause}")
    if changes:
        print(
            f"{_count(len(changes), 'file')} of {len(tree.files)} not as the specs and templates say; {_remedy(changes)}"
        )
    else:
        print(f"{_count(len(tree.files), 'file')} as the specs and templates say, {_count(len(tree.specs), 'model')}")
    for fault in faults:
        if style == "github":
            _annotate("", fault)
        else:
            print(fault)


def check_json(
    changes: Sequence[Change], faults: Sequence[str], evidence: Sequence[KernelState], tree: Tree, ok: bool
) -> dict[str, Any]:
    """What `check --json` writes."""
    return {
        "ok": ok,
        "models": sorted(tree.specs),
        "files": len(tree.files),
        "changes": [asdict(change) for change in changes],
        "faults": list(faults),
        "evidence": [asdict(line) for line in evidence],
    }


def write_json(document: Mapping[str, Any], path: Path) -> None:
    """JSON to a file, or to stdout for `-`."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def models(specs: Mapping[str, ModelSpec], evidence: Sequence[KernelState]) -> None:
    """The models with their shapes, kernels and, for every arch, how far it is verified."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("model", "vocabulary", "rank", "N"):
        table.add_column(heading, no_wrap=True)
    for heading in ("TP", "kernels", "archs"):
        table.add_column(heading, overflow="fold")
    for name, spec in specs.items():
        target, draft = spec.vocabulary.target, spec.vocabulary.draft
        archs = []
        for arch in spec.emit.archs:
            states = sorted({line.state for line in evidence if (line.model, line.arch) == (name, arch)})
            archs.append(f"{arch} {', '.join(states) or 'not generated'}")
        table.add_row(
            name,
            str(target) if draft == target else f"{draft} of {target}",
            str(spec.markov.rank_dim),
            str(spec.draft.num_steps),
            " ".join(map(str, spec.parallel.tp)),
            " ".join(spec.emit.kernels),
            "\n".join(archs),
        )
    Console(width=None if sys.stdout.isatty() else LIST_WIDTH).print(table)


def _dsl() -> str:
    """The version of CuTe DSL and the CUDA version that it assembles for."""
    found, recorded = toolkit.toolkit(), toolkit.RECORDED
    wish = (
        ""
        if found in (None, recorded)
        else f" (recorded runs: {recorded}, pip install 'nvidia-cutlass-dsl[cu{recorded}]')"
    )
    return _version("nvidia-cutlass-dsl") + ("" if found is None else f", CUDA {found}{wish}")


def environment(roots: Roots, specs: int, devices: Sequence[str]) -> bool:
    """Print what this machine has; returns whether the generator itself can work."""
    ruff = formatter_version()
    lines = [
        ("dsparkgen", __version__),
        ("python", platform.python_version()),
        ("ruff", f"{ruff or 'not installed'}{'' if ruff == RUFF_VERSION else f' (expected {RUFF_VERSION})'}"),
        *((name, _version(name)) for name in ("pydantic", "jinja2", "typer")),
        *((name, _version(name)) for name in ("torch", "triton", "cuda-python")),
        ("nvidia-cutlass-dsl", _dsl()),
        ("gpu", _gpu()),
        ("templates", show_path(roots.templates)),
        ("specs", f"{show_path(roots.specs)} ({_count(specs, 'model')})"),
        ("devices", ", ".join(devices) or "none"),
        (
            "generated",
            f"{show_path(roots.out / PACKAGE)} ({MANIFEST} {'found' if (roots.out / MANIFEST).exists() else 'missing'})",
        ),
    ]
    for name, text in lines:
        print(f"{name:<20}{text}")
    return ruff == RUFF_VERSION


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "unknown (torch is not installed)"
    if not torch.cuda.is_available():
        return "none"
    found = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} SMs"


def _annotate(file: str, message: str, *, line: int | None = None, column: int | None = None) -> None:
    where = [f"file={file}"] if file else []
    where += [f"{key}={value}" for key, value in (("line", line), ("col", column)) if value is not None]
    escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    print(f"::error {','.join(where)}::{escaped}")


def _remedy(changes: Sequence[Change]) -> str:
    edited = any(change.kind == "edited by hand" for change in changes)
    return f"run: dsparkgen generate{' (it discards the edits by hand)' if edited else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
