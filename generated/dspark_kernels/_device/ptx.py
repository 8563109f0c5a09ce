"""PTX that the chain kernel needs and CuTe DSL has no call for, one function an instruction.

Shared-memory addresses are 32-bit (`.shared` window), global addresses 64-bit. Functions marked "side effect free" may be
merged and moved by the compiler; all others stay where they are written.
"""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

LANES = 32


def _asm(out, ins, text: str, constraints: str, *, pure: bool = False, loc=None, ip=None):
    return llvm.inline_asm(
        out,
        [x.ir_value(loc=loc, ip=ip) for x in ins],
        text,
        constraints,
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _unpack(struct, count: int, mlir_type, dsl_type: type[Numeric], *, loc=None, ip=None) -> list:
    return [dsl_type(llvm.extractvalue(mlir_type, struct, [i], loc=loc, ip=ip)) for i in range(count)]


# A store where operand 0 holds, to operand 1, of the operands behind it.
_IF = "{\n.reg .pred p;\nsetp.ne.b32 p, $0, 0;\n@p "
_WORDS = {1: ".b32 [$1], $2;", 2: ".v2.b32 [$1], {$2, $3};", 4: ".v4.b32 [$1], {$2, $3, $4, $5};"}

# ---- copies into shared memory. An L2 policy is a constant that each copy makes itself: kept in a variable, it takes registers.

_READ_ONCE = ".reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
_READ_AGAIN = ".reg .b64 again;\ncreatepolicy.fractional.L2::evict_last.b64 again, 1.0;\n"


@dsl_user_op
def bulk_load(dst: Int32, src: Int64, nbytes: Int32, bar: Int32, keep: Boolean, *, loc=None, ip=None) -> None:
    """Copies `nbytes` (a multiple of 16) from global to shared memory; both ends 16-byte aligned; completes on `bar`.

    `keep`: L2 is asked to keep the data, which is read again for each position; else to drop it first.
    """
    text = (
        "{\n.reg .pred p;\n" + _READ_ONCE + _READ_AGAIN + "setp.ne.b32 p, $4, 0;\nselp.b64 once, again, once, p;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], once;\n}"
    )
    _asm(None, [dst, src, nbytes, bar, Int32(keep)], text, "r,l,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def copy_async_16_if(condition: Boolean, dst: Int32, src: Int64, *, loc=None, ip=None) -> None:
    """Where the condition holds, starts a copy of 16 bytes that are read once, both ends 16-byte aligned, from global to shared memory."""
    text = (
        "{\n.reg .pred p;\n" + _READ_ONCE + "setp.ne.b32 p, $2, 0;\n"
        "@p cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, once;\n}"
    )
    _asm(None, [dst, src, Int32(condition)], text, "r,l,r", loc=loc, ip=ip)


@dsl_user_op
def copy_async_16_of_if(condition: Boolean, dst: Int32, src: Int64, nbytes: Int32, *, loc=None, ip=None) -> None:
    """copy_async_16_if that reads only the first `nbytes` (0 .. 16) and fills up with zeros."""
    text = (
        "{\n.reg .pred p;\n" + _READ_ONCE + "setp.ne.b32 p, $3, 0;\n"
        "@p cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, $2, once;\n}"
    )
    _asm(None, [dst, src, nbytes, Int32(condition)], text, "r,l,r,r", loc=loc, ip=ip)


@dsl_user_op
def copy_async_commit(*, loc=None, ip=None) -> None:
    """Makes a group of this thread's copy_async since the last commit; it may be empty."""
    _asm(None, [], "cp.async.commit_group;", "", loc=loc, ip=ip)


@dsl_user_op
def copy_async_wait(pending: int, *, loc=None, ip=None) -> None:
    """Waits until at most `pending` of this thread's newest groups are under way; other threads need a barrier on top."""
    _asm(None, [], f"cp.async.wait_group {pending};", "", loc=loc, ip=ip)


@dsl_user_op
def prefetch_l2(address: Int64, *, loc=None, ip=None) -> None:
    """Brings the 128-byte line at `address` into L2."""
    _asm(None, [address], "prefetch.global.L2 [$0];", "l", loc=loc, ip=ip)


# ---- mbarriers


@dsl_user_op
def mbarrier_init(bar: Int32, arrivals: Int32, *, loc=None, ip=None) -> None:
    _asm(None, [bar, arrivals], "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", loc=loc, ip=ip)


@dsl_user_op
def mbarrier_expect(bar: Int32, nbytes: Int32, *, loc=None, ip=None) -> None:
    """Arrives and announces `nbytes` of bulk copies."""
    _asm(None, [bar, nbytes], "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", loc=loc, ip=ip)


@dsl_user_op
def mbarrier_wait(bar: Int32, parity: Int32, *, loc=None, ip=None) -> None:
    """Waits for the phase of that parity. Only bulk copies of this CTA complete it: they end or the launch faults."""
    text = (
        "{\n.reg .pred p;\nTRY:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
        "@p bra.uni DONE;\nbra.uni TRY;\nDONE:\n}"
    )
    _asm(None, [bar, parity], text, "r,r", loc=loc, ip=ip)


# ---- shared memory


@dsl_user_op
def lds_b128(address: Int32, *, loc=None, ip=None) -> list[Uint32]:
    out = llvm.StructType.get_literal([T.i32()] * 4)
    x = _asm(out, [address], "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", loc=loc, ip=ip)
    return _unpack(x, 4, T.i32(), Uint32, loc=loc, ip=ip)


@dsl_user_op
def lds_b64(address: Int32, *, loc=None, ip=None) -> list[Uint32]:
    out = llvm.StructType.get_literal([T.i32()] * 2)
    x = _asm(out, [address], "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", loc=loc, ip=ip)
    return _unpack(x, 2, T.i32(), Uint32, loc=loc, ip=ip)


@dsl_user_op
def lds_b32(address: Int32, *, loc=None, ip=None) -> Uint32:
    return Uint32(_asm(T.i32(), [address], "ld.shared.b32 $0, [$1];", "=r,r", loc=loc, ip=ip))


@dsl_user_op
def lds_u16(address: Int32, *, loc=None, ip=None) -> Uint32:
    """One 16-bit word, zero-extended."""
    return Uint32(_asm(T.i32(), [address], "ld.shared.u16 $0, [$1];", "=r,r", loc=loc, ip=ip))


@dsl_user_op
def sts_b128(address: Int32, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    _asm(None, [address, *x], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def sts_b64(address: Int32, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    _asm(None, [address, *x], "st.shared.v2.b32 [$0], {$1, $2};", "r,r,r", loc=loc, ip=ip)


@dsl_user_op
def sts_b32(address: Int32, x: Uint32, *, loc=None, ip=None) -> None:
    _asm(None, [address, x], "st.shared.b32 [$0], $1;", "r,r", loc=loc, ip=ip)


@dsl_user_op
def sts_u16(address: Int32, x: Uint32, *, loc=None, ip=None) -> None:
    """Stores the low half of `x`."""
    text = "{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, $1;\nst.shared.b16 [$0], lo;\n}"
    _asm(None, [address, x], text, "r,r", loc=loc, ip=ip)


# ---- global memory


@dsl_user_op
def ldg_b128(address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """Read-only data: the Markov embedding."""
    out = llvm.StructType.get_literal([T.i32()] * 4)
    x = _asm(out, [address], "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", loc=loc, ip=ip)
    return _unpack(x, 4, T.i32(), Uint32, loc=loc, ip=ip)


@dsl_user_op
def ldg_head_b128(condition: Boolean, address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """Where the condition holds, 16 bytes of the Markov head that are read once, else zeros. They are waited for at their first use."""
    out = llvm.StructType.get_literal([T.i32()] * 4)
    text = (
        "{\n.reg .pred p;\n" + _READ_ONCE + "setp.ne.b32 p, $5, 0;\n"
        "mov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;\nmov.b32 $3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], once;\n}"
    )
    x = _asm(out, [address, Int32(condition)], text, "=&r,=&r,=&r,=&r,l,r", loc=loc, ip=ip)
    return _unpack(x, 4, T.i32(), Uint32, loc=loc, ip=ip)


@dsl_user_op
def ldg_b32(address: Int64, *, loc=None, ip=None) -> Uint32:
    return Uint32(_asm(T.i32(), [address], "ld.global.b32 $0, [$1];", "=r,l", loc=loc, ip=ip))


@dsl_user_op
def ldg_u16(address: Int64, *, loc=None, ip=None) -> Uint32:
    return Uint32(_asm(T.i32(), [address], "ld.global.u16 $0, [$1];", "=r,l", loc=loc, ip=ip))


@dsl_user_op
def ldg_s64(address: Int64, *, loc=None, ip=None) -> Int64:
    return Int64(_asm(T.i64(), [address], "ld.global.b64 $0, [$1];", "=l,l", loc=loc, ip=ip))


@dsl_user_op
def stg_b32(address: Int64, x: Uint32, *, loc=None, ip=None) -> None:
    _asm(None, [address, x], "st.global.b32 [$0], $1;", "l,r", loc=loc, ip=ip)


@dsl_user_op
def stg_s64(address: Int64, x: Int64, *, loc=None, ip=None) -> None:
    _asm(None, [address, x], "st.global.b64 [$0], $1;", "l,l", loc=loc, ip=ip)


@dsl_user_op
def stg_words_if(condition: Boolean, address: Int64, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """Where the condition holds, one store of 1 or 2 words that nobody on this SM reads again."""
    text = _IF + "st.global.L1::no_allocate" + _WORDS[len(x)] + "\n}"
    _asm(None, [Int32(condition), address, *x], text, "r,l" + ",r" * len(x), loc=loc, ip=ip)


@dsl_user_op
def stg_u16_if(condition: Boolean, address: Int64, x: Uint32, *, loc=None, ip=None) -> None:
    """Where the condition holds, stores the low half of `x`."""
    text = (
        "{\n.reg .pred p;\n.reg .b16 lo, hi;\nsetp.ne.b32 p, $0, 0;\nmov.b32 {lo, hi}, $2;\n"
        "@p st.global.L1::no_allocate.b16 [$1], lo;\n}"
    )
    _asm(None, [Int32(condition), address, x], text, "r,l,r", loc=loc, ip=ip)


@dsl_user_op
def st_relaxed_gpu(address: Int64, x: Uint64, *, loc=None, ip=None) -> None:
    """One 64-bit store, whole to every reader on this GPU."""
    _asm(None, [address, x], "st.relaxed.gpu.global.b64 [$0], $1;", "l,l", loc=loc, ip=ip)


@dsl_user_op
def ld_relaxed_gpu(address: Int64, *, loc=None, ip=None) -> Uint64:
    return Uint64(_asm(T.i64(), [address], "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", loc=loc, ip=ip))


@dsl_user_op
def ld_relaxed_gpu_x2(address: Int64, *, loc=None, ip=None) -> list[Uint64]:
    """Two neighbouring 64-bit words; each is whole, the pair is not: PTX orders nothing between them."""
    out = llvm.StructType.get_literal([T.i64()] * 2)
    x = _asm(out, [address], "ld.relaxed.gpu.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", loc=loc, ip=ip)
    return _unpack(x, 2, T.i64(), Uint64, loc=loc, ip=ip)


@dsl_user_op
def st_relaxed_sys(address: Int64, x: Uint64, *, loc=None, ip=None) -> None:
    """One 64-bit store, whole to every reader on any GPU."""
    _asm(None, [address, x], "st.relaxed.sys.global.b64 [$0], $1;", "l,l", loc=loc, ip=ip)


@dsl_user_op
def ld_relaxed_sys(address: Int64, *, loc=None, ip=None) -> Uint64:
    return Uint64(_asm(T.i64(), [address], "ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", loc=loc, ip=ip))


@dsl_user_op
def ld_relaxed_sys_x2(address: Int64, *, loc=None, ip=None) -> list[Uint64]:
    """Two neighbouring 64-bit words; each is whole, the pair is not."""
    out = llvm.StructType.get_literal([T.i64()] * 2)
    x = _asm(out, [address], "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", loc=loc, ip=ip)
    return _unpack(x, 2, T.i64(), Uint64, loc=loc, ip=ip)


@dsl_user_op
def ld_acquire_sys(address: Int64, *, loc=None, ip=None) -> Uint64:
    """A load after which this thread sees what the writer, on any GPU, released before the word."""
    return Uint64(_asm(T.i64(), [address], "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", loc=loc, ip=ip))


@dsl_user_op
def stg_b128_if(condition: Boolean, address: Int64, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """Where the condition holds, stores 16 aligned bytes that nobody on this SM reads again."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $0, 0;\n@p st.global.L1::no_allocate.v4.b32 [$1], {$2, $3, $4, $5};\n}"
    _asm(None, [Int32(condition), address, *x], text, "r,l,r,r,r,r", loc=loc, ip=ip)


@dsl_user_op
def st_relaxed_sys_b32(address: Int64, x: Int32, *, loc=None, ip=None) -> None:
    """A store that the host sees."""
    _asm(None, [address, x], "st.relaxed.sys.global.b32 [$0], $1;", "l,r", loc=loc, ip=ip)


@dsl_user_op
def fence_sys(*, loc=None, ip=None) -> None:
    _asm(None, [], "fence.acq_rel.sys;", "", loc=loc, ip=ip)


@dsl_user_op
def trap(*, loc=None, ip=None) -> None:
    _asm(None, [], "trap;", "", loc=loc, ip=ip)


# ---- arithmetic


@dsl_user_op
def mma_bf16(a: Sequence[Uint32], b0: Uint32, b1: Uint32, c: Sequence[Float32], *, loc=None, ip=None) -> list[Float32]:
    """D[16, 8] = A[16, 16] @ B[16, 8] + C in fp32 over one warp. Side effect free."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    out = llvm.StructType.get_literal([T.f32()] * 4)
    x = _asm(out, [*a, b0, b1, *c], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", pure=True, loc=loc, ip=ip)
    return _unpack(x, 4, T.f32(), Float32, loc=loc, ip=ip)


@dsl_user_op
def div_full(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """The division that Triton's fp32 `/` compiles to; not correctly rounded. Side effect free."""
    return Float32(_asm(T.f32(), [a, b], "div.full.f32 $0, $1, $2;", "=f,f,f", pure=True, loc=loc, ip=ip))


@dsl_user_op
def bf16_bits(x: Float32, *, loc=None, ip=None) -> Uint32:
    """fp32 rounded to nearest even bf16, in the low half. Side effect free."""
    text = "{\n.reg .b16 h, z;\nmov.b16 z, 0;\ncvt.rn.bf16.f32 h, $1;\nmov.b32 $0, {h, z};\n}"
    return Uint32(_asm(T.i32(), [x], text, "=r,f", pure=True, loc=loc, ip=ip))


@dsl_user_op
def bf16x2_bits(lo: Float32, hi: Float32, *, loc=None, ip=None) -> Uint32:
    """Two fp32 rounded to nearest even bf16, `lo` in the low half. Side effect free."""
    return Uint32(_asm(T.i32(), [hi, lo], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", pure=True, loc=loc, ip=ip))


@dsl_user_op
def float_of(bits: Uint32, *, loc=None, ip=None) -> Float32:
    """The fp32 with these bits. Side effect free."""
    return Float32(_asm(T.f32(), [bits], "mov.b32 $0, $1;", "=f,r", pure=True, loc=loc, ip=ip))


@dsl_user_op
def bits_of(x: Float32, *, loc=None, ip=None) -> Uint32:
    """The bits of an fp32. Side effect free."""
    return Uint32(_asm(T.i32(), [x], "mov.b32 $0, $1;", "=r,f", pure=True, loc=loc, ip=ip))


@dsl_user_op
def add_rn(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """fp32 sum that no optimisation may contract or drop; a NaN result is always 0x7FFFFFFF. Side effect free."""
    return Float32(_asm(T.f32(), [a, b], "add.rn.f32 $0, $1, $2;", "=f,f,f", pure=True, loc=loc, ip=ip))


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:
    """`x`, which the compiler cannot see through: what is computed from it stays where it is written, out of registers elsewhere."""
    return Int32(_asm(T.i32(), [x], "mov.b32 $0, $1;", "=r,r", loc=loc, ip=ip))


def opaque_lane(lane: Int32) -> Int32:
    """`opaque` of a lane's number, of which the compiler still knows that it is one: it divides by shifting."""
    return opaque(lane) & (LANES - 1)


@dsl_user_op
def globaltimer(*, loc=None, ip=None) -> Int64:
    """Nanoseconds; coarse, for deadlines only."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", loc=loc, ip=ip))


def select(condition: Boolean, a, b):
    """`a` where the condition holds, else `b`; both of one DSL type, which the result keeps."""
    return type(a)(cutlass.select_(condition, a, b))


def shuffle_xor(x, offset: int):
    """`x` of the lane whose index differs in `offset`; all lanes of the warp take part."""
    return type(x)(cute.arch.shuffle_sync_bfly(x, offset))


def warp_max_u32(x: Uint32) -> Uint32:
    """The largest `x` of the warp, in every lane."""
    return Uint32(cute.arch.warp_redux_sync(x, "umax"))


@dsl_user_op
def claim_once(address: Int64, *, loc=None, ip=None) -> Uint32:
    """Sets the word to 1 and returns what it held: 0 for one caller only."""
    return Uint32(_asm(T.i32(), [address], "atom.relaxed.gpu.global.exch.b32 $0, [$1], 1;", "=r,l", loc=loc, ip=ip))
