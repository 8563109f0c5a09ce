"""Head tiles: how 16 vocabulary rows of the Markov head lie in shared memory and meet the request rows' embeddings in the tensor core.

Shared-memory form of a tile: rows 0..7, then a shift of 64 bytes, then rows 8..15, each row rank_dim bf16. Fragment row g of the
warp's MMA is vocabulary row 8 (g % 2) + 2 (g / 2) + group: even fragment rows come from the first half and odd ones from the
second, and the shift lets the eight lanes of a 16-byte load phase (two fragment rows x 64 bytes) touch all 32 banks once.

No register moves: a lane's 16-byte load X0..X3 (8 consecutive k of ONE vocabulary row) is used as it lies as the A fragment of
m16n8k16. The tensor core takes X0, X2 as fragment row g and X1, X3 as row g + 8, so row g needs the embedding's k pairs 0 and 2
in the B columns and row g + 8 its pairs 1 and 3.
    up to 4 request rows: B columns 0..3 hold pairs (0, 2), columns 4..7 pairs (1, 3) of the same rows; bias = D[g][n] + D[g + 8][4 + n]
    up to 8: two MMAs with one A fragment; bias = D1[g][n] + D2[g + 8][n]
The other half of D is not used. A chunk is 32 k: 64 bytes of a row, one 16-byte load a lane and group. Where rank_dim ends with half a
chunk, the lanes that would load its missing half have zeros, and so has the embedding.
"""

import cutlass
from cutlass import Float32, Int32, Uint32

from . import plan_line, ptx

TILE_ROWS = 16
CHUNK_BYTES = 64  # 32 bf16
BANK_SHIFT = 64
WIDE_ROWS = 8  # row slots from which a tile takes two MMAs a chunk and group
GROUPS = 2


class TileShape:
    """Byte counts of a tile of one rank_dim (a multiple of 16)."""

    def __init__(self, rank_dim: int) -> None:
        self.row_bytes = 2 * rank_dim
        self.chunks = plan_line.chunks_of(rank_dim)
        self.ends_half = self.row_bytes % CHUNK_BYTES != 0
        self.half_bytes = TILE_ROWS // 2 * self.row_bytes
        self.slot_bytes = 2 * self.half_bytes + BANK_SHIFT
        self.chunk_words = 4 * GROUPS  # 32-bit words that a lane holds of one chunk of a tile


def fragment_offset(shape: TileShape, lane: Int32) -> Int32:
    """Byte offset in a slot of the lane's first 16 bytes."""
    g, t = lane // 4, lane % 4
    return (g % 2) * (shape.half_bytes + BANK_SHIFT) + (g // 2) * (2 * shape.row_bytes) + t * 16


def fragment_row(lane: Int32, group: int) -> Int32:
    """The row of the tile whose bytes the lane's fragments of that group are."""
    g = lane // 4
    return (g % 2) * (TILE_ROWS // 2) + (g // 2) * 2 + group


def load_fragments(shape: TileShape, address: Int32, chunk: int, lane: Int32) -> list:
    """The A fragments of both groups of one chunk. `address`: of the lane's first 16 bytes in the slot."""
    at = address + chunk * CHUNK_BYTES
    if not (shape.ends_half and chunk + 1 == shape.chunks):
        return [ptx.lds_b128(at + group * shape.row_bytes) for group in range(GROUPS)]
    here = (
        lane % 4 < 2
    )  # the others read these lanes' bytes once more, and take none: what lies behind the row may be NaN
    at = ptx.select(here, at, at - CHUNK_BYTES // 2)
    return [
        [ptx.select(here, x, Uint32(0)) for x in ptx.lds_b128(at + group * shape.row_bytes)] for group in range(GROUPS)
    ]


def embedding_offset(row_slots: int, half: int, lane: Int32) -> Int32:
    """Byte offset of the lane's first B fragment. `half`: bytes of the (0, 2) half of the embeddings of up to 4 rows."""
    g, t = lane // 4, lane % 4
    if row_slots == WIDE_ROWS:
        return (g * 4 + t) * 16
    return (g // 4) * half + cutlass.min(g % 4, row_slots - 1) * 32 + t * 8  # unused columns repeat the last row


def load_embedding(row_slots: int, address: Int32, chunk: int) -> list[Uint32]:
    """The B fragments of one chunk: 2 words, or 4 for two MMAs."""
    if row_slots == WIDE_ROWS:
        return ptx.lds_b128(address + chunk * 512)
    return ptx.lds_b64(address + chunk * 32 * row_slots)


def store_embedding(row_slots: int, half: int, base: Int32, row: Int32, piece: Int32, x: list[Uint32]) -> None:
    """Stores 8 consecutive k of a request row's embedding (`piece` counts them) in fragment order."""
    chunk, t = piece // 4, piece % 4
    if row_slots == WIDE_ROWS:
        ptx.sts_b128(base + chunk * 512 + (row * 4 + t) * 16, [x[0], x[2], x[1], x[3]])
    else:
        address = base + chunk * (32 * row_slots) + row * 32 + t * 8
        ptx.sts_b64(address, [x[0], x[2]])
        ptx.sts_b64(address + half, [x[1], x[3]])


def new_accumulators(row_slots: int) -> list:
    """fp32 accumulators [MMA][group] of one tile, zero."""
    mmas = 2 if row_slots == WIDE_ROWS else 1
    return [[[Float32(0.0)] * 4 for _ in range(GROUPS)] for _ in range(mmas)]


def multiply(acc: list, e: list[Uint32], fragments: list) -> None:
    """acc += fragments . e for one chunk."""
    for m in range(len(acc)):
        for group in range(GROUPS):
            acc[m][group] = ptx.mma_bf16(fragments[group], e[2 * m], e[2 * m + 1], acc[m][group])


def biases(row_slots: int, lane: Int32, acc: list) -> list[list[Float32]]:
    """The biases that this lane finishes, rounded to bf16: [row][entry], see bias_rows and bias_entry for which.

    8 row slots: both groups of two rows, no exchange. Fewer: lanes t < 2 finish group 0 and lanes t >= 2 group 1, each adding
    what the lane two further holds.
    """
    if row_slots == WIDE_ROWS:
        return [round_pair(*[acc[0][group][h] + acc[1][group][2 + h] for group in range(GROUPS)]) for h in range(2)]
    first = lane % 4 < 2
    out = []
    for h in range(min(row_slots, 2)):
        mine = ptx.select(first, acc[0][0][h], acc[0][1][2 + h])
        give = ptx.select(first, acc[0][1][h], acc[0][0][2 + h])
        out.append([ptx.float_of(ptx.bf16_bits(mine + ptx.shuffle_xor(give, 2)) << Uint32(16))])
    return out


def round_pair(lo: Float32, hi: Float32) -> list[Float32]:
    """Two fp32 rounded to bf16, as fp32."""
    return unpack_bf16(ptx.bf16x2_bits(lo, hi))


def unpack_bf16(word: Uint32) -> list[Float32]:
    """The two bf16 of a word, as fp32."""
    return [ptx.float_of(word << Uint32(16)), ptx.float_of(word & Uint32(0xFFFF0000))]


def bias_row(row_slots: int, lane: Int32) -> Int32:
    """The first request row of the lane's biases; the second, if any, is the next row. Past row_slots: the lane has none."""
    t = lane % 4
    return 2 * t if row_slots == WIDE_ROWS else 2 * (t % 2)


def bias_entry(row_slots: int, lane: Int32) -> Int32:
    """The first of a tile's 16 entries that the lane finishes; with 8 row slots it has the next one too."""
    g, t = lane // 4, lane % 4
    entry = (g % 2) * 8 + (g // 2) * 2
    return entry if row_slots == WIDE_ROWS else entry + t // 2


def bias_lanes(row_slots: int) -> tuple[int, ...]:
    """Lane distances over which the lanes of one row are reduced."""
    return (4, 8, 16) if row_slots == WIDE_ROWS else (2, 4, 8, 16)
