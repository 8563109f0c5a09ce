"""Fused Markov loop of {{ spec.model.title }}: one launch a draft position, for any number of request rows.

    bias[v] = bf16(head[v] . embed[prev]),  s = transform(base + bias),  cache = round(s),  score = cache / T + gumbel (T = 0: cache)

A program takes BLOCK head rows and up to 16 request rows (the columns of a tensor-core tile), writes its part of the logits cache
and leaves one candidate a row. The program that arrives last picks each row's winner, the lowest id with a NaN score, else
the lowest id of the maximum; the next position's launch reads it from draft_tokens. The noise is drawn in the kernel.

Cost: {{ spec.draft.num_steps }} launches; each reads the head once per 16 rows, and base logits and cache once.
This is the path for batches that the chain does not take and for machines without CuTe DSL, and, in Triton's interpreter, for
CPU tensors: set TRITON_INTERPRET=1 before Triton is imported.
"""

import triton
import triton.language as tl

from .._device import fused_launcher
from .._device.fused_math import best_of_programs, best_of_tile, bias_tile, leave_candidates, previous_token
from .._device.noise_math import gumbel_noise, step_seed
from .._device.score_math import (
    LARGEST_ID,
    add_bias,
    load_fp32,
    order_of,
    pad_order,
    round_bf16,
    round_to,
    store_rounded,
)
from . import config

VOCAB_SIZE = tl.constexpr(config.VOCAB_SIZE)
DRAFT_VOCAB_SIZE = tl.constexpr(config.DRAFT_VOCAB_SIZE)
# Target ids from here on belong to a padded head: cached as -inf, never drawn.
SAMPLING_LIMIT = tl.constexpr(config.SAMPLING_LIMIT)
NUM_STEPS = tl.constexpr(config.NUM_STEPS)
RANK_DIM = tl.constexpr(config.RANK_DIM)
RANK_TILE = tl.constexpr(fused_launcher.rank_tile(config.RANK_DIM))
TRANSFORM = tl.constexpr(config.TRANSFORM)
BASE_CAPPED = tl.constexpr(config.BASE_CAPPED)
MULTIPLIER = tl.constexpr(config.MULTIPLIER)
SOFT_CAP = tl.constexpr(config.SOFT_CAP)
INVERSE_SOFT_CAP = tl.constexpr(config.INVERSE_SOFT_CAP)
NOISE_SCHEME = tl.constexpr(config.NOISE_SCHEME)
STEP_MIX = tl.constexpr(config.STEP_MIX)
# Added to the position key, so that a draft token and the token that replaces it when it is rejected never share noise.
DRAFT_SALT = tl.constexpr(config.DRAFT_SALT)


# No argument is specialised: Triton would compile another binary for a value that is 1 or a multiple of 16, or for another
# pointer alignment, and a first such call under graph capture would compile there. Strides of more than 32 bits are declared
# int64, or their value would choose the type. The alignment of the weights is checked by why_not and stated in the body.
@triton.jit(do_not_specialize=fused_launcher.RUNTIME_ARGUMENTS)
def _fused_step(
    head,  # bf16 [DRAFT_VOCAB_SIZE, RANK_DIM]
    embed,  # bf16 [VOCAB_SIZE, RANK_DIM]
    # % if spec.vocabulary.d2t
    target_ids,  # int32 [DRAFT_VOCAB_SIZE]
    # % endif
    base,  # bf16 or fp32 [rows, NUM_STEPS, >= DRAFT_VOCAB_SIZE]
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
    orders,  # int32, or int64 for fp64 scores [row tiles, programs, ROW_TILE], scratch
    winners,  # int32, likewise
    arrivals,  # int32 [row tiles], zero between launches
    rows,
    step,
    BLOCK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    programs: tl.constexpr = (DRAFT_VOCAB_SIZE + BLOCK - 1) // BLOCK
    base_type: tl.constexpr = base.dtype.element_ty
    row = (tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    live = row < rows
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_vocab = column < DRAFT_VOCAB_SIZE
    # % if spec.vocabulary.d2t
    token = tl.load(target_ids + column, mask=in_vocab, other=LARGEST_ID)
    # % else
    token = column
    # % endif
    candidate = token < SAMPLING_LIMIT

    prev = previous_token(step, input_ids, query_per_row, draft_tokens, token_stride, row, live, VOCAB_SIZE)
    state = tl.load(idx_mapping + row * NUM_STEPS + step, mask=live, other=-1)
    active = state >= 0
    # Padding rows are greedy and read nothing at their index.
    heat = tl.load(temperature + state, mask=active, other=0.0)
    seed = step_seed(tl.load(seeds + state, mask=active, other=0), step, STEP_MIX)
    key = tl.load(sample_pos + row * NUM_STEPS + step, mask=live, other=0) - 1 + DRAFT_SALT

    # Asked for before the head, so that the two latencies overlap.
    base_at = base + row[None, :] * base_row_stride + step * base_step_stride + column[:, None]
    logits = load_fp32(base_at, in_vocab[:, None] & live[None, :])

    bias = round_bf16(bias_tile(head, embed, column, prev, in_vocab, live, RANK_DIM, RANK_TILE, TENSOR_CORES))
    logits = add_bias(
        logits, bias, base_type, TRANSFORM, BASE_CAPPED, MULTIPLIER, SOFT_CAP, INVERSE_SOFT_CAP
    )
    logits = tl.where(candidate[:, None], round_to(logits, cache.dtype.element_ty), float("-inf"))
    cache_at = cache + state[None, :] * cache_req_stride + step * cache_step_stride + token[:, None]
    store_rounded(cache_at, logits, in_vocab[:, None] & active[None, :])

    # score = s / T + noise; a greedy row divides by 1 and drops the result
    greedy = heat == 0.0
    noise = gumbel_noise(seed[None, :], key[None, :], token[:, None], NOISE_SCHEME)
    noised = logits / tl.where(greedy, 1.0, heat)[None, :] + noise
    order = order_of(tl.where(greedy[None, :], logits, noised))
    order = tl.where(candidate[:, None], order, pad_order(order.dtype))

    best, winner = best_of_tile(order, token)
    if leave_candidates(orders, winners, arrivals, best, winner, programs):
        drawn = best_of_programs(orders, winners, programs, ROW_TILE)
        tl.store(draft_tokens + row * token_stride + step, drawn.to(tl.int64), mask=live)
        # No program of this launch counts any more; the next launch of the stream starts from zero, also in a graph replay.
        tl.store(arrivals + tl.program_id(1), 0)


class FusedLoop(fused_launcher.FusedLauncher):
    """Draws all {{ spec.draft.num_steps }} draft tokens of a batch of any size, one launch a position; documented in FusedLauncher."""

    config = config
    kernel = _fused_step


compile_builds = FusedLoop.builds
