"""The timing tables of README.md, written from recorded runs of the kernels that are checked in.

python -m dsparkgen.timings README.md
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsparkgen.evidence import verified_rows
from dsparkgen.tree import read_manifest

BEGIN = "<!-- timings: written by `make docs` from benchmarks/results -->\n"
END = "<!-- end of timings -->\n"
NO_RUN = "No run of the checked-in kernels is recorded yet.\n"


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


def fill(text: str, root: Path) -> str:
    """A page with its timing tables brought up to date. Raises ValueError where the page has no place for them."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"expected the lines {BEGIN.strip()!r} and {END.strip()!r}, got a page without")
    before, rest = text.split(BEGIN, 1)
    return before + BEGIN + timings(root) + END + rest.split(END, 1)[1]


def _table(device: str, model: str, rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{model} on {device}, microseconds a step of N draft positions, noise included, L2 cold (median):\n\n"
    yield "| vocabulary | N | rows | engine's loop | fused loop | chain | engine / chain | chain alone | of the floor |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for row in sorted(rows, key=lambda row: (row["vocab_size"], row["num_steps"], row["rows"])):
        times = [f"{row[key]:.1f}" for key in ("eager_us", "fused_us", "call_us")]
        ratio, floor = row["eager_us"] / row["call_us"], 100 * row["floor_us"] / row["us"]
        cells = [
            row["vocab_size"],
            row["num_steps"],
            row["rows"],
            *times,
            f"{ratio:.1f}",
            f"{row['us']:.1f}",
            f"{floor:.0f} %",
        ]
        yield f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(fill(page.read_text(), Path(__file__).parents[2]))
