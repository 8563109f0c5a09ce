"""One line of a model's PLANS table: what the chain kernel keeps where, on one device, for one vocabulary shard and row count.

Plain Python, no imports beyond the standard library, so that reading a plan costs nothing.
"""

from typing import NamedTuple


class Residency(NamedTuple):
    """Where the tiles of a CTA live, in the order streamed, resident, registers."""

    register_tiles: int  # per warp: tiles whose fragments stay in registers
    register_chunks: (
        int  # of such a tile's chunks of 32 rank dimensions, those in registers; the rest lies in shared memory
    )
    resident: int  # per CTA: tiles that stay in shared memory
    ring: int  # slots that streamed tiles pass through; 0 when nothing is streamed
    ahead: int  # tiles whose noise and base logits a warp stages at a time
    keep: int  # streamed tiles per CTA that L2 is asked to keep (evict_last); the others are read evict_first


class PlanLine(NamedTuple):
    """One chain build. A tile is 16 consecutive vocabulary rows of the Markov head, the work item of one warp."""

    device: str  # name of the device description
    tp: int  # tensor-parallel ranks that the vocabulary is split over
    row_slots: int  # request rows that this build serves at most: 1, 2, 4 or 8
    ctas: int  # CTAs of the cooperative launch, one per SM
    warps: int  # warps of a CTA; who has read a slot of the ring refills it, so that no "empty" barrier is needed
    tiles: int  # tiles of the CTA that has most
    bf16: Residency  # with bf16 base logits
    fp32: Residency  # with fp32 base logits, whose staging takes more room
    shared_bytes: int  # shared memory of a CTA with bf16 base logits
    partial: bool  # whether the last tile of a shard has fewer than 16 vocabulary rows


TILE_ROWS = 16  # vocabulary rows of a tile: the 16 rows of two groups of m16n8k16 (head_tiles.py)
CHUNK_DIMS = 32  # rank dimensions of a chunk: 64 bytes of a head row
CHUNK_BYTES = 64  # of a row: 32 rank dimensions
STAGED_CHUNKS = 12  # of a tile at most that comes into registers through a slot of its warp: so many slots of larger ones leave no room
BANK_SHIFT = 64  # bytes between the two halves of a tile in shared memory
MBARRIER_BYTES = 8
KEY_BYTES = 8
RANK_GATHER_WARPS = (
    4  # read the records of several ranks at least: at two ranks and one row, 8 took 0.15 us a position more
)
EMULATED_SPARE_CHUNKS = 2  # of a register tile, that the addresses of a CTA's own rank take where one GPU plays several
RED_WARPS = 16  # keys per row in the block reduction, one a warp
ROW_TABLE_BYTES = 16
NOISE_BYTES = 4  # fp32
MOST_ITEMS = 32  # tiles of a warp: one a lane writes the order down
ORDER_BYTES = 2
ADDRESS_BYTES = 8
KEPT_OF = 32  # a power of two


class SharedLayout(NamedTuple):
    """Byte offsets in a CTA's shared memory, in this order."""

    slots: int  # head tiles
    embedding: int  # the request rows' Markov embeddings, in fragment order
    parked: int  # the part of the register tiles that is not in registers, per warp
    keys: int  # [row slot][warp] best key
    partials: int  # [row slot][gathering warp] largest key of its share of the records
    row_table: int  # [row slot][position] 16 bytes: cache address, temperature, whether the cache is written
    order: int  # [warp][MOST_ITEMS] the warp's tiles in its order, 16 bits each
    barriers: int  # mbarriers: one a warp for its register tiles on their way in, one a tile in shared memory
    ranks: int  # addresses of the ranks' symmetric buffers and staging, and the launch's number (chain_ranks.py); nothing at TP 1
    inputs: int  # [warp][ahead][row slot] noise and base logits of a tile
    total: int


def chunks_of(rank_dim: int) -> int:
    """Chunks of CHUNK_DIMS rank dimensions that a head row has; the last may be half of one."""
    return -(-rank_dim // CHUNK_DIMS)


def slot_bytes(rank_dim: int) -> int:
    """Shared memory of one head tile in bytes."""
    return TILE_ROWS * 2 * rank_dim + BANK_SHIFT


def residency(line: PlanLine, base_bytes: int) -> Residency:
    """The line's residency for base logits of `base_bytes` an entry."""
    return line.bf16 if base_bytes == 2 else line.fp32


def stage_bytes(base_bytes: int) -> int:
    """Staging of one tile and request row: noise, then base logits of its 16 entries."""
    return TILE_ROWS * (NOISE_BYTES + base_bytes)


def stages_register_tiles(rank_dim: int) -> bool:
    """Whether register tiles come in through slots; else each lane loads its own fragments from memory."""
    return chunks_of(rank_dim) <= STAGED_CHUNKS


def slot_count(line: PlanLine, rank_dim: int, base_bytes: int) -> int:
    """Slots of a CTA. Register tiles that come in through slots take the last ones, one a warp, so these must exist."""
    x = residency(line, base_bytes)
    staged = x.register_tiles > 0 and stages_register_tiles(rank_dim)
    return max(x.ring + x.resident, line.warps if staged else 0)


def shared_tiles(line: PlanLine, base_bytes: int) -> int:
    """Tiles of the CTA that has most that do not live in registers: streamed and resident ones."""
    return max(line.tiles - residency(line, base_bytes).register_tiles * line.warps, 0)


def kept_share(x: Residency, streamed: int) -> int:
    """Of KEPT_OF tiles that are streamed for every position, how many L2 is asked to keep; KEPT_OF: all streamed tiles are kept."""
    if x.keep >= streamed:
        return KEPT_OF
    return min(KEPT_OF * x.keep // max(streamed - 2 * x.ring, 1), KEPT_OF - 1)


def gathering_warps(line: PlanLine) -> int:
    """Warps that read the records of a position."""
    return max(RANK_GATHER_WARPS, line.row_slots) if line.tp > 1 else line.row_slots


def most_items(line: PlanLine, base_bytes: int) -> int:
    """Tiles of the warp that has most; a build refuses more than MOST_ITEMS."""
    return residency(line, base_bytes).register_tiles + -(-shared_tiles(line, base_bytes) // line.warps)


def shared_layout(line: PlanLine, rank_dim: int, num_steps: int, base_bytes: int) -> SharedLayout:
    """Where everything lies, for one plan line and base logits of `base_bytes` (2 or 4) an entry."""
    x = residency(line, base_bytes)
    parked_chunks = chunks_of(rank_dim) - x.register_chunks if x.register_tiles else 0
    slots = slot_count(line, rank_dim, base_bytes)
    sizes = (
        slots * slot_bytes(rank_dim),
        2 * CHUNK_DIMS * chunks_of(rank_dim) * line.row_slots,
        line.warps * x.register_tiles * parked_chunks * TILE_ROWS * CHUNK_BYTES,
        line.row_slots * RED_WARPS * KEY_BYTES,
        line.row_slots * gathering_warps(line) * KEY_BYTES,
        line.row_slots * num_steps * ROW_TABLE_BYTES,
        line.warps * MOST_ITEMS * ORDER_BYTES,
        (line.warps + shared_tiles(line, base_bytes)) * MBARRIER_BYTES,
        (2 * line.tp + 1) * ADDRESS_BYTES if line.tp > 1 else 0,
        line.warps * x.ahead * line.row_slots * stage_bytes(base_bytes),
    )
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = (end + size + 127) // 128 * 128
    return SharedLayout(*offsets, end)


def ends_partial(shard_width: int, vocab_size: int) -> bool:
    """Whether some shard's last tile has fewer than TILE_ROWS vocabulary rows, when every rank but the last ones has `shard_width`."""
    return shard_width % TILE_ROWS != 0 or vocab_size % shard_width % TILE_ROWS != 0


def for_shard(line: PlanLine, shard_width: int, vocab_size: int, rank_dim: int, num_steps: int) -> PlanLine:
    """The line for shards of another width than it was planned for. What no longer fits the planned places becomes resident, so that the
    caller compares `shared_layout` with the device's limit.

    Args:
        line: A plan line.
        shard_width: Columns of a rank; the last ranks have what is left.
        vocab_size: Draft vocabulary.
        rank_dim: Markov rank.
        num_steps: Draft positions.
    """
    tiles = -(-(-(-shard_width // TILE_ROWS)) // line.ctas)
    line = line._replace(tiles=tiles, partial=ends_partial(shard_width, vocab_size))
    line = line._replace(bf16=_with_room(line, line.bf16), fp32=_with_room(line, line.fp32))
    return line._replace(shared_bytes=shared_layout(line, rank_dim, num_steps, 2).total)


def _with_room(line: PlanLine, x: Residency) -> Residency:
    """A residency without a ring must have a place for every tile."""
    room = x.register_tiles * line.warps + x.resident
    return x if x.ring else x._replace(resident=x.resident + max(line.tiles - room, 0))


def emulated(line: PlanLine, world: int, shard_width: int, vocab_size: int, rank_dim: int, num_steps: int) -> PlanLine:
    """The line of one of `world` ranks that share a GPU, from that GPU's TP 1 line: each has its part of the SMs, and about as many tiles
    on each of them. Arguments as for `for_shard`."""
    if line.tp != 1 or not 1 < world <= line.ctas:
        raise ValueError(f"expected a TP 1 line and 2 to {line.ctas} ranks, got TP {line.tp} and {world} ranks")
    line = line._replace(tp=world, ctas=line.ctas // world)
    line = line._replace(bf16=_with_spare(line, line.bf16, rank_dim), fp32=_with_spare(line, line.fp32, rank_dim))
    return for_shard(line, shard_width, vocab_size, rank_dim, num_steps)


def _with_spare(line: PlanLine, x: Residency, rank_dim: int) -> Residency:
    """A residency with fewer chunks of each register tile in registers, which the addresses of the CTA's own rank take, and more tiles streamed,
    through a smaller ring if need be, in exchange for their place in shared memory. Where nothing is streamed there are registers to spare."""
    if x.register_tiles and not stages_register_tiles(rank_dim):
        # Lanes that load their own fragments have no registers for these addresses: what was parked becomes room for resident tiles.
        parked = line.warps * x.register_tiles * (chunks_of(rank_dim) - x.register_chunks) * TILE_ROWS * CHUNK_BYTES
        return x._replace(register_tiles=0, register_chunks=0, resident=x.resident + parked // slot_bytes(rank_dim))
    parked = EMULATED_SPARE_CHUNKS * line.warps * x.register_tiles * TILE_ROWS * CHUNK_BYTES
    slots = -(-parked // slot_bytes(rank_dim))
    ring = x.ring - max(slots - x.resident, 0)
    if not x.ring or x.register_chunks <= EMULATED_SPARE_CHUNKS or ring < 1:
        return x
    chunks = x.register_chunks - EMULATED_SPARE_CHUNKS
    return x._replace(register_chunks=chunks, resident=max(x.resident - slots, 0), ring=ring)


def overlapping(line: PlanLine, rank_dim: int, num_steps: int, smem_limit: int) -> PlanLine:
    """The line for programmatic dependent launches: without register tiles where shared memory holds the shard, so that a CTA finds room
    beside the kernel ahead of it in the stream. A CTA with register tiles needs an SM's whole register file.

    Args:
        line: A plan line.
        rank_dim: Markov rank.
        num_steps: Draft positions.
        smem_limit: Shared memory of a CTA that the device allows, in bytes.
    """

    def small(field: str, base_bytes: int) -> PlanLine:
        placed = line._replace(**{field: Residency(0, 0, line.tiles, 0, residency(line, base_bytes).ahead, 0)})
        total = shared_layout(placed, rank_dim, num_steps, base_bytes).total
        return placed if total <= smem_limit and most_items(placed, base_bytes) <= MOST_ITEMS else line

    line = small("bf16", 2)
    line = small("fp32", 4)
    return line._replace(shared_bytes=shared_layout(line, rank_dim, num_steps, 2).total)
