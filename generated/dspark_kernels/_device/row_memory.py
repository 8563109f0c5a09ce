"""Global memory accesses of the chain kernel's cache rows: the count that orders them, and loads with something else for a default."""

from cutlass import Boolean, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(out, ins, text: str, constraints: str, loc, ip):
    return llvm.inline_asm(
        out,
        [x.ir_value(loc=loc, ip=ip) for x in ins],
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dsl_user_op
def count_release_gpu(address: Int64, *, loc=None, ip=None) -> None:
    """Adds 1 to a word, behind everything that this thread has written or seen before."""
    _asm(None, [address], "red.release.gpu.global.add.u32 [$0], 1;", "l", loc, ip)


@dsl_user_op
def load_acquire_gpu(address: Int64, *, loc=None, ip=None) -> Uint32:
    """A word, after which this thread sees what was released on this GPU before the counts that it holds."""
    return Uint32(_asm(T.i32(), [address], "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", loc, ip))


@dsl_user_op
def load_words_or(condition: Boolean, address: Int64, count: int, other: Uint32, *, loc=None, ip=None) -> list[Uint32]:
    """Where the condition holds, `count` (1, 2 or 4) aligned words that this SM reads once; else that many times `other`."""
    words = [f"${i}" for i in range(count)]
    kind, target = (f".v{count}.b32", f"{{{', '.join(words)}}}") if count > 1 else (".b32", words[0])
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${count}, 0;\n"
        + "".join(f"mov.b32 {word}, ${count + 2};\n" for word in words)
        + f"@p ld.global.L1::no_allocate{kind} {target}, [${count + 1}];\n}}"
    )
    out = llvm.StructType.get_literal([T.i32()] * count) if count > 1 else T.i32()
    x = _asm(out, [Int32(condition), address, other], text, ",".join(["=&r"] * count) + ",r,l,r", loc, ip)
    if count == 1:
        return [Uint32(x)]
    return [Uint32(llvm.extractvalue(T.i32(), x, [i], loc=loc, ip=ip)) for i in range(count)]
