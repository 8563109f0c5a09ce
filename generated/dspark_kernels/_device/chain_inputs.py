"""What the chain kernel reads beside the head: noise and base logits of each tile, the rows' states, the Markov embeddings.

A warp stages the noise and base logits of its next few tiles, across positions: whenever it has finished a tile, it starts copying
those of the tile `ahead` further on in its order. So they neither wait for the exchange between CTAs nor delay it in a burst.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from . import chain_head, head_tiles, plan_line, ptx

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
NOISE_BYTES = plan_line.NOISE_BYTES
PIECE = 16  # bytes that one lane copies at once
PLACES = 4  # words of locate_inputs
NOTHING = -1  # target of a lane that copies nothing
NOISE_PIECES = TILE_ROWS * NOISE_BYTES // PIECE  # of a tile and row


class Inputs:
    """The part of a chain kernel that stages its inputs; comes with chain_head.Head. Methods take the kernel's context `c`."""

    def __init__(
        self,
        line: plan_line.PlanLine,
        rank_dim: int,
        num_steps: int,
        vocab_size: int,
        base_bytes: int,
        cache_bytes: int,
    ):
        self.vocab_size = vocab_size
        self.base_bytes = base_bytes
        self.cache_bytes = cache_bytes
        self.draws = cache_bytes > 0  # else the drafts are greedy: no noise, no temperature, no cache
        self.shared = plan_line.shared_layout(line, rank_dim, num_steps, base_bytes)
        self.stage_bytes = plan_line.stage_bytes(base_bytes)
        self.base_pieces = TILE_ROWS * base_bytes // PIECE  # of a tile and row
        # Of a tile's 16 entries of a row, those of one lane.
        self.entries = 2 if line.row_slots == head_tiles.WIDE_ROWS else 1
        self.embed_pieces = 2 * rank_dim // PIECE
        self.embed_places = plan_line.chunks_of(rank_dim) * (2 * plan_line.CHUNK_DIMS // PIECE)
        # Bytes of one half of the embeddings, see head_tiles.store_embedding.
        self.embed_half = self.embed_places * (PIECE // 2) * line.row_slots

    # ---- noise and base logits

    def locate_inputs(self, c, lane: Int32) -> list[Uint32]:
        """What a lane copies of each tile, 16 bytes of noise and 16 of base logits: sources of tile 0 at position 0 in pieces from the
        arrays' start (32 bits are enough for these), and targets in the staging; a lane with nothing to copy has target NOTHING."""
        row, piece = lane // NOISE_PIECES, lane % NOISE_PIECES
        at = Uint32(row * self.num_steps * Int32(c.noise_stride) + c.first_column)
        noise_source = at // Uint32(PIECE // NOISE_BYTES) + Uint32(piece)
        noise_target = ptx.select(row < c.rows, row * self.stage_bytes + piece * PIECE, Int32(NOTHING))
        row, piece = lane // self.base_pieces, lane % self.base_pieces
        at = Uint32(row) * Uint32(c.base_row_stride) + Uint32(c.first_column)
        base_source = at // Uint32(PIECE // self.base_bytes) + Uint32(piece)
        base_target = row * self.stage_bytes + TILE_ROWS * NOISE_BYTES + piece * PIECE
        base_target = ptx.select((row < c.rows) & (c.base_vector != 0), base_target, Int32(NOTHING))
        return [noise_source, Uint32(noise_target), base_source, Uint32(base_target)]

    def keep_input_places(self, c) -> None:
        """Narrow builds keep locate_inputs in registers; builds with 8 row slots have none to spare."""
        if not self.wide:
            for i, x in enumerate(self.locate_inputs(c, c.lane)):
                c.places[i] = x

    @cute.jit
    def fetch_inputs(self, c, tile: Int32, step: Int32, stage: Int32):
        """Starts copying a tile's noise and base logits of one position into one of the warp's stages; one copy group."""
        if cutlass.const_expr(self.wide):
            places = self.locate_inputs(c, ptx.opaque_lane(c.lane))
        else:
            places = [c.places[i] for i in range(PLACES)]
        staged = c.inputs + stage * (self.rows * self.stage_bytes)
        exists = step < self.num_steps
        if cutlass.const_expr(self.draws):
            noise = places[0] + Uint32(step * Int32(c.noise_stride)) // Uint32(PIECE // NOISE_BYTES)
            self.copy_piece(c, exists, staged, places[1], c.noise, noise, tile, NOISE_BYTES)
        base = places[2] + Uint32(step) * Uint32(c.base_pos_stride) // Uint32(PIECE // self.base_bytes)
        self.copy_piece(c, exists, staged, places[3], c.base, base, tile, self.base_bytes)
        if (c.base_vector == 0) & exists:
            self.copy_base(c, tile, step, staged)
        ptx.copy_async_commit()

    def copy_piece(
        self,
        c,
        exists: Boolean,
        staged: Int32,
        target: Uint32,
        array: Int64,
        source: Uint32,
        tile: Int32,
        entry_bytes: int,
    ) -> None:
        """Starts copying the lane's 16 bytes of a tile from one of the two arrays."""
        pieces = TILE_ROWS * entry_bytes // PIECE
        address = array + Int64(source + Uint32(tile * pieces)) * PIECE
        mine = exists & (Int32(target) != NOTHING)
        if self.line.partial:
            left = (c.span - tile * TILE_ROWS) * entry_bytes - c.lane % pieces * PIECE
            part = cutlass.max(cutlass.min(left, PIECE), 0)
            ptx.copy_async_16_of_if(mine, staged + Int32(target), address, part)
        else:
            ptx.copy_async_16_if(mine, staged + Int32(target), address)

    @cute.jit
    def fetch_first_inputs(self, c):
        """Writes down the warp's order of tiles, and fetch_inputs of the first; the order goes on from position to position."""
        if c.lane < c.items:
            ptx.sts_u16(c.order + c.lane * plan_line.ORDER_BYTES, Uint32(self.tile_of(c, c.lane)))
        cute.arch.sync_warp()
        item, step = Int32(0), Int32(0)
        for stage in cutlass.range(self.residency.ahead, unroll=1):
            if c.items > 0:
                self.fetch_inputs(c, self.ordered_tile(c, item, step), step, stage)
            item += 1
            if item >= c.items:
                item = Int32(0)
                step += 1

    def ordered_tile(self, c, item: Int32, step: Int32) -> Int32:
        """The warp's item-th tile of a position, as written down. Where tiles are streamed, every other position goes backwards."""
        if self.ring > 0:
            item = ptx.select(chain_head.goes_up(step), item, c.items - 1 - item)
        return Int32(ptx.lds_u16(c.order + item * plan_line.ORDER_BYTES))

    @cute.jit
    def fetch_inputs_ahead(self, c, item: Int32, step: Int32):
        """After the warp's `item`-th tile: fetch_inputs of the tile `ahead` further on, into the stage that is free now."""
        cute.arch.sync_warp()  # every lane has read this stage
        after, position = item + c.ahead_items, step + c.ahead_steps
        if after >= c.items:
            after -= c.items
            position += 1
        self.fetch_inputs(c, self.ordered_tile(c, after, position), position, c.stage[0])
        c.stage[0] = c.stage[0] + 1
        if c.stage[0] == self.residency.ahead:
            c.stage[0] = Int32(0)

    def wait_inputs(self) -> None:
        """Waits for the inputs of the tile whose turn it is: all but the `ahead - 1` newest groups have arrived."""
        ptx.copy_async_wait(self.residency.ahead - 1)
        cute.arch.sync_warp()  # what the other lanes copied is there

    @cute.jit
    def copy_base(self, c, tile: Int32, step: Int32, staged: Int32):
        """Base logits that are not aligned to 16 bytes, entry by entry. Offsets are 32-bit counts of entries, as the launcher checks."""
        column = Uint32(c.first_column + tile * TILE_ROWS) + Uint32(step) * Uint32(c.base_pos_stride)
        for j in cutlass.range_constexpr((self.rows * TILE_ROWS + LANES - 1) // LANES):
            row, entry = (c.lane + LANES * j) // TILE_ROWS, (c.lane + LANES * j) % TILE_ROWS
            if (row < c.rows) & (entry < c.span - tile * TILE_ROWS):
                source = (
                    c.base + Int64(Uint32(row) * Uint32(c.base_row_stride) + column + Uint32(entry)) * self.base_bytes
                )
                target = staged + row * self.stage_bytes + TILE_ROWS * NOISE_BYTES + entry * self.base_bytes
                if cutlass.const_expr(self.base_bytes == 2):
                    ptx.sts_u16(target, ptx.ldg_u16(source))
                else:
                    ptx.sts_b32(target, ptx.ldg_b32(source))

    def load_noise(self, address: Int32) -> list[Float32]:
        """The lane's noise of one row; nothing where none is drawn with."""
        return self.load_fp32(address) if self.draws else []

    def load_bf16(self, address: Int32) -> list[Float32]:
        """The lane's bf16 entries of one row, as fp32."""
        if self.entries == 1:
            return [ptx.float_of(ptx.lds_u16(address) << Uint32(16))]
        return head_tiles.unpack_bf16(ptx.lds_b32(address))

    def load_base(self, address: Int32) -> list[Float32]:
        """The lane's base logits of one row."""
        return self.load_bf16(address) if self.base_bytes == 2 else self.load_fp32(address)

    def load_fp32(self, address: Int32) -> list[Float32]:
        """The lane's fp32 entries of one row."""
        return [ptx.float_of(x) for x in ([ptx.lds_b32(address)] if self.entries == 1 else ptx.lds_b64(address))]

    def round_bf16(self, x: list[Float32]):
        """The values rounded to bf16, as fp32 and as packed words."""
        if self.entries == 1:
            word = ptx.bf16_bits(x[0])
            return [ptx.float_of(word << Uint32(16))], [word]
        word = ptx.bf16x2_bits(x[0], x[1])
        return head_tiles.unpack_bf16(word), [word]

    # ---- the cache

    @cute.jit
    def store_logits(self, c, mine: Boolean, address: Int64, at: Int32, words):
        """The lane's entries into the cache row, in one store where alignment and the end of the shard allow."""
        whole = mine
        if cutlass.const_expr(self.line.partial):
            whole = mine & (at + self.entries <= c.span)
        if cutlass.const_expr(self.entries > 1):
            whole = whole & (c.cache_vector != 0)
        if cutlass.const_expr(self.cache_bytes == 2 and self.entries == 1):
            ptx.stg_u16_if(whole, address, words[0])
        else:
            ptx.stg_words_if(whole, address, words)
        if cutlass.const_expr(self.entries > 1):
            by_entry = c.cache_vector == 0
            if cutlass.const_expr(self.line.partial):
                by_entry = Boolean(True)
            if by_entry:
                for e in cutlass.range_constexpr(self.entries):
                    single = mine & (not whole) & (at + e < c.span)
                    if cutlass.const_expr(self.cache_bytes == 4):
                        ptx.stg_words_if(single, address + 4 * e, [words[e]])
                    else:
                        ptx.stg_u16_if(single, address + 2 * e, words[0] >> Uint32(16 * e))

    # ---- rows: state, anchor, embedding

    @cute.jit
    def fetch_embedding(self, c, row: Int32, token: Int32):
        """The Markov embedding of a row's previous token, from memory into fragment order. One warp."""
        source = c.embed + Int64(token) * self.tile.row_bytes
        for j in cutlass.range_constexpr((self.embed_places + LANES - 1) // LANES):
            piece = c.lane + LANES * j
            if piece < self.embed_places:
                x = [Uint32(0)] * 4  # the missing half of the last chunk
                if piece < self.embed_pieces:
                    x = ptx.ldg_b128(source + Int64(piece) * PIECE)
                head_tiles.store_embedding(self.rows, self.embed_half, c.embedding_stage, row, piece, x)

    @cute.jit
    def load_row_table(self, c):
        """Cache address, temperature and whether the cache is written, of every (row, position). A padding row has temperature 0."""
        if cutlass.const_expr(not self.draws):
            return
        if c.tid < c.rows * self.num_steps:
            state = ptx.ldg_s64(c.idx_mapping + Int64(c.tid) * 8)
            temperature = Uint32(0)
            if state >= 0:
                temperature = ptx.ldg_b32(c.temperature_table + state * 4)
            step = c.tid % self.num_steps
            offset = state * c.cache_req_stride + Int64(step) * c.cache_pos_stride + self.cache_column(c)
            address = Uint64(c.cache + offset * self.cache_bytes)
            halves = [Uint32(address & Uint64(0xFFFFFFFF)), Uint32(address >> Uint64(32))]
            target = c.smem + self.shared.row_table + c.tid * plan_line.ROW_TABLE_BYTES
            ptx.sts_b128(target, [*halves, temperature, self.staged_mark(c, c.tid // self.num_steps, step, state)])

    def row_state(self, c, row: Int32, step: Int32) -> list[Uint32]:
        """The row table's four words of a row at a position; nothing where nothing is drawn with."""
        if not self.draws:
            return []
        return ptx.lds_b128(c.smem + self.shared.row_table + (row * self.num_steps + step) * plan_line.ROW_TABLE_BYTES)

    @cute.jit
    def load_anchor(self, c, row: Int32):
        """The token before position 0. A row slot without a row, or an id outside the vocabulary, reads token 0."""
        token = Int32(0)
        if row < c.rows:
            token = Int32(ptx.ldg_b32(c.input_ids + Int64(row * c.query_per_row) * 4))
            if (token < 0) | (token >= self.vocab_size):
                token = Int32(0)
        return token
