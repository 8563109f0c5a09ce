"""What a rank stages at its peers is what they copy into their caches: the kernel's own stage_logits and fill_cache, run in Python.

Every lane of every tile of every rank stages its entries; then every thread of every rank copies. Memory is a dictionary by address, so an
entry that is read where nobody wrote, or stored to a column that is not a peer's, shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.harness import chain_simulator

from dspark_kernels._device import plan_line, symmetric_buffer

STEPS = 2
LANES = 32
TILE_ROWS = 16
BYTES = {"bf16": 2, "fp32": 4}
TARGETS, STAGING, CACHE = 1 << 24, 1 << 32, 1 << 40
LIMIT = 300  # target ids from here on are not cached, where draft ids have targets of their own
APART = 1 << 28  # bytes between two ranks' buffers, caches, and two rows of a cache
PADDING_ROW = 1  # in calls of more rows than one


class Entry(NamedTuple):
    """A logit."""

    row: int
    step: int
    draft: int


class Word(NamedTuple):
    """A 32-bit word of one or two entries."""

    entries: tuple[Entry | None, ...]

    def __rshift__(self, bits: int) -> Word:
        return Word(self.entries[bits // 16 :])


class Memory:
    """Entries by address, and the stand-ins of ptx.py that reach them."""

    def __init__(self, ptx: Any, entry_bytes: int) -> None:
        self.size = entry_bytes
        self.entries: dict[int, Entry] = {}
        ptx.stg_u16_if = lambda mine, address, word: self.store(mine, address, [Word(word.entries[:1])])
        ptx.stg_words_if = ptx.stg_b128_if = self.store
        ptx.ldg_once_b128 = self.load

    def store(self, mine: bool, address: int, words: list[Word]) -> None:
        if not mine:
            return
        values = [entry for word in words for entry in word.entries]
        assert address % self.size == 0
        if len(words) == 4:
            assert address % 16 == 0, "a 16-byte store that is not aligned"
        for place, value in enumerate(values):
            if value is not None:
                at = address + place * self.size
                assert self.entries.setdefault(at, value) == value, f"{value} over {self.entries[at]}"

    def load(self, address: int) -> list[Word]:
        assert address % 16 == 0, "a 16-byte load that is not aligned"
        count = 4 // self.size
        found = [self.entries.get(address + place * self.size) for place in range(16 // self.size)]
        return [Word(tuple(found[first : first + count])) for first in range(0, len(found), count)]


class Ranks:
    """A kernel for several ranks, and what its methods read of the context."""

    def __init__(
        self,
        world: int,
        vocab: int,
        slots: int,
        rows: int,
        cache: str,
        ctas: int,
        vector: bool,
        width: int | None,
        mapped: bool,
    ) -> None:
        self.world, self.vocab, self.rows, self.ctas, self.vector = world, vocab, rows, ctas, vector
        self.shard_width = -(-vocab // world) if width is None else width
        residency = plan_line.Residency(1, 2, 64, 0, 1, 0)
        line = plan_line.PlanLine("gpu", world, slots, ctas, 12, 1, residency, residency, 0, True)
        line = plan_line.for_shard(line, self.shard_width, vocab, 64, STEPS)
        simulator = chain_simulator.Simulator(
            rank_dim=64,
            num_steps=STEPS,
            vocab_size=vocab,
            line=line,
            base_dtype="bf16",
            cache_dtype=cache,
            width=0,
            rank=0,
        )
        self.kernel = simulator.module.ChainKernel(line, "bf16", cache, world)
        self.kernel.drawn_columns = vocab
        self.kernel.maps_ids, self.kernel.sampling_limit = mapped, LIMIT
        simulator.machine.ldg_b32 = lambda address: target_of((address - TARGETS) // 4)
        self.memory = Memory(simulator.machine, BYTES[cache])
        self.head_tiles = simulator.module.head_tiles
        self.kernel.rank_address = self.rank_address
        self.kernel.row_state = self.row_state

    def width(self, rank: int) -> int:
        return max(min(self.shard_width, self.vocab - rank * self.shard_width), 0)

    def context(self, rank: int, cta: int, tid: int = 0) -> SimpleNamespace:
        first_column = self.first_tile(rank, cta) * TILE_ROWS
        return SimpleNamespace(
            rank=rank, cta=cta, tid=tid, shard_width=self.shard_width, shard_tiles=-(-self.shard_width // TILE_ROWS),
            first_column=first_column, first_token=rank * self.shard_width + first_column, rows=self.rows,
            cache_vector=int(self.vector), target_ids=TARGETS,
        )  # fmt: skip

    def first_tile(self, rank: int, cta: int) -> int:
        return -(-self.width(rank) // TILE_ROWS) * cta // self.ctas

    def rank_address(self, c: SimpleNamespace, place: int) -> int:
        """What meet_ranks writes down of staging: this rank's place at each peer, and its own staging's start."""
        own = place == 2 * self.world - 1
        reader = c.rank if own else (c.rank + 1 + place - self.world) % self.world
        start = STAGING + reader * APART
        return start if own else start + self.kernel.staging_place(c.rank, reader) * self.kernel.source_bytes(c)

    def row_state(self, c: SimpleNamespace, row: int, step: int) -> list[int]:
        state = -1 if self.rows > 1 and row == PADDING_ROW else row
        address = self.row_address(c.rank, row, step) + self.kernel.cache_column(c) * self.kernel.cache_bytes
        return [address & 0xFFFF_FFFF, address >> 32, 0, self.kernel.staged_mark(c, row, step, state)]

    def row_address(self, rank: int, row: int, step: int) -> int:
        return CACHE + ((rank * self.rows + row) * STEPS + step) * APART

    def stage(self) -> None:
        """Every rank's every CTA finishes its tiles."""
        kernel = self.kernel
        for rank in range(self.world):
            for cta in range(self.ctas):
                c = self.context(rank, cta)
                for tile in range(self.first_tile(rank, cta + 1) - self.first_tile(rank, cta)):
                    for step, lane, h in [
                        (s, n, h) for s in range(STEPS) for n in range(LANES) for h in range(kernel.lane_rows)
                    ]:
                        row = self.head_tiles.bias_row(kernel.rows, lane) + h
                        column = self.head_tiles.bias_entry(kernel.rows, lane)
                        if row >= self.rows:
                            continue
                        first = c.first_token + tile * TILE_ROWS + column
                        entries = [Entry(row, step, first + e) for e in range(kernel.entries)]
                        words = [Word(tuple(entries))] if kernel.cache_bytes == 2 else [Word((e,)) for e in entries]
                        mark = self.row_state(c, row, step)[3]
                        kernel.stage_logits(c, mark != 0, mark, tile, column, words)

    def fill(self) -> None:
        """Every thread of every rank copies, the last warp's only the last position; only then are the caches looked at."""
        threads = self.kernel.threads
        for rank in range(self.world):
            for cta in range(self.ctas):
                for tid in range(threads):
                    if tid < threads - LANES:
                        self.kernel.fill_cache(self.context(rank, cta, tid), 0, STEPS - 1, threads - LANES)
                    self.kernel.fill_cache(self.context(rank, cta, tid), STEPS - 1, 1, threads)

    def cached(self, rank: int) -> dict[tuple[int, int, int], Entry]:
        """What lies in a rank's cache, by row, position and column."""
        first = self.row_address(rank, 0, 0)
        found = {}
        for address, entry in self.memory.entries.items():
            pair, place = divmod(address - first, APART)
            if address >= CACHE and 0 <= pair < self.rows * STEPS:
                assert place % self.kernel.cache_bytes == 0
                found[(*divmod(pair, STEPS), place // self.kernel.cache_bytes)] = entry
        return found


def shapes() -> Iterator[tuple[Any, ...]]:
    """World, vocabulary, row slots, rows, cache dtype, CTAs, whether aligned, shard width."""
    yield from ((2, 256, slots, slots, cache, 3, True, None) for slots in (1, 2, 4, 8) for cache in BYTES)
    yield from ((3, 250, slots, slots, cache, 2, False, None) for slots in (1, 8) for cache in BYTES)  # partial tiles
    yield 2, 256, 4, 3, "bf16", 3, False, None  # fewer rows than slots
    yield 4, 10, 2, 2, "bf16", 3, False, None  # shards of three columns, the last of one
    yield 4, 2, 2, 2, "fp32", 2, False, None  # two ranks have nothing
    yield 4, 200, 8, 5, "bf16", 2, True, 64  # a padded shard: the last rank has 8 columns
    yield 3, 128, 1, 1, "bf16", 5, True, 64  # an empty one


def target_of(draft: int) -> int:
    """A map that does not rise."""
    return 2 * draft + 1 if draft % 2 else 2 * draft + 4


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("world", "vocab", "slots", "rows", "cache", "ctas", "vector", "width"), list(shapes()))
def test_every_rank_copies_what_its_peers_staged(
    world: int, vocab: int, slots: int, rows: int, cache: str, ctas: int, vector: bool, width: int | None, mapped: bool
) -> None:
    ranks = Ranks(world, vocab, slots, rows, cache, ctas, vector, width, mapped)
    ranks.stage()
    layout = symmetric_buffer.layout(
        world=world, ctas=ctas, variants=1, row_slots=slots, num_steps=STEPS, shard_width=ranks.shard_width,
        cache_bytes=BYTES[cache],
    )  # fmt: skip
    for address in ranks.memory.entries:
        assert (address - STAGING) % APART < layout.staging_bytes
    ranks.fill()
    for rank in range(world):
        own = range(rank * ranks.shard_width, rank * ranks.shard_width + ranks.width(rank))
        live = [row for row in range(rows) if rows == 1 or row != PADDING_ROW]
        others = [draft for draft in range(vocab) if draft not in own]
        columns = {target_of(draft) if mapped else draft: draft for draft in others}
        wanted = {
            (row, step, column): Entry(row, step, draft)
            for row in live for step in range(STEPS) for column, draft in columns.items() if not mapped or column < LIMIT
        }  # fmt: skip
        assert ranks.cached(rank) == wanted
