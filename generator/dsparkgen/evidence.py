"""What has been run on a real GPU, and whether it is still the code that is checked in.

``benchmarks/results/<gpu>/<model>.json`` is written by ``verify --record`` and ``bench --record``, and by ``take``, which merges two
such files::

    {"device": "h200", "date": "2026-11-29", "command": "...",
     "rows": [{"kernel": "chain", "inputs": "<digest>", ...timings}],
     "verified": [{"kernel": "chain", "arch": "sm_90a", "inputs": "<digest>", "checks": {...}}],
     "seal": "<sha256 of the canonical JSON of the rest>"}

Entries of several ranks have their number as ``tp``, and ``emulated`` where one GPU ran them all. A run on more than two
GPUs of a host stands in a folder of its own, such as h200-x4.

A row of a throw-away spec (a vocabulary shard, a sweep) carries ``parent``, the digest of the checked-in kernel that
was rendered from the same templates at the same time; its own ``inputs`` matches no checked-in file by design.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

ROW_KEY = ("kernel", "vocab_size", "num_steps", "rank_dim", "tp", "emulated", "rows")
VERIFIED_KEY = ("kernel", "arch", "tp", "emulated")
GPUS_OF_ONE_FOLDER = 2  # runs on one or two GPUs of a host share a folder; more have one with their number
FILES = re.compile(r"(--json|--plot) \S+")
State = Literal["verified", "stale", "compiled only"]


class EvidenceError(ValueError):
    """A results file that no real run can have written: broken seal, malformed, or of an unknown kernel digest."""


@dataclass(frozen=True)
class KernelState:
    """One line of the evidence table: what is known of one kernel on one architecture."""

    model: str
    kernel: str
    arch: str
    state: State
    device: str | None = None
    date: str | None = None
    ranks: tuple[str, ...] = ()  # over how many ranks this code was also verified: "2", "4 emulated"


def folder(device: str, gpus: int) -> str:
    """Name of the folder that holds the results of a run on so many GPUs of one host."""
    return device if gpus <= GPUS_OF_ONE_FOLDER else f"{device}-x{gpus}"


def results_path(results: Path, device: str, model: str) -> Path:
    """Where the results of one model on one GPU stand."""
    return results / device / f"{model}.json"


def seal_of(document: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of everything but the seal."""
    rest = {key: value for key, value in document.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load(path: Path) -> dict[str, Any]:
    """Read one results file and check its form and seal. Raises EvidenceError, which names the file."""
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise EvidenceError(f"{path}: not JSON: {error}") from error
    wanted = {"device": str, "date": str, "command": str, "rows": list, "verified": list, "seal": str}
    for key, kind in wanted.items():
        found = document.get(key) if isinstance(document, dict) else None
        if not isinstance(found, kind):
            raise EvidenceError(f"{path}: {key}: expected {kind.__name__}, got {type(found).__name__}")
    seal = seal_of(document)
    if document["seal"] != seal:
        raise EvidenceError(
            f"{path}: seal: the content gives {seal[:12]}, the file says {document['seal'][:12]}: it was edited by "
            "hand. Run verify --record and bench --record again on that GPU"
        )
    for entry in [*document["rows"], *document["verified"]]:
        if not isinstance(entry, dict) or not {"kernel", "inputs"} <= entry.keys():
            raise EvidenceError(f"{path}: an entry without kernel and inputs: {entry!r}")
    return document


def record(
    results: Path,
    device: str,
    model: str,
    command: str,
    *,
    rows: Iterable[Mapping[str, Any]] = (),
    verified: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """Merge new timings or checks into a results file: an entry replaces the one of the same kernel and shape.

    Raises EvidenceError when the existing file is not intact, rather than sealing somebody's edit.
    """
    path = results_path(results, device, model)
    date = datetime.now(UTC).date().isoformat()
    old: dict[str, Any] = load(path) if path.exists() else {"rows": [], "verified": []}
    rows = _merged(old["rows"], ({**row, "date": date} for row in rows), ROW_KEY)
    verified = _merged(old["verified"], ({**entry, "date": date} for entry in verified), VERIFIED_KEY)
    return _write(path, device, date, command, rows, verified)


def _write(
    path: Path,
    device: str,
    date: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    verified: Sequence[Mapping[str, Any]],
) -> Path:
    document: dict[str, Any] = {
        "device": device,
        "date": date,
        "command": FILES.sub(r"\1 FILE", command),  # where a machine wrote its other files tells nothing
        "rows": rows,
        "verified": verified,
    }
    document["seal"] = seal_of(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def take(results: Path, file: Path, kernels: Mapping[str, Mapping[str, Any]]) -> Path:
    """Merge a results file that runs on another machine have written, ``<gpu>/<model>.json``, into the repository's.

    Of two entries for one kernel and shape the one of the code that is checked in stays; of two such ones, or of none, the later; of
    two of one day, the taken one.

    Args:
        results: The folder of results, benchmarks/results.
        file: The file to take. Its name is the model's.
        kernels: MANIFEST.json's kernel table, as for ``problems``.

    Raises:
        EvidenceError: One of the two files is not intact, or the taken one has a digest that no checked-in kernel ever had.
    """
    given, model = load(file), file.stem
    path = results_path(results, given["device"], model)
    unknown = _unknown(file, given, model, kernels)
    if unknown:
        raise EvidenceError(unknown[0])
    old: dict[str, Any] = load(path) if path.exists() else {"date": "", "command": "", "rows": [], "verified": []}

    def rank(entry: Mapping[str, Any]) -> tuple[bool, str]:
        current = kernels.get(f"{model}/{entry['kernel']}", {}).get("inputs")
        return entry.get("parent", entry["inputs"]) == current, entry.get("date", "")

    def newer(field: str, key: tuple[str, ...]) -> list[Mapping[str, Any]]:
        kept = {tuple(entry.get(name) for name in key): entry for entry in old[field]}
        better = [
            entry
            for entry in given[field]
            if (there := kept.get(tuple(entry.get(name) for name in key))) is None or rank(entry) >= rank(there)
        ]
        return _merged(old[field], better, key)

    date, command = max((old["date"], old["command"]), (given["date"], given["command"]))
    return _write(path, given["device"], date, command, newer("rows", ROW_KEY), newer("verified", VERIFIED_KEY))


def _merged(
    old: Sequence[Mapping[str, Any]], new: Iterable[Mapping[str, Any]], key: tuple[str, ...]
) -> list[Mapping[str, Any]]:
    entries = {tuple(entry.get(name) for name in key): entry for entry in old}
    entries.update({tuple(entry.get(name) for name in key): entry for entry in new})
    return [entries[name] for name in sorted(entries, key=lambda name: [(str(type(v)), v) for v in name])]


def _unknown(
    file: Path, document: Mapping[str, Any], model: str, kernels: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A sentence for each entry of a results file whose digest no checked-in kernel ever had, or one for a model that is gone."""
    if not any(name.startswith(f"{model}/") for name in kernels):
        return [f"{file}: no spec describes {model} any more; delete this file or bring back specs/{model}.toml"]
    found = []
    for entry in [*document["rows"], *document["verified"]]:
        known = kernels.get(f"{model}/{entry['kernel']}", {})
        digest = entry.get("parent", entry["inputs"])
        if digest != known.get("inputs") and digest not in known.get("earlier", ()):
            found.append(
                f"{file}: {entry['kernel']}: inputs {digest} match no {model}/{entry['kernel']} that was ever checked in"
            )
    return found


def _files(results: Path) -> list[Path]:
    return sorted(results.glob("*/*.json"))


def problems(results: Path, kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every results file that must be rejected: a broken seal, or a digest that no checked-in kernel ever had.

    ``kernels`` is MANIFEST.json's table {"<model>/<kernel>": {"inputs": digest, "earlier": [digests]}}.
    """
    found = []
    for path in _files(results):
        try:
            document = load(path)
        except EvidenceError as error:
            found.append(str(error))
            continue
        if document["device"] != path.parent.name:
            found.append(
                f"{path}: device: expected {path.parent.name!r}, the folder's name, got {document['device']!r}"
            )
        found += _unknown(path, document, path.stem, kernels)
    return sorted(set(found))


def states(
    results: Path,
    kernels: Mapping[str, Mapping[str, Any]],
    archs: Mapping[str, Sequence[str]],
) -> list[KernelState]:
    """The evidence table: one line per checked-in kernel and architecture it is emitted for.

    The state is that of the kernel on one GPU; runs over ranks are named beside it.

    Args:
        results: the folder of results, benchmarks/results.
        kernels: MANIFEST.json's kernel table, as for ``problems``.
        archs: architectures by model, from each spec's ``emit.archs``.

    Raises:
        EvidenceError: a results file is not intact.
    """
    runs: dict[tuple[str, str, str], list[tuple[bool, str, str]]] = {}
    ranks: dict[tuple[str, str, str], set[tuple[int, str]]] = {}
    for path in _files(results):
        document = load(path)
        for entry in document["verified"]:
            key = (path.stem, entry["kernel"], entry["arch"])
            current = entry["inputs"] == kernels.get(f"{path.stem}/{entry['kernel']}", {}).get("inputs")
            world = entry.get("tp", 1)
            if world > 1:
                if current:
                    name = f"{world} emulated" if entry.get("emulated") else f"{world}"
                    ranks.setdefault(key, set()).add((world, name))
                continue
            run = (current, entry.get("date", document["date"]), document["device"])
            runs.setdefault(key, []).append(run)
    table = []
    for name in sorted(kernels):
        model, kernel = name.split("/")
        for arch in archs.get(model, ()):
            key = (model, kernel, arch)
            over = tuple(text for _, text in sorted(ranks.get(key, ())))
            found = runs.get(key)
            if found is None:
                table.append(KernelState(*key, "compiled only", ranks=over))
                continue
            current, date, device = max(found)
            table.append(KernelState(*key, "verified" if current else "stale", device, date, over))
    return table


def missing(table: Iterable[KernelState], arch: str) -> list[KernelState]:
    """The lines of one architecture that are not verified: what ``check --evidence`` fails for."""
    return [line for line in table if line.arch == arch and line.state != "verified"]


def render_table(table: Sequence[KernelState]) -> str:
    """The evidence table as aligned text."""
    header = ("model", "kernel", "arch", "state", "device", "date", "also over ranks")
    lines = [header]
    for s in table:
        lines.append((s.model, s.kernel, s.arch, s.state, s.device or "-", s.date or "-", ", ".join(s.ranks) or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def verified_ranks(
    results: Path, device: str, model: str, kernel: str, kernels: Mapping[str, Mapping[str, Any]]
) -> set[tuple[int, bool]]:
    """Over how many ranks the checked-in code of a kernel was verified on such GPUs, 1 for one alone; with each, whether one GPU
    emulated them."""
    path = results_path(results, device, model)
    current = kernels.get(f"{model}/{kernel}", {}).get("inputs")
    entries = load(path)["verified"] if path.exists() else []
    own = (entry for entry in entries if (entry["kernel"], entry["inputs"]) == (kernel, current))
    return {(entry.get("tp", 1), bool(entry.get("emulated"))) for entry in own}


def is_verified(results: Path, device: str, model: str, kernel: str, kernels: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the checked-in code of a kernel was verified on one such GPU."""
    return (1, False) in verified_ranks(results, device, model, kernel, kernels)


def current_rows(
    results: Path, device: str, model: str, kernels: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The timings that docs may quote: rows measured with the kernels that are checked in now, whether or not these are verified."""
    path = results_path(results, device, model)
    if not path.exists():
        return []
    current = {name.split("/")[1]: entry["inputs"] for name, entry in kernels.items() if name.startswith(f"{model}/")}
    rows = load(path)["rows"]
    return [row for row in rows if row.get("parent", row["inputs"]) == current.get(row["kernel"])]
