"""Noise arithmetic of the step kernels, equal to noise_math.py's on a GPU to the bit.

Each function is one block of PTX with explicit rounding, so that no compiler contracts or regroups it, and side effect free.
The logarithms are libdevice's, in fp32 the flush-to-zero ones, which Triton's tl.log and libdevice.log1p call: instruction by
instruction, for the arguments that noise has, which are normal and no special values.
tests/kernels/test_step_math.py compares the noise with Triton's: of all 2^32 random words, in fp64 of many pairs of words.
"""

from cutlass import Boolean, Float32, Float64, Int32, Uint32, Uint64
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
# log1p: bits of 3/4 (minus it is -1061158912) and of 4, the polynomial, which begins with the highest power.
LOG1P_SPLIT, FOUR = -1061158912, 0x40800000
LOG1P_SERIES = (
    0xBD39BF78,
    0x3DD80012,
    0xBE0778E0,
    0x3E146475,
    0xBE2A68DD,
    0x3E4CAF9E,
    0xBE800042,
    0x3EAAAAE6,
    0xBF000000,
)
# log in fp64: upper words of sqrt(2), of 1 and the mantissa's mask there, the exponent's bias; the polynomial of
# (log(f) - s) / s^3 in s^2, s = 2 (f - 1) / (f + 1); ln 2 in two parts.
SQRT_2_HIGH, ONE_HIGH, MANTISSA_HIGH, EXPONENT_BIAS = 0x3FF6A09F, 0x3FF00000, 0x000FFFFF, 1023
EXPONENT_SHIFT, EXPONENT_UNIT = 20, 1 << 20
WIDE_LOG_SERIES = (
    0x3EB1380B3AE80F1E,
    0x3ED0EE258B7A8B04,
    0x3EF3B2669F02676F,
    0x3F1745CBA9AB0956,
    0x3F3C71C72D1B5154,
    0x3F624924923BE72D,
    0x3F8999999999A3C4,
    0x3FB5555555555554,
)
WIDE_LN_2, WIDE_LN_2_REST = 0x3FE62E42FEFA39EF, 0x3C7ABC9E3B39803F
WIDE_HALF, WIDE_ONE, WIDE_MINUS_ONE = 0x3FE0000000000000, 0x3FF0000000000000, 0xBFF0000000000000
WIDE_TWO_MINUS_53, WIDE_MINUS_TWO_MINUS_53 = 0x3CA0000000000000, 0xBCA0000000000000
DROPPED_BITS = 11  # of 64 random bits: 53 are left

# Philox 4x32-10, see Triton's random.py: what a key is raised by from round to round, and the multipliers of a round.
PHILOX_ROUNDS = 10
PHILOX_KEYS, PHILOX_FACTORS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57)
PHILOX_UNIT = 0x2FFFFFFF  # bits of 4.6566127342e-10, the largest fp32 below 2^-31: a uniform's step and its least value

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


def _log1p(result: str, x: str) -> str:
    """PTX of result = log(1 + x), -1 < x < 0, using registers e, f, i, j of the block around it."""
    return (
        f"add.rz.ftz.f32 f, {x}, {_hex(ONE)};\nmov.b32 i, f;\nadd.s32 i, i, {LOG1P_SPLIT};\nand.b32 i, i, {EXPONENT};\n"
        f"mov.b32 j, {x};\nsub.s32 j, j, i;\nmov.b32 f, j;\nsub.s32 j, {FOUR}, i;\nmov.b32 e, j;\n"
        f"fma.rn.ftz.f32 e, {_hex(QUARTER)}, e, {_hex(MINUS_ONE)};\nadd.rn.f32 f, e, f;\n"
        f"cvt.rn.f32.s32 e, i;\nmul.rn.f32 e, e, {_hex(TWO_MINUS_23)};\n"
        + _horner(result, "f", LOG1P_SERIES, ftz=".ftz")
        + f"mul.rn.f32 {result}, f, {result};\nfma.rn.ftz.f32 {result}, {result}, f, f;\n"
        f"fma.rn.ftz.f32 {result}, e, {_hex(LN_2)}, {result};\n"
    )


def _wide_hex(bits: int) -> str:
    return f"0d{bits:016X}"


def _wide_log(result: str, x: str) -> str:
    """PTX of result = log(x) in fp64, x positive and normal, using the registers of _WIDE_LOG_REGISTERS."""
    series = [f"mov.f64 p, {_wide_hex(WIDE_LOG_SERIES[0])};\n"]
    series += [f"fma.rn.f64 p, p, z, {_wide_hex(c)};\n" for c in WIDE_LOG_SERIES[1:]]
    return (
        # x = f 2^k with f around 1
        f"mov.b64 {{i, j}}, {x};\nshr.u32 k, j, {EXPONENT_SHIFT};\nand.b32 j, j, {MANTISSA_HIGH};\nor.b32 j, j, {ONE_HIGH};\n"
        f"setp.ge.u32 above, j, {SQRT_2_HIGH};\n@above sub.s32 j, j, {EXPONENT_UNIT};\n@above add.s32 k, k, 1;\n"
        f"mov.b64 f, {{i, j}};\nsub.s32 k, k, {EXPONENT_BIAS};\ncvt.rn.f64.s32 e, k;\n"
        # s = 2 (f - 1) / (f + 1), d = f - 1
        f"add.rn.f64 d, f, {_wide_hex(WIDE_MINUS_ONE)};\nadd.rn.f64 f, f, {_wide_hex(WIDE_ONE)};\n"
        f"rcp.approx.ftz.f64 r, f;\nneg.f64 f, f;\nfma.rn.f64 t, f, r, {_wide_hex(WIDE_ONE)};\n"
        "fma.rn.f64 t, t, t, t;\nfma.rn.f64 r, t, r, r;\nmul.rn.f64 s, d, r;\nfma.rn.f64 s, d, r, s;\nmul.rn.f64 z, s, s;\n"
        + "".join(series)
        # what s lost to rounding, then the series
        + "sub.rn.f64 t, d, s;\nadd.rn.f64 t, t, t;\nneg.f64 f, s;\nfma.rn.f64 t, f, d, t;\nmul.rn.f64 t, r, t;\n"
        "mul.rn.f64 p, z, p;\nfma.rn.f64 p, p, s, t;\n"
        # log(x) = k ln 2 + s + p
        f"fma.rn.f64 d, e, {_wide_hex(WIDE_LN_2)}, s;\nneg.f64 f, e;\nfma.rn.f64 t, f, {_wide_hex(WIDE_LN_2)}, d;\n"
        f"sub.rn.f64 t, t, s;\nsub.rn.f64 t, p, t;\nfma.rn.f64 t, e, {_wide_hex(WIDE_LN_2_REST)}, t;\n"
        f"add.rn.f64 {result}, d, t;\n"
    )


_WIDE_LOG_REGISTERS = ".reg .f64 d, e, f, p, r, s, t, z;\n.reg .b32 i, j, k;\n.reg .pred above;\n"
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
def gumbel_of_philox(bits: Uint32, *, loc=None, ip=None) -> Float32:
    """Gumbel noise of a Philox word, in about [-2.8115, 21.488]: the word as a signed number, a negative one mirrored, is the
    uniform's numerator."""
    text = (
        _LOG_REGISTERS + ".reg .f32 u, v;\n.reg .b32 h;\n"
        f"shr.s32 h, $1, 31;\nxor.b32 h, h, $1;\ncvt.rn.f32.s32 u, h;\nmul.rn.f32 u, u, {_hex(PHILOX_UNIT)};\n"
        f"max.f32 u, u, {_hex(PHILOX_UNIT)};\nsub.rn.f32 u, {_hex(0)}, u;\n"
        + _log1p("v", "u")
        + f"sub.rn.f32 v, {_hex(0)}, v;\n"
        + _log("$0", "v")
        + f"sub.rn.f32 $0, {_hex(0)}, $0;\n"
    )
    return Float32(_pure(T.f32(), [bits], text, "=&f,r", loc, ip))


@dsl_user_op
def gumbel_wide(high: Uint32, low: Uint32, *, loc=None, ip=None) -> Float64:
    """Gumbel noise in fp64 of 64 random bits, of which the upper 53 count, in about [-3.62, 36.74]."""
    text = (
        _WIDE_LOG_REGISTERS + ".reg .f64 u, v;\n.reg .b64 b;\n.reg .pred whole;\n"
        # u = (bits + 0.5) 2^-53, less 2^-53 where that rounds to 1
        f"mov.b64 b, {{$2, $1}};\nshr.u64 b, b, {DROPPED_BITS};\ncvt.rn.f64.s64 u, b;\n"
        f"add.rn.f64 u, u, {_wide_hex(WIDE_HALF)};\nmul.rn.f64 u, u, {_wide_hex(WIDE_TWO_MINUS_53)};\n"
        f"setp.eq.f64 whole, u, {_wide_hex(WIDE_ONE)};\n"
        f"@whole add.rn.f64 u, u, {_wide_hex(WIDE_MINUS_TWO_MINUS_53)};\n"
        + _wide_log("v", "u")
        + f"sub.rn.f64 v, {_wide_hex(0)}, v;\n"
        + _wide_log("$0", "v")
        + f"sub.rn.f64 $0, {_wide_hex(0)}, $0;\n"
    )
    return Float64(_pure(T.f64(), [high, low], text, "=&d,r,r", loc, ip))


@dsl_user_op
def widened(x: Float32, *, loc=None, ip=None) -> Float64:
    """fp32 as fp64, exact."""
    return Float64(_pure(T.f64(), [x], "cvt.f64.f32 $0, $1;\n", "=d,f", loc, ip))


@dsl_user_op
def narrowed(x: Float64, *, loc=None, ip=None) -> Float32:
    """fp64 rounded to fp32."""
    return Float32(_pure(T.f32(), [x], "cvt.rn.f32.f64 $0, $1;\n", "=f,d", loc, ip))


@dsl_user_op
def add_wide(a: Float64, b: Float64, *, loc=None, ip=None) -> Float64:
    """fp64 sum that no optimisation may contract or drop."""
    return Float64(_pure(T.f64(), [a, b], "add.rn.f64 $0, $1, $2;\n", "=d,d,d", loc, ip))


@dsl_user_op
def words_of(x: Float64, *, loc=None, ip=None) -> list[Uint32]:
    """The bits of an fp64, the upper word first."""
    pair = llvm.StructType.get_literal([T.i32()] * 2)
    x = _pure(pair, [x], "mov.b64 {$1, $0}, $2;\n", "=r,=r,d", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), x, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def wide_of(high: Uint32, low: Uint32, *, loc=None, ip=None) -> Float64:
    """The fp64 with these bits."""
    return Float64(_pure(T.f64(), [high, low], "mov.b64 $0, {$2, $1};\n", "=d,r,r", loc, ip))


@dsl_user_op
def is_nan_wide(x: Float64, *, loc=None, ip=None) -> Boolean:
    """Whether an fp64 is NaN."""
    text = ".reg .pred p;\nsetp.nan.f64 p, $1, $1;\nselp.b32 $0, 1, 0, p;\n"
    return Uint32(_pure(T.i32(), [x], text, "=r,d", loc, ip)) != 0


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


def hash_prefix(seed: Uint64, key: Uint64, domain: int = 0) -> Uint32:
    """Hash state before the token id; the seed has the draft step mixed in. `domain`: hash seed."""
    state = absorb(absorb(Uint32(domain), low_word(seed)), high_word(seed))
    return absorb(state, low_word(key))


def hash_word(prefix: Uint32, token: Int32) -> Uint32:
    """The hash of a target token id before its last operation, which changes the lower half only."""
    state = absorb(prefix, Uint32(token)) ^ Uint32(HASHED_BYTES)
    state = (state ^ (state >> Uint32(16))) * Uint32(FINAL_MUL_1)
    return (state ^ (state >> Uint32(13))) * Uint32(FINAL_MUL_2)


def hash_token(prefix: Uint32, token: Int32) -> Uint32:
    """The 32 random bits of a target token id."""
    state = hash_word(prefix, token)
    return state ^ (state >> Uint32(16))


def philox(seed: Uint64, counter: Uint64) -> Uint32:
    """First word of Philox 4x32-10."""
    zero = Uint32(0)
    words, keys = [low_word(counter), high_word(counter), zero, zero], [low_word(seed), high_word(seed)]
    for _ in range(PHILOX_ROUNDS):
        first, second = (Uint64(w) * Uint64(f) for w, f in zip((words[0], words[2]), PHILOX_FACTORS, strict=True))
        words = [
            high_word(second) ^ words[1] ^ keys[0],
            low_word(second),
            high_word(first) ^ words[3] ^ keys[1],
            low_word(first),
        ]
        keys = [key + Uint32(raised) for key, raised in zip(keys, PHILOX_KEYS, strict=True)]
    return words[0]


def mirrored(word: Uint32) -> Uint32:
    """The 31 bits of a word as a signed number: x, or -x - 1 of a negative one."""
    return word ^ Uint32(Int32(word) >> 31)


def unpack_bf16(word: Uint32) -> list[Float32]:
    """The two bf16 of a word as fp32, the low half first."""
    return [ptx.float_of(word << Uint32(16)), ptx.float_of(word & Uint32(0xFFFF0000))]
