"""Stand-ins for the chain kernel's stores into global memory, over bytes."""

from __future__ import annotations

import struct
from collections import Counter


class ByteStores:
    """What ptx.py's predicated stores wrote: the bytes by address, and how often each was stored."""

    def __init__(self) -> None:
        self.stored: Counter[int] = Counter()
        self.bytes: dict[int, int] = {}

    def store(self, address: int, data: bytes) -> None:
        for place, byte in enumerate(data):
            self.stored[address + place] += 1
            self.bytes[address + place] = byte

    def stg_u16_if(self, mine: bool, address: int, word: int) -> None:
        if mine:
            assert address % 2 == 0
            self.store(address, struct.pack("<H", word & 0xFFFF))

    def stg_words_if(self, mine: bool, address: int, words: list[int]) -> None:
        if mine:
            assert address % (4 * len(words)) == 0, "a store that is not aligned"
            self.store(address, struct.pack(f"<{len(words)}I", *(word & 0xFFFFFFFF for word in words)))
