"""The exchange inside the grid: every CTA writes one record a row, every CTA reads all of them, and the winner comes with them.

A record is one 64-bit word, the CTA's key (keys.py) with the exchange's sequence tag in its lowest bits:

    records[parity of the sequence number][CTA][16 words, one per row slot]        128 bytes a CTA

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

ROW_WORDS = 16  # 64-bit words between two CTAs' records: one 128-byte line a writer
CLAIM_WORDS = 16  # behind the records: the word that elects the one thread that reports a timeout
POLLS_PER_CLOCK_READ = 1024  # a power of two; about half a millisecond: a deadline needs no finer clock
REPORT_GRID = 1  # report code: waited for a CTA of this grid


def records_words(ctas: int) -> int:
    """64-bit words of one build's exchange buffer, zero-initialised once."""
    return 2 * ctas * ROW_WORDS + CLAIM_WORDS


def tag_of(sequence: Uint32, tag_bits: int) -> Uint32:
    """Never 0, so that a fresh buffer holds no valid record."""
    return sequence % Uint32((1 << tag_bits) - 1) + Uint32(1)


def record_address(c, sequence: Uint32, cta: Int32, row: Int32) -> Int64:
    slot = (Int32(sequence & Uint32(1)) * c.grid + cta) * ROW_WORDS + row
    return c.records + Int64(slot) * 8


def publish(c, sequence: Uint32, row: Int32, hi: Uint32, lo: Uint32, tag_bits: int) -> None:
    """Writes this CTA's record of one row. One lane."""
    word = (Uint64(hi) << Uint64(32)) | Uint64(lo | tag_of(sequence, tag_bits))
    ptx.st_relaxed_gpu(record_address(c, sequence, c.cta, row), word)


@cute.jit
def collect(
    c,
    sequence: Uint32,
    step: Int32,
    row: Int32,
    pair: cutlass.Constexpr,
    most: cutlass.Constexpr,
    tag_bits: cutlass.Constexpr,
):
    """Waits for the records of all CTAs for `pair` neighbouring rows and returns their largest keys, [(high, low)] * pair.

    One warp, all lanes. Lane l reads the CTAs l, l + 32, ...; past the last CTA it reads that one again, which changes no maximum.
    `most` is the compile-time bound of the CTAs.
    """
    loads = (most + 31) // 32
    hi = cute.make_rmem_tensor(cute.make_layout(loads * pair), Uint32)
    lo = cute.make_rmem_tensor(cute.make_layout(loads * pair), Uint32)
    tag = tag_of(sequence, tag_bits)
    tag_mask = Uint32((1 << tag_bits) - 1)
    waiting = Int32(1)
    polls = Int32(0)
    started = Int64(0)
    while waiting != 0:
        missing = Int32(-1)
        for j in cutlass.range_constexpr(loads):
            cta = cutlass.min(c.lane + 32 * j, c.expected - 1)
            address = record_address(c, sequence, cta, row)
            if cutlass.const_expr(pair == 2):
                words = ptx.ld_relaxed_gpu_x2(address)
            else:
                words = [ptx.ld_relaxed_gpu(address)]
            for p in cutlass.range_constexpr(pair):
                hi[j * pair + p] = Uint32(words[p] >> Uint64(32))
                lo[j * pair + p] = Uint32(words[p] & Uint64(0xFFFFFFFF))
                if (lo[j * pair + p] & tag_mask) != tag:
                    missing = cta
        waiting = Int32(1)
        if cute.arch.vote_all_sync(missing < 0):
            waiting = Int32(0)
        polls += 1
        if (polls & (POLLS_PER_CLOCK_READ - 1)) == 0:
            now = ptx.globaltimer()
            if started == 0:
                started = now
            if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (missing >= 0):
                report_timeout(c, step, row, missing)
    winners = []
    for p in cutlass.range_constexpr(pair):
        best_hi, best_lo = hi[p], lo[p]
        for j in cutlass.range_constexpr(1, loads):
            best_hi, best_lo = keys.larger(hi[j * pair + p], lo[j * pair + p], best_hi, best_lo)
        winners.append(keys.warp_largest(best_hi, best_lo))
    return winners


@cute.jit
def report_timeout(c, step: Int32, row: Int32, peer: Int32) -> None:
    """One thread of the grid tells the host whom it waited for, then traps; the others keep polling until that ends them."""
    claim = c.records + Int64(2 * c.grid * ROW_WORDS) * 8
    if ptx.claim_once(claim) == 0:
        words = (REPORT_GRID, 0, row, step, peer, c.cta, Int32(c.timeout_ns // 1000000), ptx.ldg_b32(c.epoch))
        for i in cutlass.range_constexpr(1, len(words)):
            ptx.st_relaxed_sys_b32(c.report + 4 * i, Int32(words[i]))
        ptx.fence_sys()  # the code goes last: a host that sees it sees the rest
        ptx.st_relaxed_sys_b32(c.report, Int32(words[0]))
        ptx.fence_sys()  # and it leaves the chip before the trap ends the context
        ptx.trap()
