"""The tensor core's operands as head_tiles.py lays them out, multiplied on numbers: every lane of a warp, every rank and row slot count."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.harness.chain_simulator import LANES, _Uint32, device_module

DEVICE = Path(__file__).parents[2] / "templates" / "device"
NAME = "head_tiles_on_numbers"
TILE_ROWS = 16
NAN = 0x7FC0


class _Memory(ModuleType):
    """What stands for ptx.py: shared memory in 32-bit words, NaN where nobody wrote."""

    def __init__(self) -> None:
        super().__init__("ptx")
        self.words: dict[int, int] = {}
        self.select = lambda condition, a, b: a if condition else b

    def _load(self, address: int, count: int) -> list[int]:
        assert address % (4 * count) == 0
        return [_Uint32(self.words.get(address + 4 * i, NAN << 16 | NAN)) for i in range(count)]

    def lds_b128(self, address: int) -> list[int]:
        return self._load(address, 4)

    def lds_b64(self, address: int) -> list[int]:
        return self._load(address, 2)

    def _store(self, address: int, x: list[int], count: int) -> None:
        assert address % (4 * count) == 0 and len(x) == count
        self.words |= {address + 4 * i: int(x[i]) for i in range(count)}

    def sts_b128(self, address: int, x: list[int]) -> None:
        self._store(address, x, 4)

    def sts_b64(self, address: int, x: list[int]) -> None:
        self._store(address, x, 2)


@pytest.fixture(scope="module")
def head_tiles() -> Iterator[ModuleType]:
    """head_tiles.py over the stand-ins; `head_tiles.memory` is the ptx one."""
    memory = _Memory()
    module = device_module(NAME, "head_tiles", ptx=memory)
    module.memory = memory  # type: ignore[attr-defined]
    yield module


def _bf16(word: int) -> tuple[float, float]:
    low, high = struct.unpack("<2f", struct.pack("<2I", (word << 16) & 0xFFFFFFFF, word & 0xFFFF0000))
    return low, high


def _words(values: np.ndarray) -> list[int]:
    """Pairs of bf16 numbers as words, the first in the low half."""
    bits = values.astype(np.float32).view(np.uint32) >> 16
    return [int(low) | int(high) << 16 for low, high in bits.reshape(-1, 2)]


def _mma(a: list[list[int]], b: list[tuple[int, int]]) -> np.ndarray:
    """D[16, 8] = A[16, 16] @ B[16, 8] of m16n8k16 from every lane's registers, as the PTX manual lays them out."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(LANES):
        g, t = divmod(lane, 4)
        for register, (row, k) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            left[row, k : k + 2] = _bf16(a[lane][register])
        for register, k in enumerate((2 * t, 2 * t + 8)):
            right[k : k + 2, g] = _bf16(b[lane][register])
    return left @ right


@pytest.mark.parametrize("row_slots", [1, 2, 4, 8])
@pytest.mark.parametrize("rank_dim", [64, 80, 176, 256, 496])
def test_every_bias_is_the_whole_dot_product(head_tiles: ModuleType, rank_dim: int, row_slots: int) -> None:
    """Rows lie as the bulk copies lay them; what lies behind a row, and in columns without a request row, does not count."""
    rng = np.random.default_rng(rank_dim + row_slots)
    shape, memory = head_tiles.TileShape(rank_dim), head_tiles.memory
    head = rng.integers(-4, 5, (TILE_ROWS, rank_dim)) / 16
    embed = rng.integers(-4, 5, (row_slots, rank_dim)) / 16
    slot, stage = 0, 1 << 20
    memory.words.clear()
    for row in range(TILE_ROWS):
        at = slot + row * shape.row_bytes + (head_tiles.BANK_SHIFT if row >= TILE_ROWS // 2 else 0)
        memory.words |= {at + 4 * i: word for i, word in enumerate(_words(head[row]))}
    half = 32 * shape.chunks * row_slots
    for row in range(row_slots):
        words = _words(embed[row]) + [0] * (
            16 * shape.chunks - rank_dim // 2
        )  # as fetch_embedding fills up the last chunk
        for piece in range(4 * shape.chunks):
            head_tiles.store_embedding(row_slots, half, stage, row, piece, words[4 * piece : 4 * piece + 4])

    mmas = 2 if row_slots == head_tiles.WIDE_ROWS else 1
    total = np.zeros((mmas, head_tiles.GROUPS, 16, 8))
    for chunk in range(shape.chunks):
        fragments, embeddings = [], []
        for lane in range(LANES):
            address = slot + head_tiles.fragment_offset(shape, lane)
            fragments.append(head_tiles.load_fragments(shape, address, chunk, lane))
            place = stage + head_tiles.embedding_offset(row_slots, half, lane)
            embeddings.append(head_tiles.load_embedding(row_slots, place, chunk))
        for m in range(mmas):
            for group in range(head_tiles.GROUPS):
                left = [fragments[lane][group] for lane in range(LANES)]
                right = [(embeddings[lane][2 * m], embeddings[lane][2 * m + 1]) for lane in range(LANES)]
                total[m, group] += _mma(left, right)

    wanted = head @ embed.T
    for group in range(head_tiles.GROUPS):
        for g in range(8):
            vocabulary_row = 8 * (g % 2) + 2 * (g // 2) + group
            for row in range(row_slots):
                if mmas == 2:
                    bias = total[0, group, g, row] + total[1, group, g + 8, row]
                else:
                    bias = total[0, group, g, row] + total[0, group, g + 8, 4 + row]
                assert bias == wanted[vocabulary_row, row], (vocabulary_row, row)
