"""Gumbel noise of the draft samplers, all schemes, as Triton device functions.

One draw is a pure function of (seed, key, target token id). `gumbel_noise` draws it by the scheme that a spec names:

- `murmur3_32`: MurmurHash3_x86_32 over their 16 bytes gives 32 random bits, these give a uniform in (0, 1], and
  g = -log(-log1p(-u)) is its Gumbel noise. Large noise, which decides the arg max, comes from small u, where fp32 is finest.
- `murmur3_64`: a second hash gives the high word, the upper 53 bits a uniform in (0, 1), and g = -log(-log(u)) in fp64.
- `philox_32`: Philox 4x32-10 as Triton has it, keyed by a first draw from seed and key; g = -log(-log1p(-u)) with libdevice's log1p.

The roundings are part of the contract: on a GPU each Horner step is one fused multiply-add (Triton contracts it by default) and
the fp32 logarithm is libdevice's flush-to-zero one, as `tl.log` would be; one rounding more, less or elsewhere changes the last
bits and with them, sometimes, a token. `neg_log` and `uniform32` round as `tl.log` and conversions do, in fewer instructions:
tests/kernels/test_step_math.py compares the noise of all 2^32 random words with those of the engine's form.

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

# Bits of 2^23 as fp32: with a 16-bit number in its mantissa it is 2^23 + number, so a subtraction converts the number.
TWO_23_BITS = tl.constexpr(0x4B000000)
HALF_MASK = tl.constexpr(0xFFFF)
HIGH_UNIT = tl.constexpr(2.0**-16)
LOW_UNIT = tl.constexpr(2.0**-32)
HIGH_OFFSET = tl.constexpr(2.0**7)  # 2^23 in units of the high half
LOW_OFFSET = tl.constexpr(2.0**23 - 0.5)  # leaves the low half + 0.5
# Below this u the series of log1p is more exact than the logarithm of a rounded 1 - u.
SERIES_LIMIT = tl.constexpr(0.25)
SERIES_DEGREE = tl.constexpr(8)
# 1 - u is 0 when u rounds to 1; half an ulp below 1 keeps the noise finite there (about -2.81).
SMALLEST_COMPLEMENT = tl.constexpr(2.0**-24)

# The logarithm: x = 2^e (1 - g) with 1 - g in [2/3, 4/3), and -log(1 - g) = g + g^2 (1/2 + g (1/3 + ..)) in libdevice's coefficients.
EXPONENT_PLACE = tl.constexpr(23)
# Added to the bits of x it leaves e + 128 in the exponent's place; 0x3F2AAAAB are the bits of 2/3.
EXPONENT_BIAS = tl.constexpr(0x40000000 - 0x3F2AAAAB)
# Added to e + 128 it gives the bits of the fp32 2^23 + 512 + e. The 512 keeps a negative e out of the bits above, and shifted into
# the exponent's place it is 0.
EXPONENT_TO_FLOAT = tl.constexpr(0x4B000000 + 512 - 128)
FLOAT_EXPONENT = tl.constexpr(2.0**23 + 512)
LN_2 = tl.constexpr(float.fromhex("0x1.62e430p-1"))
_LOG_COEFFICIENTS = (
    "0x1.0aa04ep-3",
    "0x1.2073ecp-3",
    "0x1.f19b98p-4",
    "0x1.1e52aap-3",
    "0x1.55b172p-3",
    "0x1.99da16p-3",
    "0x1.fffe44p-3",
    "0x1.5554f0p-2",
    "0x1.000000p-1",
)
LOG_SERIES = tl.constexpr(tuple(float.fromhex(coefficient) for coefficient in _LOG_COEFFICIENTS))
LOG_TERMS = tl.constexpr(len(_LOG_COEFFICIENTS))
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
def hash_word(prefix, token):
    """The hash of `hash_token` before its last operation, which changes the lower half only."""
    state = absorb(prefix, token.to(tl.uint32)) ^ HASHED_BYTES
    state = (state ^ (state >> 16)) * FINAL_MUL_1
    return (state ^ (state >> 13)) * FINAL_MUL_2


@triton.jit
def hash_token(prefix, token):
    """Finished 32-bit hash for `prefix` from `hash_prefix` and int32 token ids; uint32 of the broadcast shape."""
    word = hash_word(prefix, token)
    return word ^ (word >> 16)


@triton.jit
def uniform32(word):
    """(bits + 0.5) / 2^32 rounded to fp32, for the random bits of a `hash_word`; in [2^-33, 1], and 1 itself can occur.

    The halves convert exactly, so the one rounding is that of their sum and the small end keeps all 32 bits.
    """
    high = (word >> 16) + TWO_23_BITS
    low = (word & HALF_MASK) ^ high  # the hash's last operation, on a half that lies in a mantissa already
    high = high.to(tl.float32, bitcast=True) * HIGH_UNIT - HIGH_OFFSET
    return (low.to(tl.float32, bitcast=True) - LOW_OFFSET) * LOW_UNIT + high


@triton.jit
def neg_log(x):
    """-log(x) of positive normal fp32, rounded as libdevice's flush-to-zero logarithm; +0.0 for 1.

    libdevice expands in -g, which turns the sign of every other step and no rounding. Its other cases are for arguments that noise
    does not have: 0, denormal numbers, infinity, NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    exponent = ((bits + EXPONENT_BIAS) >> EXPONENT_PLACE) + EXPONENT_TO_FLOAT
    g = 1.0 - (bits - (exponent << EXPONENT_PLACE)).to(tl.float32, bitcast=True)
    minus_e = FLOAT_EXPONENT - exponent.to(tl.float32, bitcast=True)
    horner = g * LOG_SERIES[0] + LOG_SERIES[1]
    for term in tl.static_range(2, LOG_TERMS):
        horner = g * horner + LOG_SERIES[term]
    return minus_e * LN_2 + ((g * horner) * g + g)


@triton.jit
def neg_log_complement(u):
    """-log(1 - u) for fp32 u in (0, 1]: u + u^2/2 + ... + u^8/8 for small u, else the logarithm."""
    horner = 1.0 / SERIES_DEGREE
    for term in tl.static_range(SERIES_DEGREE - 1, 0, -1):
        horner = 1.0 / term + u * horner
    direct = neg_log(tl.maximum(1.0 - u, SMALLEST_COMPLEMENT))
    return tl.where(u < SERIES_LIMIT, u * horner, direct)


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
        noise = neg_log(neg_log_complement(uniform32(hash_word(hash_prefix(seed, key, LOW_DOMAIN), token))))
    elif SCHEME == "murmur3_64":
        low = hash_token(hash_prefix(seed, key, LOW_DOMAIN), token)
        high = hash_token(hash_prefix(seed, key, HIGH_DOMAIN), token)
        noise = -tl.log(-tl.log(uniform64(high, low)))
    else:
        tl.static_assert(SCHEME == "philox_32", "unknown noise scheme")
        u = tl.maximum(tl.rand(tl.randint(seed, key), token), SMALLEST_PHILOX)
        noise = neg_log(-log1p(-u))
    return noise
