"""Arithmetic of scores in CuTe DSL that must equal the engine's to the bit, beside what ptx.py has.

Each function names the instruction sequence that it stands for and by what it was found equal.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def tanh(x: Float32) -> Float32:
    """torch's tanh of fp32 on a GPU: libdevice's, without flush to zero (tests/kernels/test_score_ops.py compares all fp32 values)."""
    return cute.math.tanh(x)


@dsl_user_op
def mul_rn(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """fp32 product that no optimisation may contract with a sum. Side effect free."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            operands,
            "mul.rn.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
