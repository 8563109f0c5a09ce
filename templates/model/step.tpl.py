"""Step kernels of {{ spec.model.title }}: the tail of one draft position in one launch, behind the engine's own product for the bias.

For a position and each request row (tests/harness/oracle.py is the exact contract):
# % if spec.logits.cache_dtypes
    logit[v]  = cache_round(transform(base[v] + bias[v]))   the sum rounded to the base logits' dtype
    cache[v]  = logit[v]                                    not written for padding rows
    score[v]  = logit[v] / T + noise[v]                     logit[v] alone where T == 0
    token     = the lowest id whose score is NaN, else the lowest id of the maximum
# % else
    score[v]  = transform(base[v] + bias[v])                the sum rounded to the base logits' dtype
    token     = the lowest draft id whose score is NaN, else the lowest draft id of the maximum; as target id
# % endif

`anchor_embed` gathers the anchors' Markov embeddings once a call. `step` does the above: a block takes some columns of one row, and the
block of a row that arrives last writes the draft token and gathers its embedding, or, where ranks share the vocabulary, writes the row's
packet. `pick` takes the ranks' packets to token and embedding. `cache_fill` takes the ranks' flat shards to the cache.

Cost of a position: one launch (two, and a gathering of a packet a row, with ranks); base and bias read once, the cache written once.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from .._device import ptx, step_fill, step_mapped, step_memory, step_rows, step_scan, step_scores, step_sizes, step_state, step_tail
from .._device.kernel_image import Description, LaunchShape, parameters
from . import config

LANES = 32
WORD_BYTES = 4
FILL_KERNEL = step_mapped.MappedFillKernel if config.D2T else step_fill.FillKernel
BLOCK_SIZES = (1024, 2048, 4096, 8192)  # vocabulary columns of a block; all give the same tokens
LEAST_THREADS, MOST_THREADS = 128, 256  # of a block
MOST_COLUMNS = 32  # of a thread, where that leaves a block enough threads

# What the compiled kernels take, in this order: addresses and sizes as Python ints, strides in elements, then the stream.
ANCHOR_ARGUMENTS = (
    "embed",  # address of the Markov embedding, bf16 [VOCAB_SIZE, RANK_DIM]
    "embeddings",  # out: address, bf16 [rows, RANK_DIM], of position 0
    "input_ids",  # address, int32; row r's anchor is input_ids[r * query_per_row]
    "query_per_row",
    "scratch",  # out: zeroed for `rows` rows
    "rows",
)
STEP_ARGUMENTS = (
    "base",  # address of the base logits of row 0 at this position and this shard's first column
    "base_row_stride",
    "bias",  # address of the bias, bf16 [rows, width]
    "bias_row_stride",
    # From here to `seeds` not used by greedy drafts.
    "cache",  # address of the cache of state 0 at this position; of row 0 of a flat shard where `cache_fill` follows
    "cache_row_stride",  # between two states; between two rows of a flat shard
    "idx_mapping",  # address, int64 [rows * NUM_STEPS]
    "sample_pos",  # address, int64 [rows * NUM_STEPS]
    "temperature",  # address, fp32, by request-state index
    "seeds",  # address, int64, by request-state index
    "scratch",  # address of step_sizes.scratch_words(rows) words, zeroed by anchor_embed; left zero
    "draft_tokens",  # address, int64, of row 0, position 0; not used with ranks
    "token_stride",
    "embed",  # address of the Markov embedding; not used with ranks
    "embeddings",  # out: address, bf16 [rows, RANK_DIM], of the next position; not used with ranks
    "packets",  # out, with ranks only: address, int32 [rows, PACKET_WORDS]
    "target_ids",  # address, int32, of this shard's first column; only of a reduced vocabulary
    "rows",
    "step",
    "vocab_start",  # draft id of this shard's first column
    "width",  # columns of this shard
)
PICK_ARGUMENTS = (
    "packets",  # address, int32 [world, rows, PACKET_WORDS]
    "draft_tokens",
    "token_stride",
    "embed",
    "embeddings",
    "rows",
    "step",
    "world",
)
FILL_ARGUMENTS = (
    "shards",  # address of the flat shards, [world][rows][NUM_STEPS][pitch]
    "rank_stride",
    "pitch",
    "cache",  # address of state 0, position 0, column 0
    "cache_req_stride",
    "cache_pos_stride",
    "idx_mapping",
    "inverse",  # address, int32 [VOCAB_SIZE]: draft id of a target id, or -1; only of a reduced vocabulary
    "rows",
    "world",
    "width",  # columns of a shard
)
NARROW = ("query_per_row", "rows", "step", "vocab_start", "width", "world")  # int32, all others int64


def threads_of(block: int) -> int:
    """Threads of a block that takes so many columns."""
    return min(MOST_THREADS, max(LEAST_THREADS, block // MOST_COLUMNS))


def shared_bytes(block: int) -> int:
    """Shared memory of a block: the best key of each warp, and the hint of the best score so far."""
    return (threads_of(block) // LANES + 1) * step_sizes.SHARED_KEY_BYTES


class StepKernel(step_scan.Scan, step_tail.Tail):
    """One build: columns of a block, the base logits' and the cache's dtype, ranks, 16-byte accesses."""

    def __init__(self, block: int, base_dtype: str, cache_dtype: str, sharded: bool, vector: bool, pdl: bool) -> None:
        if block not in BLOCK_SIZES:
            raise ValueError(f"block: expected one of {', '.join(map(str, BLOCK_SIZES))}, got {block}")
        self.block, self.sharded = block, sharded
        threads = threads_of(block)
        self.shared_bytes = shared_bytes(block)
        by_row = sharded or config.D2T  # the cache is a flat shard
        turns = block // (threads * step_scan.ENTRIES)
        step_scan.Scan.__init__(self, config, base_dtype, cache_dtype, by_row, vector, threads, turns)
        step_tail.Tail.__init__(self, config, pdl)

    def launch_shape(self) -> LaunchShape:
        """How it is launched: an empty shard has a block too, which writes its packets."""
        return LaunchShape(
            ("rows", ("width", self.block), 1), self.threads, self.shared_bytes, cooperative=False, pdl=self.pdl
        )

    @cute.kernel
    def kernel(
        self,
        base: Int64,
        base_row_stride: Int64,
        bias: Int64,
        bias_row_stride: Int64,
        cache: Int64,
        cache_row_stride: Int64,
        idx_mapping: Int64,
        sample_pos: Int64,
        temperature: Int64,
        seeds: Int64,
        scratch: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        embed: Int64,
        embeddings: Int64,
        packets: Int64,
        target_ids: Int64,
        step: Int32,
        vocab_start: Int32,
        width: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()  # rows first: a row's later blocks find a floor that its first ones left
        _, parts, _ = cute.arch.grid_dim()
        warp, lane = cute.arch.make_warp_uniform(tid // LANES), tid % LANES
        base_row = base + Int64(row) * base_row_stride * self.base_bytes
        bias_row = bias + Int64(row) * bias_row_stride * step_scan.BF16_BYTES
        scratch_row = scratch + Int64(row) * step_sizes.SCRATCH_BYTES
        staged = cute.make_rmem_tensor(cute.make_layout(self.depth * self.staged_words), Uint32)
        shared = Int32(cutlass.memory.SmemAllocator().allocate(self.shared_bytes, step_sizes.SHARED_KEY_BYTES).toint())
        shared_hint = shared + self.threads // LANES * step_sizes.SHARED_KEY_BYTES
        if tid == 0:
            ptx.sts_b32(shared_hint, Uint32(0))

        # Nothing is read or written before the kernel ahead has ended: bias, scratch and tokens come from it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # The first turns' loads start ahead of the row's state, which is two loads deep: the barrier keeps the compiler from
        # turning that round.
        place = step_state.Context(
            tid=tid, warp=warp, first_column=part * self.block, end=cutlass.min(width, (part + 1) * self.block), base=base_row,
            bias=bias_row, target_ids=target_ids, staged=staged
        )  # fmt: skip
        self.fetch_first(place)
        cute.arch.sync_threads()  # the block's hint is there
        known_hint = self.scores.hint_in_memory(scratch_row)
        c = self.with_state(
            place, row, step, idx_mapping, sample_pos, temperature, seeds, cache, cache_row_stride
        )._replace(
            lane=lane, vocab_start=vocab_start, known_hint=known_hint, shared_hint=shared_hint,
            floor=cute.make_rmem_tensor(cute.make_layout(1), Float32),
            best=cute.make_rmem_tensor(cute.make_layout(self.scores.KEY_WORDS), Uint32),
            logits=cute.make_rmem_tensor(cute.make_layout(step_scan.ENTRIES), Float32),
            bounds=cute.make_rmem_tensor(cute.make_layout(step_scan.ENTRIES), Float32),
        )  # fmt: skip
        for i in cutlass.range_constexpr(self.scores.KEY_WORDS):
            c.best[i] = Uint32(0)

        for turn in cutlass.range(self.turns(c), unroll=1):
            self.scan_turn(c, turn)

        # The block's best key, and the row's once all its blocks have arrived
        best = step_scores.warp_largest([c.best[i] for i in range(self.scores.KEY_WORDS)])
        if lane == 0:
            for i in cutlass.range_constexpr(self.scores.KEY_WORDS):
                ptx.sts_b32(shared + warp * step_sizes.SHARED_KEY_BYTES + i * WORD_BYTES, best[i])
        cute.arch.sync_threads()
        best = [Uint32(0)] * self.scores.KEY_WORDS
        if tid < self.threads // LANES:
            best = ptx.lds_b128(shared + tid * step_sizes.SHARED_KEY_BYTES)[: self.scores.KEY_WORDS]
        if warp == 0:
            best = step_scores.warp_largest(best)
            arrived = Uint32(0)
            if lane == 0:
                if best[0] != 0:
                    self.scores.raise_key(scratch_row, best)
                arrived = step_memory.arrive(scratch_row + step_sizes.ARRIVALS_BYTE, Uint32(parts - 1))
            if cute.arch.shuffle_sync(arrived, 0) == Uint32(parts - 1):
                self.finish_row(
                    lane,
                    row,
                    step,
                    scratch_row,
                    draft_tokens,
                    token_stride,
                    embed,
                    embeddings,
                    packets,
                    target_ids,
                    vocab_start,
                )

    @cute.jit
    def finish_row(
        self,
        lane: Int32,
        row: Int32,
        step: Int32,
        scratch_row: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        embed: Int64,
        embeddings: Int64,
        packets: Int64,
        target_ids: Int64,
        vocab_start: Int32,
    ):
        """The row's winner from its best key, by one warp; the scratch is left zero for the next position."""
        winner = [Uint32(0)] * self.scores.KEY_WORDS
        if lane == 0:  # the thread whose arrival acquired the other blocks' keys
            winner = self.scores.take_key(scratch_row)
        *rank, low = [Uint32(cute.arch.shuffle_sync(word, 0)) for word in winner]
        token = self.token_of(Int32(low ^ Uint32(step_tail.ALL_ONES)), rank[0] != 0, target_ids, vocab_start)
        if cutlass.const_expr(self.sharded):
            self.write_packet(lane, packets, row, rank, token)
        else:
            self.write_token(lane, draft_tokens, token_stride, row, step, token)
            self.gather_embedding(lane, embed, token, embeddings, row)

    @cute.jit
    def __call__(
        self,
        base: Int64,
        base_row_stride: Int64,
        bias: Int64,
        bias_row_stride: Int64,
        cache: Int64,
        cache_row_stride: Int64,
        idx_mapping: Int64,
        sample_pos: Int64,
        temperature: Int64,
        seeds: Int64,
        scratch: Int64,
        draft_tokens: Int64,
        token_stride: Int64,
        embed: Int64,
        embeddings: Int64,
        packets: Int64,
        target_ids: Int64,
        rows: Int32,
        step: Int32,
        vocab_start: Int32,
        width: Int32,
        stream,
    ):
        parts = cutlass.max((width + (self.block - 1)) // self.block, 1)  # an empty shard writes its packets
        self.kernel(
            base, base_row_stride, bias, bias_row_stride, cache, cache_row_stride, idx_mapping, sample_pos, temperature, seeds,
            scratch, draft_tokens, token_stride, embed, embeddings, packets, target_ids, step, vocab_start, width,
        ).launch(
            grid=[rows, parts, 1], block=[self.threads, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=self.pdl
        )  # fmt: skip


def _compile(kernel, names: tuple[str, ...], arch: str | None, options: str):
    dummies = [Int32(1) if name in NARROW else Int64(16) for name in names]
    flags = f"--gpu-arch {arch} {options}" if arch else options
    return cute.compile(kernel, *dummies, make_fake_stream(), options=flags)


def compile_anchor_embed(*, pdl: bool = False, arch: str | None = None, options: str = ""):
    """Compiles anchor_embed; needs no GPU. `arch` such as "sm_90a" (default: this machine's GPU).

    Returns the callable of the DSL: it takes ANCHOR_ARGUMENTS, then a stream. `pdl`: programmatic dependent launch.
    """
    return _compile(step_rows.AnchorKernel(config, pdl), ANCHOR_ARGUMENTS, arch, options)


def compile_step(
    block: int,
    base_dtype: str,
    cache_dtype: str,
    *,
    sharded: bool = False,
    vector: bool = True,
    pdl: bool = False,
    arch: str | None = None,
    options: str = "",
):
    """Compiles one build of step; it takes STEP_ARGUMENTS, then a stream.

    `block`: columns of a block, one of BLOCK_SIZES. Dtypes: "bf16" or "fp32"; "" for the cache that greedy drafts do not have.
    `sharded`: write packets and a flat shard of the cache.
    `vector`: 16-byte accesses, for widths of a multiple of 8 and base, bias and cache rows that start on 16 bytes.
    """
    kernel = StepKernel(block, base_dtype, cache_dtype, sharded, vector, pdl)
    return _compile(kernel, STEP_ARGUMENTS, arch, options)


def compile_pick(*, pdl: bool = False, arch: str | None = None, options: str = ""):
    """Compiles pick; it takes PICK_ARGUMENTS, then a stream."""
    return _compile(step_rows.PickKernel(config, pdl), PICK_ARGUMENTS, arch, options)


def compile_cache_fill(
    cache_dtype: str, *, vector: bool = True, pdl: bool = False, arch: str | None = None, options: str = ""
):
    """Compiles cache_fill; it takes FILL_ARGUMENTS, then a stream. `vector`: as for step, of shards and cache."""
    return _compile(FILL_KERNEL(config, cache_dtype, vector, pdl), FILL_ARGUMENTS, arch, options)


# The kernels that a host names: of a build, step_call.Build, the kernel; its arguments, and those that are none of the kernel's own.
KINDS = {
    "anchor": (lambda b: step_rows.AnchorKernel(config, b.pdl), ANCHOR_ARGUMENTS, ("rows",)),
    "step": (lambda b: StepKernel(b.block, b.base, b.cache, b.sharded, b.vector, b.pdl), STEP_ARGUMENTS, ("rows",)),
    "pick": (lambda b: step_rows.PickKernel(config, b.pdl), PICK_ARGUMENTS, ("rows",)),
    "fill": (lambda b: FILL_KERNEL(config, b.cache, b.vector, b.pdl), FILL_ARGUMENTS, ("world",)),
}


def compile_build(build: Any, *, arch: str | None = None, options: str = ""):
    """Compiles a build."""
    make, names, _ = KINDS[build.kernel]
    return _compile(make(build), names, arch, options)


def describe(build: Any) -> Description:
    """What a host must know to launch a build without this module."""
    make, names, unused = KINDS[build.kernel]
    own = parameters([name for name in names if name not in unused], NARROW)
    return Description(own, make(build).launch_shape(), {})


def compile_builds() -> dict[str, tuple[Callable[[str, str], Any], int]]:
    """Every build that this module is launched as, by name: a function that compiles it for an arch with options of the DSL, and its
    shared memory in bytes."""
    builds = {}
    for base in config.BASE_DTYPES:
        for cache, block, sharded, vector, pdl in product(
            config.CACHE_DTYPES or ("",),
            BLOCK_SIZES,
            sorted({world > 1 for world in config.TP_SIZES}),
            (True, False),
            (False, True),
        ):
            options = {"sharded": sharded, "vector": vector, "pdl": pdl}
            dtypes = f"{base}/{cache}" if cache else base
            name = " ".join([f"step {dtypes} {block}", *(option for option, on in options.items() if on)])
            builds[name] = _build(compile_step, block, base, cache, **options), shared_bytes(block)
    for pdl in (False, True):
        suffix = " pdl" if pdl else ""
        builds[f"anchor_embed{suffix}"] = _build(compile_anchor_embed, pdl=pdl), 0
        builds[f"pick{suffix}"] = _build(compile_pick, pdl=pdl), 0
        for cache, vector in product(config.CACHE_DTYPES, (True, False)):
            name = " ".join(["cache_fill", cache, *(["vector"] if vector else [])])
            builds[f"{name}{suffix}"] = _build(compile_cache_fill, cache, vector=vector, pdl=pdl), FILL_KERNEL.shared_bytes(config, cache)
    return builds


def _build(compile_kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[str, str], Any]:
    return lambda arch, flags: compile_kernel(*arguments, **options, arch=arch, options=flags)
