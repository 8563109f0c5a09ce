"""Sizes of the memory that the step kernels share with their host. Plain Python: no compiler is imported."""

KEY_BYTES = 8  # a 64-bit key: keys.ordered of the score, then the complement of the token id
SCRATCH_BYTES = 32  # of a row: its best key and its count of arrivals, alone in a sector of memory
SCRATCH_WORDS = SCRATCH_BYTES // KEY_BYTES
SHARD_ENTRIES = 8  # a position's row of a flat shard is padded to a multiple: 16 bytes of bf16


def scratch_words(rows: int) -> int:
    """64-bit words that the step kernels need for so many request rows, zero before the first launch."""
    return rows * SCRATCH_WORDS


def shard_pitch(width: int) -> int:
    """Entries from one position's row of a flat shard to the next."""
    return -(-width // SHARD_ENTRIES) * SHARD_ENTRIES
