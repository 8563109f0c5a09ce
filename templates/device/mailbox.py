"""Words in symmetric memory, and how a warp waits for a row of them (rank_exchange.py says who writes them)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from . import exchange, keys, ptx, symmetric_buffer

LANES = 32
RECORD_BYTES = symmetric_buffer.RECORD_BYTES
RECORDS_ALIGNMENT = 16  # records of a row start a 128-byte line


class Wait:
    """What a wait for a row of records is about.

    Args:
        records: most records of a row.
        tag_bits: of a record.
        across: whether other ranks write them, else CTAs of this rank.
    """

    def __init__(self, records: int, tag_bits: int, *, across: bool) -> None:
        self.loads = (records + LANES - 1) // LANES  # records that a lane reads
        self.tag_bits = tag_bits
        self.across = across
        self.code = exchange.REPORT_PEER if across else exchange.REPORT_GRID


def record_stride(ctas: int) -> int:
    """64-bit words of one row's local records. One more than there are CTAs is read when a test asks for the timeout."""
    return -(-(ctas + 1) // RECORDS_ALIGNMENT) * RECORDS_ALIGNMENT


def records_words(ctas: int, row_slots: int) -> int:
    """64-bit words of the local records of one build and rank, zero-initialised once."""
    return 2 * row_slots * record_stride(ctas) + exchange.CLAIM_WORDS


def records_of(c, sequence: Uint32, row: Int32, row_slots: int, ctas: int) -> Int64:
    """Address of the local records of one row."""
    return c.records + Int64((Int32(sequence & Uint32(1)) * row_slots + row) * record_stride(ctas)) * RECORD_BYTES


def mailbox_of(mailbox: Int64, sequence: Uint32, row: Int32) -> Int64:
    """Address of the ranks' records of one row."""
    place = Int32(sequence & Uint32(1)) * symmetric_buffer.MOST_ROWS + row
    return mailbox + Int64(place) * symmetric_buffer.ROW_BYTES


def word_of(hi: Uint32, lo: Uint32) -> Uint64:
    return (Uint64(hi) << Uint64(32)) | Uint64(lo)


@cute.jit
def largest_record(c, w: cutlass.Constexpr, address: Int64, count: Int32, step: Int32, row: Int32, tag: Uint32):
    """One warp waits until the `count` neighbouring records all carry the tag; returns the largest, tag included, in every lane.

    Past the last record a lane reads that one again, which changes no maximum. What has arrived is not read again.
    """
    hi = cute.make_rmem_tensor(cute.make_layout(w.loads), Uint32)
    lo = cute.make_rmem_tensor(cute.make_layout(w.loads), Uint32)
    for j in cutlass.range_constexpr(w.loads):
        lo[j] = Uint32(0)
    tag_mask = Uint32((1 << w.tag_bits) - 1)
    waiting = Int32(1)
    polls = Int32(0)
    started = Int64(0)
    while waiting != 0:
        for j in cutlass.range_constexpr(w.loads):
            if (lo[j] & tag_mask) != tag:
                at = address + Int64(cutlass.min(c.lane + LANES * j, count - 1)) * RECORD_BYTES
                word = ptx.ld_relaxed_sys(at) if cutlass.const_expr(w.across) else ptx.ld_relaxed_gpu(at)
                hi[j] = Uint32(word >> Uint64(32))
                lo[j] = Uint32(word & Uint64(0xFFFFFFFF))
        missing = Int32(-1)
        for j in cutlass.range_constexpr(w.loads):
            if (lo[j] & tag_mask) != tag:
                missing = cutlass.min(c.lane + LANES * j, count - 1)
        waiting = Int32(1)
        if cute.arch.vote_all_sync(missing < 0):
            waiting = Int32(0)
        polls += 1
        if (polls & (exchange.POLLS_PER_CLOCK_READ - 1)) == 0:
            now = ptx.globaltimer()
            if started == 0:
                started = now
            late = (c.timeout_ns > 0) & (now - started > c.timeout_ns)
            if cutlass.const_expr(w.across):
                # The own rank's record comes from a leader whose own wait is bounded, and which knows the CTA that is missing.
                late = late & cute.arch.vote_all_sync(missing != c.rank)
            if late & (missing >= 0):
                exchange.report(c, c.claim, (w.code, c.rank, row, step, missing))
    top, low = hi[0], lo[0]
    for j in cutlass.range_constexpr(1, w.loads):
        top, low = keys.larger(hi[j], lo[j], top, low)
    return keys.warp_largest(top, low)


@cute.jit
def wait_for_counts(c, address: Int64, wanted: Uint32, peer: Int32, step: Int32):
    """One warp waits until each lane's 32-bit count is `wanted` or beyond. On timeout a lane that waits reports its `peer`.

    The loads acquire: a lane that returns sees what its peer released before it counted. Counts only rise, and may wrap.
    """
    arrived = Int32(0)
    waiting = Int32(1)
    polls = Int32(0)
    started = Int64(0)
    while waiting != 0:
        if arrived == 0:
            arrived = Int32(Int32(Uint32(ptx.ld_acquire_sys(address)) - wanted) >= 0)
        waiting = Int32(1)
        if cute.arch.vote_all_sync(arrived != 0):
            waiting = Int32(0)
        polls += 1
        if (polls & (exchange.POLLS_PER_CLOCK_READ - 1)) == 0:
            now = ptx.globaltimer()
            if started == 0:
                started = now
            if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (arrived == 0):
                exchange.report(c, c.claim, (exchange.REPORT_PEER, c.rank, 0, step, peer))
