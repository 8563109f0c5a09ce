"""Exact score arithmetic as Triton device functions: bf16 in fp32 registers, and the order of scores.

bf16 values are carried as fp32 whose low 16 bits are zero. Conversions are integer operations, because Triton's interpreter
truncates where the hardware rounds to nearest even, and the two must agree to the bit.
"""

import triton
import triton.language as tl

# A score's order word is a signed 32-bit integer. NaN ranks above +inf (0x7F800000), padding below -inf (-0x7F800001).
NAN_ORDER = tl.constexpr(0x7FFFFFFF)
PAD_ORDER = tl.constexpr(-0x80000000)
# All bits of an id: flipping them turns the lowest id into the highest number.
LARGEST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def widen_bf16(value):
    """bf16 to fp32, exact."""
    return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(value):
    """fp32 to the nearest bf16, ties to even, left in fp32. NaN stays NaN, overflow gives infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
    # The carry would turn some NaN payloads into infinities or zeros.
    return tl.where(value == value, rounded.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def narrow_bf16(value):
    """fp32 that `round_bf16` has rounded, to bf16, exact."""
    return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def order_of(score):
    """int32 whose signed order is that of the fp32 scores: -0.0 equals +0.0, and every NaN ranks highest."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, ordered, NAN_ORDER)


@triton.jit
def pack_key(order, token):
    """int64 candidate key whose maximum is the winner: the highest order word, then the lowest token id (int32, >= 0)."""
    return (order.to(tl.int64) << 32) | (token ^ LARGEST_ID).to(tl.int64)


@triton.jit
def key_token(key):
    """int64 token id of a key from `pack_key`."""
    return (key & LARGEST_ID) ^ LARGEST_ID
