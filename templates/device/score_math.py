"""Exact score arithmetic as Triton device functions: bf16 in fp32 registers, the output transform, and the order of scores.

bf16 values are carried as fp32 whose low 16 bits are zero. Conversions are integer operations, because Triton's interpreter
truncates where the hardware rounds to nearest even, and the two must agree to the bit.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# A score's order word is a signed integer of its width. NaN ranks above +inf, padding below -inf.
NAN_ORDER_32 = tl.constexpr(0x7FFFFFFF)
PAD_ORDER_32 = tl.constexpr(-0x80000000)
NAN_ORDER_64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
PAD_ORDER_64 = tl.constexpr(-0x8000000000000000)
# Above every token id: what loses when the lowest id wins.
LARGEST_ID = tl.constexpr(0x7FFFFFFF)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)  # of fp32
# Below this |x| the series of tanh is exact to fp64; above it, 1 - exp(-2 |x|) loses few bits.
TANH_SERIES = tl.constexpr(0.02)


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
def round_to(value, DTYPE: tl.constexpr):
    """fp32 rounded to DTYPE, bf16 or fp32, and left in fp32."""
    if DTYPE == tl.bfloat16:
        value = round_bf16(value)
    return value


@triton.jit
def load_fp32(pointers, mask):
    """Load bf16 or fp32 as fp32; masked elements are undefined."""
    value = tl.load(pointers, mask=mask)
    if value.dtype == tl.bfloat16:
        value = widen_bf16(value)
    return value


@triton.jit
def store_rounded(pointers, value, mask):
    """Store fp32 that `round_to` has rounded to the pointers' type, bf16 or fp32."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, narrow_bf16(value), mask=mask)
    else:
        tl.store(pointers, value, mask=mask)


# A product that no later addition may absorb into a fused multiply-add: the engine's are operations of their own.
@triton.jit
def compiled_product(left, right):
    """left * right in fp32, rounded; subnormal numbers count, which libdevice would flush."""
    instruction: tl.constexpr = "mul.rn.f32 $0, $1, $2;"
    return tl.inline_asm_elementwise(instruction, "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def interpreted_product(left, right):
    """left * right in fp32, rounded: the interpreter fuses nothing."""
    return left * right


@triton.jit
def compiled_tanh(x):
    """tanh of fp32 by libdevice, which is torch's on a GPU but that it flushes subnormal numbers, whose tanh they are themselves."""
    return tl.where(tl.abs(x) < SMALLEST_NORMAL, x, libdevice.tanh(x))


@triton.jit
def interpreted_tanh(x):
    """tanh of fp32 where no libdevice is at hand: computed in fp64 and rounded."""
    wide = x.to(tl.float64)
    square = wide * wide
    series = wide * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(wide))
    direct = (1.0 - decay) / (1.0 + decay)
    direct = tl.where(wide < 0.0, -direct, direct)
    return tl.where(tl.abs(wide) < TANH_SERIES, series, direct).to(tl.float32)


product = interpreted_product if triton.knobs.runtime.interpret else compiled_product
tanh = interpreted_tanh if triton.knobs.runtime.interpret else compiled_tanh


@triton.jit
def transform(
    value,
    DTYPE: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    INVERSE_SOFT_CAP: tl.constexpr,
):
    """MULTIPLIER, then SOFT_CAP * tanh(x * INVERSE_SOFT_CAP), fp32 in and out, each operation rounded to DTYPE.

    So torch computes it on tensors of that dtype on a GPU, where division by a number is a multiplication by its inverse.

    Args:
        value: fp32 values that DTYPE holds.
        DTYPE: bf16 or fp32.
        MULTIPLIER: fp32 number; 1 leaves the values as they are.
        SOFT_CAP: fp32 number, or None for no cap.
        INVERSE_SOFT_CAP: 1 / SOFT_CAP in fp32, or None.
    """
    if MULTIPLIER != 1.0:
        value = round_to(product(value, tl.full(value.shape, MULTIPLIER, tl.float32)), DTYPE)
    if SOFT_CAP != None:  # noqa: E711  a constexpr in the interpreter, which no `is` sees through
        value = round_to(product(value, tl.full(value.shape, INVERSE_SOFT_CAP, tl.float32)), DTYPE)
        value = round_to(tanh(value), DTYPE)
        value = round_to(product(value, tl.full(value.shape, SOFT_CAP, tl.float32)), DTYPE)
    return value


@triton.jit
def add_bias(
    logits,
    bias,
    DTYPE: tl.constexpr,
    PLACEMENT: tl.constexpr,
    BASE_CAPPED: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    INVERSE_SOFT_CAP: tl.constexpr,
):
    """s = base + bias with the spec's output transform, fp32 in and out.

    Args:
        logits: base logits, values that DTYPE holds.
        bias: rounded to bf16, the dtype of the Markov head.
        DTYPE: of the base logits, bf16 or fp32; their sum is rounded to it.
        PLACEMENT: `logits.transform.placement`: what is transformed, none, base, both or the sum.
        BASE_CAPPED: the base logits arrive transformed.
        MULTIPLIER, SOFT_CAP, INVERSE_SOFT_CAP: as for `transform`.
    """
    tl.static_assert(PLACEMENT == "none" or PLACEMENT == "base" or PLACEMENT == "both" or PLACEMENT == "sum")
    if (PLACEMENT == "base" or PLACEMENT == "both") and not BASE_CAPPED:
        logits = transform(logits, DTYPE, MULTIPLIER, SOFT_CAP, INVERSE_SOFT_CAP)
    if PLACEMENT == "both":
        bias = transform(bias, tl.bfloat16, MULTIPLIER, SOFT_CAP, INVERSE_SOFT_CAP)
    total = round_to(logits + bias, DTYPE)
    if PLACEMENT == "sum":
        total = transform(total, tl.float32, MULTIPLIER, SOFT_CAP, INVERSE_SOFT_CAP)
    return total


@triton.jit
def order_of(score):
    """Signed integer as wide as the scores, fp32 or fp64, in their order: -0.0 equals +0.0, and every NaN ranks highest."""
    plain = tl.where(score == 0.0, 0.0, score)
    if score.dtype == tl.float64:
        bits = plain.to(tl.int64, bitcast=True)
        ordered = tl.where(score == score, bits ^ ((bits >> 63) & NAN_ORDER_64), NAN_ORDER_64)
    else:
        bits = plain.to(tl.int32, bitcast=True)
        ordered = tl.where(score == score, bits ^ ((bits >> 31) & NAN_ORDER_32), NAN_ORDER_32)
    return ordered


@triton.jit
def pad_order(DTYPE: tl.constexpr):
    """The order below that of every score: of what is no candidate. DTYPE is int32 or int64."""
    if DTYPE == tl.int64:
        order = tl.full([], PAD_ORDER_64, tl.int64)
    else:
        order = tl.full([], PAD_ORDER_32, tl.int32)
    return order
