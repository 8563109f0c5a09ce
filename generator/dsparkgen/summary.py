"""The summary of a CI run as Markdown: models, what the change does to their constants, registers, generated lines.

    python -m dsparkgen.summary [--check FILE] [--compile FILE] [--base MANIFEST] [--patch NAME] >> "$GITHUB_STEP_SUMMARY"

FILE are what `dsparkgen check --json` and `dsparkgen compile --json` wrote; MANIFEST is generated/MANIFEST.json of the commit that the
change is based on. What is not given is left out.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsparkgen.locate import show
from dsparkgen.render import PACKAGE
from dsparkgen.tree import find_roots, read_manifest

MOST_LINES = 40  # of a list of files or constants; GitHub shows a summary of at most 1 MiB
NONE = "–"

Document = Mapping[str, Any]


def summary(
    manifest: Document,
    lines: Mapping[str, int],
    *,
    checked: Document | None = None,
    compiled: Document | None = None,
    base: Document | None = None,
    patch: str | None = None,
) -> str:
    """The whole page.

    Args:
        manifest: The checked-in MANIFEST.json; {} where it is missing.
        lines: Generated lines on disk, by model.
        checked: What `check --json` wrote.
        compiled: What `compile --json` wrote.
        base: MANIFEST.json of the commit that the change is based on.
        patch: Name of the artifact with the missing change of the generated tree, where one was uploaded.
    """
    parts = ["# Generated kernels\n"]
    if checked is not None:
        parts.append("\n".join(_state(checked, patch)))
    parts.append("\n".join(_models(manifest, lines, checked, compiled)))
    if base is not None:
        parts.append("\n".join(_constants(base, manifest)))
    if compiled is not None:
        parts.append("\n".join(_faults(compiled)))
    return "\n".join(part for part in parts if part)


def generated_lines(out: Path) -> dict[str, int]:
    """Lines of each model's generated files below a source root, by model."""
    found: dict[str, int] = {}
    for path in sorted((out / PACKAGE).glob("*/config.py")):
        files = path.parent.glob("*.py")
        found[path.parent.name] = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return found


def _state(checked: Document, patch: str | None) -> Iterator[str]:
    changes, faults = checked["changes"], checked["faults"]
    if not changes:
        yield f"All {checked['files']} files are as the specs and templates say.\n"
    else:
        yield f"**{len(changes)} of {checked['files']} files are not as the specs and templates say.** Run `dsparkgen generate`"
        if patch is not None:
            yield f"or apply the artifact `{patch}`: `git apply --directory=generated {patch}`."
        yield ""
        yield from _cut([f"- `{change['path']}`: {change['kind']}{_causes(change)}" for change in changes])
        yield ""
    for fault in faults:
        yield f"- {fault}"
    if faults:
        yield ""


def _causes(change: Document) -> str:
    return f" ({'; '.join(change['causes'])})" if change["causes"] else ""


def _models(
    manifest: Document, lines: Mapping[str, int], checked: Document | None, compiled: Document | None
) -> Iterator[str]:
    yield "## Models\n"
    yield "| model | kernels | generated lines | registers, most of each kernel | evidence |"
    yield "|---|---|---|---|---|"
    kernels = manifest.get("kernels", {})
    for model in sorted(manifest.get("models", {})):
        own = [name.split("/")[1] for name in kernels if name.startswith(f"{model}/")]
        row = [f"`{model}`", ", ".join(own), str(lines.get(model, NONE))]
        yield f"| {' | '.join([*row, _registers(model, own, compiled), _evidence(model, checked)])} |"
    yield ""


def _registers(model: str, kernels: Sequence[str], compiled: Document | None) -> str:
    if compiled is None:
        return NONE
    most: dict[str, int] = {}
    for build in compiled["kernels"]:
        if build["model"] == model:
            most[build["kernel"]] = max(most.get(build["kernel"], 0), build["registers"])
    return ", ".join(f"{kernel} {most[kernel]}" for kernel in kernels if kernel in most) or NONE


def _evidence(model: str, checked: Document | None) -> str:
    if checked is None:
        return NONE
    states = [line["state"] for line in checked["evidence"] if line["model"] == model]
    counts = {state: states.count(state) for state in sorted(set(states))}
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or NONE


def _constants(base: Document, manifest: Document) -> Iterator[str]:
    before, now = base.get("models", {}), manifest.get("models", {})
    yield "## Changes of specs and devices\n"
    rows = [f"- `{model}` is new" for model in sorted(set(now) - set(before))]
    rows += [f"- `{model}` is gone" for model in sorted(set(before) - set(now))]
    for section in ("models", "devices"):
        old, new = base.get(section, {}), manifest.get(section, {})
        for name in sorted(set(old) & set(new)):
            for key in sorted({*old[name], *new[name]}):
                was, value = old[name].get(key), new[name].get(key)
                if was != value:
                    rows.append(f"- `{name}`: `{key}` was {_value(was)}, is {_value(value)}")
    yield from _cut(rows) if rows else ["None."]
    yield ""


def _value(value: Any) -> str:
    return "absent" if value is None else f"`{show(tuple(value) if isinstance(value, list) else value)}`"


def _faults(compiled: Document) -> Iterator[str]:
    bad = [build for build in compiled["kernels"] if build["spill_bytes"] or build["local_bytes"]]
    rows = [
        f"- {_title(build)}: {build['spill_bytes']} bytes of spills, {build['local_bytes']} of local memory a thread"
        for build in bad
    ]
    rows += [f"- {_title(build)}: {build['error']}" for build in compiled["errors"]]
    yield f"## Compiled: {len(compiled['kernels'])} builds, {len(rows)} at fault\n"
    yield from _cut(rows)
    yield ""


def _title(build: Document) -> str:
    parts = (build["model"], build["kernel"], build["arch"], build.get("device"), build.get("variant"))
    slots = [f"tp {build['tp']} rows {build['row_slots']}"] if build.get("row_slots") else []
    return " ".join([*filter(None, parts), *slots])


def _cut(rows: Sequence[str]) -> list[str]:
    rest = len(rows) - MOST_LINES
    return [*rows[:MOST_LINES], *([f"- and {rest} more"] if rest > 0 else [])]


def _document(path: Path | None) -> Document | None:
    """A JSON file; None where there is none, as a step that failed early wrote none."""
    if path is None or not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page for the repository around the working directory."""
    parser = argparse.ArgumentParser(description="The summary of a CI run as Markdown.")
    parser.add_argument("--check", type=Path, metavar="FILE", help="what `dsparkgen check --json` wrote")
    parser.add_argument("--compile", type=Path, metavar="FILE", help="what `dsparkgen compile --json` wrote")
    parser.add_argument("--base", type=Path, metavar="MANIFEST", help="generated/MANIFEST.json of the base commit")
    parser.add_argument("--patch", metavar="NAME", help="artifact with the missing change of the generated tree")
    asked = parser.parse_args(arguments)
    roots = find_roots(reads_only=True)
    page = summary(
        read_manifest(roots.out),
        generated_lines(roots.out),
        checked=_document(asked.check),
        compiled=_document(asked.compile),
        base=_document(asked.base),
        patch=asked.patch,
    )
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
