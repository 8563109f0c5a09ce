"""PTX for words in staging (rank_logits.py), beside ptx.py's."""

from collections.abc import Sequence

from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import ptx


@dsl_user_op
def ld_relaxed_sys_x4(address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """Four neighbouring 32-bit words, the first one 16-byte aligned; each is whole, the four are not."""
    out = llvm.StructType.get_literal([T.i32()] * 4)
    x = ptx._asm(
        out, [address], "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", loc=loc, ip=ip
    )
    return ptx._unpack(x, 4, T.i32(), Uint32, loc=loc, ip=ip)


@dsl_user_op
def st_relaxed_sys_words_if(condition: Boolean, address: Int64, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """Where the condition holds, 1, 2 or 4 neighbouring words, aligned to all of them; each is whole to every reader on any GPU."""
    text = ptx._IF + "st.relaxed.sys.global" + ptx._WORDS[len(x)] + "\n}"
    ptx._asm(None, [Int32(condition), address, *x], text, "r,l" + ",r" * len(x), loc=loc, ip=ip)


@dsl_user_op
def min_u32(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    """The smaller of two. Side effect free."""
    return Uint32(ptx._asm(T.i32(), [a, b], "min.u32 $0, $1, $2;", "=r,r,r", pure=True, loc=loc, ip=ip))
