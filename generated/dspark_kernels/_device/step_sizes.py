"""Sizes of the memory that the step kernels share with their host. Plain Python: no compiler is imported."""

WORD_BYTES = 8  # of the scratch
ARRIVALS_BYTE = 16  # of a row's scratch: its count of arrivals, behind the best key, of 8 or 16 bytes
SCRATCH_BYTES = 32  # of a row, alone in a sector of memory
SCRATCH_WORDS = SCRATCH_BYTES // WORD_BYTES
SHARED_KEY_BYTES = 16  # a key in shared memory
SHARD_ENTRIES = 8  # a position's row of a flat shard is padded to a multiple: 16 bytes of bf16


def scratch_words(rows: int) -> int:
    """64-bit words that the step kernels need for so many request rows, zero before the first launch."""
    return rows * SCRATCH_WORDS


def shard_pitch(width: int) -> int:
    """Entries from one position's row of a flat shard to the next."""
    return -(-width // SHARD_ENTRIES) * SHARD_ENTRIES
