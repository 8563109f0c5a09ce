"""How the CTAs of several ranks agree on each row's winner, by records (exchange.py) in each other's memory. Two forms, by the number of ranks.

Direct, up to DIRECT_RANKS ranks: exchange.py's exchange over all CTAs of all ranks. A CTA writes its record into every rank's mailbox, and
waits for all CTAs' records in its own rank's.

    mailbox[parity of the sequence number][rank, CTA][row slot]

In two stages, for more ranks, whose CTAs' records would be too many to write and to poll: a CTA writes its record into its rank's memory;
the row's leader, one CTA, reads these alone and writes the largest, the rank's record, into every mailbox; all CTAs of all ranks wait for the
ranks' records of the row. At two ranks this costs about 0.7 us a position more: one more store to see and one more poll.

    records[parity][row slot][CTA]       local, read by one warp: packed
    mailbox[parity][row slot][rank]      read by every CTA of the rank

Why this is lawful without a fence stands in exchange.py: a record is one 64-bit word, whole to every reader (`.sys` between GPUs), with its
tag in it, and nothing else is handed over. Two parities are enough in both forms. Direct: as in exchange.py, with the CTAs of all ranks.
Two stages: a rank's record of exchange s is overwritten in s + 2 by a leader that has its own CTAs' records of s + 2, each of which has read
all ranks' records of s + 1; and another rank's record of s + 1 was made of its CTAs' records of s + 1, each written after reading all
ranks' of s. Every row slot is written in every exchange of a build, and each build has its own mailbox and counter, so that a word is never
older than s - 2. Only CTA 0 reads the last position's records, before its launch ends, and its rank's next records come after that.

Records do not say that logits have arrived: those tell themselves (chain_ranks.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import exchange, mailbox, plan_line, ptx, symmetric_buffer

LINE_BYTES = 128  # of L2


def is_direct(world: int) -> bool:
    """Whether every CTA writes to every rank."""
    return world <= symmetric_buffer.DIRECT_RANKS


def records_words(line: plan_line.PlanLine, world: int) -> int:
    """64-bit words of a rank's local memory: records, where there are any, and the word that elects the thread that reports."""
    return exchange.CLAIM_WORDS if is_direct(world) else mailbox.records_words(line.ctas, line.row_slots)


class RankExchange:
    """The part of a chain kernel in which ranks agree; comes with chain_agree.Agreement and chain_ranks.Ranks."""

    def __init__(self, line: plan_line.PlanLine, world: int) -> None:
        self.direct = is_direct(world)
        self.every_cta = world * line.ctas
        self.gather_warps = plan_line.gathering_warps(line)
        self.every_gather = exchange.Gather(line.row_slots, self.every_cta + 1, self.gather_warps, world, line.ctas)
        self.grid_wait = mailbox.Wait(line.ctas + 1, self.tag_bits, across=False)
        self.rank_wait = mailbox.Wait(world, self.tag_bits, across=True)

    @cute.jit
    def publish_records(self, c, step: Int32, sequence: Uint32):
        """Warp n, one of the first row_slots: this CTA's best key of row n, and in two stages the rank's."""
        keys_at = self.shared.keys + c.warp * (plan_line.RED_WARPS * plan_line.KEY_BYTES)
        hi, lo = self.largest_key(c, keys_at, self.line.warps)
        record = mailbox.word_of(hi, lo | exchange.tag_of(sequence, self.tag_bits))
        if cutlass.const_expr(self.direct):
            if c.lane < self.world:  # one lane a rank
                there = self.every_record(c, c.lane)
                cta = c.rank * self.line.ctas + c.cta
                ptx.st_relaxed_sys(exchange.record_address(there, sequence, cta, c.warp, self.stride), record)
        else:
            records = mailbox.records_of(c, sequence, c.warp, self.rows, self.line.ctas)
            if c.lane == 0:
                ptx.st_relaxed_gpu(records + Int64(c.cta) * 8, record)
        if (c.lane * LINE_BYTES < self.tile.row_bytes) & (hi != 0) & (step + 1 < self.num_steps):
            candidate = c.embed + Int64(self.token_of(c, lo)) * self.tile.row_bytes
            ptx.prefetch_l2(candidate + Int64(c.lane) * LINE_BYTES)
        if cutlass.const_expr(not self.direct):
            if c.cta == c.warp * (self.line.ctas // self.rows):  # the row's leader
                self.publish_ranks_record(c, step, sequence)

    @cute.jit
    def publish_ranks_record(self, c, step: Int32, sequence: Uint32):
        """The leader of the warp's row: waits for its rank's records and writes the largest to every rank."""
        target = self.rank_address(c, cutlass.min(c.lane, self.world - 1)) + c.mailbox
        records = mailbox.records_of(c, sequence, c.warp, self.rows, self.line.ctas)
        tag = exchange.tag_of(sequence, self.tag_bits)
        hi, lo = mailbox.largest_record(c, self.grid_wait, records, c.expected, step, c.warp, tag)
        if c.lane < self.world:
            place = mailbox.mailbox_of(target, sequence, c.warp) + Int64(c.rank) * 8
            ptx.st_relaxed_sys(place, mailbox.word_of(hi, lo))

    def every_record(self, c, rank: Int32):
        """The context for exchange.py with the records of all ranks' CTAs in a rank's mailbox."""
        return c._replace(
            records=self.rank_address(c, rank) + c.mailbox,
            grid=Int32(self.every_cta + 1),
            expected=c.expected + (self.every_cta - self.line.ctas),
        )

    @cute.jit
    def collect_records(self, c, step: Int32, sequence: Uint32):
        """Waits for everybody's records of a position and takes the winners. All warps."""
        if cutlass.const_expr(self.direct):
            if c.warp < self.gather_warps:
                found = exchange.gather(
                    self.every_record(c, c.rank), sequence, step, self.every_gather, self.tag_bits, self.stride
                )
                self.store_shares(c, found, self.every_gather)
            cute.arch.sync_threads()  # the gathering warps' shares are there
            if c.warp < self.rows:
                shares = self.shared.partials + c.warp * (self.gather_warps * plan_line.KEY_BYTES)
                hi, lo = self.largest_key(c, shares, self.gather_warps)
                self.take_winner(c, step, hi, lo)
        else:
            if c.warp < self.rows:
                own = mailbox.mailbox_of(self.rank_address(c, c.rank) + c.mailbox, sequence, c.warp)
                tag = exchange.tag_of(sequence, self.tag_bits)
                hi, lo = mailbox.largest_record(c, self.rank_wait, own, Int32(self.world), step, c.warp, tag)
                self.take_winner(c, step, hi, lo)
