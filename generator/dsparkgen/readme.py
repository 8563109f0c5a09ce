"""The parts of README.md that are written from the repository: a plan, and the timings of recorded runs.

python -m dsparkgen.readme README.md
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsparkgen.device import load_devices
from dsparkgen.evidence import verified_rows
from dsparkgen.plan import plan_model, render_text
from dsparkgen.spec import read_spec
from dsparkgen.tree import read_manifest

MODEL, DEVICE, ROWS = "deepseek_v41", "h200", (1, 8)
NO_RUN = "No run of the checked-in kernels is recorded yet.\n"


def plan(root: Path) -> str:
    """The residency table of one model on one GPU, as an indented block. Raises InvalidFile for an invalid spec or device."""
    spec = read_spec(root / "specs" / f"{MODEL}.toml")
    text = render_text(plan_model(spec, load_devices(root)), DEVICE, spec.parallel.tp, ROWS)
    table = text.split("\n\nWhy")[0]
    return "".join(f"    {line}".rstrip() + "\n" for line in table.splitlines())


def timings(root: Path) -> str:
    """Markdown with one table a recorded GPU and model; a sentence where nothing current is recorded.

    Rows measured with earlier kernels are left out. Raises EvidenceError for a results file that is not intact.
    """
    kernels = read_manifest(root / "generated").get("kernels", {})
    results = root / "benchmarks" / "results"
    sections = []
    for path in sorted(results.glob("*/*.json")):
        rows = [row for row in verified_rows(results, path.parent.name, path.stem, kernels) if row["kernel"] == "chain"]
        if rows:
            sections.append("".join(_table(path.parent.name, path.stem, rows)))
    return "\n".join(sections) or NO_RUN


PARTS: Mapping[str, Callable[[Path], str]] = {"plan": plan, "timings": timings}


def fill(text: str, root: Path, parts: Mapping[str, Callable[[Path], str]] = PARTS) -> str:
    """A page with its parts brought up to date. Raises ValueError where the page has no place for one."""
    for name, write in parts.items():
        begin, end = f"<!-- {name}: written by `make docs` -->\n", f"<!-- end of {name} -->\n"
        if begin not in text or end not in text:
            raise ValueError(f"expected the lines {begin.strip()!r} and {end.strip()!r}, got a page without")
        before, rest = text.split(begin, 1)
        text = before + begin + write(root) + end + rest.split(end, 1)[1]
    return text


def _table(device: str, model: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{model} on {device}, microseconds a step of N draft positions, noise included, L2 cold (median):\n\n"
    yield "| vocabulary | N | rows | engine's loop | fused loop | chain | engine / chain | chain alone | of the floor |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for row in sorted(rows, key=lambda row: (row["vocab_size"], row["num_steps"], row["rows"])):
        times = [f"{row[key]:.1f}" for key in ("eager_us", "fused_us", "call_us")]
        ratio, floor = row["eager_us"] / row["call_us"], 100 * row["floor_us"] / row["us"]
        alone = [f"{row['us']:.1f}", f"{floor:.0f} %"]
        cells = [row["vocab_size"], row["num_steps"], row["rows"], *times, f"{ratio:.1f}", *alone]
        yield f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(), Path(__file__).parents[2]))
