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
    resident_fp32: int  # the same with fp32 base logits, whose staging takes more room
    ring: int  # slots that streamed tiles pass through; 0 when nothing is streamed
    keep: int  # streamed tiles per CTA that L2 is asked to keep (evict_last); the others are read evict_first
    shared_bytes: int  # shared memory of a CTA with bf16 base logits
    partial: bool  # whether the last tile of a shard has fewer than 16 vocabulary rows


TILE_ROWS = 16  # vocabulary rows of a tile: the 16 rows of two groups of m16n8k16 (head_tiles.py)
BANK_SHIFT = 64  # bytes between the two halves of a tile in shared memory
MBARRIER_BYTES = 8
KEY_BYTES = 8
RED_WARPS = 16  # keys per row in the block reduction, one a warp


class SharedLayout(NamedTuple):
    """Byte offsets in a CTA's shared memory, in this order."""

    slots: int  # head tiles
    embedding: int  # the request rows' Markov embeddings, in fragment order
    parked: int  # the part of the register tiles that is not in registers, per warp
    scratch: int  # bias of one tile, per warp: [row slot][16] bf16
    keys: int  # best key per row and warp
    states: int  # [row slot][position] request-state index, int32
    temperatures: int  # [row slot][position] fp32
    barriers: int  # one mbarrier a slot, one for the inputs
    base: int  # [row slot][tiles * 16] base logits of one position
    noise: int  # [row slot][tiles * 16] noise of one position
    total: int


def slot_bytes(rank_dim: int) -> int:
    """Shared memory of one head tile in bytes."""
    return TILE_ROWS * 2 * rank_dim + BANK_SHIFT


def resident_tiles(line: PlanLine, base_bytes: int) -> int:
    """Tiles per CTA that stay in shared memory, for base logits of `base_bytes` an entry."""
    return line.resident if base_bytes == 2 else line.resident_fp32


def slot_count(line: PlanLine, base_bytes: int) -> int:
    """Slots of a CTA. Register tiles pass through slot w of each warp w on their way in, so these must exist."""
    return max(line.ring + resident_tiles(line, base_bytes), line.warps if line.register_tiles else 0)


def shared_layout(line: PlanLine, rank_dim: int, num_steps: int, base_bytes: int) -> SharedLayout:
    """Where everything lies, for one plan line and base logits of `base_bytes` (2 or 4) an entry."""
    chunks = rank_dim // 32
    slots = slot_count(line, base_bytes)
    columns = line.tiles * TILE_ROWS
    sizes = (
        slots * slot_bytes(rank_dim),
        2 * rank_dim * line.row_slots,
        line.warps * line.register_tiles * (chunks - line.register_chunks) * TILE_ROWS * 64,
        line.warps * line.row_slots * TILE_ROWS * 2,
        line.row_slots * RED_WARPS * KEY_BYTES,
        line.row_slots * num_steps * 4,
        line.row_slots * num_steps * 4,
        (slots + 1) * MBARRIER_BYTES,
        line.row_slots * columns * base_bytes,
        line.row_slots * columns * 4,
    )
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = (end + size + 127) // 128 * 128
    return SharedLayout(*offsets, end)
