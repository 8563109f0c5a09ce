"""The pictures beside the recorded runs, drawn from their rows: `make docs` writes them, so that they cannot be of other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsparkgen.evidence import current_rows, load
from dsparkgen.gpu import harness
from dsparkgen.spec import ModelSpec, read_specs
from dsparkgen.tree import read_manifest

SWEEP = "-sweep"  # at the end of the name of the picture over vocabularies
Row = Mapping[str, Any]


def own_rows(spec: ModelSpec, rows: Sequence[Row]) -> list[Row]:
    """A model's rows of its own vocabulary and positions."""
    wanted = (spec.vocabulary.draft, spec.draft.num_steps)
    return [row for row in rows if (row["vocab_size"], row["num_steps"]) == wanted]


def drawn_rows(spec: ModelSpec, rows: Sequence[Row]) -> list[Row]:
    """Of these, the chain's on one GPU: what a model's picture shows."""
    return [row for row in own_rows(spec, rows) if (row["kernel"], row["tp"]) == ("chain", 1)]


def of_model(root: Path, spec: ModelSpec, device: str, rows: Sequence[Row], remark: str = "") -> dict[str, str]:
    """SVG texts by what stands behind the model's name in a file's: "" for its rows, `SWEEP` for one row over vocabularies.

    Args:
        root: the repository, for benchmarks/plot.py.
        device: name of the GPU, for the titles.
        rows: bench rows of one run, of any shape. What there is nothing to draw from is left out.
        remark: behind the titles.
    """
    plot = harness(root, "benchmarks.plot")
    pictures = {}
    own = drawn_rows(spec, rows)
    if own:
        keys = tuple(key for key in plot.SERIES if all(key in row for row in own))
        pictures[""] = plot.bars(f"{spec.model.title} on {device}, cold L2{remark}", own, keys)
    steps = spec.draft.num_steps
    swept = [row for row in rows if (row["kernel"], row["tp"], row["rows"], row["num_steps"]) == ("chain", 1, 1, steps)]
    if len({row["vocab_size"] for row in swept}) > 1:
        pictures[SWEEP] = plot.sweep(f"{spec.model.title}: one row over the vocabulary, {device}{remark}", swept)
    return pictures


def recorded(root: Path) -> dict[Path, str]:
    """The pictures of all recorded runs by file: of the rows of the checked-in kernels, or where no such row can be drawn of all rows, with
    a remark that they are of earlier kernels. Raises EvidenceError for a results file that is not intact."""
    kernels = read_manifest(root / "generated").get("kernels", {})
    results = root / "benchmarks" / "results"
    specs = read_specs(root / "specs")
    found: dict[Path, str] = {}
    for path in sorted(results.glob("*/*.json")):
        device, model = path.parent.name, path.stem
        if model not in specs:  # `dsparkgen check` refuses the file
            continue
        pictures = of_model(root, specs[model], device, current_rows(results, device, model, kernels))
        if not pictures:
            pictures = of_model(root, specs[model], device, load(path)["rows"], ", earlier kernels")
        found |= {path.with_name(f"{model}{name}.svg"): text for name, text in pictures.items()}
    return found


def write(root: Path) -> None:
    """Draws the pictures of all recorded runs, and deletes those of none."""
    pictures = recorded(root)
    for path in (root / "benchmarks" / "results").glob("*/*.svg"):
        if path not in pictures:
            path.unlink()
    for path, text in pictures.items():
        path.write_text(text, encoding="utf-8")
