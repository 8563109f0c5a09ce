"""What the fused loop's kernels share, as Triton device functions: the bias tile, and who draws when all programs are done."""

import triton
import triton.language as tl

from .score_math import LARGEST_ID, pad_order, widen_bf16

VECTOR_BYTES = tl.constexpr(16)  # alignment of weight rows, and of the mask's stores
KEY_TILE = tl.constexpr(128)  # programs whose candidates the last one reads at a time


@triton.jit
def previous_token(step, input_ids, query_per_row, draft_tokens, token_stride, row, live, VOCAB_SIZE: tl.constexpr):
    """Target id that a position continues from, int64 by row: the anchor, then the winner of the step before."""
    if step == 0:
        token = tl.load(input_ids + row * query_per_row, mask=live, other=0).to(tl.int64)
        # The anchor of a padding row may be anything.
        token = tl.where((token >= 0) & (token < VOCAB_SIZE), token, 0)
    else:
        token = tl.load(draft_tokens + row * token_stride + (step - 1), mask=live, other=0)
    return token


@triton.jit
def bias_tile(
    head,
    embed,
    column,
    prev,
    in_vocab,
    live,
    RANK_DIM: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    """sum over k of head[column, k] * embed[prev, k] in fp32, not rounded: [columns, rows].

    Elements of columns beyond the vocabulary and rows beyond the batch are undefined.
    """
    bias = tl.zeros([column.shape[0], prev.shape[0]], tl.float32)
    for rank_start in tl.static_range(0, RANK_DIM, RANK_TILE):
        rank = rank_start + tl.arange(0, RANK_TILE)
        head_at = tl.multiple_of(head + column[:, None].to(tl.int64) * RANK_DIM + rank[None, :], [1, VECTOR_BYTES])
        embed_at = tl.multiple_of(embed + prev[None, :] * RANK_DIM + rank[:, None], [VECTOR_BYTES, 1])
        head_tile = tl.load(head_at, mask=in_vocab[:, None])
        embed_tile = tl.load(embed_at, mask=live[None, :])
        if TENSOR_CORES:
            bias = tl.dot(head_tile, embed_tile, bias)
        else:
            bias = tl.dot(widen_bf16(head_tile), widen_bf16(embed_tile), bias, input_precision="ieee")
    return bias


@triton.jit
def best_of_tile(order, token):
    """The highest order of each row and the lowest token id that has it: ([rows], [rows]) of order [columns, rows]."""
    best = tl.max(order, axis=0)
    return best, tl.min(tl.where(order == best[None, :], token[:, None], LARGEST_ID), axis=0)


@triton.jit
def leave_candidates(orders, tokens, arrivals, best, winner, programs: tl.constexpr):
    """Leave this program's candidates; true for the program that finds all others' left.

    orders, tokens: int32 or int64, and int32 [row tiles, programs, rows of a tile]; arrivals: int32 [row tiles].
    """
    tile = tl.program_id(1)
    slot = (tile * programs + tl.program_id(0)) * best.shape[0] + tl.arange(0, best.shape[0])
    tl.store(orders + slot, best)
    tl.store(tokens + slot, winner)
    # The barrier orders the candidates, which several threads stored, before the one thread's atomic; its release publishes them
    # to the GPU. Its acquire, for the program that sees all others arrived, makes theirs visible; .cg reads them from L2.
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def best_of_programs(orders, tokens, programs: tl.constexpr, ROW_TILE: tl.constexpr):
    """The token of each row's winner among all programs' candidates, int32 [ROW_TILE]; for the program that arrived last."""
    lane = tl.arange(0, ROW_TILE)
    order_type: tl.constexpr = orders.dtype.element_ty
    leading = tl.zeros([KEY_TILE, ROW_TILE], order_type) + pad_order(order_type)
    leader = tl.full([KEY_TILE, ROW_TILE], LARGEST_ID, tl.int32)
    for first in range(0, programs, KEY_TILE):
        other = first + tl.arange(0, KEY_TILE)
        slot = (tl.program_id(1) * programs + other[:, None]) * ROW_TILE + lane[None, :]
        there = other[:, None] < programs
        order = tl.load(orders + slot, mask=there, other=pad_order(order_type), cache_modifier=".cg")
        token = tl.load(tokens + slot, mask=there, other=LARGEST_ID, cache_modifier=".cg")
        better = (order > leading) | ((order == leading) & (token < leader))
        leading = tl.where(better, order, leading)
        leader = tl.where(better, token, leader)
    best = tl.max(leading, axis=0)
    return tl.min(tl.where(leading == best[None, :], leader, LARGEST_ID), axis=0)


# As for the loop's kernels: no argument is specialised.
@triton.jit(do_not_specialize=range(4))
def mask_rows(
    cache,
    cache_req_stride: tl.int64,
    cache_step_stride: tl.int64,
    idx_mapping,
    NUM_STEPS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill a call's rows of the logits cache with -inf, one program a block of ids and sample: ids without a draft id keep it.

    The stores are aligned vectors wherever a row starts; a block is shifted down to where the row's first vector begins, so there is
    one block more than BLOCK divides the vocabulary into where the last one does not reach.
    """
    ENTRY_BYTES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    ENTRIES: tl.constexpr = VECTOR_BYTES // ENTRY_BYTES
    sample = tl.program_id(1).to(tl.int64)
    state = tl.load(idx_mapping + sample)
    row = cache + state * cache_req_stride + (sample % NUM_STEPS) * cache_step_stride
    # Entries of the first vector that are not the row's.
    before = ((row.to(tl.int64) % VECTOR_BYTES) // ENTRY_BYTES).to(tl.int32)
    start = tl.multiple_of(row - before, VECTOR_BYTES)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // ENTRIES)[:, None] * ENTRIES
    entry = tl.arange(0, ENTRIES)[None, :]
    whole = (place >= before) & (place + ENTRIES <= before + VOCAB_SIZE)
    masked = tl.full([BLOCK // ENTRIES, ENTRIES], float("-inf"), tl.float32).to(cache.dtype.element_ty)
    tl.store(start + (place + entry), masked, mask=whole & (state >= 0))
    if (tl.program_id(0) == 0) | ((tl.program_id(0) + 1) * BLOCK > before + VOCAB_SIZE):
        inside = (place + entry >= before) & (place + entry < before + VOCAB_SIZE)
        tl.store(start + (place + entry), masked, mask=inside & (whole == 0) & (state >= 0))
