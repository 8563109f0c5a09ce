"""The whole Markov draft chain of {{ spec.model.title }} in one cooperative launch.

For each position i of NUM_STEPS and each of up to 8 request rows (docs/semantics in the repository give the exact contract):
    bias[v]  = bf16(head[v] . embed[prev])           tensor cores, fp32 accumulation
    cache[v] = round(base[i, v] + bias[v])           before temperature; not written for padding rows
    score[v] = cache[v] / T + noise[i, v]            cache[v] alone where T == 0
    prev     = draft_tokens[i] = the winner over the vocabulary, agreed by all CTAs

One CTA per SM owns a contiguous range of head tiles, in the order [streamed | resident in shared memory | resident in registers].
Cost: one launch; NUM_STEPS - 1 grid-wide exchanges; the head is read from device memory once, its streamed tiles again from L2
for each position; base logits, noise and cache once.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64
from cutlass.cute.runtime import make_fake_stream

from .._device import exchange, head_tiles, keys, plan_line, ptx
from .._device.plan_line import PlanLine
from .config import DTYPE_BYTES, ID_BITS, NUM_STEPS, RANK_DIM, VOCAB_SIZE

TAG_BITS = 32 - ID_BITS  # what a record's lower word has left beside the token id
LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
TILE = head_tiles.TileShape(RANK_DIM)
EMBED_PIECES = RANK_DIM // 8  # 16-byte pieces of a Markov embedding row
EMBED_LINES = (TILE.row_bytes + 127) // 128  # L2 lines of one
NOISE_BYTES = 4

# What the compiled kernel takes, in this order: addresses and sizes as Python ints, then the stream.
ARGUMENTS = (
    "head",  # address of this shard's first row of the Markov head, bf16 [width, RANK_DIM]
    "embed",  # address of the Markov embedding, bf16 [VOCAB_SIZE, RANK_DIM]
    "base",  # address of the base logits of row 0, position 0, at this shard's first column
    "base_row_stride",  # elements
    "base_pos_stride",  # elements
    "noise",  # address of the noise, fp32 [rows * NUM_STEPS, noise_pitch], of this shard's columns
    "noise_pitch",  # elements, a multiple of 4
    "cache",  # address of the logits cache of state 0, position 0, at this shard's first column
    "cache_req_stride",  # elements
    "cache_pos_stride",  # elements
    "input_ids",  # address, int32; row r's anchor is input_ids[r * query_per_row]
    "query_per_row",
    "idx_mapping",  # address, int64 [rows * NUM_STEPS]
    "temperature",  # address, fp32, by request-state index
    "draft_tokens",  # address, int64
    "token_stride",  # elements between two rows of draft_tokens
    "records",  # address of exchange.records_words(ctas) 64-bit words, zeroed once
    "epoch",  # address of one int32, zeroed once: launches so far
    "report",  # address of 16 int32 words in pinned host memory
    "timeout_ns",  # bound of every wait; 0: none
    "rows",  # request rows of this call, 1 .. row_slots
    "vocab_start",  # token id of this shard's first column
    "width",  # columns of this shard
    "base_vector",  # 1: base logits are 16-byte aligned in address and strides; 0: copied entry by entry
    "cache_vector",  # 1: so is the cache; 0: stored entry by entry
    "ctas",  # records to wait for: line.ctas (a test passes one more, and gets the timeout)
)
WIDE_ARGUMENTS = 17  # the first that are addresses or strides
NARROW = ("query_per_row", "rows", "vocab_start", "width", "base_vector", "cache_vector", "ctas")


# What the parts of the kernel share: this thread's place, this CTA's range, addresses; tensors of one or two registers are the state.
Context = namedtuple(
    "Context",
    "tid lane warp cta grid smem rows span streamed resident first_register my_register my_resident my_shared early first_bit head embed base base_row_stride base_pos_stride base_vector noise noise_stride cache cache_req_stride cache_pos_stride cache_vector input_ids query_per_row idx_mapping temperature_table draft_tokens token_stride records report timeout_ns expected epoch first_column first_token bars input_bar embedding_stage embedding parked scratch base_stage noise_stage fragment my_row my_entry once again phase fragments best inputs_here input_parity temperature cache_row stores",
)


def records_words(line: PlanLine) -> int:
    """64-bit words of the exchange buffer of one build."""
    return exchange.records_words(line.ctas)


class ChainKernel:
    """One build: a plan line, the base logits' dtype and the cache's dtype ("bf16" or "fp32")."""

    def __init__(self, line: PlanLine, base_dtype: str, cache_dtype: str) -> None:
        self.line = line
        self.rows = line.row_slots
        self.base_bytes = DTYPE_BYTES[base_dtype]
        self.cache_bytes = DTYPE_BYTES[cache_dtype]
        self.rounds = base_dtype == "bf16" or cache_dtype == "bf16"
        self.shared = plan_line.shared_layout(line, RANK_DIM, NUM_STEPS, self.base_bytes)
        self.slots = plan_line.slot_count(line, self.base_bytes)
        self.resident = plan_line.resident_tiles(line, self.base_bytes)
        self.threads = line.warps * LANES
        self.register_words = line.register_tiles * line.register_chunks * TILE.chunk_words
        self.parked_chunks = TILE.chunks - line.register_chunks
        self.embed_half = TILE.chunks * 32 * self.rows
        self.entries = self.rows // 2 if self.rows > 2 else 1  # of a tile's 16 entries of one row, those that one lane finishes
        self.row_lanes = TILE_ROWS // self.entries
        self.pair = 2 if self.rows > 1 else 1  # request rows whose exchange one warp handles
        self.base_pitch = line.tiles * TILE_ROWS * self.base_bytes
        self.noise_pitch = line.tiles * TILE_ROWS * NOISE_BYTES

    # ---- the head: filling slots, multiplying tiles

    @cute.jit
    def fill(self, c, slot: Int32, tile: Int32, policy: Uint64):
        """Starts the bulk copies of one of the CTA's tiles into a slot. One lane."""
        source = c.head + Int64(tile * (TILE_ROWS * TILE.row_bytes))
        dst = c.smem + slot * TILE.slot_bytes
        bar = c.bars + slot * plan_line.MBARRIER_BYTES
        if cutlass.const_expr(self.line.partial):
            left = cutlass.min(c.span - tile * TILE_ROWS, TILE_ROWS)
            first = cutlass.min(left, TILE_ROWS // 2)
            ptx.mbarrier_expect(bar, left * TILE.row_bytes)
            ptx.bulk_load(dst, source, first * TILE.row_bytes, bar, policy)
            if left > first:
                second = (left - first) * TILE.row_bytes
                upper = dst + TILE.half_bytes + plan_line.BANK_SHIFT
                ptx.bulk_load(upper, source + TILE.half_bytes, second, bar, policy)
        else:
            half = Int32(TILE.half_bytes)
            ptx.mbarrier_expect(bar, 2 * half)
            ptx.bulk_load(dst, source, half, bar, policy)
            ptx.bulk_load(dst + TILE.half_bytes + plan_line.BANK_SHIFT, source + TILE.half_bytes, half, bar, policy)

    @cute.jit
    def settle(self, c, slot: Int32):
        """Starts loading what a slot holds first: a streamed tile, a resident one, or nothing."""
        tile = c.streamed + slot - self.line.ring
        here = (slot >= self.line.ring) & (slot - self.line.ring < c.resident)
        policy = c.once
        if slot < self.line.ring:
            tile = slot
            here = slot < c.streamed
            if slot < self.line.keep:
                policy = c.again
        if (c.lane == 0) & here:
            self.fill(c, slot, tile, policy)

    @cute.jit
    def wait_slot(self, c, slot: Int32):
        """Waits for the slot's next fill. The phase bits are per warp: bit k belongs to slot warp + k * warps."""
        bit = slot // self.line.warps
        ptx.mbarrier_wait(c.bars + slot * plan_line.MBARRIER_BYTES, Int32((c.phase[0] >> Uint32(bit)) & Uint32(1)))
        c.phase[0] = c.phase[0] ^ (Uint32(1) << Uint32(bit))

    @cute.jit
    def load_register_tiles(self, c):
        """Brings the warp's register tiles in through slot `warp`, one after the other, then settles that slot."""
        source = c.smem + c.warp * TILE.slot_bytes + c.fragment
        for i in cutlass.range_constexpr(self.line.register_tiles):
            if i < c.my_register:
                self.wait_slot(c, c.warp)
                for q in cutlass.range_constexpr(TILE.chunks):
                    x = head_tiles.load_fragments(TILE, source, q)
                    for group in cutlass.range_constexpr(head_tiles.GROUPS):
                        if cutlass.const_expr(q < self.line.register_chunks):
                            at = ((i * self.line.register_chunks + q) * head_tiles.GROUPS + group) * 4
                            for j in cutlass.range_constexpr(4):
                                c.fragments[at + j] = x[group][j]
                        else:
                            ptx.sts_b128(self.parked(c, i, q, group), x[group])
                cute.arch.sync_warp()  # every lane has read the slot
                if i + 1 < c.my_register:
                    if c.lane == 0:
                        self.fill(c, c.warp, c.first_register + (i + 1) * self.line.warps, c.once)
                else:
                    self.settle(c, c.warp)
        if c.my_register == 0:
            self.settle(c, c.warp)

    def parked(self, c, i: int, q: int, group: int) -> Int32:
        """Address of the lane's 16 bytes of a register tile's chunk that lies in shared memory."""
        at = (i * self.parked_chunks + q - self.line.register_chunks) * head_tiles.GROUPS + group
        return c.parked + at * (LANES * 16)

    def register_fragments(self, c, i: int, q: int) -> list:
        """The A fragments of one chunk of register tile i."""
        if q >= self.line.register_chunks:
            return [ptx.lds_b128(self.parked(c, i, q, group)) for group in range(head_tiles.GROUPS)]
        at = (i * self.line.register_chunks + q) * TILE.chunk_words
        return [[c.fragments[at + 4 * group + j] for j in range(4)] for group in range(head_tiles.GROUPS)]

    def multiply_register_tile(self, c, i: int) -> list:
        acc = head_tiles.new_accumulators(self.rows)
        for q in range(TILE.chunks):
            head_tiles.multiply(acc, head_tiles.load_embedding(self.rows, c.embedding, q), self.register_fragments(c, i, q))
        return acc

    def multiply_slot(self, c, slot: Int32) -> list:
        acc = head_tiles.new_accumulators(self.rows)
        address = c.smem + slot * TILE.slot_bytes + c.fragment
        e, x = head_tiles.load_embedding(self.rows, c.embedding, 0), head_tiles.load_fragments(TILE, address, 0)
        for q in range(TILE.chunks):  # loads run one chunk ahead of the MMAs
            if q + 1 < TILE.chunks:
                after = head_tiles.load_embedding(self.rows, c.embedding, q + 1), head_tiles.load_fragments(TILE, address, q + 1)
            head_tiles.multiply(acc, e, x)
            e, x = after
        return acc

    # ---- a tile's 16 entries of each row: cache and candidates

    @cute.jit
    def finish_tile(self, c, tile: Int32, acc):
        """logit = round(base + bias) into the cache, score against the lane's best so far."""
        cute.arch.sync_warp()  # the scratch of the tile before has been read
        head_tiles.store_bias(self.rows, c.scratch, c.lane, acc)
        if c.inputs_here[0] == 0:
            ptx.mbarrier_wait(c.input_bar, c.input_parity[0])
            c.inputs_here[0] = Int32(1)
        cute.arch.sync_warp()
        if c.my_row < c.rows:
            at = tile * TILE_ROWS + c.my_entry  # from the CTA's first column
            bias = self.load_bf16(c.scratch + c.my_row * (2 * TILE_ROWS) + c.my_entry * 2)
            base_address = c.base_stage + c.my_row * self.base_pitch + at * self.base_bytes
            base = self.load_bf16(base_address) if cutlass.const_expr(self.base_bytes == 2) else self.load_fp32(base_address)
            noise = self.load_fp32(c.noise_stage + c.my_row * self.noise_pitch + at * NOISE_BYTES)
            logits = [ptx.add_rn(base[e], bias[e]) for e in range(self.entries)]
            words = []
            if cutlass.const_expr(self.rounds):
                logits, words = self.round_bf16(logits)
            if c.stores[0] != 0:
                self.store_logits(c, at, logits, words)
            top, low = Uint32(0), Uint32(0)
            for e in cutlass.range_constexpr(self.entries):
                noised = ptx.add_rn(ptx.div_full(logits[e], c.temperature[0]), noise[e])
                score = ptx.select(c.temperature[0] == Float32(0.0), logits[e], noised)
                rank = keys.ordered(score)
                if cutlass.const_expr(self.line.partial):
                    rank = ptx.select(at + e < c.span, rank, Uint32(0))
                if rank > top:  # entries come by rising id: the first of equals stays
                    top = rank
                    low = keys.low_word(c.first_token + at + e, ID_BITS)
            c.best[0], c.best[1] = keys.larger(top, low, c.best[0], c.best[1])

    def load_bf16(self, address: Int32) -> list[Float32]:
        """The lane's consecutive bf16 entries, as fp32."""
        if self.entries == 1:
            return [ptx.float_of(ptx.lds_u16(address) << Uint32(16))]
        words = [ptx.lds_b32(address)] if self.entries == 2 else ptx.lds_b64(address)
        return self.unpack(words)

    def load_fp32(self, address: Int32) -> list[Float32]:
        """The lane's consecutive fp32 entries."""
        if self.entries == 1:
            return [ptx.float_of(ptx.lds_b32(address))]
        return [ptx.float_of(x) for x in (ptx.lds_b64(address) if self.entries == 2 else ptx.lds_b128(address))]

    def unpack(self, words: list[Uint32]) -> list[Float32]:
        return [ptx.float_of(bits) for w in words for bits in (w << Uint32(16), w & Uint32(0xFFFF0000))]

    def round_bf16(self, x: list[Float32]):
        """The values rounded to bf16, as fp32 and as packed words."""
        if self.entries == 1:
            words = [ptx.bf16_bits(x[0])]
            return [ptx.float_of(words[0] << Uint32(16))], words
        words = [ptx.bf16x2_bits(x[e], x[e + 1]) for e in range(0, self.entries, 2)]
        return self.unpack(words), words

    @cute.jit
    def store_logits(self, c, at: Int32, logits, words):
        """The lane's entries into the cache row, in one store where alignment and the end of the shard allow."""
        address = c.cache_row[0] + Int64(at) * self.cache_bytes
        whole = c.cache_vector != 0
        if cutlass.const_expr(self.line.partial):
            whole = whole & (at + self.entries <= c.span)
        if cutlass.const_expr(self.cache_bytes == 4):
            words = [ptx.bits_of(x) for x in logits]
        if whole:
            if cutlass.const_expr(self.cache_bytes == 2 and self.entries == 1):
                ptx.stg_u16(address, words[0])
            else:
                ptx.stg_words(address, words)
        else:
            for e in cutlass.range_constexpr(self.entries):
                if at + e < c.span:
                    if cutlass.const_expr(self.cache_bytes == 4):
                        ptx.stg_b32(address + 4 * e, words[e])
                    else:
                        ptx.stg_u16(address + 2 * e, words[e // 2] >> Uint32(16 * (e % 2)))

    # ---- what a position needs from memory

    @cute.jit
    def fetch_inputs(self, c, step: Int32):
        """Starts the bulk copies of one position's noise and, where it is aligned, base logits. One thread."""
        noise_bytes = (c.span * NOISE_BYTES + 15) // 16 * 16
        base_bytes = (c.span * self.base_bytes + 15) // 16 * 16
        row_bytes = noise_bytes
        if c.base_vector != 0:
            row_bytes += base_bytes
        ptx.mbarrier_expect(c.input_bar, c.rows * row_bytes)
        for n in cutlass.range(c.rows, unroll=1):
            noise = c.noise + (Int64(n * NUM_STEPS + step) * c.noise_stride + c.first_column) * NOISE_BYTES
            ptx.bulk_load(c.noise_stage + n * self.noise_pitch, noise, noise_bytes, c.input_bar, c.once)
            if c.base_vector != 0:
                ptx.bulk_load(c.base_stage + n * self.base_pitch, self.base_row(c, n, step), base_bytes, c.input_bar, c.once)

    def base_row(self, c, n: Int32, step: Int32) -> Int64:
        return c.base + (Int64(n) * c.base_row_stride + Int64(step) * c.base_pos_stride + c.first_column) * self.base_bytes

    @cute.jit
    def copy_base(self, c, step: Int32):
        """Base logits that bulk copies cannot take, entry by entry. All threads; a CTA barrier must follow."""
        for n in cutlass.range(c.rows, unroll=1):
            source = self.base_row(c, n, step)
            target = c.base_stage + n * self.base_pitch
            for at in cutlass.range(c.tid, c.span, self.threads, unroll=1):
                if cutlass.const_expr(self.base_bytes == 2):
                    ptx.sts_u16(target + at * 2, ptx.ldg_u16(source + Int64(at) * 2))
                else:
                    ptx.sts_b32(target + at * 4, ptx.ldg_b32(source + Int64(at) * 4))

    @cute.jit
    def fetch_embedding(self, c, row: Int32, token: Int32):
        """The Markov embedding of a row's previous token, from memory into fragment order. One warp."""
        source = c.embed + Int64(token) * TILE.row_bytes
        for j in cutlass.range_constexpr((EMBED_PIECES + LANES - 1) // LANES):
            piece = c.lane + LANES * j
            if piece < EMBED_PIECES:
                x = ptx.ldg_b128(source + Int64(piece) * 16)
                head_tiles.store_embedding(self.rows, self.embed_half, c.embedding_stage, row, piece, x)

    @cute.jit
    def load_row_state(self, c):
        """Request-state index and temperature of every (row, position) into shared memory. A padding row gets temperature 0."""
        if c.tid < c.rows * NUM_STEPS:
            state = Int32(ptx.ldg_s64(c.idx_mapping + Int64(c.tid) * 8))
            temperature = Uint32(0)
            if state >= 0:
                temperature = ptx.ldg_b32(c.temperature_table + Int64(state) * 4)
            ptx.sts_b32(c.smem + self.shared.states + c.tid * 4, Uint32(state))
            ptx.sts_b32(c.smem + self.shared.temperatures + c.tid * 4, temperature)

    @cute.jit
    def load_anchor(self, c, row: Int32):
        """The token before position 0. A row slot without a row, or an id outside the vocabulary, reads token 0."""
        token = Int32(0)
        if row < c.rows:
            token = Int32(ptx.ldg_b32(c.input_ids + Int64(row * c.query_per_row) * 4))
            if (token < 0) | (token >= VOCAB_SIZE):
                token = Int32(0)
        return token

    # ---- one position

    @cute.jit
    def begin_position(self, c, step: Int32):
        """The lane's row: temperature, cache row, whether it is written; no candidate yet."""
        c.best[0] = Uint32(0)
        c.best[1] = Uint32(0)
        c.inputs_here[0] = Int32(0)
        c.input_parity[0] = step & 1
        if c.my_row < c.rows:
            at = (c.my_row * NUM_STEPS + step) * 4
            state = Int32(ptx.lds_b32(c.smem + self.shared.states + at))
            c.temperature[0] = ptx.float_of(ptx.lds_b32(c.smem + self.shared.temperatures + at))
            offset = Int64(state) * c.cache_req_stride + Int64(step) * c.cache_pos_stride + c.first_column
            c.cache_row[0] = c.cache + offset * self.cache_bytes
            c.stores[0] = Int32(state >= 0)

    @cute.jit
    def multiply_tiles(self, c, step: Int32):
        """All tiles of the warp: its first streamed one, so that its slot is refilled early, then registers, resident, other streamed."""
        for it in cutlass.range(c.my_shared + 1, unroll=1):
            if cutlass.const_expr(self.line.register_tiles > 0):
                if it == c.early:
                    for i in cutlass.range_constexpr(self.line.register_tiles):
                        if i < c.my_register:
                            acc = self.multiply_register_tile(c, i)
                            self.finish_tile(c, c.first_register + i * self.line.warps, acc)
            if it < c.my_shared:
                is_streamed = (it < c.early) | (it >= c.early + c.my_resident)
                slot = c.warp + (c.first_bit + it - c.early) * self.line.warps
                tile = c.streamed + slot - self.line.ring
                if is_streamed:
                    slot = c.warp
                    tile = c.warp
                    if it >= c.early:
                        tile = c.warp + (it - c.my_resident) * self.line.ring
                if is_streamed | (step == 0):
                    self.wait_slot(c, slot)
                acc = self.multiply_slot(c, slot)
                if cutlass.const_expr(self.line.ring > 0):
                    if is_streamed:
                        self.refill(c, step, tile)
                self.finish_tile(c, tile, acc)

    @cute.jit
    def refill(self, c, step: Int32, tile: Int32):
        """The slot's next tile: of this position, or the first of the next. It depends on no token, so it runs ahead of the exchange."""
        cute.arch.sync_warp()  # every lane has read the slot
        after = tile + self.line.ring
        wraps = after >= c.streamed
        if wraps:
            after = c.warp
        policy = c.once
        if after < self.line.keep:
            policy = c.again
        if (c.lane == 0) & ((step + 1 < NUM_STEPS) | (after != c.warp)):
            self.fill(c, c.warp, after, policy)

    @cute.jit
    def reduce_warp(self, c):
        """The warp's best key of each row into shared memory."""
        hi, lo = c.best[0], c.best[1]
        if cutlass.const_expr(self.rows == 1):
            hi, lo = keys.warp_largest(hi, lo)
        else:
            for k in cutlass.range_constexpr(self.row_lanes.bit_length() - 1):
                hi, lo = keys.larger(ptx.shuffle_xor(hi, 1 << k), ptx.shuffle_xor(lo, 1 << k), hi, lo)
        if (c.lane % self.row_lanes == 0) & (c.my_row < self.rows):
            address = c.smem + self.shared.keys + (c.my_row * plan_line.RED_WARPS + c.warp) * plan_line.KEY_BYTES
            ptx.sts_b64(address, [lo, hi])

    @cute.jit
    def agree(self, c, step: Int32, sequence: Uint32):
        """Publishes this CTA's best keys, waits for everybody's, fetches the winners' embeddings. Warps of row pairs."""
        if c.warp < self.rows // self.pair:
            first = c.warp * self.pair
            for p in cutlass.range_constexpr(self.pair):
                words = [Uint32(0), Uint32(0)]
                if c.lane < self.line.warps:
                    words = ptx.lds_b64(
                        c.smem + self.shared.keys + ((first + p) * plan_line.RED_WARPS + c.lane) * plan_line.KEY_BYTES
                    )
                hi, lo = keys.warp_largest(words[1], words[0])
                if c.lane == 0:
                    exchange.publish(c, sequence, first + p, hi, lo, TAG_BITS)
                if (c.lane < EMBED_LINES) & (hi != 0):
                    candidate = c.embed + Int64(keys.token_of(lo, ID_BITS)) * TILE.row_bytes
                    ptx.prefetch_l2(candidate + Int64(c.lane) * 128)
            if (step + 1 < NUM_STEPS) | (c.cta == 0):  # only CTA 0 reports the last token
                winners = exchange.collect(c, sequence, step, first, self.pair, self.line.ctas + 1, TAG_BITS)
                for p in cutlass.range_constexpr(self.pair):
                    token = keys.token_of(winners[p][1], ID_BITS)
                    if winners[p][0] == 0:  # a row slot without a row
                        token = Int32(0)
                    if step + 1 < NUM_STEPS:
                        self.fetch_embedding(c, first + p, token)
                    if (c.cta == 0) & (c.lane == 0) & (first + p < c.rows):
                        ptx.stg_s64(c.draft_tokens + (Int64(first + p) * c.token_stride + step) * 8, Int64(token))

    @cute.kernel
    def kernel(
        self,
        head: Int64,
        embed: Int64,
        base: Int64,
        base_row_stride: Int64,
        base_pos_stride: Int64,
        noise: Int64,
        noise_pitch: Int64,
        cache: Int64,
        cache_req_stride: Int64,
        cache_pos_stride: Int64,
        input_ids: Int64,
        query_per_row: Int32,
        idx_mapping: Int64,
        temperature: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        records: Int64,
        epoch: Int64,
        report: Int64,
        timeout_ns: Int64,
        rows: Int32,
        vocab_start: Int32,
        width: Int32,
        base_vector: Int32,
        cache_vector: Int32,
        ctas: Int32,
    ):
        line, shared = self.line, self.shared
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp, lane = tid // LANES, tid % LANES
        smem = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 128).toint())

        # The CTA's range of tiles and where each lives
        tiles = (width + TILE_ROWS - 1) // TILE_ROWS
        first_tile = tiles * cta // grid
        count = tiles * (cta + 1) // grid - first_tile
        in_registers = cutlass.min(count, line.register_tiles * line.warps)
        resident = cutlass.min(count - in_registers, self.resident)
        streamed = count - in_registers - resident
        first_column = first_tile * TILE_ROWS
        span = cutlass.min(count * TILE_ROWS, width - first_column)

        # The warp's share. Slot s belongs to warp s % warps alone; slots 0 .. ring - 1 are the ring, the others hold resident tiles.
        first_register = streamed + resident + warp
        my_register = (in_registers - warp + line.warps - 1) // line.warps
        my_streamed = Int32(0)
        first_bit = Int32(0)
        if warp < line.ring:
            my_streamed = (streamed - warp + line.ring - 1) // line.ring
            first_bit = Int32(1)
        early = cutlass.min(my_streamed, 1)
        my_resident = cutlass.max(line.ring + resident - warp - first_bit * line.warps + line.warps - 1, 0) // line.warps

        c = Context(
            tid=tid, lane=lane, warp=warp, cta=cta, grid=grid, smem=smem, rows=rows, span=span,
            streamed=streamed, resident=resident, first_register=first_register, my_register=my_register,
            my_resident=my_resident, my_shared=my_streamed + my_resident, early=early, first_bit=first_bit,
            head=head + Int64(first_tile) * (TILE_ROWS * TILE.row_bytes), embed=embed,
            base=base, base_row_stride=base_row_stride, base_pos_stride=base_pos_stride, base_vector=base_vector,
            noise=noise, noise_stride=noise_pitch, cache=cache, cache_req_stride=cache_req_stride,
            cache_pos_stride=cache_pos_stride, cache_vector=cache_vector, input_ids=input_ids, query_per_row=query_per_row,
            idx_mapping=idx_mapping, temperature_table=temperature, draft_tokens=draft_tokens, token_stride=token_stride,
            records=records, report=report, timeout_ns=timeout_ns, expected=ctas, epoch=epoch,
            first_column=Int64(first_column), first_token=vocab_start + first_column,
            bars=smem + shared.barriers, input_bar=smem + shared.barriers + self.slots * plan_line.MBARRIER_BYTES,
            embedding_stage=smem + shared.embedding,
            embedding=smem + shared.embedding + head_tiles.embedding_offset(self.rows, self.embed_half, lane),
            parked=smem + shared.parked + warp * (line.register_tiles * self.parked_chunks * TILE_ROWS * 64) + lane * 16,
            scratch=smem + shared.scratch + warp * (self.rows * 2 * TILE_ROWS),
            base_stage=smem + shared.base, noise_stage=smem + shared.noise,
            fragment=head_tiles.fragment_offset(TILE, lane),
            my_row=lane // self.row_lanes, my_entry=lane % self.row_lanes * self.entries,
            once=ptx.policy_evict_first(), again=ptx.policy_evict_last(),
            phase=cute.make_rmem_tensor(cute.make_layout(1), Uint32),
            fragments=cute.make_rmem_tensor(cute.make_layout(max(self.register_words, 1)), Uint32),
            best=cute.make_rmem_tensor(cute.make_layout(2), Uint32),
            inputs_here=cute.make_rmem_tensor(cute.make_layout(1), Int32),
            input_parity=cute.make_rmem_tensor(cute.make_layout(1), Int32),
            temperature=cute.make_rmem_tensor(cute.make_layout(1), Float32),
            cache_row=cute.make_rmem_tensor(cute.make_layout(1), Int64),
            stores=cute.make_rmem_tensor(cute.make_layout(1), Int32),
        )  # fmt: skip
        c.phase[0] = Uint32(0)
        c.temperature[0] = Float32(0.0)
        c.cache_row[0] = cache
        c.stores[0] = Int32(0)

        # The head is read before the kernel ahead of this one in the stream has ended: nothing there depends on it.
        for slot in cutlass.range(tid, self.slots + 1, self.threads, unroll=1):
            ptx.mbarrier_init(c.bars + slot * plan_line.MBARRIER_BYTES, Int32(1))
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")  # the copy engine sees the barriers
        cute.arch.sync_threads()
        if cutlass.const_expr(line.register_tiles > 0):
            if (lane == 0) & (my_register > 0):
                self.fill(c, warp, first_register, c.once)
            for slot in cutlass.range(warp + line.warps, self.slots, line.warps, unroll=1):
                self.settle(c, slot)
        else:
            for slot in cutlass.range(warp, self.slots, line.warps, unroll=1):
                self.settle(c, slot)
        cute.arch.griddepcontrol_wait()

        # Inputs that do depend on it
        launches = Int32(ptx.ldg_b32(epoch))
        if (tid == self.threads - LANES) & (span > 0):
            self.fetch_inputs(c, Int32(0))
        if base_vector == 0:
            self.copy_base(c, Int32(0))
        self.load_row_state(c)
        if warp < self.rows:
            self.fetch_embedding(c, warp, self.load_anchor(c, warp))
        cute.arch.sync_threads()
        if cutlass.const_expr(line.register_tiles > 0):
            self.load_register_tiles(c)

        for step in cutlass.range(NUM_STEPS, unroll=1):
            self.begin_position(c, step)
            self.multiply_tiles(c, step)
            self.reduce_warp(c)
            cute.arch.sync_threads()  # all keys are there; the staged inputs and the embeddings have been read
            if step + 1 < NUM_STEPS:
                if (tid == self.threads - LANES) & (span > 0):
                    self.fetch_inputs(c, step + 1)
                if base_vector == 0:
                    self.copy_base(c, step + 1)
            self.agree(c, step, Uint32(launches) * Uint32(NUM_STEPS) + Uint32(step))
            cute.arch.sync_threads()  # the next embeddings are there
        if (cta == 0) & (tid == 0):
            ptx.stg_b32(epoch, Uint32(launches + 1))  # every CTA has read it: each wrote a record of the last position

    @cute.jit
    def __call__(
        self,
        head: Int64,
        embed: Int64,
        base: Int64,
        base_row_stride: Int64,
        base_pos_stride: Int64,
        noise: Int64,
        noise_pitch: Int64,
        cache: Int64,
        cache_req_stride: Int64,
        cache_pos_stride: Int64,
        input_ids: Int64,
        query_per_row: Int32,
        idx_mapping: Int64,
        temperature: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        records: Int64,
        epoch: Int64,
        report: Int64,
        timeout_ns: Int64,
        rows: Int32,
        vocab_start: Int32,
        width: Int32,
        base_vector: Int32,
        cache_vector: Int32,
        ctas: Int32,
        stream,
    ):
        self.kernel(
            head, embed, base, base_row_stride, base_pos_stride, noise, noise_pitch, cache, cache_req_stride, cache_pos_stride,
            input_ids, query_per_row, idx_mapping, temperature, draft_tokens, token_stride, records, epoch, report, timeout_ns,
            rows, vocab_start, width, base_vector, cache_vector, ctas,
        ).launch(
            grid=[self.line.ctas, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared.total,
            stream=stream,
            cooperative=True,  # the exchange needs every CTA resident; the driver refuses a grid that is not
            min_blocks_per_mp=1,
        )  # fmt: skip


def compile_chain(line: PlanLine, base_dtype: str, cache_dtype: str, *, arch: str | None = None, options: str = ""):
    """Compiles one build; needs no GPU.

    `arch` such as "sm_90a" (default: this machine's GPU). Returns the callable of the DSL: it takes ARGUMENTS, then a stream.
    """
    dummies = [Int32(1) if name in NARROW else Int64(16) for name in ARGUMENTS]
    flags = f"--gpu-arch {arch} {options}" if arch else options
    return cute.compile(ChainKernel(line, base_dtype, cache_dtype), *dummies, make_fake_stream(), options=flags)
