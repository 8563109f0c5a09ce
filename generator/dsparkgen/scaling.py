"""How the chain's time goes with the number of GPUs: recorded runs, and predictions with what each assumes.

A prediction for W ranks is the sum of three parts, per row count:

    shard(W)     the chain of a vocabulary of ceil(V / W) on one GPU, as recorded; where that shard was not measured, the line
                 through the two smallest that were
    exchange     what the exchange between ranks added at the recorded number of ranks: hops that do not follow each other, so
                 the same for any number of ranks within one NVLink domain
    tail(W)      what staging and filling the cache added there, in proportion to the columns that come from peers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsparkgen.evidence import current_rows

WORLDS = (2, 4, 8, 16)
TWO_HOSTS = 16  # ranks of the prediction for two hosts
SWITCH_US = 0.70  # assumed: a second NVLink switch costs as much as was measured between two H200s behind one
ROWS = (1, 8)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of the table: microseconds by rows of a batch, None where nothing is recorded to tell."""

    ranks: str
    how: str
    us: Mapping[int, float | None]
    floor_us: Mapping[int, float | None]
    eager_us: Mapping[int, float | None]
    assumes: str


class Scaling:
    """The recorded rows of one model.

    Args:
        vocab_size: draft vocabulary V.
        num_steps: positions N.
        rows: bench rows of the checked-in kernels, from every folder of that kind of GPU.
    """

    def __init__(self, vocab_size: int, num_steps: int, rows: Sequence[Row]) -> None:
        self._vocab, self._steps = vocab_size, num_steps
        self._rows = [row for row in rows if row["kernel"] == "chain" and row["num_steps"] == num_steps]

    def row(self, world: int, count: int, *, emulated: bool = False, vocab: int | None = None) -> Row | None:
        """The recorded row of so many ranks and request rows, or None."""
        wanted = (self._vocab if vocab is None else vocab, world, count, emulated)
        for row in self._rows:
            if (row["vocab_size"], row["tp"], row["rows"], bool(row.get("emulated"))) == wanted:
                return row
        return None

    def shard_us(self, world: int, count: int) -> float | None:
        """The chain of one rank's shard alone on a GPU: recorded, or extended from the two smallest shards that were."""
        width = -(-self._vocab // world)
        exact = self.row(1, count, vocab=width)
        if exact is not None:
            return float(exact["us"])
        widths = (-(-self._vocab // other) for other in (1, *WORLDS))
        known = sorted((w, float(found["us"])) for w in widths if (found := self.row(1, count, vocab=w)) is not None)
        if len(known) < 2:
            return None
        (small, us), (large, more) = known[:2]
        return us + (width - small) * (more - us) / (large - small)

    def predicted_us(self, world: int, count: int) -> float | None:
        """The sum of the parts, from the recorded run over most GPUs; None without one, or without shards."""
        measured = self._widest(count)
        shard = self.shard_us(world, count)
        if measured is None or shard is None:
            return None
        from_peers = 1 - 1 / world
        tail = max(0.0, measured["tail_us"]) * from_peers / (1 - 1 / measured["tp"])
        return float(shard + measured["exchange_us"] + tail)

    def _widest(self, count: int) -> Row | None:
        found = [row for world in WORLDS if (row := self.row(world, count)) is not None and "tail_us" in row]
        return found[-1] if found else None

    def lines(self) -> Iterator[Line]:
        """The table's lines; one that nothing tells anything about is left out."""
        for world in (1, *WORLDS):
            yield from self._line(world, "measured", {n: self.row(world, n) for n in ROWS}, "")
            if world == 1:
                continue
            emulated = {n: self.row(world, n, emulated=True) for n in ROWS}
            note = "all ranks share one GPU, its bandwidth and its SMs; the hop is a store to its own L2"
            yield from self._line(world, "emulated", emulated, note)
            if not any(self.row(world, n) for n in ROWS):
                yield from self._prediction(world, f"{world}", 0.0, "parts as above; one NVLink domain")
        assumed = f"as above, and {SWITCH_US} us a position for a second NVLink switch"
        yield from self._prediction(TWO_HOSTS, f"{TWO_HOSTS} on two hosts of one NVLink domain", SWITCH_US, assumed)

    def _line(self, world: int, how: str, found: Mapping[int, Row | None], assumes: str) -> Iterator[Line]:
        if not any(found.values()):
            return

        def of(name: str) -> dict[int, float | None]:
            return {n: None if row is None else float(row[name]) for n, row in found.items()}

        yield Line(str(world), how, of("us"), of("floor_us"), of("eager_us"), assumes)

    def _prediction(self, world: int, ranks: str, extra_hop_us: float, assumes: str) -> Iterator[Line]:
        us = {n: self.predicted_us(world, n) for n in ROWS}
        if any(value is not None for value in us.values()):
            later = {n: None if value is None else value + self._steps * extra_hop_us for n, value in us.items()}
            nothing: dict[int, float | None] = dict.fromkeys(ROWS)
            yield Line(ranks, "predicted", later, nothing, nothing, assumes)


def recorded(results: Path, device: str, model: str, kernels: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bench rows of the checked-in kernels of a model, from the folders of one kind of GPU, whatever their number."""
    folders = sorted(path.name for path in results.glob(f"{device}*") if path.is_dir())
    own = [name for name in folders if name == device or name.removeprefix(f"{device}-x").isdecimal()]
    return [row for name in own for row in current_rows(results, name, model, kernels)]


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Lines as a Markdown table."""
    yield f"| GPUs | how | rows {ROWS[0]}: us | floor | engine's loop | rows {ROWS[1]}: us | floor | engine's loop | assumes |\n"
    yield "|---|---|---|---|---|---|---|---|---|\n"
    for line in lines:
        cells = []
        for n in ROWS:
            values = (line.us.get(n), line.floor_us.get(n), line.eager_us.get(n))
            cells += ["-" if value is None else f"{value:.1f}" for value in values]
        yield f"| {line.ranks} | {line.how} | {' | '.join(cells)} | {line.assumes} |\n"
