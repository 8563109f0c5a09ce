"""How compiled kernels' figures are shown: a table in the terminal, JSON for programs, docs/resources.md for readers."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

PAGE_INTRODUCTION = """\
# Registers and shared memory of every kernel

Written by `dsparkgen compile --page`: for each model and arch the chain at its smallest and largest TP size, for row slots {slots} in that
order, and at a size that leaves pad rows in the last shard where these do not and another does, with one pair of data types, which the models
take in turn, and one build of each other kernel. Registers are 32-bit, a thread; shared memory is KiB a block.
Compiled with {compilers}. Digests are those of the code that was compiled.
"""

Record = dict[str, Any]


@dataclass(frozen=True)
class Build:
    """One compilation: a kernel of a model for an arch, and which variant of it.

    A chain kernel's variant is its plan line (device, tp, row_slots) and its dtypes; another kernel's is the name under which the
    module lists it, the same for every device, TP size and row count.
    """

    model: str
    kernel: str
    arch: str
    inputs: str
    tp: int = 1
    device: str | None = None
    row_slots: int | None = None
    base_dtype: str | None = None
    cache_dtype: str | None = None
    variant: str | None = None

    @property
    def title(self) -> str:
        """The build in words, for progress and messages."""
        parts = [self.model, self.kernel, self.arch]
        if self.variant is not None:
            return " ".join([*parts, self.variant])
        line = [f"{self.device}", f"tp {self.tp}", f"rows {self.row_slots}", f"{self.base_dtype}/{self.cache_dtype}"]
        return " ".join([*parts, *line])


def tabulate(model: str, builds: Sequence[Build], records: Sequence[Record]) -> Table:
    """One model's figures as a table, one row a build; what must not be is red."""
    title = f"{model}: registers and bytes a thread, shared bytes a block"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for heading in ("kernel", "arch", "device", "tp", "row slots"):
        table.add_column(heading, no_wrap=True)
    table.add_column("base/cache", overflow="fold")  # or a variant's name, which may be long
    for heading in ("registers", "spill", "local", "shared", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for build, record in zip(builds, records, strict=True):
        if build.variant is None:
            where = [build.device, str(build.tp), str(build.row_slots), f"{build.base_dtype}/{build.cache_dtype}"]
        else:
            where = ["any", "any", "any", build.variant]
        if "error" in record:
            figures = ["[red]failed[/]"]
        else:
            bad = [f"[red]{record[key]}[/]" if record[key] else "0" for key in ("spill_bytes", "local_bytes")]
            figures = [str(record["registers"]), *bad, str(record["shared_bytes"]), f"{record['seconds']:.1f}"]
        table.add_row(build.kernel, build.arch, *where, *figures)
    return table


def to_json(builds: Sequence[Build], records: Sequence[Record], compilers: Sequence[str]) -> dict[str, Any]:
    """What `compile --json` writes: every build that compiled under "kernels", the others under "errors"."""
    pairs = [{**asdict(build), **record} for build, record in zip(builds, records, strict=True)]
    return {
        "compilers": list(compilers),
        "kernels": [pair for pair in pairs if "error" not in pair],
        "errors": [pair for pair in pairs if "error" in pair],
    }


def find_faults(builds: Sequence[Build], records: Sequence[Record]) -> list[str]:
    """What makes the answer no: builds that failed, spill or use local memory, a sentence each."""
    faults = []
    for build, record in zip(builds, records, strict=True):
        if "error" in record:
            faults.append(f"{build.title}: {record['error']}")
        elif record["spill_bytes"] or record["local_bytes"]:
            faults.append(
                f"{build.title}: expected no spills and no local memory, got {record['spill_bytes']} bytes spilled and "
                f"{record['local_bytes']} bytes of local memory a thread"
            )
    return faults


def to_markdown(builds: Sequence[Build], records: Sequence[Record], compilers: Sequence[str]) -> str:
    """docs/resources.md: one row a kernel, device and TP size. Every build must have compiled."""
    slots = sorted({build.row_slots for build in builds if build.row_slots is not None})
    introduction = PAGE_INTRODUCTION.format(slots=", ".join(map(str, slots)), compilers=" and ".join(compilers))
    return introduction + "".join(_write_sections(list(zip(builds, records, strict=True))))


def page_sections(page: str) -> dict[str, str]:
    """The sections of docs/resources.md by model."""
    return {section.split("\n", 1)[0].strip(): section for section in page.split("\n## ")[1:]}


def _write_sections(pairs: Sequence[tuple[Build, Record]]) -> Iterator[str]:
    for model, of_model in groupby(sorted(pairs, key=lambda pair: pair[0].model), lambda pair: pair[0].model):
        members = list(of_model)
        digests = dict.fromkeys((build.kernel, build.inputs) for build, _ in members)
        yield f"\n## {model}\n\n" + ", ".join(f"{kernel} `{inputs}`" for kernel, inputs in digests) + "\n\n"
        yield "| kernel | arch | device | tp | registers | shared KiB | spill bytes | local bytes |\n"
        yield "|---|---|---|---|---|---|---|---|\n"
        rows: dict[tuple[str, ...], list[tuple[Build, Record]]] = {}
        for build, record in members:
            tp = str(build.tp) if build.variant is None else "any"
            rows.setdefault((build.kernel, build.arch, build.device or "any", tp), []).append((build, record))
        for where, cells in rows.items():
            registers = _by_row_slots(cells, "registers", 1)
            shared = _by_row_slots(cells, "shared_bytes", 1024)
            spills, local = (str(max(record[key] for _, record in cells)) for key in ("spill_bytes", "local_bytes"))
            yield f"| {' | '.join([*where, registers, shared, spills, local])} |\n"


def _by_row_slots(cells: Sequence[tuple[Build, Record]], key: str, unit: int) -> str:
    """The most of a figure for each number of row slots, in ascending order."""
    most: dict[int, int] = {}
    for build, record in cells:
        slots = build.row_slots or 0
        most[slots] = max(most.get(slots, 0), record[key])
    return ", ".join(str(-(-most[slots] // unit)) for slots in sorted(most))
