"""How the chain's time goes with the number of GPUs: recorded runs, and predictions with what each assumes.

A prediction for W ranks is the sum of three parts, per row count:

    shard(W)     the chain of a vocabulary of ceil(V / W) on one GPU, as recorded, times what the host of the run over ranks took
                 longer (or less) for the shard of its own size: hosts differ by several percent. A shard that was not measured lies
                 on the line through the two smallest that were
    exchange(W)  what the exchange between ranks added at the recorded number of ranks, whose hops do not follow each other; where
                 that was the direct form and W ranks take two stages, also what the two forms differed by when they were compared
    tail(W)      what staging and filling the cache added there, in proportion to the columns that come from peers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsparkgen.device_code import load_device_code
from dsparkgen.evidence import current_rows, verified_ranks

WORLDS = (2, 4, 8, 16)
TWO_HOSTS = 16  # ranks of the prediction for two hosts
# What two stages took more than the direct form over TWO_STAGE_STEPS positions by rows, on two GPUs in one run (docs/kernel-notes.md).
TWO_STAGE_US = {1: 0.7, 8: -0.8}
TWO_STAGE_STEPS = 5
DIRECT_RANKS: int = load_device_code("symmetric_buffer").DIRECT_RANKS
ROWS = (1, 8)
EMULATED_NOTE = "all ranks share one GPU, its bandwidth and its SMs; the hop is a store to its own L2"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of the table: microseconds by rows of a batch, None where nothing is recorded to tell."""

    ranks: str
    how: str
    us: Mapping[int, float | None]
    floor_us: Mapping[int, float | None]
    eager_us: Mapping[int, float | None]  # the engine's loop with the whole head on every GPU
    nccl_us: Mapping[int, float | None]  # the engine's loop over shards, with all-gathers
    assumes: str


class Scaling:
    """The recorded rows of one model.

    Args:
        vocab_size: draft vocabulary V.
        num_steps: positions N.
        rank_hop_us: the device's, in microseconds; a second NVLink switch is assumed to cost as much as the way through one.
        rows: bench rows of the checked-in kernels, from every folder of that kind of GPU.
    """

    def __init__(self, vocab_size: int, num_steps: int, rank_hop_us: float, rows: Sequence[Row]) -> None:
        self._vocab, self._steps, self._switch_us = vocab_size, num_steps, rank_hop_us
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

    def host_factor(self, count: int) -> float | None:
        """How many times as long the host of the run over most GPUs took for its shard alone as the recorded run on one GPU did;
        None where either is not recorded."""
        measured = self._widest(count)
        if measured is None:
            return None
        there = self.row(1, count, vocab=-(-self._vocab // measured["tp"]))
        return None if there is None else float(measured["shard_us"] / there["us"])

    def predicted_us(self, world: int, count: int) -> float | None:
        """The sum of the parts, from the recorded run over most GPUs; None without one, or without shards."""
        measured, factor, shard = self._widest(count), self.host_factor(count), self.shard_us(world, count)
        if measured is None or factor is None or shard is None:
            return None
        from_peers = 1 - 1 / world
        tail = max(0.0, measured["tail_us"]) * from_peers / (1 - 1 / measured["tp"])
        return float(factor * shard + measured["exchange_us"] + self._two_stage_us(measured["tp"], world, count) + tail)

    def _two_stage_us(self, measured: int, world: int, count: int) -> float:
        """What `world` ranks' exchange takes more for its form than that of the `measured` ones."""
        if measured <= DIRECT_RANKS < world:
            return TWO_STAGE_US[count] * self._steps / TWO_STAGE_STEPS
        return 0.0

    def _widest(self, count: int) -> Row | None:
        found = [row for world in WORLDS if (row := self.row(world, count)) is not None and "tail_us" in row]
        return found[-1] if found else None

    def lines(self) -> Iterator[Line]:
        """The table's lines; one that nothing tells anything about is left out."""
        said: dict[str, int] = {}  # what predictions assume, and which says so first
        for world in (1, *WORLDS):
            yield from self._line(world, "measured", {n: self.row(world, n) for n in ROWS}, "")
            if world == 1:
                continue
            emulated = {n: self.row(world, n, emulated=True) for n in ROWS}
            yield from self._line(world, "emulated", emulated, EMULATED_NOTE)
            if not any(self.row(world, n) for n in ROWS):
                assumed = self._assumed(world)
                first = said.setdefault(assumed, world)
                yield from self._prediction(world, f"{world}", 0.0, assumed if first == world else f"as for {first}")
        assumed = f"as for {TWO_HOSTS}, and {self._switch_us} us a position for a second NVLink switch"
        hosts = f"{TWO_HOSTS} on two hosts of one NVLink domain"
        yield from self._prediction(TWO_HOSTS, hosts, self._switch_us, assumed)

    def _assumed(self, world: int) -> str:
        """What goes into a prediction beside the sum of the recorded parts, in words."""
        known = {n: row for n in ROWS if (row := self._widest(n)) is not None}
        factors = {n: factor for n in known if (factor := self.host_factor(n)) is not None}
        forms = {n: self._two_stage_us(row["tp"], world, n) for n, row in known.items()}
        gpus = " / ".join(dict.fromkeys(str(row["tp"]) for row in known.values()))
        longer = " / ".join(f"{factor:.2f}" for factor in factors.values())
        host = f"shards take {longer} times as long as recorded, as on the host of the run over {gpus} GPUs"
        said = ["one NVLink domain", host]
        if any(forms.values()):
            more = " / ".join(f"{us:+.1f}" for us in forms.values())
            said.append(f"its direct exchange, and {more} us for one in two stages")
        return "; ".join(said)

    def _line(self, world: int, how: str, found: Mapping[int, Row | None], assumes: str) -> Iterator[Line]:
        if not any(found.values()):
            return

        def of(name: str) -> dict[int, float | None]:
            return {n: None if row is None or name not in row else float(row[name]) for n, row in found.items()}

        yield Line(str(world), how, of("us"), of("floor_us"), of("eager_us"), of("nccl_us"), assumes)

    def _prediction(self, world: int, ranks: str, extra_hop_us: float, assumes: str) -> Iterator[Line]:
        us = {n: self.predicted_us(world, n) for n in ROWS}
        if any(value is not None for value in us.values()):
            later = {n: None if value is None else value + self._steps * extra_hop_us for n, value in us.items()}
            nothing: dict[int, float | None] = dict.fromkeys(ROWS)
            yield Line(ranks, "predicted", later, nothing, nothing, nothing, assumes)


def folders(results: Path, device: str) -> list[str]:
    """The folders of results of one kind of GPU, whatever their number."""
    found = sorted(path.name for path in results.glob(f"{device}*") if path.is_dir())
    return [name for name in found if name == device or name.removeprefix(f"{device}-x").isdecimal()]


def recorded(results: Path, device: str, model: str, kernels: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bench rows of the checked-in kernels of a model, from the folders of one kind of GPU, whatever their number."""
    return [row for name in folders(results, device) for row in current_rows(results, name, model, kernels)]


def unverified(
    lines: Sequence[Line], results: Path, device: str, model: str, kernels: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """A sentence that names the runs in the table whose code was not verified over so many ranks; nothing where all were."""
    known = {
        ranks for name in folders(results, device) for ranks in verified_ranks(results, name, model, "chain", kernels)
    }
    runs = [(int(line.ranks), line.how == "emulated") for line in lines if line.how != "predicted"]
    named = [
        f"{world} emulated" if emulated else f"{world}" for world, emulated in runs if (world, emulated) not in known
    ]
    if named:
        yield f"Timings alone: of the checked-in kernels no verification is recorded over these numbers of GPUs: {', '.join(named)}.\n"


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Lines as a Markdown table."""
    own = ("us", "floor", "loop, replicated", "loop, NCCL")
    heads = [name if place else f"rows {n}: {name}" for n in ROWS for place, name in enumerate(own)]
    yield f"| GPUs | how | {' | '.join(heads)} | assumes |\n"
    yield "|---" * (3 + len(heads)) + "|\n"
    for line in lines:
        cells = []
        for n in ROWS:
            values = (line.us.get(n), line.floor_us.get(n), line.eager_us.get(n), line.nccl_us.get(n))
            cells += ["-" if value is None else f"{value:.1f}" for value in values]
        yield f"| {line.ranks} | {line.how} | {' | '.join(cells)} | {line.assumes} |\n"
