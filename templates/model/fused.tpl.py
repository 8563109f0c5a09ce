"""Fused Markov loop of {{ spec.model.title }}: one launch a draft position, for any number of request rows.

    bias[v] = bf16(head[v] . embed[prev]),  s = base + bias,  cache = round(s),  score = cache / T + gumbel (T = 0: cache)

A program takes BLOCK head rows and up to 16 request rows (the columns of a tensor-core tile), writes its part of the logits cache
and leaves one candidate key a row. The program that arrives last picks each row's winner, the lowest id with a NaN score, else
the lowest id of the maximum; the next position's launch reads it from draft_tokens. The noise is drawn in the kernel.

Cost: {{ spec.draft.num_steps }} launches; each reads the head once per 16 rows, and base logits and cache once.
This is the path for batches that the chain does not take and for machines without CuTe DSL, and, in Triton's interpreter, for
CPU tensors: set TRITON_INTERPRET=1 before Triton is imported.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .._device import host
from .._device.noise_math import gumbel32, hash_prefix
from .._device.score_math import (
    LARGEST_ID,
    PAD_ORDER,
    key_token,
    narrow_bf16,
    order_of,
    pack_key,
    round_bf16,
    widen_bf16,
)
from . import config

VOCAB_SIZE = tl.constexpr(config.VOCAB_SIZE)
# Ids from here on belong to a padded head: cached as -inf, never drawn.
SAMPLING_LIMIT = tl.constexpr(config.SAMPLING_LIMIT)
NUM_STEPS = tl.constexpr(config.NUM_STEPS)
RANK_DIM = tl.constexpr(config.RANK_DIM)
# Markov rank columns of one tile: the largest power of two that divides the rank, as tl.arange needs one.
RANK_TILE = tl.constexpr(min(config.RANK_DIM & -config.RANK_DIM, 128))
# Added to the position key, so that a draft token and the token that replaces it when it is rejected never share noise.
DRAFT_SALT = tl.constexpr(config.DRAFT_SALT)
# Bits that the draft step is shifted by before it is mixed into the seed: the step fills the seed's high word.
STEP_SHIFT = tl.constexpr(32)

KEY_TILE = tl.constexpr(128)  # programs whose keys the last one reads at a time
LOWEST_KEY = tl.constexpr(-(2**63))  # below every key of a program
VECTOR_BYTES = tl.constexpr(16)  # alignment of weight rows
BLOCK = 64  # head rows of a program on a GPU: 32 KiB of head at rank 256, several programs a SM keep loads in flight
INTERPRETER_BLOCK = 8192  # the interpreter's cost is per program more than per element
NUM_WARPS = 4
ROW_TILE = 16  # request rows of a program: columns of a tensor-core tile
RUNTIME_ARGUMENTS = range(20)  # of the kernel, by place: all but its compile-time constants
LARGEST_STRIDE = 2**31 - 1  # query_per_row and token_stride are 32-bit in the kernel


@triton.jit
def _load_fp32(pointers, mask):
    value = tl.load(pointers, mask=mask)
    if value.dtype == tl.bfloat16:
        value = widen_bf16(value)
    return value


# No argument is specialised: Triton would compile another binary for a value that is 1 or a multiple of 16, or for another
# pointer alignment, and a first such call under graph capture would compile there. Strides of more than 32 bits are declared
# int64, or their value would choose the type. The alignment of the weights is checked by why_not and stated in the body.
@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def _fused_step(
    head,  # bf16 [VOCAB_SIZE, RANK_DIM]
    embed,  # bf16 [VOCAB_SIZE, RANK_DIM]
    base,  # bf16 or fp32 [rows, NUM_STEPS, >= VOCAB_SIZE]
    base_row_stride: tl.int64,
    base_step_stride: tl.int64,
    cache,  # bf16 or fp32 [max_reqs, NUM_STEPS, >= VOCAB_SIZE]
    cache_req_stride: tl.int64,
    cache_step_stride: tl.int64,
    input_ids,  # int32; the anchor of row r is element r * query_per_row
    query_per_row,
    idx_mapping,  # int64 [rows * NUM_STEPS]
    sample_pos,  # int64 [rows * NUM_STEPS]
    temperature,  # fp32 [max_reqs]
    seeds,  # int64 [max_reqs]
    draft_tokens,  # int64 [>= rows, NUM_STEPS]
    token_stride,
    keys,  # int64 [row tiles, programs, ROW_TILE], scratch
    arrivals,  # int32 [row tiles], zero between launches
    rows,
    step,
    BLOCK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    program = tl.program_id(0)
    programs: tl.constexpr = (VOCAB_SIZE + BLOCK - 1) // BLOCK
    tile = tl.program_id(1)
    lane = tl.arange(0, ROW_TILE)
    row = (tile * ROW_TILE + lane).to(tl.int64)
    live = row < rows
    column = program * BLOCK + tl.arange(0, BLOCK)
    in_vocab = column < VOCAB_SIZE

    # prev: the anchor, then the winner of the step before.
    if step == 0:
        prev = tl.load(input_ids + row * query_per_row, mask=live, other=0).to(tl.int64)
        # The anchor of a padding row may be anything.
        prev = tl.where((prev >= 0) & (prev < VOCAB_SIZE), prev, 0)
    else:
        prev = tl.load(draft_tokens + row * token_stride + (step - 1), mask=live, other=0)

    state = tl.load(idx_mapping + row * NUM_STEPS + step, mask=live, other=-1)
    active = state >= 0
    # Padding rows are greedy and read nothing at their index.
    heat = tl.load(temperature + state, mask=active, other=0.0)
    seed = tl.load(seeds + state, mask=active, other=0)
    # % if spec.noise.step_mix
    seed = seed ^ (tl.cast(step, tl.int64) << STEP_SHIFT)
    # % endif
    key = tl.load(sample_pos + row * NUM_STEPS + step, mask=live, other=0) - 1 + DRAFT_SALT

    # Asked for before the head, so that the two latencies overlap.
    base_at = base + row[None, :] * base_row_stride + step * base_step_stride + column[:, None]
    logits = _load_fp32(base_at, in_vocab[:, None] & live[None, :])

    # bias[v, r] = bf16(sum over k of head[v, k] * embed[prev[r], k])
    bias = tl.zeros([BLOCK, ROW_TILE], tl.float32)
    for rank_start in tl.static_range(0, RANK_DIM, RANK_TILE):
        rank = rank_start + tl.arange(0, RANK_TILE)
        head_at = tl.multiple_of(head + column[:, None].to(tl.int64) * RANK_DIM + rank[None, :], [1, VECTOR_BYTES])
        embed_at = tl.multiple_of(embed + prev[None, :] * RANK_DIM + rank[:, None], [VECTOR_BYTES, 1])
        # Masked elements are undefined: they reach only columns beyond the vocabulary and rows beyond the batch.
        head_tile = tl.load(head_at, mask=in_vocab[:, None])
        embed_tile = tl.load(embed_at, mask=live[None, :])
        if TENSOR_CORES:
            bias = tl.dot(head_tile, embed_tile, bias)
        else:
            bias = tl.dot(widen_bf16(head_tile), widen_bf16(embed_tile), bias, input_precision="ieee")
    bias = round_bf16(bias)

    # s = base + bias, rounded to the base logits' dtype, then to the cache's
    logits += bias
    if base.dtype.element_ty == tl.bfloat16 or cache.dtype.element_ty == tl.bfloat16:
        # One rounding, also for two bf16 tensors: rounding twice to the same format changes nothing.
        logits = round_bf16(logits)
    candidate = column < SAMPLING_LIMIT
    logits = tl.where(candidate[:, None], logits, float("-inf"))
    cache_at = cache + state[None, :] * cache_req_stride + step * cache_step_stride + column[:, None]
    cached = in_vocab[:, None] & active[None, :]
    if cache.dtype.element_ty == tl.bfloat16:
        tl.store(cache_at, narrow_bf16(logits), mask=cached)
    else:
        tl.store(cache_at, logits, mask=cached)

    # score = s / T + noise; a greedy row divides by 1 and drops the result
    greedy = heat == 0.0
    noise = gumbel32(hash_prefix(seed, key)[None, :], column[:, None])
    noised = logits / tl.where(greedy, 1.0, heat)[None, :] + noise
    order = order_of(tl.where(greedy[None, :], logits, noised))
    order = tl.where(candidate[:, None], order, PAD_ORDER)
    best = tl.max(order, axis=0)
    winner = tl.min(tl.where(order == best[None, :], column[:, None], LARGEST_ID), axis=0)
    tl.store(keys + (tile * programs + program) * ROW_TILE + lane, pack_key(best, winner))

    # The barrier orders the keys, which several threads stored, before the one thread's atomic; its release publishes them to
    # the GPU. Its acquire, for the program that sees all others arrived, makes their keys visible; .cg reads them from L2.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        leading = tl.full([KEY_TILE, ROW_TILE], LOWEST_KEY, tl.int64)
        for first in range(0, programs, KEY_TILE):
            other = first + tl.arange(0, KEY_TILE)
            keys_at = keys + (tile * programs + other[:, None]) * ROW_TILE + lane[None, :]
            found = tl.load(keys_at, mask=other[:, None] < programs, other=LOWEST_KEY, cache_modifier=".cg")
            leading = tl.maximum(leading, found)
        token = key_token(tl.max(leading, axis=0))
        tl.store(draft_tokens + row * token_stride + step, token, mask=live)
        # No program of this launch counts any more; the next launch of the stream starts from zero, also in a graph replay.
        tl.store(arrivals + tile, 0)


class FusedLoop:
    """Draws all {{ spec.draft.num_steps }} draft tokens of a batch of 1 to `max_reqs` request rows, one launch a position.

    Two calls of one loop must be ordered by one stream (or by events): they share the scratch buffers.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, 16-byte aligned.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], likewise, on the same device. Rows beyond the
            vocabulary are ignored; both are read where they lie, so a reload into the same storage is seen.
        max_reqs: number of request states, and the most rows of a call.
        block: head rows of a program, a power of two; None takes the device's constant. Results do not depend on it.

    Raises:
        ValueError: with `why_not`'s reason, when the loop cannot be built from these.
    """

    def __init__(
        self, embed_weight: torch.Tensor, head_weight: torch.Tensor, *, max_reqs: int, block: int | None = None
    ) -> None:
        reason = self.why_not(embed_weight, head_weight, max_reqs=max_reqs)
        if reason is not None:
            raise ValueError(f"{config.MODEL}: no fused loop: {reason}")
        self.device = embed_weight.device
        self.embed_weight, self.head_weight = embed_weight, head_weight
        self.max_reqs = max_reqs
        self._on_gpu = self.device.type == "cuda"
        if block is None:
            block = BLOCK if self._on_gpu else INTERPRETER_BLOCK
        host.check_int("block", block, ROW_TILE)
        if block & (block - 1):
            raise ValueError(f"block: expected a power of two, got {block}")
        self._block = block
        self._programs = triton.cdiv(config.VOCAB_SIZE, block)
        tiles = triton.cdiv(max_reqs, ROW_TILE)
        self._keys = torch.empty((tiles, self._programs, ROW_TILE), dtype=torch.int64, device=self.device)
        self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        base_dtypes = tuple(host.DTYPES[name] for name in config.BASE_DTYPES)
        cache_dtypes = tuple(host.DTYPES[name] for name in config.CACHE_DTYPES)
        self._base_dtypes, self._cache_dtypes = base_dtypes, cache_dtypes
        self._temperature = host.Expected((torch.float32,), (max_reqs,), (0,), contiguous=True)
        self._seeds = host.Expected((torch.int64,), (max_reqs,), (0,), contiguous=True)
        self._cache = host.Expected(cache_dtypes, (max_reqs, config.NUM_STEPS, config.VOCAB_SIZE), (0, 2))

    @staticmethod
    def why_not(embed_weight: torch.Tensor, head_weight: torch.Tensor, *, max_reqs: int) -> str | None:
        """Why no loop can be built from these, or None. Looks at shapes, dtypes, addresses and the device only."""
        if not isinstance(embed_weight, torch.Tensor):
            return f"embed_weight: expected a tensor, got {host.describe(embed_weight)}"
        device = embed_weight.device
        if device.type != "cuda" and isinstance(_fused_step, triton.JITFunction):
            return f"weights on {device} need Triton's interpreter; set TRITON_INTERPRET=1 before Triton is imported"
        for name, weight, tokens in (
            ("embed_weight", embed_weight, config.VOCAB_SIZE),
            ("head_weight", head_weight, config.DRAFT_VOCAB_SIZE),
        ):
            shape = (tokens, config.RANK_DIM)
            wanted = host.Expected((torch.bfloat16,), shape, (0,), contiguous=True, alignment=VECTOR_BYTES.value)
            found = wanted.misfit(name, weight, device)
            if found is not None:
                return found.message
        if not isinstance(max_reqs, int) or max_reqs < 1:
            return f"max_reqs: expected an int of at least 1, got {max_reqs!r}"
        return None

    def sample(
        self,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor,
        draft_tokens: torch.Tensor,
        *,
        query_per_row: int = config.QUERY_PER_ROW,
    ) -> None:
        """Draw the draft tokens of every row on the current stream. Allocates nothing and does not synchronise.

        Args:
            base_logits: bf16 or fp32 [rows, NUM_STEPS, >= VOCAB_SIZE], last stride 1, other strides free.
            input_ids: int32; the anchor of row r is input_ids[r * query_per_row].
            idx_mapping: int64 [>= rows * NUM_STEPS], request-state index; negative for padding rows.
            sample_pos: int64 [>= rows * NUM_STEPS], position of the token being predicted.
            temperature: fp32 [max_reqs], by request-state index; 0 is greedy.
            seeds: int64 [max_reqs], by request-state index.
            logits_cache: bf16 or fp32 [max_reqs, NUM_STEPS, >= VOCAB_SIZE], last stride 1; columns below VOCAB_SIZE of the
                states in use are written.
            draft_tokens: int64 [>= rows, NUM_STEPS], written by row.
            query_per_row: distance of two rows' anchors in input_ids.

        Raises:
            TypeError: for an argument of another dtype.
            ValueError: for an argument of another shape, layout or device, or more rows than max_reqs.
        """
        rows = base_logits.shape[0]
        host.check_int("rows of base_logits", rows, 1, self.max_reqs)
        host.check_int("query_per_row", query_per_row, 1, LARGEST_STRIDE)
        samples = host.Expected((torch.int64,), (rows * config.NUM_STEPS,), (0,), contiguous=True)
        anchors = host.Expected((torch.int32,), ((rows - 1) * query_per_row + 1,), (0,), contiguous=True)
        tokens = host.Expected((torch.int64,), (rows, config.NUM_STEPS), (0,))
        logits = host.Expected(self._base_dtypes, (rows, config.NUM_STEPS, config.VOCAB_SIZE), (2,))
        for expected, name, tensor in (
            (logits, "base_logits", base_logits),
            (anchors, "input_ids", input_ids),
            (samples, "idx_mapping", idx_mapping),
            (samples, "sample_pos", sample_pos),
            (self._temperature, "temperature", temperature),
            (self._seeds, "seeds", seeds),
            (self._cache, "logits_cache", logits_cache),
            (tokens, "draft_tokens", draft_tokens),
        ):
            expected.check(name, tensor, self.device)
        host.check_int("first stride of draft_tokens", draft_tokens.stride(0), 0, LARGEST_STRIDE)
        # The interpreter computes every lane of a tile, also those without a row.
        row_tile = ROW_TILE if self._on_gpu else min(ROW_TILE, triton.next_power_of_2(rows))
        with torch.cuda.device_of(base_logits):
            for step in range(config.NUM_STEPS):
                _fused_step[self._programs, triton.cdiv(rows, row_tile)](
                    self.head_weight,
                    self.embed_weight,
                    base_logits,
                    base_logits.stride(0),
                    base_logits.stride(1),
                    logits_cache,
                    logits_cache.stride(0),
                    logits_cache.stride(1),
                    input_ids,
                    query_per_row,
                    idx_mapping,
                    sample_pos,
                    temperature,
                    seeds,
                    draft_tokens,
                    draft_tokens.stride(0),
                    self._keys,
                    self._arrivals,
                    rows,
                    step,
                    BLOCK=self._block,
                    ROW_TILE=row_tile,
                    TENSOR_CORES=self._on_gpu,
                    num_warps=NUM_WARPS,
                )

    def warmup(self, cache_dtype: torch.dtype | None = None) -> None:
        """Compile and load every binary that a call can launch, so that none compiles under graph capture.

        Each is launched with one padding row, which writes no cache. Any row count, stride or alignment launches the same
        binaries: there is one for each pair of dtypes.

        Args:
            cache_dtype: the cache dtype that will be used; None warms up all that the spec lists.
        """
        steps, vocab, device = config.NUM_STEPS, config.VOCAB_SIZE, self.device
        anchor = torch.zeros(1, dtype=torch.int32, device=device)
        padding = torch.full((steps,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros(steps, dtype=torch.int64, device=device)
        temperature = torch.zeros(self.max_reqs, dtype=torch.float32, device=device)
        seeds = torch.zeros(self.max_reqs, dtype=torch.int64, device=device)
        tokens = torch.empty((1, steps), dtype=torch.int64, device=device)
        for cache in self._cache_dtypes if cache_dtype is None else (cache_dtype,):
            logits_cache = torch.empty(vocab, dtype=cache, device=device).expand(self.max_reqs, steps, vocab)
            for dtype in self._base_dtypes:
                base = torch.zeros(vocab, dtype=dtype, device=device).expand(1, steps, vocab)
                self.sample(base, anchor, padding, positions, temperature, seeds, logits_cache, tokens, query_per_row=1)


def compile_builds() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Every binary that this module launches on a GPU: "base dtype/cache dtype" -> (jit function, argument types, constants,
    compiler options)."""
    builds = {}
    for base in config.BASE_DTYPES:
        for cache in config.CACHE_DTYPES:
            signature = {
                "head": "*bf16",
                "embed": "*bf16",
                "base": f"*{base}",
                "base_row_stride": "i64",
                "base_step_stride": "i64",
                "cache": f"*{cache}",
                "cache_req_stride": "i64",
                "cache_step_stride": "i64",
                "input_ids": "*i32",
                "query_per_row": "i32",
                "idx_mapping": "*i64",
                "sample_pos": "*i64",
                "temperature": "*fp32",
                "seeds": "*i64",
                "draft_tokens": "*i64",
                "token_stride": "i32",
                "keys": "*i64",
                "arrivals": "*i32",
                "rows": "i32",
                "step": "i32",
                "BLOCK": "constexpr",
                "ROW_TILE": "constexpr",
                "TENSOR_CORES": "constexpr",
            }
            constants = {"BLOCK": BLOCK, "ROW_TILE": ROW_TILE, "TENSOR_CORES": True}
            builds[f"{base}/{cache}"] = (_fused_step, signature, constants, {"num_warps": NUM_WARPS})
    return builds
