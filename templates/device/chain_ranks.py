"""The part of a chain kernel that several ranks add: each rank's place, and what it does beside the products. rank_exchange.py has the records,
rank_logits.py everybody's logits.

Emulated ranks share one GPU and one launch: rank = block // CTAs of a rank.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from . import exchange, mailbox, plan_line, ptx, rank_exchange, rank_logits, symmetric_buffer

LANES = 32
ADDRESS_BYTES = plan_line.ADDRESS_BYTES
NOISE_BYTES = plan_line.NOISE_BYTES
# Shapes of launches that ranks compare: launch count 32 bits, rows 4, the host's word 28.
ROWS_SHIFT = 28
SHAPE_MASK = (1 << ROWS_SHIFT) - 1
LAUNCHES, ROWS, SHAPE = 0, 1, 2  # what differs, in the report


class Ranks(rank_exchange.RankExchange, rank_logits.RankLogits):
    """The part of a chain kernel for `world` ranks; comes with the others. Methods take the kernel's context `c`."""

    def __init__(self, line: plan_line.PlanLine, world: int, emulated: bool, check_ranks: bool) -> None:
        if world not in (1, line.tp):
            raise ValueError(f"world: expected 1 or the plan line's {line.tp} ranks, got {world}")
        if not 1 <= world <= symmetric_buffer.MOST_RANKS:
            raise ValueError(f"world: expected 1 to {symmetric_buffer.MOST_RANKS} ranks, got {world}")
        if world == 1 and (emulated or check_ranks):
            raise ValueError("emulated, check_ranks: expected more than one rank, got 1")
        self.world = world
        self.emulated = emulated
        self.check_ranks = check_ranks
        self.peers = world - 1
        self.last_warp = line.warps - 1
        gathering = plan_line.gathering_warps(line)
        if world > 1 and line.warps <= gathering:
            raise ValueError(f"warps: expected more than the {gathering} that wait for records, got {line.warps}")
        self.rank_words = rank_exchange.records_words(line, world)
        rank_exchange.RankExchange.__init__(self, line, world)

    # ---- who this is

    def own_arguments(self, a, block: Int32):
        """The CTA's number among its rank's, and the arguments of that rank."""
        if not self.emulated:
            return block, a
        cta, shift = block % self.line.ctas, block // self.line.ctas
        at = Int64(shift)
        own = a._replace(
            rank=a.rank + shift,
            head=a.head + at * a.shard_width * self.tile.row_bytes,
            base=a.base + at * a.base_rank_stride * self.base_bytes,
            noise=a.noise + at * a.noise_rank_stride * NOISE_BYTES,
            cache=a.cache + at * a.cache_rank_stride * self.cache_bytes,
            draft_tokens=a.draft_tokens + at * a.token_rank_stride * 8,
            records=a.records + at * self.rank_words * 8,
            epoch=a.epoch + at * 4,
            launches=a.launches + at * 4,
        )
        return cta, own

    def claim_of(self, records: Int64, rank: Int32) -> Int64:
        """Address of the word that elects the thread that reports: emulated ranks share the first one's, as they share the report."""
        own = records + Int64(self.rank_words - exchange.CLAIM_WORDS) * 8
        return own - Int64(rank) * self.rank_words * 8 if self.emulated else own

    def shard_of(self, rank: Int32, shard_width: Int32):
        """A rank's first draft id and number of columns; none where the ranks before it have them all."""
        if self.world == 1:
            return Int32(0), cutlass.min(shard_width, self.drawn_columns)
        first = rank * shard_width
        return first, cutlass.max(cutlass.min(shard_width, self.drawn_columns - first), 0)

    # ---- 64-bit words in shared memory: [rank] address of its symmetric buffer; [world + j] of this rank's staging at the j-th peer, then
    # of the own staging; [2 * world] the number of this launch. Memory's count cannot be read again: CTA 0 may have ended and changed it.

    def rank_address(self, c, place) -> Int64:
        """One of the addresses that meet_ranks wrote down."""
        words = ptx.lds_b64(c.smem + self.shared.ranks + place * ADDRESS_BYTES)
        return Int64((Uint64(words[1]) << Uint64(32)) | Uint64(words[0]))

    def peer(self, c, j) -> Int32:
        """The rank that comes j + 1 behind this one: so ranks write to different peers at a time."""
        peer = c.rank + 1 + j
        return ptx.select(peer >= self.world, peer - self.world, peer)

    @cute.jit
    def meet_ranks(self, c):
        """Writes the addresses down and greets the peers; in builds that check ranks, compares what they are about to launch."""
        launches = ptx.ldg_b32(c.launches)
        if c.tid < self.world:
            buffer = ptx.ldg_s64(c.rank_table + Int64(c.tid) * ADDRESS_BYTES)
            staging = buffer + c.staging
            if (launches & Uint32(1)) != 0:
                staging += c.staging_bytes
            place = c.tid - c.rank - 1
            if place < 0:
                place += self.world  # the rank itself comes last
            if c.tid != c.rank:
                staging += Int64(self.staging_place(c.rank, c.tid)) * self.source_bytes(c)
            self.store_address(c, c.tid, buffer)
            self.store_address(c, self.world + place, staging)
            if c.tid == c.rank:
                self.store_address(c, 2 * self.world, Int64(launches))
        if cutlass.const_expr(self.draws or self.check_ranks):
            if (c.cta == 0) & (c.warp == self.last_warp):
                self.greet(c, launches)
                if cutlass.const_expr(self.check_ranks):
                    self.compare_launches(c, launches)

    def store_address(self, c, place, address: Int64) -> None:
        halves = [Uint32(Uint64(address) & Uint64(0xFFFFFFFF)), Uint32(Uint64(address) >> Uint64(32))]
        ptx.sts_b64(c.smem + self.shared.ranks + place * ADDRESS_BYTES, halves)

    def launch_shape(self, c) -> Uint32:
        """What the ranks' launches must agree on beside their number."""
        return Uint32(c.rows) << Uint32(ROWS_SHIFT) | (Uint32(c.batch_shape) & Uint32(SHAPE_MASK))

    @cute.jit
    def greet(self, c, launches: Uint32):
        """Tells every rank this launch's number and shape. One warp.

        A rank says n + 1 in its n-th launch, so 0 in a fresh buffer is no word of it. The fence makes the word a release of what this
        rank's launches before have done, as these have ended: of their blanking. It costs nothing here, where the head is still loading.
        """
        buffer = ptx.ldg_s64(c.rank_table + Int64(cutlass.min(c.lane, self.world - 1)) * ADDRESS_BYTES)
        if c.lane < self.world:
            ptx.fence_sys()
            ptx.st_relaxed_sys(buffer + Int64(c.rank) * 8, mailbox.word_of(self.launch_shape(c), launches + Uint32(1)))

    @cute.jit
    def wait_for_greetings(self, c):
        """Waits until the peers' launches of this number have started, and acquires what their launches before did. One warp of CTA 0; the
        kernel's end passes it on to this rank's next launch."""
        peer = self.peer(c, cutlass.min(c.lane, self.peers - 1))
        own = self.rank_address(c, c.rank) + Int64(peer) * 8
        launches = Uint32(self.rank_address(c, 2 * self.world))
        mailbox.wait_for_counts(c, own, launches + Uint32(1), peer, Int32(0))

    @cute.jit
    def compare_launches(self, c, launches: Uint32):
        """Waits for the ranks' greetings and reports the first that differs. One warp.

        A word is read before it is overwritten: the sender's next launch comes after this one has ended, for which it needs this
        CTA's records, and they come after this.
        """
        mine, count = self.launch_shape(c), launches + Uint32(1)
        peer = cutlass.min(c.lane, self.world - 1)
        own = ptx.ldg_s64(c.rank_table + Int64(c.rank) * ADDRESS_BYTES) + Int64(peer) * 8
        given, shape = launches, Uint32(0)
        polls, started = Int32(0), Int64(0)
        waiting = Int32(1)
        while waiting != 0:
            word = ptx.ld_relaxed_sys(own)
            shape, given = Uint32(word >> Uint64(32)), Uint32(word & Uint64(0xFFFFFFFF))
            if (given != count) & (given != launches):
                self.report_difference(c, peer, LAUNCHES, count, given)
            waiting = Int32(1)
            if cute.arch.vote_all_sync(given == count):
                waiting = Int32(0)
            polls += 1
            if (polls & (exchange.POLLS_PER_CLOCK_READ - 1)) == 0:
                now = ptx.globaltimer()
                if started == 0:
                    started = now
                if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (given != count):
                    exchange.report(c, c.claim, (exchange.REPORT_PEER, c.rank, 0, 0, peer))
        if (shape >> Uint32(ROWS_SHIFT)) != Uint32(c.rows):
            self.report_difference(c, peer, ROWS, Uint32(c.rows), shape >> Uint32(ROWS_SHIFT))
        if shape != mine:
            self.report_difference(c, peer, SHAPE, mine & Uint32(SHAPE_MASK), shape & Uint32(SHAPE_MASK))

    def report_difference(self, c, peer: Int32, what: int, expected: Uint32, given: Uint32) -> None:
        exchange.report(c, c.claim, (exchange.REPORT_DIFFERENCE, c.rank, what, 0, peer), (expected, given))

    # ---- a position's winner

    @cute.jit
    def agree_ranks(self, c, step: Int32, sequence: Uint32):
        """Agreement.agree for several ranks, and the barrier behind it; beside it the cache takes the peers' logits. All warps.

        Only CTA 0 waits for the last position's winners, to report them; so there its gathering warps copy nothing.
        """
        last = step + 1 == self.num_steps
        gathers = (not last) | (c.cta == 0)
        if c.warp < self.rows:
            self.publish_records(c, step, sequence)
        if cutlass.const_expr(self.draws):
            if (step == 0) & (c.cta == 0) & (c.warp == self.last_warp):
                self.wait_for_greetings(c)
            first_warp = ptx.select(gathers, Int32(self.gather_warps), Int32(0))
            if c.warp >= first_warp:
                end = ptx.select(last, Int32(self.num_steps), step)
                for position in cutlass.range(cutlass.max(step - 1, 0), end, unroll=1):
                    self.copy_position(c, position, first_warp)
        if gathers:
            self.collect_records(c, step, sequence)
        cute.arch.sync_threads()  # the next embeddings are there; CTA 0 may count the launch
