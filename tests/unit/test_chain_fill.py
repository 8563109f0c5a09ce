"""What the chain kernel writes into cache columns that nothing is drawn from, run as it stands on numbers in place of DSL values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.byte_stores import ByteStores
from tests.harness.chain_simulator import LANES, _Uint32, device_module

CACHE, RECORDS, DRAFT_IDS = 1 << 40, 1 << 42, 1 << 44
RECORDS_WORDS, CLAIM_BYTES = 100, 128
COUNT = RECORDS + 8 * RECORDS_WORDS - CLAIM_BYTES + 64
TIMEOUT_NS = 1000


class _GaveUp(Exception):
    """The kernel reported a wait and trapped."""


class _Memory(ByteStores):
    """What stands for ptx.py and row_memory.py: bytes, whose stores are counted, a table of ids, and the count of CTAs."""

    def __init__(self) -> None:
        self.ptx, self.row_memory = ModuleType("ptx"), ModuleType("row_memory")
        for name in ("stg_u16_if", "stg_words_if", "stg_b128_if", "ldg_b128", "globaltimer", "prefetch_l2"):
            setattr(self.ptx, name, getattr(self, name))
        for name in ("count_release_gpu", "load_acquire_gpu", "load_words_or"):
            setattr(self.row_memory, name, getattr(self, name))
        self.ptx.select = lambda condition, a, b: a if condition else b  # type: ignore[attr-defined]
        self.loads, self.now = 0, 0
        self.draft_ids: list[int] = []
        self.prefetched: set[int] = set()
        self.clear()

    def clear(self) -> None:
        ByteStores.__init__(self)
        self.count = 0
        self.order: list[str] = []

    def store(self, address: int, data: bytes) -> None:
        self.order.append("store")
        super().store(address, data)

    def stg_b128_if(self, mine: bool, address: int, words: list[int]) -> None:
        assert len(words) == 4
        self.stg_words_if(mine, address, words)

    def ldg_b128(self, address: int) -> list[int]:
        first = (address - DRAFT_IDS) // 4
        assert first % 4 == 0
        return [_Uint32(x) for x in self.draft_ids[first : first + 4]]

    def load_words_or(self, condition: bool, address: int, count: int, other: int) -> list[int]:
        if not condition:
            return [_Uint32(other)] * count
        assert address % (4 * count) == 0, "a load that is not aligned"
        return [_Uint32(x) for x in struct.unpack(f"<{count}I", self._read(address, 4 * count))]

    def _read(self, address: int, size: int) -> bytes:
        return bytes(self.bytes.get(address + place, 0xAB) for place in range(size))  # what nobody stored is anything

    def count_release_gpu(self, address: int) -> None:
        assert address == COUNT
        self.order.append("count")
        self.count += 1

    def load_acquire_gpu(self, address: int) -> int:
        assert address == COUNT
        self.loads += 1
        return _Uint32(self.count)

    def prefetch_l2(self, address: int) -> None:
        self.prefetched.add((address - DRAFT_IDS) // 4)

    def globaltimer(self) -> int:
        self.now += TIMEOUT_NS
        return self.now


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """chain_fill.py and chain_scores.py over the same stand-ins, which are `memory`."""
    memory, exchange = _Memory(), ModuleType("exchange")
    exchange.CLAIM_WORDS, exchange.REPORT_FILL, exchange.POLLS_PER_CLOCK_READ = CLAIM_BYTES // 8, 4, 4  # type: ignore[attr-defined]

    def report(c: Any, claim: int, what: tuple[int, ...]) -> None:
        raise _GaveUp(what)

    exchange.report = report  # type: ignore[attr-defined]
    fill = device_module(
        "chain_fill_on_numbers", "chain_fill", ptx=memory.ptx, row_memory=memory.row_memory, exchange=exchange
    )
    others = {name: ModuleType(name) for name in ("score_ops", "keys")}
    scores = device_module("chain_scores_for_fill", "chain_scores", ptx=memory.ptx, **others)
    yield SimpleNamespace(memory=memory, fill=fill, scores=scores)


class _Rows:
    """A cache: rows at a pitch of entries, some of them of padding rows; `first_entry` shifts the first one."""

    def __init__(self, size: int, written: list[bool], steps: int, pitch: int, first_entry: int) -> None:
        self.size, self.written, self.steps, self.pitch = size, written, steps, pitch
        self.start = CACHE + first_entry * size

    @property
    def aligned(self) -> bool:
        """Whether every row starts a vector."""
        return self.start % 16 == 0 and self.pitch * self.size % 16 == 0

    def state(self, row: int, step: int, column: int) -> list[int]:
        """The row table's words: the address of the column where a CTA's first logit goes, temperature, whether it is written."""
        address = self.start + ((row * self.steps + step) * self.pitch + column) * self.size
        return [address & 0xFFFFFFFF, address >> 32, 0, int(self.written[row])]

    def entries(self, memory: _Memory) -> dict[tuple[int, int], dict[int, bytes]]:
        """What was stored into the cache by row and position, then column; every byte once, and entries whole."""
        found: dict[tuple[int, int], dict[int, dict[int, int]]] = {}
        for address, byte in memory.bytes.items():
            if address < RECORDS:
                assert memory.stored[address] == 1, "a byte was stored twice"
                entry, place = divmod(address - self.start, self.size)
                sample, column = divmod(entry, self.pitch)
                found.setdefault(divmod(sample, self.steps), {}).setdefault(column, {})[place] = byte
        assert all(len(entry) == self.size for row in found.values() for entry in row.values()), "a part of an entry"
        return {
            place: {column: bytes(entry[i] for i in range(self.size)) for column, entry in row.items()}
            for place, row in found.items()
        }

    def nothing(self) -> bytes:
        """An entry of -inf."""
        return struct.pack("<f", -math.inf)[4 - self.size :]


def _kernel(parts: SimpleNamespace, rows: _Rows, **values: Any) -> Any:
    """A kernel of which only the fill exists."""
    given = {
        "vocab_size": 1000, "drafts": 1000, "drawn": 1000, "d2t": True, "draws": True, "slots": 1, "ctas": 3, "warps": 12, "world": 1,
    } | values  # fmt: skip
    kind = type("Kernel", (parts.fill.Fill, parts.scores.Scores), {})
    kernel = kind.__new__(kind)
    kernel.__dict__.update({name: given[name] for name in ("vocab_size", "draws")})
    kernel.__dict__.update(base_bytes=2, cache_bytes=rows.size, rows=given["slots"], num_steps=rows.steps)
    kernel.line = SimpleNamespace(ctas=given["ctas"], warps=given["warps"], row_slots=given["slots"])
    config = SimpleNamespace(
        VOCAB_SIZE=given["vocab_size"], DRAFT_VOCAB_SIZE=given["drafts"], DRAWN_COLUMNS=given["drawn"],
        SAMPLING_LIMIT=given["vocab_size"], D2T=given["d2t"], MULTIPLIER=1.0, SOFT_CAP=None, INVERSE_SOFT_CAP=None, TRANSFORM="none",
    )  # fmt: skip
    parts.scores.Scores.__init__(kernel, config)
    parts.fill.Fill.__init__(kernel, config, kernel.line, given["world"], RECORDS_WORDS)
    kernel.row_state = lambda c, row, step: rows.state(row, step, kernel.cache_column(c))
    parts.memory.clear()
    return kernel


def _context(rows: _Rows, **values: Any) -> Any:
    plain = {
        "rows": len(rows.written), "first_token": 16, "first_column": 16, "records": RECORDS, "draft_ids": DRAFT_IDS,
        "cache_vector": int(rows.aligned), "claim": 0, "rank": 0, "timeout_ns": 0,
    }  # fmt: skip
    return SimpleNamespace(**plain | values)


def _threads(kernel: Any, rows: _Rows) -> Iterator[Any]:
    for cta in range(kernel.line.ctas):
        for tid in range(kernel.line.warps * LANES):
            yield _context(rows, cta=cta, tid=tid, warp=tid // LANES, lane=tid % LANES)


# A reduced vocabulary: rows that are composed


def _stage(kernel: Any, rows: _Rows, step: int, targets: list[int], limit: int) -> None:
    """Every draft id's logit, whose bits say where it belongs, as CTAs of 5 columns stage it; those beyond the limit are not stored."""
    for row, written in enumerate(rows.written):
        for draft, target in enumerate(targets):
            place = _context(rows, first_column=draft // 5 * 5)
            mark = _Uint32(kernel.staged_place(place, row, step) + 1) if written else _Uint32(0)
            word = _Uint32(_logit(row, step, draft))
            kernel.keep_entry(place, written and target < limit, [0, 0, 0, mark], draft % 5, target, [word], 0)


def _logit(row: int, step: int, draft: int) -> int:
    return 1 + row + 8 * step + 64 * draft


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_composed_of_what_was_drafted_and_of_nothing(parts: SimpleNamespace, data: st.DataObject) -> None:
    """What is composed before it is staged is other bits, and before it is counted waits for ever."""
    vocab = data.draw(st.one_of(st.integers(2, 40), st.integers(100, 300)))
    targets = data.draw(st.lists(st.integers(0, vocab - 1), unique=True, min_size=1, max_size=min(vocab, 60)))
    limit = data.draw(st.integers(1, vocab))
    slots = data.draw(st.sampled_from([2, 4, 8]))
    written = data.draw(st.lists(st.booleans(), min_size=1, max_size=slots))
    vector = data.draw(st.booleans())
    pitch = -(-vocab // 8) * 8 if vector else vocab + data.draw(st.integers(0, 9))
    rows = _Rows(
        data.draw(st.sampled_from([2, 4])), written, data.draw(st.integers(1, 5)), pitch,
        0 if vector else data.draw(st.integers(0, 9)),
    )  # fmt: skip
    kernel = _kernel(
        parts, rows, vocab_size=vocab, drafts=len(targets), slots=slots, ctas=data.draw(st.integers(1, 3)),
        warps=data.draw(st.integers(1, 2)),
    )  # fmt: skip
    found = {target: draft for draft, target in enumerate(targets) if target < limit}
    parts.memory.draft_ids = [found.get(x, -1 if x < vocab else 0) for x in range(-(-vocab // 8) * 8)]
    for step in range(rows.steps):
        _stage(kernel, rows, step, targets, limit)
        for thread in _threads(kernel, rows):
            kernel.fill_rest(thread, step)
    for thread in _threads(kernel, rows):
        kernel.compose_rows(thread, 0)
    staged = [address - RECORDS - 8 * RECORDS_WORDS for address in parts.memory.bytes if address >= RECORDS]
    assert all(0 <= place < 8 * kernel.staging_words for place in staged)
    assert all(count == 1 for count in parts.memory.stored.values()), "two logits have one place"
    expected = {
        (row, step): {
            x: struct.pack("<I", _logit(row, step, found[x]))[: rows.size] if x in found else rows.nothing()
            for x in range(vocab)
        }
        for row, mine in enumerate(written)
        if mine
        for step in range(rows.steps)
    }
    assert rows.entries(parts.memory) == expected


def test_the_last_position_is_counted_and_no_other(parts: SimpleNamespace) -> None:
    rows = _Rows(2, [True] * 2, 3, 64, 0)
    kernel = _kernel(parts, rows, vocab_size=64, drafts=8, slots=2)
    for step in range(3):
        for warp in range(12):
            for lane in range(2):
                kernel.fill_rest(_context(rows, cta=0, warp=warp, lane=lane), step)
        assert parts.memory.count == (step == 2)


def test_the_whole_map_comes_into_l2(parts: SimpleNamespace) -> None:
    rows = _Rows(2, [True], 1, 1024, 0)
    kernel = _kernel(parts, rows, vocab_size=1024, ctas=3, slots=2)
    for thread in _threads(kernel, rows):
        kernel.prefetch_map(thread)
    assert {x * 4 // 128 for x in parts.memory.prefetched} == set(range(1024 * 4 // 128))


# Rows that are filled first: of one row slot, and over several ranks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whole_rows_are_filled_wherever_they_start(parts: SimpleNamespace, data: st.DataObject) -> None:
    vocab = data.draw(st.one_of(st.integers(2, 40), st.integers(200, 900)))
    written = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    rows = _Rows(
        data.draw(st.sampled_from([2, 4])), written, data.draw(st.integers(1, 3)), vocab + data.draw(st.integers(0, 9)),
        data.draw(st.integers(0, 9)),
    )  # fmt: skip
    kernel = _kernel(
        parts, rows, vocab_size=vocab, ctas=data.draw(st.integers(1, 4)), warps=data.draw(st.integers(1, 4)),
        slots=1 if len(written) == 1 else 8, world=1 if len(written) == 1 else 2,
    )  # fmt: skip
    for thread in _threads(kernel, rows):
        kernel.fill_rows(thread)
    filled = dict.fromkeys(range(vocab), rows.nothing())
    expected = {(row, step): filled for row, mine in enumerate(written) if mine for step in range(rows.steps)}
    assert rows.entries(parts.memory) == expected


def test_aligned_rows_are_filled_by_whole_vectors(parts: SimpleNamespace) -> None:
    rows = _Rows(2, [True] * 2, 2, 1024, 0)
    kernel = _kernel(parts, rows, vocab_size=1024, world=2)
    for thread in _threads(kernel, rows):
        kernel.fill_rows(thread)
    assert parts.memory.order.count("store") == 2 * 2 * 1024 // 8


def test_a_cta_counts_once_behind_its_stores_and_its_barrier(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _Rows(2, [True], 1, 64, 0)
    kernel = _kernel(parts, rows, vocab_size=64, ctas=1, warps=2, world=2)
    monkeypatch.setattr(
        parts.fill.cute.arch, "sync_threads", lambda: parts.memory.order.append("barrier"), raising=False
    )
    kernel.fill_rows(_context(rows, cta=0, warp=0, lane=0))  # has the row; the other warp has none
    kernel.fill_rows(_context(rows, cta=0, warp=1, lane=0))
    assert parts.memory.order == ["store", "barrier", "barrier", "count"]
    assert parts.memory.count == 1


@pytest.mark.parametrize("launches", [0, 5, (1 << 32) // 3 - 1])  # with the last one the count wraps
def test_logits_wait_for_every_cta_of_this_launch(parts: SimpleNamespace, launches: int) -> None:
    rows = _Rows(2, [True], 1, 64, 0)
    kernel = _kernel(parts, rows, ctas=3, world=2)
    waiting = _context(rows, cta=0, warp=11, lane=0, timeout_ns=TIMEOUT_NS)
    parts.memory.count = _Uint32(3 * launches + 3)
    kernel.wait_for_rows(waiting, launches)
    parts.memory.count = _Uint32(3 * launches + 1)
    with pytest.raises(_GaveUp) as caught:
        kernel.wait_for_rows(waiting, launches)
    assert caught.value.args == ((4, 0, 0, 0, 2),)  # two CTAs are missing
    kernel.wait_for_rows(_context(rows, cta=0, warp=0, lane=0), launches)  # the others wait at the CTA's barrier


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("values", [{"d2t": False}, {"draws": False}])
def test_other_models_write_no_rows(parts: SimpleNamespace, values: dict[str, bool], slots: int) -> None:
    rows = _Rows(2, [True], 1, 1000, 0)
    kernel = _kernel(parts, rows, slots=slots, **values)
    loads = parts.memory.loads
    for thread in _threads(kernel, rows):
        kernel.fill_rows(thread)
        kernel.wait_for_rows(thread, 0)
        kernel.compose_rows(thread, 0)
        kernel.fill_rest(thread, 0)
    assert not parts.memory.order and parts.memory.loads == loads


# A padded head


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_columns_from_the_sampling_limit_on_are_filled(parts: SimpleNamespace, data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 300))
    drawn = data.draw(st.integers(1, vocab))
    rows = _Rows(data.draw(st.sampled_from([2, 4])), [True, False], 2, vocab + 3, 0)
    kernel = _kernel(parts, rows, vocab_size=vocab, drawn=drawn, d2t=False, slots=2, ctas=1)
    for thread in _threads(kernel, rows):
        kernel.fill_rest(thread, 1)
    expected = {(0, 1): dict.fromkeys(range(drawn, vocab), rows.nothing())} if drawn < vocab else {}
    assert rows.entries(parts.memory) == expected
