"""Gumbel noise of the draft samplers, all schemes, as Triton device functions.

One draw is a pure function of (seed, key, target token id). `gumbel_noise` draws it by the scheme that a spec names:

- `murmur3_32`: MurmurHash3_x86_32 over their 16 bytes gives 32 random bits, these give a uniform in (0, 1], and
  g = -log(-log1p(-u)) is its Gumbel noise. Large noise, which decides the arg max, comes from small u, where fp32 is finest.
- `murmur3_64`: a second hash gives the high word, the upper 53 bits a uniform in (0, 1), and g = -log(-log(u)) in fp64.
- `philox_32`: Philox 4x32-10 as Triton has it, keyed by a first draw from seed and key; g = -log(-log1p(-u)) with libdevice's log1p.

The order of the floating-point operations is part of the contract. On a GPU each Horner step is one fused multiply-add
(Triton contracts it by default) and `tl.log` is libdevice's flush-to-zero logarithm; regrouping a sum or replacing a
function changes the last bits and with them, sometimes, a token.

All functions broadcast: `seed` and `key` may be scalars or a row of request rows, `token` a column of vocabulary ids.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# MurmurHash3_x86_32: block multipliers, block addend, finaliser multipliers.
BLOCK_MUL_1 = tl.constexpr(0xCC9E2D51)
BLOCK_MUL_2 = tl.constexpr(0x1B873593)
BLOCK_ADD = tl.constexpr(0xE6546B64)
FINAL_MUL_1 = tl.constexpr(0x85EBCA6B)
FINAL_MUL_2 = tl.constexpr(0xC2B2AE35)
# Bytes hashed: seed low and high word, key low word, token id. The finaliser mixes the length in.
HASHED_BYTES = tl.constexpr(16)
LOW_DOMAIN = tl.constexpr(0)  # hash seed of the first word
HIGH_DOMAIN = tl.constexpr(0x9E3779B9)  # hash seed of the high word of 64 bits

HIGH_HALF_UNIT = tl.constexpr(2.0**-16)
LOW_HALF_UNIT = tl.constexpr(2.0**-32)
# Below this u the series of log1p is more exact than the logarithm of a rounded 1 - u.
SERIES_LIMIT = tl.constexpr(0.25)
SERIES_DEGREE = tl.constexpr(8)
# 1 - u is 0 when u rounds to 1; half an ulp below 1 keeps the noise finite there (about -2.81).
SMALLEST_COMPLEMENT = tl.constexpr(2.0**-24)
DROPPED_BITS = tl.constexpr(11)  # of 64 random bits: 53 are left, what fp64 holds
UNIT_53 = tl.constexpr(2.0**-53)
# The smallest positive number that Triton's fp32 `tl.rand` gives, taken in place of 0.
SMALLEST_PHILOX = tl.constexpr(4.6566127342e-10)
# Bits that the draft step is shifted by before it is mixed into the seed: the step fills the seed's high word.
STEP_SHIFT = tl.constexpr(32)


@triton.jit
def rotate_left(word, bits: tl.constexpr):
    """Rotate uint32 words left by 0 < bits < 32."""
    return (word << bits) | (word >> (32 - bits))


@triton.jit
def absorb(state, word):
    """Mix one uint32 message word into the uint32 hash state."""
    word = rotate_left(word * BLOCK_MUL_1, 15) * BLOCK_MUL_2
    return rotate_left(state ^ word, 13) * 5 + BLOCK_ADD


@triton.jit
def hash_prefix(seed, key, DOMAIN: tl.constexpr):
    """Hash state after the request's three words, before the token id.

    Args:
        seed: int64, the request seed with the draft step mixed in; its sign bit is a bit like any other.
        key: int64 position key; only its low 32 bits are hashed.
        DOMAIN: hash seed, LOW_DOMAIN or HIGH_DOMAIN.

    Returns:
        uint32 of the broadcast shape. A scalar prefix keeps this work out of the per-token loop.
    """
    state = absorb(tl.zeros_like(seed).to(tl.uint32) ^ DOMAIN, (seed & 0xFFFFFFFF).to(tl.uint32))
    state = absorb(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return absorb(state, (key & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def hash_token(prefix, token):
    """Finished 32-bit hash for `prefix` from `hash_prefix` and int32 token ids; uint32 of the broadcast shape."""
    state = absorb(prefix, token.to(tl.uint32)) ^ HASHED_BYTES
    state = (state ^ (state >> 16)) * FINAL_MUL_1
    state = (state ^ (state >> 13)) * FINAL_MUL_2
    return state ^ (state >> 16)


@triton.jit
def uniform32(bits):
    """(bits + 0.5) / 2^32 rounded to fp32; in [2^-33, 1], and 1 itself can occur.

    The halves convert exactly, so the one rounding is that of their sum and the small end keeps all 32 bits.
    """
    high = (bits >> 16).to(tl.int32).to(tl.float32)
    low = (bits & 0xFFFF).to(tl.int32).to(tl.float32)
    return high * HIGH_HALF_UNIT + (low + 0.5) * LOW_HALF_UNIT


@triton.jit
def log1p_negated(u):
    """log(1 - u) for fp32 u in (0, 1]: -(u + u^2/2 + ... + u^8/8) for small u, else the logarithm."""
    horner = 1.0 / SERIES_DEGREE
    for term in tl.static_range(SERIES_DEGREE - 1, 0, -1):
        horner = 1.0 / term + u * horner
    series = -u * horner
    direct = tl.log(tl.maximum(1.0 - u, SMALLEST_COMPLEMENT))
    return tl.where(u < SERIES_LIMIT, series, direct)


@triton.jit
def uniform64(high, low):
    """The upper 53 of two uint32 words' 64 bits as fp64: (bits + 0.5) / 2^53, in (0, 1)."""
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> DROPPED_BITS
    u = (bits.to(tl.int64).to(tl.float64) + 0.5) * UNIT_53
    # The largest midpoint rounds to 1, whose noise would be infinite.
    return tl.where(u == 1.0, u - UNIT_53, u)


@triton.jit
def compiled_log1p(x):
    """log(1 + x) of fp32 by libdevice."""
    return libdevice.log1p(x)


@triton.jit
def interpreted_log1p(x):
    """log(1 + x) of fp32 where no libdevice is at hand: close, not equal to it."""
    return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)


log1p = interpreted_log1p if triton.knobs.runtime.interpret else compiled_log1p


@triton.jit
def step_seed(seed, step, MIX: tl.constexpr):
    """int64 seed of a draft step: the request's, with the step mixed into the high word where the spec says so."""
    if MIX:
        seed = seed ^ (tl.cast(step, tl.int64) << STEP_SHIFT)
    return seed


@triton.jit
def gumbel_noise(seed, key, token, SCHEME: tl.constexpr):
    """Gumbel noise of int32 target token ids: fp32, or fp64 for the scheme `murmur3_64`; fp32 is in about [-2.8115, 22.874].

    Args:
        seed: int64, with the draft step mixed in.
        key: int64, the position before the drawn token's, with the draft salt added.
        token: int32 target ids.
        SCHEME: `noise.scheme` of the spec.
    """
    if SCHEME == "murmur3_32":
        noise = -tl.log(-log1p_negated(uniform32(hash_token(hash_prefix(seed, key, LOW_DOMAIN), token))))
    elif SCHEME == "murmur3_64":
        low = hash_token(hash_prefix(seed, key, LOW_DOMAIN), token)
        high = hash_token(hash_prefix(seed, key, HIGH_DOMAIN), token)
        noise = -tl.log(-tl.log(uniform64(high, low)))
    else:
        tl.static_assert(SCHEME == "philox_32", "unknown noise scheme")
        u = tl.maximum(tl.rand(tl.randint(seed, key), token), SMALLEST_PHILOX)
        noise = -tl.log(-log1p(-u))
    return noise
