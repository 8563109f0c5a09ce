"""One line of a model's PLANS table: what the chain kernel keeps where, on one device, for one vocabulary shard and row count.

Plain Python, no imports beyond the standard library, so that reading a plan costs nothing.
"""

from typing import NamedTuple


class PlanLine(NamedTuple):
    """Residency of one chain build. A tile is 16 consecutive vocabulary rows of the Markov head, the work item of one warp."""

    device: str  # name of the device description
    tp: int  # tensor-parallel ranks that the vocabulary is split over
    row_slots: int  # request rows that this build serves at most: 1, 2, 4 or 8
    ctas: int  # CTAs of the cooperative launch, one per SM
    warps: int  # warps of a CTA; each warp owns its slots alone, so that no "empty" barrier is needed
    tiles: int  # tiles of the CTA that has most
    register_tiles: int  # tiles per warp whose fragments stay in registers
    register_chunks: (
        int  # of a register tile's rank_dim / 32 chunks, those really in registers; the rest lies in shared memory
    )
    resident: int  # tiles per CTA that stay in shared memory (bf16 base logits)
    ring: int  # slots that streamed tiles pass through, at most one a warp; 0 when nothing is streamed
    resident_fp32: int  # the same two with fp32 base logits, whose staging takes more room
    ring_fp32: int
    keep: int  # streamed tiles per CTA that L2 is asked to keep (evict_last); the others are read evict_first
    shared_bytes: int  # shared memory of a CTA with bf16 base logits
    partial: bool  # whether the last tile of a shard has fewer than 16 vocabulary rows


TILE_ROWS = 16  # vocabulary rows of a tile: the 16 rows of two groups of m16n8k16 (head_tiles.py)
BANK_SHIFT = 64  # bytes between the two halves of a tile in shared memory
MBARRIER_BYTES = 8
KEY_BYTES = 8
RED_WARPS = 16  # keys per row in the block reduction, one a warp
ROW_TABLE_BYTES = 16
NOISE_BYTES = 4  # fp32


class SharedLayout(NamedTuple):
    """Byte offsets in a CTA's shared memory, in this order."""

    slots: int  # head tiles
    embedding: int  # the request rows' Markov embeddings, in fragment order
    parked: int  # the part of the register tiles that is not in registers, per warp
    keys: int  # [row slot][warp] best key
    partials: int  # [row slot][gathering warp] largest key of its share of the records
    row_table: int  # [row slot][position] 16 bytes: cache address, temperature, whether the cache is written
    barriers: int  # one mbarrier a slot
    inputs: int  # [tile][row slot] noise and base logits of one position
    total: int


def slot_bytes(rank_dim: int) -> int:
    """Shared memory of one head tile in bytes."""
    return TILE_ROWS * 2 * rank_dim + BANK_SHIFT


def resident_tiles(line: PlanLine, base_bytes: int) -> int:
    """Tiles per CTA that stay in shared memory, for base logits of `base_bytes` an entry."""
    return line.resident if base_bytes == 2 else line.resident_fp32


def stage_bytes(base_bytes: int) -> int:
    """Staging of one tile and request row: noise, then base logits of its 16 entries."""
    return TILE_ROWS * (NOISE_BYTES + base_bytes)


def ring_slots(line: PlanLine, base_bytes: int) -> int:
    """Slots that streamed tiles pass through, for base logits of `base_bytes` an entry."""
    return line.ring if base_bytes == 2 else line.ring_fp32


def slot_count(line: PlanLine, base_bytes: int) -> int:
    """Slots of a CTA. Register tiles come in through the last slots, one a warp, so these must exist."""
    return max(
        ring_slots(line, base_bytes) + resident_tiles(line, base_bytes), line.warps if line.register_tiles else 0
    )


def shared_layout(line: PlanLine, rank_dim: int, num_steps: int, base_bytes: int) -> SharedLayout:
    """Where everything lies, for one plan line and base logits of `base_bytes` (2 or 4) an entry."""
    chunks = rank_dim // 32
    slots = slot_count(line, base_bytes)
    sizes = (
        slots * slot_bytes(rank_dim),
        2 * rank_dim * line.row_slots,
        line.warps * line.register_tiles * (chunks - line.register_chunks) * TILE_ROWS * 64,
        line.row_slots * RED_WARPS * KEY_BYTES,
        line.row_slots * line.row_slots * KEY_BYTES,
        line.row_slots * num_steps * ROW_TABLE_BYTES,
        slots * MBARRIER_BYTES,
        line.tiles * line.row_slots * stage_bytes(base_bytes),
    )
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = (end + size + 127) // 128 * 128
    return SharedLayout(*offsets, end)
