"""The whole Markov draft chain of {{ spec.model.title }} in one cooperative launch.

For each position i of NUM_STEPS and each of up to 8 request rows (tests/harness/oracle.py is the exact contract):
    bias[v]  = bf16(head[v] . embed[prev])           tensor cores, fp32 accumulation
    {{ plan.chain_formula }}
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

from .._device import chain_agree, chain_fill, chain_head, chain_inputs, chain_ranks, chain_scores, chain_tiles, exchange
from .._device import head_tiles, keys, plan_line, ptx, rank_exchange
from .._device.kernel_image import Description, LaunchShape, parameters
from .._device.plan_line import PlanLine
from . import config
from .config import DTYPE_BYTES, ID_BITS, NUM_STEPS, RANK_DIM, VOCAB_SIZE

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
NOISE_BYTES = plan_line.NOISE_BYTES

# What the compiled kernel takes, in this order: addresses and sizes as Python ints, then the stream.
ARGUMENTS = (
    "head",  # address of this rank's first row of the Markov head, bf16 [its columns, RANK_DIM]
    "embed",  # address of the Markov embedding, bf16 [VOCAB_SIZE, RANK_DIM]
    "base",  # address of the base logits of row 0, position 0, at this rank's first column
    "base_row_stride",  # elements
    "base_pos_stride",  # elements
    "noise",  # address of the noise, fp32 [rows * NUM_STEPS, noise_pitch], of this rank's columns
    "noise_pitch",  # elements, a multiple of 4
    "cache",  # address of the logits cache of state 0, position 0, at column 0
    "cache_req_stride",  # elements
    "cache_pos_stride",  # elements
    "input_ids",  # address, int32; row r's anchor is input_ids[r * query_per_row]
    "query_per_row",
    "idx_mapping",  # address, int64 [rows * NUM_STEPS]
    "temperature",  # address, fp32, by request-state index
    "draft_tokens",  # address, int64
    "token_stride",  # elements between two rows of draft_tokens
    "records",  # address of the description's records_words 64-bit words, zeroed once
    "epoch",  # address of one int32, zeroed once: launches of this build so far
    "report",  # address of 16 int32 words in pinned host memory
    "timeout_ns",  # bound of every wait; 0: none
    "rows",  # request rows of this call, 1 .. row_slots
    "base_vector",  # 1: base logits are 16-byte aligned in address and strides; 0: copied entry by entry
    "cache_vector",  # 1: so is the cache, and with several ranks shard_width; 0: stored entry by entry
    "ctas",  # records of a rank to wait for: line.ctas (a test passes one more, and gets the timeout)
    "target_ids",  # address, int32 [DRAFT_VOCAB_SIZE]: the target id of every draft id; 0 where they are the same
    "draft_ids",  # address, int32 [VOCAB_SIZE, rounded up to 8]: negative where nothing drafts a target id; 0 as above
    "shard_width",  # rank r has the draft ids from r * shard_width on, so many or what is left; DRAFT_VOCAB_SIZE at TP 1
    # Only for several ranks; 0 at TP 1. Layout of the symmetric buffers: symmetric_buffer.py
    "rank",  # this launch's rank; of emulated ranks the first
    "peers",  # address of int64 [ranks]: where this GPU sees each rank's symmetric buffer
    "launches",  # address of one int32, zeroed once: launches of all builds that share the symmetric buffers
    "mailbox",  # byte offset of this build's mailbox
    "staging",  # byte offset
    "staging_bytes",  # of one launch parity
    "batch_shape",  # what ranks must agree on, 28 bits; used by builds that check ranks
    "base_rank_stride",  # elements from one emulated rank's base logits to the next one's
    "noise_rank_stride",  # elements, a multiple of 4
    "cache_rank_stride",  # elements
    "token_rank_stride",  # elements
)
NARROW = (  # int32, all others int64
    "query_per_row", "rows", "base_vector", "cache_vector", "ctas", "shard_width", "rank", "batch_shape",
)  # fmt: skip
Arguments = namedtuple("Arguments", ARGUMENTS)

# What the parts of the kernel share: this thread's place, its CTA's range, the arguments, and small tensors as state.
CONTEXT = """
tid lane warp cta grid smem rows span streamed resident first_register my_register my_streamed
head embed base base_row_stride base_pos_stride base_vector noise noise_stride cache cache_req_stride cache_pos_stride
cache_vector input_ids query_per_row idx_mapping temperature_table draft_tokens token_stride records report timeout_ns
expected epoch shard_width rank rank_table launches claim shard_tiles mailbox staging staging_bytes batch_shape
first_column first_token target_ids draft_ids bars embedding_stage embedding parked inputs order
items ahead_items ahead_steps stage stage_slot fragment
places fragments best
"""
Context = namedtuple("Context", CONTEXT.split())


def records_words(line: PlanLine, world: int = 1) -> int:
    """64-bit words of the local exchange buffer of one build and rank."""
    if world > 1:
        return rank_exchange.records_words(line, world)
    return exchange.records_words(line.ctas, exchange.record_stride(line.row_slots))


class ChainKernel(
    chain_head.Head, chain_inputs.Inputs, chain_scores.Scores, chain_fill.Fill, chain_tiles.Tiles, chain_agree.Agreement, chain_ranks.Ranks
):
    """One build: a plan line, the base logits' dtype and the cache's dtype, "bf16" or "fp32", None for greedy drafts without one."""

    def __init__(
        self,
        line: PlanLine,
        base_dtype: str,
        cache_dtype: str | None,
        world: int = 1,
        emulated: bool = False,
        check_ranks: bool = False,
        pdl: bool = False,
    ) -> None:
        self.pdl = pdl
        base_bytes, cache_bytes = DTYPE_BYTES[base_dtype], DTYPE_BYTES[cache_dtype] if cache_dtype else 0
        items = plan_line.most_items(line, base_bytes)
        if items > plan_line.MOST_ITEMS:
            raise ValueError(f"{line}: expected at most {plan_line.MOST_ITEMS} tiles a warp, got {items}")
        chain_head.Head.__init__(self, line, RANK_DIM, NUM_STEPS, base_bytes)
        chain_inputs.Inputs.__init__(self, line, RANK_DIM, NUM_STEPS, VOCAB_SIZE, base_bytes, cache_bytes)
        chain_scores.Scores.__init__(self, config)
        chain_fill.Fill.__init__(self, config, line, world, records_words(line, world))
        chain_agree.Agreement.__init__(self, line, ID_BITS)
        chain_ranks.Ranks.__init__(self, line, world, emulated, check_ranks)
        self.threads = line.warps * LANES
        # Half an SM's registers leave room for a kernel beside it: the head's loading then overlaps with the kernel ahead.
        self.blocks_per_sm = 2 if pdl and not self.residency.register_tiles else 1

    def describe(self) -> Description:
        """What a host must know to launch this build without this module."""
        ctas = self.line.ctas * (self.world if self.emulated else 1)
        # The exchange needs every CTA resident: a cooperative launch is refused where they are not. A kernel overlaps the one before
        # it without that attribute only; the launcher then checks residency.
        shape = LaunchShape((ctas, 1, 1), self.threads, self.shared.total, cooperative=not self.pdl, pdl=self.pdl)
        words = records_words(self.line, self.world) + self.staging_words
        return Description(parameters(ARGUMENTS, NARROW), shape, {"records_words": words})

    # ---- a tile's 16 entries of each row: cache and candidates

    def load_entries(self, c, step: Int32, item: Int32) -> list:
        """What the lane's entries of the tile whose turn it is need beside the bias, per row: whether it is live, column, state words,
        noise, base. Their staging is free then, and the inputs of a later tile start into it."""
        targets = self.load_targets(c, {{ plan.target_order }})
        self.wait_inputs()
        lane = ptx.opaque_lane(c.lane) if self.wide else c.lane
        first, column = head_tiles.bias_row(self.rows, lane), head_tiles.bias_entry(self.rows, lane)
        loaded = []
        for h in range(self.lane_rows):
            row = cutlass.min(first + h, self.rows - 1)  # a lane without a row reads the last one and uses nothing
            state = self.row_state(c, row, step)
            staged = c.inputs + (c.stage[0] * self.rows + row) * self.stage_bytes
            noise = self.load_noise(staged + column * NOISE_BYTES)
            base = self.load_base(staged + TILE_ROWS * NOISE_BYTES + column * self.base_bytes)
            loaded.append((first + h < c.rows, column, state, noise, base, targets))
        self.fetch_inputs_ahead(c, item, step)
        return loaded

    def add_bias(self, base: list[Float32], bias: list[Float32]) -> list[Float32]:
        """The fp32 logits of the lane's entries of a row."""
        # % if plan.transforms_base
        base = self.transformed(base, self.base_bytes)
        # % endif
        # % if spec.logits.transform.placement == "both"
        bias = self.transformed(bias, chain_scores.BF16_BYTES)
        # % endif
        sums = [ptx.add_rn(base[e], bias[e]) for e in range(self.entries)]
        # % if spec.logits.transform.placement == "sum"
        sums = self.transformed_sum(sums)
        # % endif
        return sums

    @cute.jit
    def finish_tile(self, c, tile: Int32, acc, loaded):
        """The lane's entries of a tile: logits, into the cache where there is one, and the best key against the lane's best so far."""
        biases, staged = head_tiles.biases(self.rows, c.lane, acc), []
        for h in cutlass.range_constexpr(self.lane_rows):
            live, column, state, noise, base, targets = loaded[h]
            at = tile * TILE_ROWS + column  # from the CTA's first column
            logits, words = self.round_logits(self.add_bias(base, biases[h]))
            # % if not spec.logits.cache_dtypes
            top, low = self.best_column(c, live, at, logits)
            # % elif spec.vocabulary.d2t
            top, low = self.finish_targets(c, live, at, targets, state, noise, logits, words)
            staged.append((live & (state[3] != 0), state[3], words))
            # % else
            row = Int64((Uint64(state[1]) << Uint64(32)) | Uint64(state[0]))
            self.store_logits(c, live & (state[3] != 0), row + Int64(at) * self.cache_bytes, at, words)
            staged.append((live & (state[3] != 0), state[3], words))
            scores = [self.score(logits[e], noise[e], ptx.float_of(state[2])) for e in range(self.entries)]
            top, low = self.best_column(c, live, at, scores)
            # % endif
            c.best[2 * h], c.best[2 * h + 1] = keys.larger(top, low, c.best[2 * h], c.best[2 * h + 1])
        self.stage_logits(c, tile, column, staged)

    @cute.kernel
    def kernel(self, arguments: tuple):
        line, shared = self.line, self.shared
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(tid // LANES), tid % LANES
        smem = Int32(cutlass.memory.SmemAllocator().allocate(shared.total, 128).toint())

        # The rank's columns; the CTA's range of tiles and where each lives
        cta, a = self.own_arguments(Arguments(*arguments), block)
        first_id, width = self.shard_of(a.rank, a.shard_width)
        tiles = (width + TILE_ROWS - 1) // TILE_ROWS
        first_tile = tiles * cta // line.ctas
        count = tiles * (cta + 1) // line.ctas - first_tile
        in_registers = cutlass.min(count, self.residency.register_tiles * line.warps)
        resident = cutlass.min(count - in_registers, self.residency.resident)
        streamed = count - in_registers - resident
        first_column = first_tile * TILE_ROWS
        span = cutlass.min(count * TILE_ROWS, width - first_column)

        # The warp's share: every warps-th tile of each kind.
        first_register = streamed + resident + warp
        my_register = (in_registers - warp + line.warps - 1) // line.warps
        my_streamed = (streamed - warp + line.warps - 1) // line.warps
        items = my_register + (streamed + resident - warp + line.warps - 1) // line.warps

        c = Context(
            tid=tid, lane=lane, warp=warp, cta=cta, grid=grid, smem=smem, rows=a.rows, span=span,
            streamed=streamed, resident=resident, first_register=first_register, my_register=my_register,
            my_streamed=my_streamed,
            head=a.head + Int64(first_tile) * (TILE_ROWS * self.tile.row_bytes), embed=a.embed, base=a.base,
            base_row_stride=a.base_row_stride, base_pos_stride=a.base_pos_stride, base_vector=a.base_vector, noise=a.noise,
            noise_stride=a.noise_pitch, cache=a.cache, cache_req_stride=a.cache_req_stride, cache_pos_stride=a.cache_pos_stride,
            cache_vector=a.cache_vector, input_ids=a.input_ids, query_per_row=a.query_per_row, idx_mapping=a.idx_mapping,
            temperature_table=a.temperature, draft_tokens=a.draft_tokens, token_stride=a.token_stride, records=a.records,
            report=a.report, timeout_ns=a.timeout_ns, expected=a.ctas, epoch=a.epoch, shard_width=a.shard_width, rank=a.rank,
            rank_table=a.peers, launches=a.launches, claim=self.claim_of(a.records, a.rank),
            shard_tiles=(a.shard_width + TILE_ROWS - 1) // TILE_ROWS, mailbox=a.mailbox, staging=a.staging,
            staging_bytes=a.staging_bytes, batch_shape=a.batch_shape, first_column=first_column,
            first_token=first_id + first_column, target_ids=a.target_ids, draft_ids=a.draft_ids,
            bars=smem + shared.barriers,
            embedding_stage=smem + shared.embedding,
            embedding=smem + shared.embedding + head_tiles.embedding_offset(self.rows, self.embed_half, lane),
            parked=smem + shared.parked + warp * (self.residency.register_tiles * self.parked_chunks * TILE_ROWS * 64) + lane * 16,
            inputs=smem + shared.inputs + warp * (self.residency.ahead * self.rows * self.stage_bytes),
            order=smem + shared.order + warp * (plan_line.MOST_ITEMS * plan_line.ORDER_BYTES),
            items=items, ahead_items=self.residency.ahead % cutlass.max(items, 1),
            ahead_steps=self.residency.ahead // cutlass.max(items, 1),
            stage=cute.make_rmem_tensor(cute.make_layout(1), Int32),
            stage_slot=self.stage_slot + (warp + (-self.stage_slot) % line.warps) % line.warps,
            fragment=head_tiles.fragment_offset(self.tile, lane),
            places=cute.make_rmem_tensor(cute.make_layout(chain_inputs.PLACES), Uint32),
            fragments=cute.make_rmem_tensor(cute.make_layout(max(self.register_words, 1)), Uint32),
            best=cute.make_rmem_tensor(cute.make_layout(2 * self.lane_rows), Uint32),
        )  # fmt: skip
        c.stage[0] = Int32(0)

        # The head is read before the kernel ahead of this one in the stream has ended: nothing there depends on it.
        self.make_barriers(c)
        cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")  # the copy engine sees the barriers
        cute.arch.sync_warp()
        if cutlass.const_expr(self.stages):
            for slot in cutlass.range(warp, self.stage_slot, line.warps, unroll=1):
                self.settle(c, slot)
            if (lane == 0) & (my_register > 0):
                self.fill(c, c.stage_slot, first_register, self.stage_bar(c), Boolean(False))
        else:
            for slot in cutlass.range(warp, self.slots, line.warps, unroll=1):
                self.settle(c, slot)
        if cutlass.const_expr(self.residency.register_tiles > 0 and not self.stages):
            self.fetch_parked(c)
        if cutlass.const_expr(self.pdl and self.residency.register_tiles > 0):
            self.load_register_tiles(c)
        cute.arch.griddepcontrol_wait()

        # Inputs that do depend on it
        launches = Int32(ptx.ldg_b32(a.epoch))
        if cutlass.const_expr(self.world > 1):
            self.meet_ranks(c)
        self.load_row_table(c)
        if warp < self.rows:
            self.fetch_embedding(c, warp, self.load_anchor(c, warp))
        self.keep_input_places(c)
        self.fetch_first_inputs(c)
        cute.arch.sync_threads()  # embeddings and row table are there
        self.prefetch_map(c)
        self.fill_rows(c)
        self.wait_for_rows(c, launches)
        if cutlass.const_expr(not self.pdl and self.residency.register_tiles > 0):
            self.load_register_tiles(c)
        if cutlass.const_expr(self.fills_rows):
            cute.arch.sync_threads()  # the cache rows' -inf comes before any logit

        for step in cutlass.range(NUM_STEPS, unroll=1):
            self.begin_position(c)
            self.multiply_tiles(c, step)
            self.reduce_warp(c)
            cute.arch.sync_threads()  # all keys are there; the embeddings have been read
            self.fill_rest(c, step)  # by warps that wait for the exchange
            sequence = Uint32(launches) * Uint32(NUM_STEPS) + Uint32(step)
            if cutlass.const_expr(self.world > 1):
                self.agree_ranks(c, step, sequence)
            else:
                self.agree(c, step, sequence)
                cute.arch.sync_threads()  # the next embeddings are there
        self.compose_rows(c, launches)
        if (cta == 0) & (tid == 0):
            ptx.stg_b32(a.epoch, Uint32(launches + 1))  # every CTA has read it: each wrote a record of the last position
            if cutlass.const_expr(self.world > 1):
                ptx.stg_b32(a.launches, ptx.ldg_b32(a.launches) + Uint32(1))

    @cute.jit
    def __call__(
        self, head: Int64, embed: Int64, base: Int64, base_row_stride: Int64, base_pos_stride: Int64, noise: Int64,
        noise_pitch: Int64, cache: Int64, cache_req_stride: Int64, cache_pos_stride: Int64, input_ids: Int64,
        query_per_row: Int32, idx_mapping: Int64, temperature: Int64, draft_tokens: Int64, token_stride: Int64,
        records: Int64, epoch: Int64, report: Int64, timeout_ns: Int64, rows: Int32, base_vector: Int32, cache_vector: Int32,
        ctas: Int32, target_ids: Int64, draft_ids: Int64, shard_width: Int32, rank: Int32, peers: Int64,
        launches: Int64, mailbox: Int64, staging: Int64, staging_bytes: Int64, batch_shape: Int32,
        base_rank_stride: Int64, noise_rank_stride: Int64, cache_rank_stride: Int64, token_rank_stride: Int64, stream,
    ):  # fmt: skip
        arguments = (
            head, embed, base, base_row_stride, base_pos_stride, noise, noise_pitch, cache, cache_req_stride, cache_pos_stride,
            input_ids, query_per_row, idx_mapping, temperature, draft_tokens, token_stride, records, epoch, report, timeout_ns,
            rows, base_vector, cache_vector, ctas, target_ids, draft_ids, shard_width, rank, peers, launches,
            mailbox, staging, staging_bytes, batch_shape, base_rank_stride, noise_rank_stride, cache_rank_stride,
            token_rank_stride,
        )  # fmt: skip
        shape = self.describe().shape
        self.kernel(arguments).launch(
            grid=list(shape.grid), block=[shape.block, 1, 1], smem=shape.shared, stream=stream, cooperative=shape.cooperative,
            use_pdl=shape.pdl, min_blocks_per_mp=self.blocks_per_sm,
        )  # fmt: skip


def compile_chain(
    line: PlanLine,
    base_dtype: str,
    cache_dtype: str | None,
    *,
    world: int = 1,
    emulated: bool = False,
    check_ranks: bool = False,
    pdl: bool = False,
    arch: str | None = None,
    options: str = "",
):
    """Compiles one build; needs no GPU. Returns the callable of the DSL: it takes ARGUMENTS, then a stream.

    Args:
        line: What lives where.
        base_dtype: Of the base logits, "bf16" or "fp32".
        cache_dtype: Of the logits cache; None for greedy drafts without one.
        world: Ranks that share the vocabulary: 1, or the line's.
        emulated: All ranks run in one launch on one GPU; `line` is plan_line.emulated's.
        check_ranks: Ranks compare what they are about to launch, and report the first difference.
        pdl: Programmatic dependent launch; the head is loaded while the kernel ahead in the stream still runs.
        arch: Such as "sm_90a"; by default this machine's GPU.
        options: For the DSL's compiler.
    """
    dummies = [Int32(1) if name in NARROW else Int64(16) for name in ARGUMENTS]
    flags = f"--gpu-arch {arch} {options}" if arch else options
    kernel = ChainKernel(line, base_dtype, cache_dtype, world, emulated, check_ranks, pdl)
    return cute.compile(kernel, *dummies, make_fake_stream(), options=flags)
