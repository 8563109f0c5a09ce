"""Global memory accesses of the step kernels: vectors that are read or written once, and the words that blocks of a row share."""

from collections.abc import Sequence

from cutlass import Boolean, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

VECTOR_BYTES = 16


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
def prefetch_l2_if(condition: Boolean, address: Int64, *, loc=None, ip=None) -> None:
    """Where the condition holds, brings the line at `address` into L2. Whoever writes it later is seen all the same: L2 is where
    all writes arrive."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $0, 0;\n@p prefetch.global.L2 [$1];\n}"
    _asm(None, [Int32(condition), address], text, "r,l", loc, ip)


@dsl_user_op
def load_vector_if(condition: Boolean, address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """Where the condition holds, 16 bytes that this SM reads once, else zeros. Not a read-only load: with programmatic dependent
    launch the kernel before may still write when this one starts."""
    out = llvm.StructType.get_literal([T.i32()] * 4)
    text = (
        "{\n.reg .pred p;\nsetp.ne.b32 p, $4, 0;\nmov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;\nmov.b32 $3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$5];\n}"
    )
    x = _asm(out, [Int32(condition), address], text, "=&r,=&r,=&r,=&r,r,l", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), x, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def load_b32_if(condition: Boolean, address: Int64, *, loc=None, ip=None) -> Uint32:
    """Where the condition holds, one word, else 0."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $1, 0;\nmov.b32 $0, 0;\n@p ld.global.b32 $0, [$2];\n}"
    return Uint32(_asm(T.i32(), [Int32(condition), address], text, "=&r,r,l", loc, ip))


@dsl_user_op
def load_u16_if(condition: Boolean, address: Int64, *, loc=None, ip=None) -> Uint32:
    """Where the condition holds, one 16-bit word, zero-extended, else 0."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $1, 0;\nmov.b32 $0, 0;\n@p ld.global.u16 $0, [$2];\n}"
    return Uint32(_asm(T.i32(), [Int32(condition), address], text, "=&r,r,l", loc, ip))


@dsl_user_op
def store_vector_if(condition: Boolean, address: Int64, x: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """Where the condition holds, stores 16 bytes that nobody on this SM reads again."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $0, 0;\n@p st.global.L1::no_allocate.v4.b32 [$1], {$2, $3, $4, $5};\n}"
    _asm(None, [Int32(condition), address, *x], text, "r,l,r,r,r,r", loc, ip)


@dsl_user_op
def raise_key(address: Int64, key: Uint64, *, loc=None, ip=None) -> None:
    """Makes the 64-bit word at least `key`. Relaxed: the arrival that follows orders it."""
    _asm(None, [address, key], "red.relaxed.gpu.global.max.u64 [$0], $1;", "l,l", loc, ip)


@dsl_user_op
def raise_wide_key(address: Int64, key: Sequence[Uint32], *, loc=None, ip=None) -> None:
    """Makes the 128-bit word at least the key of three words, the most significant first. Relaxed: the arrival that follows orders it.

    There is no 128-bit maximum, so it compares and swaps until the word is as large. An attempt fails only where another thread's has
    raised the word in between, so all end, and those that cannot win end after one.
    """
    text = (
        "{\n.reg .pred p, q;\n.reg .b64 rank, low, r, l;\n.reg .b128 mine, seen, found;\n"
        "mov.b64 rank, {$2, $1};\ncvt.u64.u32 low, $3;\nmov.b128 mine, {low, rank};\n"
        "mov.b64 r, 0;\nmov.b64 l, 0;\n"
        "TRY:\nmov.b128 seen, {l, r};\natom.relaxed.gpu.global.cas.b128 found, [$0], seen, mine;\n"
        # done if the swap was made
        "{\n.reg .b64 fr, fl;\nmov.b128 {fl, fr}, found;\nsetp.eq.b64 p, fr, r;\nsetp.eq.and.b64 p, fl, l, p;\n"
        "mov.b64 r, fr;\nmov.b64 l, fl;\n}\n@p bra DONE;\n"
        # or if the word is as large
        "setp.eq.u64 q, r, rank;\nsetp.ge.and.u64 q, l, low, q;\nsetp.gt.or.u64 p, r, rank, q;\n@!p bra TRY;\nDONE:\n}"
    )
    _asm(None, [address, *key], text, "l,r,r,r", loc, ip)


@dsl_user_op
def rank_of_wide_key(address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """The upper half of a 128-bit word that others may raise meanwhile, its upper word first. Read whole, as it is written: PTX gives
    accesses of other sizes no value."""
    out = llvm.StructType.get_literal([T.i32()] * 2)
    text = (
        "{\n.reg .b64 low, rank;\n.reg .b128 key;\nld.relaxed.gpu.global.b128 key, [$2];\nmov.b128 {low, rank}, key;\n"
        "mov.b64 {$1, $0}, rank;\n}"
    )
    x = _asm(out, [address], text, "=r,=r,l", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), x, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def raise_shared(address: Int32, word: Uint32, *, loc=None, ip=None) -> None:
    """Makes the 32-bit word in shared memory at least `word`. A hint to other warps: nothing is ordered by it."""
    _asm(None, [address, word], "red.relaxed.cta.shared.max.u32 [$0], $1;", "r,r", loc, ip)


@dsl_user_op
def count_shared(address: Int32, *, loc=None, ip=None) -> Uint32:
    """Adds one to the 32-bit word in shared memory and returns what it was. Nothing is ordered by it."""
    return Uint32(_asm(T.i32(), [address], "atom.relaxed.cta.shared.add.u32 $0, [$1], 1;", "=r,r", loc, ip))


@dsl_user_op
def arrive(address: Int64, last: Uint32, *, loc=None, ip=None) -> Uint32:
    """Counts an arrival at the word and returns how many came before; the one that finds `last` leaves 0 behind.

    Release: what this thread did before is seen by whoever arrives later. Acquire: this thread sees what the earlier ones did.
    All arrivals are read-modify-writes of one word, so each continues the release sequence of those before it.
    """
    text = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
    return Uint32(_asm(T.i32(), [address, last], text, "=r,l,r", loc, ip))
