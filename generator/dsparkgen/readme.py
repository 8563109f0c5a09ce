"""The parts of pages that are written from the repository: plans, and the timings of recorded runs; and these runs' pictures.

python -m dsparkgen.readme    # all pages and pictures
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsparkgen import models_page, pictures
from dsparkgen.device import load_devices
from dsparkgen.evidence import current_rows, is_verified
from dsparkgen.plan import plan_model, render_text
from dsparkgen.scaling import Scaling, recorded, unverified
from dsparkgen.scaling import table as scaling_table
from dsparkgen.spec import read_spec, read_specs
from dsparkgen.tree import read_manifest

HIDDEN_US = 0.5  # less than this of a launch hidden is called so
MODEL, DEVICE, ROWS = "deepseek_v41", "h200", (1, 8)
NO_RUN = "No run of the checked-in kernels is recorded yet.\n"
ONLY_EARLIER_RUNS = (
    "No run of the checked-in kernels is recorded yet; the results files and the pictures below are of earlier ones.\n"
)


def plan(root: Path) -> str:
    """The residency table of one model on one GPU, as an indented block. Raises InvalidFile for an invalid spec or device."""
    spec = read_spec(root / "specs" / f"{MODEL}.toml")
    text = render_text(plan_model(spec, load_devices(root)), DEVICE, spec.parallel.tp, ROWS)
    table = text.split("\n\nWhy")[0]
    return "".join(f"    {line}".rstrip() + "\n" for line in table.splitlines())


def timings(root: Path) -> str:
    """Markdown with one table a recorded GPU, of `MODEL`; where nothing current is recorded a sentence that says so.

    Rows measured with earlier kernels are left out, and those of several ranks, which docs/scaling.md has. Raises EvidenceError for
    a results file that is not intact.
    """
    kernels = read_manifest(root / "generated").get("kernels", {})
    results = root / "benchmarks" / "results"
    sections = []
    paths = sorted(results.glob(f"*/{MODEL}.json"))
    for path in paths:
        found = current_rows(results, path.parent.name, path.stem, kernels)
        rows = [row for row in found if (row["kernel"], row["tp"]) == ("chain", 1)]
        if rows:
            verified = is_verified(results, path.parent.name, path.stem, "chain", kernels)
            sections.append("".join(_table(path.parent.name, path.stem, rows, verified=verified)))
    return "\n".join(sections) or (ONLY_EARLIER_RUNS if paths else NO_RUN)


def models(root: Path) -> str:
    """Markdown table of every model of specs/: shape, residency, timings, and which of them are slower than aimed at. Raises as
    `timings` does."""
    devices, specs, found = load_devices(root), list(read_specs(root / "specs").values()), _recorded(root)
    table = models_page.models_table([plan_model(spec, devices) for spec in specs], DEVICE, found)
    remarks = "".join(models_page.misses(specs, found))
    return "".join(table) + (f"\n{remarks}" if remarks else "")


def steps(root: Path) -> str:
    """Markdown table of the step kernels' recorded runs; a sentence where there is none. Raises as `timings` does."""
    return "".join(models_page.step_table(_recorded(root))) or NO_RUN


def scaling(root: Path) -> str:
    """Markdown table of one model's chain over more and more GPUs; a sentence where nothing is recorded. Raises as `timings` does."""
    spec = read_specs(root / "specs")[MODEL]
    hop_us = load_devices(root)[DEVICE].rank_hop_us
    found = Scaling(spec.vocabulary.draft, spec.draft.num_steps, hop_us, _recorded(root)[MODEL])
    lines = list(found.lines())
    if not lines:
        return NO_RUN
    kernels = read_manifest(root / "generated").get("kernels", {})
    remarks = "".join(unverified(lines, root / "benchmarks" / "results", DEVICE, MODEL, kernels))
    return "".join(scaling_table(lines)) + (f"\n{remarks}" if remarks else "")


def pdl(root: Path) -> str:
    """Markdown table of what the chain adds behind a kernel that lets it start early; a sentence where nothing is recorded. Raises as
    `timings` does."""
    rows = [row for row in _recorded(root)[MODEL] if "pdl_us" in row]
    return "".join(_pdl_table(rows)) if rows else NO_RUN


def _pdl_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| vocabulary | N | rows | ordinary launch: visible us | programmatic: visible us | hidden us |\n"
    yield "|---" * 6 + "|\n"
    little = []
    for row in sorted(rows, key=lambda row: (row["vocab_size"], row["num_steps"], row["rows"])):
        hidden = row["pdl_off_us"] - row["pdl_us"]
        cells = [row["vocab_size"], row["num_steps"], row["rows"]]
        cells += [f"{us:.2f}" for us in (row["pdl_off_us"], row["pdl_us"], hidden)]
        yield f"| {' | '.join(map(str, cells))} |\n"
        if hidden < HIDDEN_US:
            little.append(f"{row['vocab_size']} x {row['num_steps']} rows {row['rows']} ({hidden:.2f})")
    if little:
        yield f"\nLess than {HIDDEN_US} us hidden: {', '.join(little)}.\n"


def startup(root: Path) -> str:
    """Markdown of the recorded runs from a pack whose kernels are those checked in; a sentence where there is none."""
    kernels = read_manifest(root / "generated").get("kernels", {})
    sections = []
    for path in sorted((root / "benchmarks" / "results").glob("*/startup/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        current = {name: kernels.get(f"{found['model']}/{name}", {}).get("inputs") for name in found["kernels"]}
        if found["passed"] and found["kernels"] == current:
            sections.append("".join(_startup(path.parents[1].name, found)))
    return "\n".join(sections) or NO_RUN


def _startup(device: str, found: Mapping[str, Any]) -> Iterator[str]:
    ran = sum(test["ran"] for test in found["tests"].values())
    starts, versions = found["startup"], found["versions"]
    number = sum(starts["pack"]["origins"].values())
    yield f"{found['model']} on {device}, {found['date']}, PyTorch {versions['torch']}, Triton {versions['triton']}, "
    yield f"{versions['compiler']}: {ran} tests and all checks of `verify` passed from the pack. A `DraftSampler` for "
    yield f"{starts['pack']['max_reqs']} requests, {number} kernels of chain and step:\n\n"
    rows = list(starts["pack"]["calls"].items())
    heads = [f"call of {count} row{'s' * (count != '1')} ({call['kernel']}), us" for count, call in rows]
    yield f"| kernels from | first draw, s | all warm, s | launch, us | {' | '.join(heads)} |\n"
    yield f"|---|---|---|---|{'---|' * len(rows)}\n"
    for way, start in starts.items():
        calls = [f"{start['calls'][count]['us']:.0f}" for count, _ in rows]
        seconds = [f"{start[key]:.2f}" for key in ("first_draw_s", "warm_s")]
        launch = "" if start["launch_us"] is None else f"{start['launch_us']:.1f}"
        yield f"| {' | '.join([way, *seconds, launch, *calls])} |\n"


def _recorded(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Bench rows of the checked-in kernels on `DEVICE`, by model."""
    kernels = read_manifest(root / "generated").get("kernels", {})
    results = root / "benchmarks" / "results"
    return {model: recorded(results, DEVICE, model, kernels) for model in read_specs(root / "specs")}


PAGES: Mapping[str, Mapping[str, Callable[[Path], str]]] = {
    "README.md": {"plan": plan, "timings": timings},
    "docs/kernel-notes.md": {"pdl": pdl},
    "docs/models.md": {"models": models, "steps": steps},
    "docs/packs.md": {"startup": startup},
    "docs/scaling.md": {"scaling": scaling},
}
PARTS = PAGES["README.md"]


def fill(text: str, root: Path, parts: Mapping[str, Callable[[Path], str]] = PARTS) -> str:
    """A page with its parts brought up to date. Raises ValueError where the page has no place for one."""
    for name, write in parts.items():
        begin, end = f"<!-- {name}: written by `make docs` -->\n", f"<!-- end of {name} -->\n"
        if begin not in text or end not in text:
            raise ValueError(f"expected the lines {begin.strip()!r} and {end.strip()!r}, got a page without")
        before, rest = text.split(begin, 1)
        text = before + begin + write(root) + end + rest.split(end, 1)[1]
    return text


def _table(device: str, model: str, rows: Sequence[Mapping[str, Any]], *, verified: bool) -> Iterator[str]:
    if not verified:
        yield f"These are timings alone: the verification of {model} recorded on {device} is of earlier code, or missing.\n\n"
    yield f"{model} on {device}: microseconds for all N draft positions, L2 cold, median. *Chain alone* is the chain's launch, its noise drawn\n"
    yield "before, as an engine does while the draft LM head runs; *with noise* the call draws the noise first. The engine's loop and the\n"
    yield "fused loop draw their noise in their own kernels. *Engine / ...* is how many times as long the engine's loop takes.\n\n"
    yield "| vocabulary | N | rows | engine's loop | fused loop | chain alone | floor / alone | engine / alone | with noise | engine / with noise |\n"
    yield "|---" * 10 + "|\n"
    for row in sorted(rows, key=lambda row: (row["vocab_size"], row["num_steps"], row["rows"])):
        eager, us, call = row["eager_us"], row["us"], row["call_us"]
        cells = [row["vocab_size"], row["num_steps"], row["rows"], f"{eager:.1f}", f"{row['fused_us']:.1f}"]
        cells += [f"{us:.1f}", f"{100 * row['floor_us'] / us:.0f} %", f"{eager / us:.1f}"]
        cells += [f"{call:.1f}", f"{eager / call:.1f}"]
        yield f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    repository = Path(__file__).parents[2]
    for name, parts in PAGES.items():
        page = repository / name
        page.write_text(fill(page.read_text(), repository, parts))
    pictures.write(repository)
