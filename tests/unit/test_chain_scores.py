"""The chain kernel's candidates, run as they stand on numbers in place of DSL values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.byte_stores import ByteStores
from tests.harness.chain_simulator import _Uint32, device_module

DEVICE = Path(__file__).parents[2] / "templates" / "device"
NAME = "chain_scores_on_numbers"
CACHE, TARGET_IDS = 1 << 40, 1 << 42
ID_BITS = 20


def _bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


class _Memory(ByteStores, ModuleType):
    """What stands for ptx.py: a table of ids to read, and the cache, whose stores are counted by byte."""

    def __init__(self) -> None:
        ModuleType.__init__(self, "ptx")
        ByteStores.__init__(self)
        self.target_ids: list[int] = []
        self.float_of = lambda bits: struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]
        self.bits_of = lambda value: _Uint32(0x7FFFFFFF if math.isnan(value) else _bits(value))
        self.add_rn = lambda a, b: struct.unpack("<f", struct.pack("<f", a + b))[0]
        self.div_full = lambda a, b: a / b if b else math.nan
        self.select = lambda condition, a, b: a if condition else b

    def ldg_b32(self, address: int) -> int:
        return _Uint32(self.target_ids[(address - TARGET_IDS) // 4])


@pytest.fixture(scope="module")
def scores() -> Iterator[ModuleType]:
    """chain_scores.py over the stand-ins; `scores.memory` is the ptx one."""
    memory = _Memory()
    module = device_module(NAME, "chain_scores", ptx=memory, score_ops=ModuleType("score_ops"))
    module.memory = memory  # type: ignore[attr-defined]
    yield module


def _kernel(scores: ModuleType, **values: Any) -> Any:
    """A kernel of which only the scores exist: `entries`, `cache_bytes`, and the vocabulary."""
    given = {
        "base_bytes": 2, "cache_bytes": 2, "vocab_size": 1000, "drawn": 1000, "limit": 1000, "d2t": False, "draws": True,
        "entries": 1, "partial": True,
    } | values  # fmt: skip
    kernel = scores.Scores.__new__(scores.Scores)
    kernel.__dict__.update({name: given[name] for name in ("base_bytes", "cache_bytes", "vocab_size", "draws")})
    kernel.__dict__.update(entries=given["entries"], id_bits=ID_BITS)
    kernel.line = SimpleNamespace(partial=given["partial"])
    config = SimpleNamespace(
        DRAWN_COLUMNS=given["drawn"], SAMPLING_LIMIT=given["limit"], D2T=given["d2t"], MULTIPLIER=1.0, SOFT_CAP=None,
        INVERSE_SOFT_CAP=None, BASE_CAPPED=False, TRANSFORM="none",
    )  # fmt: skip
    scores.Scores.__init__(kernel, config)

    def keep_entry(c: Any, mine: bool, state: list[int], at: int, target: int, words: list[int], e: int) -> None:
        kernel.store_entry(mine, (state[1] << 32 | state[0]) + target * kernel.cache_bytes, words, e)

    kernel.keep_entry = keep_entry  # chain_fill.py's, which may put entries elsewhere first
    scores.memory.stored.clear()
    scores.memory.bytes.clear()
    return kernel


def _context(**values: Any) -> Any:
    return SimpleNamespace(**{"first_token": 0, "span": 1 << 20, "target_ids": TARGET_IDS} | values)


# Candidates


def _winner(scores: ModuleType, key: tuple[int, int]) -> int | None:
    """The id of a key; None for no candidate."""
    return None if key[0] == 0 else (1 << ID_BITS) - 1 - (key[1] >> (32 - ID_BITS))


def _best(values: dict[int, float]) -> int | None:
    """The lowest id of a NaN, else of the maximum."""
    nan = [token for token, value in values.items() if math.isnan(value)]
    if nan or not values:
        return min(nan, default=None)
    return min(token for token, value in values.items() if value == max(values.values()))


logits = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -math.inf, math.inf, math.nan]), st.integers(-64, 64).map(lambda n: n / 8)
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(logits, min_size=2, max_size=2), st.permutations([3, 900]), st.integers(0, 3), st.sampled_from([900, 1000])
)
def test_a_mapped_entry_competes_by_its_target_id(
    scores: ModuleType, values: list[float], targets: list[int], span: int, limit: int
) -> None:
    kernel = _kernel(scores, d2t=True, entries=2, limit=limit)
    scores.memory.target_ids = targets
    words = [(_bits(values[0]) >> 16) | (_bits(values[1]) & 0xFFFF0000)]
    state = [CACHE & 0xFFFFFFFF, CACHE >> 32, _bits(0.0), 1]
    context = _context(span=max(span, 1))
    key = kernel.finish_targets(context, span > 0, 0, targets, state, [0.0, 0.0], values, words)
    there = {targets[e]: values[e] for e in range(2) if e < span and targets[e] < limit}
    assert _winner(scores, key) == _best(there)
    assert {(address - CACHE) // 2 for address in scores.memory.stored} == set(there)
    for e in range(2):
        if targets[e] in there:
            at = CACHE + 2 * targets[e]
            assert bytes(scores.memory.bytes[at + i] for i in range(2)) == struct.pack("<f", values[e])[2:]


@pytest.mark.parametrize("written", [0, 1])
def test_a_padding_row_is_drawn_and_not_cached(scores: ModuleType, written: int) -> None:
    kernel = _kernel(scores, d2t=True)
    scores.memory.target_ids = [7]
    state = [CACHE & 0xFFFFFFFF, CACHE >> 32, _bits(0.0), written]
    key = kernel.finish_targets(_context(), True, 0, [7], state, [0.0], [1.0], [_bits(1.0) >> 16])
    assert _winner(scores, key) == 7
    assert len(scores.memory.stored) == 2 * written


@settings(max_examples=200, deadline=None)
@given(st.lists(logits, min_size=2, max_size=2), st.integers(0, 3), st.booleans())
def test_columns_compete_by_draft_id_where_drafts_are_greedy(
    scores: ModuleType, values: list[float], span: int, mapped: bool
) -> None:
    """The lowest draft id of equals, whatever it is mapped to afterwards; none at or above the limit."""
    kernel = _kernel(scores, d2t=mapped, draws=False, cache_bytes=0, entries=2, limit=900)
    scores.memory.target_ids = [950, 8]
    key = kernel.best_column(_context(span=max(span, 1)), span > 0, 0, values)
    there = {e: values[e] for e in range(2) if e < span and not (mapped and scores.memory.target_ids[e] >= 900)}
    assert _winner(scores, key) == _best(there)
    if key[0]:
        token = kernel.token_of(_context(), key[1])
        assert token == (scores.memory.target_ids[_best(there)] if mapped else _best(there))  # type: ignore[index]


def test_temperature_zero_takes_the_logit_alone(scores: ModuleType) -> None:
    kernel = _kernel(scores)
    assert kernel.score(3.0, 5.0, 0.0) == 3.0
    assert kernel.score(3.0, 5.0, 2.0) == 6.5
