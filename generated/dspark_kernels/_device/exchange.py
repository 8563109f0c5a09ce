"""The exchange inside the grid: every CTA writes one record a row, every CTA reads all of them, and the winner comes with them.

A record is one 64-bit word, the CTA's key (keys.py) with the exchange's sequence tag in its lowest bits:

    records[parity of the sequence number][CTA][row slot]        a CTA's records in 32-byte sectors of their own

Why this is lawful under the PTX memory model without a fence: a 64-bit relaxed access is single-copy atomic and the tag
travels in the same word as the payload, so a reader that sees the tag has the payload; nothing else is handed over.
A two-word load is two such accesses; each half carries its own tag.

Why two parities are enough and nothing is ever reset: a CTA overwrites the record of exchange s in exchange s + 2, which it
reaches only after reading every CTA's record of s + 1; each CTA writes that one only after it has read all records of s
(its value depends on them). The tag tells s from s - 2, what the word held before; every row slot is written in every
exchange of this build, also for rows that the call does not use, so that no word can be older than that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from . import keys, ptx

GATHER_GROUP = 2  # rows that one lane reads with one load
CLAIM_WORDS = 16  # behind the records: the word that elects the one thread that reports a timeout
POLLS_PER_CLOCK_READ = 1024  # a power of two; about half a millisecond: a deadline needs no finer clock
# Report codes: waited for a CTA of this grid; for another rank; ranks were about to launch different things; waited for cache rows of -inf;
# for another rank's logits.
REPORT_GRID, REPORT_PEER, REPORT_DIFFERENCE, REPORT_FILL, REPORT_LOGITS = 1, 2, 3, 4, 5


def record_stride(row_slots: int) -> int:
    """64-bit words between two CTAs' records: whole 32-byte sectors."""
    return max(4, row_slots)


def records_words(ctas: int, stride: int) -> int:
    """64-bit words of one build's exchange buffer, zero-initialised once. `stride`: words between two CTAs' records."""
    return 2 * ctas * stride + CLAIM_WORDS


def tag_of(sequence: Uint32, tag_bits: int) -> Uint32:
    """Never 0, so that a fresh buffer holds no valid record."""
    return sequence % Uint32((1 << tag_bits) - 1) + Uint32(1)


def record_address(c, sequence: Uint32, cta: Int32, row: Int32, stride: int) -> Int64:
    slot = (Int32(sequence & Uint32(1)) * c.grid + cta) * stride + row
    return c.records + Int64(slot) * 8


def publish(c, sequence: Uint32, row: Int32, hi: Uint32, lo: Uint32, tag_bits: int, stride: int) -> None:
    """Writes this CTA's record of one row. One lane."""
    word = (Uint64(hi) << Uint64(32)) | Uint64(lo | tag_of(sequence, tag_bits))
    ptx.st_relaxed_gpu(record_address(c, sequence, c.cta, row, stride), word)


class Gather:
    """How the records are shared out: `warps` warps read them, a lane one or two rows of one CTA at a time."""

    def __init__(self, row_slots: int, ctas: int, warps: int | None = None, ranks: int = 1, rank_ctas: int = 0) -> None:
        self.ranks, self.rank_ctas = ranks, rank_ctas  # whose CTAs write the records
        self.rows = row_slots
        self.pair = min(row_slots, GATHER_GROUP)  # rows a lane reads at once
        self.lanes = row_slots // self.pair  # lanes that read one CTA's records
        self.warps = row_slots if warps is None else warps
        self.ctas_per_load = 32 // self.lanes * self.warps
        self.loads = (ctas + self.ctas_per_load - 1) // self.ctas_per_load


@cute.jit
def gather(
    c, sequence: Uint32, step: Int32, g: cutlass.Constexpr, tag_bits: cutlass.Constexpr, stride: cutlass.Constexpr
):
    """Waits for its share of the CTAs' records; returns the largest keys of it, [(high, low)] of the lane's rows.

    Warps 0 .. g.warps - 1, all lanes. The lane's rows are (lane % g.lanes) * g.pair and the next. Past the last CTA a lane reads
    that one again, which changes no maximum. What has arrived is not read again, so that waiting CTAs leave L2 to the writers.
    """
    hi = cute.make_rmem_tensor(cute.make_layout(g.loads * g.pair), Uint32)
    lo = cute.make_rmem_tensor(cute.make_layout(g.loads * g.pair), Uint32)
    for k in cutlass.range_constexpr(g.loads * g.pair):
        lo[k] = Uint32(0)
    tag = tag_of(sequence, tag_bits)
    tag_mask = Uint32((1 << tag_bits) - 1)
    row = c.lane % g.lanes * g.pair
    first = c.warp * (32 // g.lanes) + c.lane // g.lanes
    waiting = Int32(1)
    polls = Int32(0)
    started = Int64(0)
    while waiting != 0:
        missing = Int32(-1)
        for j in cutlass.range_constexpr(g.loads):
            cta = cutlass.min(first + j * g.ctas_per_load, c.expected - 1)
            here = (lo[j * g.pair] & tag_mask) == tag
            if cutlass.const_expr(g.pair == 2):
                here = here & ((lo[j * g.pair + 1] & tag_mask) == tag)
            if not here:
                address = record_address(c, sequence, cta, row, stride)
                words = load_records(address, g)
                for p in cutlass.range_constexpr(g.pair):
                    hi[j * g.pair + p] = Uint32(words[p] >> Uint64(32))
                    lo[j * g.pair + p] = Uint32(words[p] & Uint64(0xFFFFFFFF))
        for j in cutlass.range_constexpr(g.loads):
            for p in cutlass.range_constexpr(g.pair):
                if (lo[j * g.pair + p] & tag_mask) != tag:
                    missing = cutlass.min(first + j * g.ctas_per_load, c.expected - 1)
        waiting = Int32(1)
        if cute.arch.vote_all_sync(missing < 0):
            waiting = Int32(0)
        polls += 1
        if (polls & (POLLS_PER_CLOCK_READ - 1)) == 0:
            now = ptx.globaltimer()
            if started == 0:
                started = now
            if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (missing >= 0):
                if cutlass.const_expr(g.ranks > 1):
                    report_missing(c, step, row, missing, g)
                else:
                    report_timeout(c, step, row, missing, stride)
    best = []
    for p in cutlass.range_constexpr(g.pair):
        best_hi, best_lo = hi[p], lo[p]
        for j in cutlass.range_constexpr(1, g.loads):
            best_hi, best_lo = keys.larger(hi[j * g.pair + p], lo[j * g.pair + p], best_hi, best_lo)
        if cutlass.const_expr(g.lanes == 1):
            best_hi, best_lo = keys.warp_largest(best_hi, best_lo)
        else:
            for k in cutlass.range_constexpr(5):
                if cutlass.const_expr((1 << k) >= g.lanes):
                    other_hi, other_lo = ptx.shuffle_xor(best_hi, 1 << k), ptx.shuffle_xor(best_lo, 1 << k)
                    best_hi, best_lo = keys.larger(other_hi, other_lo, best_hi, best_lo)
        best.append((best_hi, best_lo))
    return best


def load_records(address: Int64, g: Gather) -> list[Uint64]:
    """A lane's records of one CTA."""
    if g.pair == 2:
        return ptx.ld_relaxed_gpu_x2(address) if g.ranks == 1 else ptx.ld_relaxed_sys_x2(address)
    return [ptx.ld_relaxed_gpu(address) if g.ranks == 1 else ptx.ld_relaxed_sys(address)]


@cute.jit
def report_missing(c, step: Int32, row: Int32, missing: Int32, g: cutlass.Constexpr) -> None:
    """A wait for a CTA of some rank ran out: that rank is to blame, or within the own rank the CTA."""
    beyond = (
        missing - g.ranks * g.rank_ctas
    )  # a test may wait for more records than there are: for a CTA of the own rank
    source = ptx.select(beyond < 0, missing // g.rank_ctas, c.rank)
    cta = ptx.select(beyond < 0, missing % g.rank_ctas, g.rank_ctas + beyond)
    own = source == c.rank
    code, peer = ptx.select(own, Int32(REPORT_GRID), Int32(REPORT_PEER)), ptx.select(own, cta, source)
    report(c, c.claim, (code, c.rank, row, step, peer))


@cute.jit
def report_timeout(c, step: Int32, row: Int32, peer: Int32, stride: cutlass.Constexpr) -> None:
    """A wait for a CTA of this grid ran out."""
    report(c, c.records + Int64(2 * c.grid * stride) * 8, (REPORT_GRID, 0, row, step, peer))


@cute.jit
def report(c, claim: Int64, what: cutlass.Constexpr, details: cutlass.Constexpr = ()) -> None:
    """One thread of the grid tells the host what it waited for, then traps; the others keep polling until that ends them.

    `what`: code, rank, row, position, peer; `details`: words behind the others. `claim`: the word that elects the thread.
    """
    if ptx.claim_once(claim) == 0:
        words = (*what, c.cta, Int32(c.timeout_ns // 1000000), ptx.ldg_b32(c.epoch), *details)
        for i in cutlass.range_constexpr(1, len(words)):
            ptx.st_relaxed_sys_b32(c.report + 4 * i, Int32(words[i]))
        ptx.fence_sys()  # the code goes last: a host that sees it sees the rest
        ptx.st_relaxed_sys_b32(c.report, Int32(words[0]))
        ptx.fence_sys()  # and it leaves the chip before the trap ends the context
        ptx.trap()
