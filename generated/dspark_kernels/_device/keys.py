"""Ordered keys: the winner of a row is the largest 64-bit key, whoever compares and in whatever order.

    key = ordered(score) : 32 | (ID_MASK - token id) : id_bits | 0 : tag_bits

`ordered` maps fp32 to unsigned integers so that a larger score is a larger integer, -0.0 equals +0.0 and every NaN is the
largest of all; the complemented id makes the lowest id win among equals. The tag bits are zero while a CTA reduces and
carry the exchange's sequence number in a record (exchange.py). Key 0 is "no candidate": ordered(-inf) is already larger.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import ptx

SIGN = 0x80000000


def ordered(score: Float32) -> Uint32:
    """The rank of a score among all fp32 values. Adding +0.0 makes -0.0 into +0.0 and every NaN into 0x7FFFFFFF."""
    bits = ptx.bits_of(ptx.add_rn(score, Float32(0.0)))
    negative = Uint32(Int32(bits) >> 31)  # all ones for a negative score
    return bits ^ (negative | Uint32(SIGN))


def low_word(token: Int32, id_bits: int) -> Uint32:
    """The lower half of a key: a smaller token id gives a larger word."""
    return Uint32((1 << id_bits) - 1 - token) << Uint32(32 - id_bits)


def token_of(low: Uint32, id_bits: int) -> Int32:
    """The token id in the lower half of a key or record."""
    return Int32((1 << id_bits) - 1) - Int32(low >> Uint32(32 - id_bits))


def larger(hi: Uint32, lo: Uint32, other_hi: Uint32, other_lo: Uint32):
    """The larger of two keys, as (high, low)."""
    first = (hi > other_hi) | ((hi == other_hi) & (lo > other_lo))
    return ptx.select(first, hi, other_hi), ptx.select(first, lo, other_lo)


@cute.jit
def warp_largest(hi: Uint32, lo: Uint32):
    """The largest key of the warp, in every lane."""
    top = ptx.warp_max_u32(hi)
    low = lo
    if hi != top:
        low = Uint32(0)
    return top, ptx.warp_max_u32(low)
