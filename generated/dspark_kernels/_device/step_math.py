"""Noise arithmetic of the step kernels, equal to noise_math.py's on a GPU to the bit.

Each function is one block of PTX with explicit rounding, so that no compiler contracts or regroups it, and side effect free.
The logarithm is libdevice's flush-to-zero one, which Triton's tl.log calls, for positive normal arguments: noise needs no others.
tests/kernels/test_step.py compares the noise of all 2^32 random words with Triton's.
"""

from cutlass import Float32, Int32, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import ptx

# MurmurHash3_x86_32, see noise_math.py: block multipliers, block addend, finaliser multipliers.
BLOCK_MUL_1, BLOCK_MUL_2, BLOCK_ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64
FINAL_MUL_1, FINAL_MUL_2 = 0x85EBCA6B, 0xC2B2AE35
HASHED_BYTES = 16
WORD_BITS, LOW_WORD = 32, 0xFFFFFFFF

# Bits of fp32 constants. A 16-bit number ORed into the mantissa of 2^23 is 2^23 + number, shifted left by 7 into that of 1 it is
# 1 + number / 2^16: subtracting the constant leaves it exact, at the full rate of additions.
ONE, MINUS_ONE = 0x3F800000, 0xBF800000
TWO_23, HALF_MINUS_TWO_23 = 0x4B000000, 0xCAFFFFFF
TWO_MINUS_32, TWO_MINUS_24, TWO_MINUS_23 = 0x2F800000, 0x33800000, 0x34000000
QUARTER = 0x3E800000
HALF_TO_MANTISSA = 7
# 1/8, 1/7 .. 1/2, 1: coefficients of the series of log1p.
SERIES = (0x3E000000, 0x3E124925, 0x3E2AAAAB, 0x3E4CCCCD, 0x3E800000, 0x3EAAAAAB, 0x3F000000, 0x3F800000)

# libdevice: bits of 2/3 (minus it is -1059760811), the exponent's mask, the polynomial of log(1 + f), ln 2.
LOG_SPLIT, EXPONENT = -1059760811, -8388608
LOG_SERIES = (
    0xBE055027,
    0x3E1039F6,
    0xBDF8CDCC,
    0x3E0F2955,
    0xBE2AD8B9,
    0x3E4CED0B,
    0xBE7FFF22,
    0x3EAAAA78,
    0xBF000000,
)
LN_2 = 0x3F317218

# CUDA's tanhf: an odd polynomial below this size, an exponential from there on.
TANH_SPLIT = 0.6
TANH_SERIES = (0x3C80F082, 0xBD563CAE, 0x3E085941, 0xBEAAA9ED)


def low_word(x: Uint64) -> Uint32:
    """The lower 32 bits."""
    return Uint32(x & Uint64(LOW_WORD))


def high_word(x: Uint64) -> Uint32:
    """The upper 32 bits."""
    return Uint32(x >> Uint64(WORD_BITS))


def _hex(bits: int) -> str:
    return f"0f{bits:08X}"


def _horner(result: str, x: str, coefficients: tuple[int, ...], *, ftz: str = "") -> str:
    """PTX of result = (.. (c0 x + c1) x + ..) x + cn, one fused multiply-add each."""
    lines = [f"mov.f32 {result}, {_hex(coefficients[0])};\n"]
    lines += [f"fma.rn{ftz}.f32 {result}, {result}, {x}, {_hex(c)};\n" for c in coefficients[1:]]
    return "".join(lines)


def _log(result: str, x: str) -> str:
    """PTX of result = log(x), using registers e, f, i, j, k of the block around it."""
    return (
        f"mov.b32 i, {x};\nadd.s32 j, i, {LOG_SPLIT};\nand.b32 j, j, {EXPONENT};\nsub.s32 k, i, j;\nmov.b32 f, k;\n"
        f"cvt.rn.f32.s32 e, j;\nmul.rn.ftz.f32 e, e, {_hex(TWO_MINUS_23)};\nadd.rn.f32 f, f, {_hex(MINUS_ONE)};\n"
        + _horner(result, "f", LOG_SERIES, ftz=".ftz")
        + f"mul.rn.f32 {result}, f, {result};\nfma.rn.ftz.f32 {result}, {result}, f, f;\n"
        f"fma.rn.ftz.f32 {result}, e, {_hex(LN_2)}, {result};\n"
    )


_LOG_REGISTERS = ".reg .f32 e, f;\n.reg .b32 i, j, k;\n"


def _pure(out, ins, text: str, constraints: str, loc, ip):
    return llvm.inline_asm(
        out,
        [x.ir_value(loc=loc, ip=ip) for x in ins],
        "{\n" + text + "}",
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def log(x: Float32, *, loc=None, ip=None) -> Float32:
    """Natural logarithm of a positive normal fp32."""
    return Float32(_pure(T.f32(), [x], _LOG_REGISTERS + _log("$0", "$1"), "=&f,f", loc, ip))


@dsl_user_op
def gumbel(bits: Uint32, *, loc=None, ip=None) -> Float32:
    """Gumbel noise of 32 random bits, in about [-2.8115, 22.874]."""
    text = (
        _LOG_REGISTERS + ".reg .f32 u, v, w;\n.reg .b32 h;\n.reg .pred p;\n"
        # u = high * 2^-16 + (low + 0.5) * 2^-32: both products are exact, so the sum is the one rounding
        f"shr.u32 h, $1, 16;\nshl.b32 h, h, {HALF_TO_MANTISSA};\nor.b32 h, h, {ONE};\nmov.b32 u, h;\n"
        f"add.rn.f32 u, u, {_hex(MINUS_ONE)};\n"
        f"and.b32 h, $1, 0xFFFF;\nor.b32 h, h, {TWO_23};\nmov.b32 v, h;\nadd.rn.f32 v, v, {_hex(HALF_MINUS_TWO_23)};\n"
        f"fma.rn.f32 u, v, {_hex(TWO_MINUS_32)}, u;\n"
        # v = -log(1 - u): the series below a quarter, else the logarithm of at least half an ulp below 1
        + _horner("v", "u", SERIES)
        + f"mul.rn.f32 v, u, v;\nmov.f32 w, {_hex(ONE)};\nsub.rn.f32 w, w, u;\nmax.f32 w, w, {_hex(TWO_MINUS_24)};\n"
        + _log("$0", "w")
        + f"neg.f32 $0, $0;\nsetp.lt.f32 p, u, {_hex(QUARTER)};\nselp.f32 v, v, $0, p;\n"
        + _log("$0", "v")
        # Triton's minus is a subtraction from 0: noise of exactly 0 is +0.0
        + f"sub.rn.f32 $0, {_hex(0)}, $0;\n"
    )
    return Float32(_pure(T.f32(), [bits], text, "=&f,r", loc, ip))


@dsl_user_op
def tanh_of_small(x: Float32, *, loc=None, ip=None) -> Float32:
    """score_ops.tanh of an fp32 whose size is below TANH_SPLIT, or NaN."""
    text = (
        ".reg .f32 s, r;\nmul.rn.f32 s, $1, $1;\n"
        + _horner("r", "s", TANH_SERIES)
        + f"fma.rn.f32 r, r, s, {_hex(0)};\nfma.rn.f32 $0, r, $1, $1;\n"
    )
    return Float32(_pure(T.f32(), [x], text, "=f,f", loc, ip))


@dsl_user_op
def larger_size(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The larger of `a` and |b|; of a number and NaN, the number."""
    return Float32(_pure(T.f32(), [a, b], ".reg .f32 s;\nabs.f32 s, $2;\nmax.f32 $0, $1, s;\n", "=f,f,f", loc, ip))


@dsl_user_op
def log2_approx(x: Float32, *, loc=None, ip=None) -> Float32:
    """Base-2 logarithm within 2^-22 of max(1, its size); -inf for 0, NaN below."""
    return Float32(_pure(T.f32(), [x], "lg2.approx.ftz.f32 $0, $1;\n", "=f,f", loc, ip))


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c with one rounding."""
    return Float32(_pure(T.f32(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;\n", "=f,f,f,f", loc, ip))


@dsl_user_op
def add_bf16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """Sums of two pairs of bf16, each rounded once. Rounding their fp32 sum gives the same: fp32 has more than twice the bits."""
    return Uint32(_pure(T.i32(), [a, b], "add.rn.bf16x2 $0, $1, $2;\n", "=r,r,r", loc, ip))


def rotate_left(x: Uint32, bits: int) -> Uint32:
    """The word rotated left by 0 < bits < 32."""
    return (x << Uint32(bits)) | (x >> Uint32(WORD_BITS - bits))


def absorb(state: Uint32, word: Uint32) -> Uint32:
    """Mixes one message word into the hash state."""
    word = rotate_left(word * Uint32(BLOCK_MUL_1), 15) * Uint32(BLOCK_MUL_2)
    return rotate_left(state ^ word, 13) * Uint32(5) + Uint32(BLOCK_ADD)


def hash_prefix(seed_low: Uint32, seed_high: Uint32, key_low: Uint32) -> Uint32:
    """Hash state before the token id; the seed has the draft step mixed in."""
    return absorb(absorb(absorb(Uint32(0), seed_low), seed_high), key_low)


def hash_word(prefix: Uint32, token: Int32) -> Uint32:
    """The hash of a target token id before its last operation, which changes the lower half only."""
    state = absorb(prefix, Uint32(token)) ^ Uint32(HASHED_BYTES)
    state = (state ^ (state >> Uint32(16))) * Uint32(FINAL_MUL_1)
    return (state ^ (state >> Uint32(13))) * Uint32(FINAL_MUL_2)


def hash_token(prefix: Uint32, token: Int32) -> Uint32:
    """The 32 random bits of a target token id."""
    state = hash_word(prefix, token)
    return state ^ (state >> Uint32(16))


def unpack_bf16(word: Uint32) -> list[Float32]:
    """The two bf16 of a word as fp32, the low half first."""
    return [ptx.float_of(word << Uint32(16)), ptx.float_of(word & Uint32(0xFFFF0000))]
