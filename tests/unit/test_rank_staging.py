"""What a rank stages at its peers is what they copy into their caches: the kernel's own stage_logits and copy_position, run in Python.

Every lane of every tile of every rank stages its entries; then every rank copies. Memory is a dictionary by address, so an entry that is waited
for and was not staged, staged where something lies, left behind, or stored to a column that is not a peer's, shows.
"""

from __future__ import annotations

import functools
import itertools
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
BLANK = symmetric_buffer.BLANK
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

    def __lshift__(self, bits: int) -> Word:
        return Word((None,) * (bits // 16) + self.entries)

    def __or__(self, other: Word) -> Word:
        return Word((*self.entries, *other.entries[len(self.entries) :]))


class Memory:
    """Caches by entry and staging by 32-bit word, and the stand-ins of ptx.py that reach them."""

    def __init__(self, ptx: Any, entry_bytes: int) -> None:
        self.size = entry_bytes
        self.entries: dict[int, Entry] = {}
        self.staged: dict[int, Word] = {}
        ptx.stg_u16_if = lambda mine, address, word: mine and self.store(mine, address, [Word(word.entries[:1])])
        ptx.stg_words_if = ptx.stg_b128_if = self.store
        ptx.st_relaxed_sys_words_if = self.stage
        ptx.ld_relaxed_sys_x4 = self.load
        ptx.globaltimer = self.give_up

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
                assert at not in self.entries, f"{value} over {self.entries[at]}"
                self.entries[at] = value

    def stage(self, mine: bool, address: int, words: list[Any]) -> None:
        if not mine:
            return
        assert address % (4 * len(words)) == 0, "a store of several words that is not aligned"
        for place, word in enumerate(words):
            at = address + 4 * place
            if word == BLANK:
                self.staged.pop(at, None)
            else:
                assert isinstance(word, Word) and at not in self.staged, f"{word} over {self.staged.get(at)}"
                self.staged[at] = word

    def load(self, address: int) -> list[Any]:
        assert address % 16 == 0, "a 16-byte load that is not aligned"
        return [self.staged.get(address + place, BLANK) for place in range(0, 16, 4)]

    def give_up(self) -> None:
        raise AssertionError("logits are waited for that nobody staged")


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
        residency = plan_line.Residency(
            1, 2, 64 if mapped else 0, 0, 1, 0
        )  # without resident tiles there is room to keep
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
        self.machine = simulator.machine
        simulator.machine.ldg_b32 = lambda address: target_of((address - TARGETS) // 4)
        self.memory = Memory(simulator.machine, BYTES[cache])
        self.head_tiles = simulator.module.head_tiles
        self.kernel.rank_address = self.rank_address
        self.kernel.row_state = self.row_state

    def width(self, rank: int) -> int:
        return max(min(self.shard_width, self.vocab - rank * self.shard_width), 0)

    def context(self, rank: int, cta: int, tid: int = 0) -> SimpleNamespace:
        first_column = self.first_tile(rank, cta) * TILE_ROWS
        end = min(self.first_tile(rank, cta + 1) * TILE_ROWS, self.width(rank))
        return SimpleNamespace(
            rank=rank, cta=cta, tid=tid, warp=tid // LANES, lane=tid % LANES, span=end - first_column, shard_width=self.shard_width, shard_tiles=-(-self.shard_width // TILE_ROWS),
            first_column=first_column, first_token=rank * self.shard_width + first_column, rows=self.rows,
            cache_vector=int(self.vector), target_ids=TARGETS, smem=0,
        )  # fmt: skip

    def first_tile(self, rank: int, cta: int) -> int:
        return -(-self.width(rank) // TILE_ROWS) * cta // self.ctas

    def rank_address(self, c: SimpleNamespace, place: int) -> int:
        """What meet_ranks writes down of staging: this rank's place at each peer, and the start of its own."""
        reader = (c.rank + 1 + place - self.world) % self.world  # the peers, then the rank itself
        start = STAGING + reader * APART
        own = place == 2 * self.world - 1
        return start if own else start + self.kernel.staging_place(c.rank, reader) * self.kernel.source_bytes(c)

    def row_state(self, c: SimpleNamespace, row: int, step: int) -> list[int]:
        state = -1 if self.rows > 1 and row == PADDING_ROW else row
        address = self.row_address(c.rank, row, step) + self.kernel.cache_column(c) * self.kernel.cache_bytes
        return [address & 0xFFFF_FFFF, address >> 32, 0, self.kernel.staged_mark(c, row, step, state)]

    def row_address(self, rank: int, row: int, step: int) -> int:
        return CACHE + ((rank * self.rows + row) * STEPS + step) * APART

    def stage(self, step: int, rank: int, cta: int) -> None:
        """A CTA finishes its tiles of a position. Lanes swap words: what each gives, then what each stages."""
        kernel, ptx, given = self.kernel, self.machine, {}

        def shuffle(lane: int, word: Any, distance: int) -> Any:
            given[lane] = word
            return given.get(lane ^ distance)

        for tile in range(self.first_tile(rank, cta + 1) - self.first_tile(rank, cta)):
            for gives in (True, False) if kernel.cache_bytes == 2 and kernel.entries == 1 else (False,):
                for lane in range(LANES):
                    c = self.context(rank, cta, lane)
                    column = self.head_tiles.bias_entry(kernel.rows, lane)
                    first = c.first_token + tile * TILE_ROWS + column
                    rows = []
                    for row in range(self.head_tiles.bias_row(kernel.rows, lane), 99)[: kernel.lane_rows]:
                        entries = [Entry(row, step, first + e) for e in range(kernel.entries)]
                        words = [Word(tuple(entries))] if kernel.cache_bytes == 2 else [Word((e,)) for e in entries]
                        mark = self.row_state(c, min(row, kernel.rows - 1), step)[3]
                        rows.append((row < self.rows and mark != 0, mark, words))
                    if gives:
                        given[lane] = self.given(c, rows)
                    else:
                        ptx.shuffle_xor = functools.partial(shuffle, lane)
                        kernel.stage_logits(c, tile, column, rows)

    def given(self, c: SimpleNamespace, rows: list[Any]) -> Word:
        """What a lane gives in pair_entries."""
        found = []
        self.machine.shuffle_xor = lambda word, distance: found.append(word) or word
        self.kernel.pair_entries(c, 0, rows)
        return found[0]

    def stage_position(self, step: int) -> None:
        """Every CTA finishes its tiles."""
        for rank, cta in itertools.product(range(self.world), range(self.ctas)):
            self.stage(step, rank, cta)

    def copy(self, step: int, first_warp: int) -> None:
        """Every rank's warps from one on copy a position."""
        for rank, cta in itertools.product(range(self.world), range(self.ctas)):
            for tid in range(first_warp * LANES, self.kernel.threads):
                self.kernel.copy_position(self.context(rank, cta, tid), step, first_warp)

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
    for step in range(STEPS):
        ranks.stage_position(step)
    layout = symmetric_buffer.layout(
        world=world, ctas=ctas, variants=1, row_slots=slots, num_steps=STEPS, shard_width=ranks.shard_width,
        cache_bytes=BYTES[cache],
    )  # fmt: skip
    for address in ranks.memory.staged:
        assert (address - STAGING) % APART < layout.staging_bytes
    for step in range(STEPS):
        ranks.copy(step, ranks.kernel.gather_warps if step + 2 < STEPS else 0)
    assert not ranks.memory.staged  # all is blank again
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
