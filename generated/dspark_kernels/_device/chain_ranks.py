"""The part of a chain kernel that several ranks add: each rank's place, and everybody's logits; rank_exchange.py has the records.

A rank's logits go into its own cache at once, and into its staging in every peer's symmetric buffer. CTA k of a rank tells CTA k of every
peer how far its logits are there, once before the last position and once after it; that one waits for these peers' CTAs alone and copies
their columns into its own rank's cache: both ends divide a shard's tiles among CTAs alike. The copies of all positions but the last
run while the last one's logits are under way.

Emulated ranks share one GPU and one launch: rank = block // CTAs of a rank.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import chain_scores, exchange, mailbox, plan_line, ptx, rank_exchange, symmetric_buffer

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
ADDRESS_BYTES = plan_line.ADDRESS_BYTES
NOISE_BYTES = plan_line.NOISE_BYTES
PIECE = 16  # bytes that a lane copies at once
PIECES_AHEAD = 4  # of them it has under way
TARGET_ID_BYTES = chain_scores.ID_BYTES
# Shapes of launches that ranks compare: launch count 32 bits, rows 4, the host's word 28.
ROWS_SHIFT = 28
SHAPE_MASK = (1 << ROWS_SHIFT) - 1
LAUNCHES, ROWS, SHAPE = 0, 1, 2  # what differs, in the report
ALL_BUT_LAST, ALL = 1, 2  # the positions whose logits are staged; a launch counts up by ALL


class Ranks(rank_exchange.RankExchange):
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
        if world > 1 and self.last_warp < line.row_slots:
            raise ValueError(f"warps: expected more than the {line.row_slots} that see to a row each, got {line.warps}")
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

    def staging_place(self, source: Int32, reader: Int32) -> Int32:
        """Where a source rank's logits lie in a reader's staging: a rank stages nothing for itself."""
        return ptx.select(source > reader, source - 1, source)

    def tile_bytes(self) -> int:
        """Staging of one tile and position."""
        return self.rows * TILE_ROWS * self.cache_bytes

    def source_bytes(self, c) -> Int64:
        """Staging of one source rank."""
        return Int64(c.shard_tiles) * (self.num_steps * self.tile_bytes())

    def row_place(self, row: Int32) -> Int32:
        """A request row's place in a staged tile: rows that a warp stores with one instruction are neighbours."""
        return row if self.rows == 1 else row % 2 * (self.rows // 2) + row // 2

    @cute.jit
    def meet_ranks(self, c):
        """Writes the addresses down; in builds that check ranks, compares what the ranks are about to launch."""
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
        if cutlass.const_expr(self.check_ranks):
            if (c.cta == 0) & (c.warp == 0):
                self.compare_launches(c, launches)

    def store_address(self, c, place, address: Int64) -> None:
        halves = [Uint32(Uint64(address) & Uint64(0xFFFFFFFF)), Uint32(Uint64(address) >> Uint64(32))]
        ptx.sts_b64(c.smem + self.shared.ranks + place * ADDRESS_BYTES, halves)

    @cute.jit
    def compare_launches(self, c, launches: Uint32):
        """Tells every rank this launch's number and shape, waits for theirs, and reports the first that differs. One warp.

        A rank says n + 1 for its n-th launch, so 0 in a fresh buffer is no word of it. A word is read before it is overwritten: the
        sender's next launch comes after this one has ended, for which it needs this CTA's records, and they come after this.
        """
        mine = Uint32(c.rows) << Uint32(ROWS_SHIFT) | (Uint32(c.batch_shape) & Uint32(SHAPE_MASK))
        count = launches + Uint32(1)
        peer = cutlass.min(c.lane, self.world - 1)
        buffer = ptx.ldg_s64(c.rank_table + Int64(peer) * ADDRESS_BYTES)
        if c.lane < self.world:
            ptx.st_relaxed_sys(buffer + Int64(c.rank) * 8, mailbox.word_of(count, mine))
        own = ptx.ldg_s64(c.rank_table + Int64(c.rank) * ADDRESS_BYTES) + Int64(peer) * 8
        given, shape = launches, Uint32(0)
        polls, started = Int32(0), Int64(0)
        waiting = Int32(1)
        while waiting != 0:
            word = ptx.ld_relaxed_sys(own)
            given, shape = Uint32(word >> Uint64(32)), Uint32(word & Uint64(0xFFFFFFFF))
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

    # ---- a position's winner, and when logits are handed over

    @cute.jit
    def agree_ranks(self, c, step: Int32, sequence: Uint32):
        """Agreement.agree for several ranks, and the barrier behind it; the last position's winners are only taken by finish_ranks. All warps."""
        if cutlass.const_expr(self.draws):
            if c.warp == self.last_warp:  # it has time while the others exchange records
                if step + 2 == self.num_steps:
                    self.hand_over(c, ALL_BUT_LAST)
                if step + 1 == self.num_steps:
                    self.hand_over(c, ALL)
        if c.warp < self.rows:
            self.publish_records(c, step, sequence)
        if step + 1 < self.num_steps:
            self.collect_records(c, step, sequence)
            cute.arch.sync_threads()  # the next embeddings are there

    @cute.jit
    def finish_ranks(self, c, sequence: Uint32):
        """After the last position: the cache takes the peers' logits, the last position's last, and CTA 0 reports the last tokens.

        No barrier comes before it: the last warp still hands over logits while the others copy.
        """
        if cutlass.const_expr(self.draws and self.num_steps > 1):
            if c.warp < self.last_warp:
                self.wait_for_logits(c, ALL_BUT_LAST)
                self.fill_cache(c, Int32(0), self.num_steps - 1, self.threads - LANES)
        if c.cta == 0:
            self.collect_records(c, Int32(self.num_steps - 1), sequence)
        if cutlass.const_expr(self.draws):
            self.wait_for_logits(c, ALL)
            self.fill_cache(c, Int32(self.num_steps - 1), 1, self.threads)
        cute.arch.sync_threads()  # CTA 0 counts the launch when all its warps have taken the last tokens

    # ---- logits of other ranks

    def staged_mark(self, c, row: Int32, step: Int32, state: Int64) -> Uint32:
        """The row table's last word: 0 for a padding row, whose logits are not stored; else not 0, and where logits are staged one more than
        the byte offset, in the own or a source's staging, of the row at that position in the CTA's first tile."""
        if self.composes:
            return ptx.select(state >= 0, self.staged_place(c, row, step) + Uint32(1), Uint32(0))
        if self.world == 1:
            return Uint32(state >= 0)
        tile = step * c.shard_tiles + c.first_column // TILE_ROWS
        offset = (tile * self.rows + self.row_place(row)) * (TILE_ROWS * self.cache_bytes)
        return ptx.select(state >= 0, Uint32(offset) + Uint32(1), Uint32(0))

    def stage_logits(self, c, mine: Boolean, mark: Uint32, tile: Int32, column: Int32, words) -> None:
        """Stores the lane's entries of one row of a tile into this rank's staging at every peer. Entries past the shard's end have a place
        there, which nobody reads: whole sectors cross the link."""
        offset = Int64(mark - Uint32(1)) + Int64(tile * self.tile_bytes() + column * self.cache_bytes)
        for j in range(self.peers):
            address = self.rank_address(c, self.world + j) + offset
            if self.cache_bytes == 2 and self.entries == 1:
                ptx.stg_u16_if(mine, address, words[0])
            else:
                ptx.stg_words_if(mine, address, words)

    @cute.jit
    def hand_over(self, c, what: cutlass.Constexpr):
        """After the CTA's barrier behind the logits in question: tells CTA k of each peer that this CTA k's are staged there. One warp.

        Order: every thread's staging stores, the CTA's barrier, then this lane's fence and store. The fence is cumulative over what the
        barrier ordered before it, and system scope reaches the peer's GPU. Counts go on from launch to launch, so nothing is reset.
        """
        peer = self.peer(c, cutlass.min(c.lane, self.peers - 1))
        target = self.rank_address(c, peer) + c.arrivals + Int64(c.rank * self.line.ctas + c.cta) * 8
        if c.lane < self.peers:
            ptx.fence_sys()  # see above
            ptx.st_relaxed_sys(target, Uint64(self.arrival_count(c, what)))

    @cute.jit
    def wait_for_logits(self, c, what: cutlass.Constexpr):
        """Waits for the CTAs of this number of all peers. Each warp for itself: its lanes acquire, and a warp barrier passes it on."""
        peer = self.peer(c, cutlass.min(c.lane, self.peers - 1))
        own = self.rank_address(c, c.rank) + c.arrivals + Int64(peer * self.line.ctas + c.cta) * 8
        mailbox.wait_for_counts(c, own, self.arrival_count(c, what), peer, Int32(self.num_steps))
        cute.arch.sync_warp()

    def arrival_count(self, c, what: int) -> Uint32:
        """What a CTA tells its peers in this launch."""
        return Uint32(self.rank_address(c, 2 * self.world)) * Uint32(ALL) + Uint32(what)

    @cute.jit
    def fill_cache(self, c, first_step: Int32, steps: cutlass.Constexpr, threads: cutlass.Constexpr):
        """Copies what the peers' CTAs of this number have staged of some positions into this rank's cache, by the first `threads` threads.
        After wait_for_logits.

        Staging of one launch parity is written again two launches later. The writer got there by the arrivals of the launch between,
        and this rank's are sent after this launch has ended. With a single parity it would be written in the next launch's first
        position, when this rank may still be reading.
        """
        for j in cutlass.range(self.peers, unroll=1):
            source = self.peer(c, j)
            first_id, width = self.shard_of(source, c.shard_width)
            tiles = (width + TILE_ROWS - 1) // TILE_ROWS
            first = tiles * c.cta // self.line.ctas
            columns = cutlass.min(
                (tiles * (c.cta + 1) // self.line.ctas - first) * TILE_ROWS, width - first * TILE_ROWS
            )
            staged = self.rank_address(c, 2 * self.world - 1)
            staged += (
                Int64(self.staging_place(source, c.rank)) * self.source_bytes(c) + Int64(first) * self.tile_bytes()
            )
            first_id += first * TILE_ROWS
            pieces = (columns * self.cache_bytes + PIECE - 1) // PIECE
            items = pieces * (c.rows * steps)
            for start in cutlass.range(c.tid, items, threads * PIECES_AHEAD, unroll=1):
                self.fill_pieces(c, start, items, pieces, first_id, columns, staged, first_step, steps, threads)

    @cute.jit
    def fill_pieces(
        self,
        c,
        start: Int32,
        items: Int32,
        pieces: Int32,
        first_id: Int32,
        columns: Int32,
        staged: Int64,
        first_step: Int32,
        steps: cutlass.Constexpr,
        threads: cutlass.Constexpr,
    ):
        """A few of the lane's 16-byte pieces of `columns` columns from a draft id on: all loads, then all stores."""
        found = []
        for n in cutlass.range_constexpr(PIECES_AHEAD):
            item = cutlass.min(
                start + n * threads, items - 1
            )  # past the last one: that one again, with the same result
            pair, piece = item // pieces, item % pieces
            row, step = pair // steps, first_step + pair % steps
            tile = step * c.shard_tiles + piece // self.cache_bytes
            at = (tile * self.rows + self.row_place(row)) * (TILE_ROWS * self.cache_bytes)
            words = ptx.ldg_once_b128(staged + Int64(at + piece % self.cache_bytes * PIECE))
            found.append((row, step, piece * (PIECE // self.cache_bytes), words))
        for n in cutlass.range_constexpr(PIECES_AHEAD):
            row, step, at, words = found[n]
            written, address = self.cache_row(c, row, step)
            self.store_piece(c, written, address, first_id + at, columns - at, words)

    @cute.jit
    def store_piece(self, c, written: Boolean, row: Int64, draft: Int32, left: Int32, words):
        """The logits of a piece's draft ids, of which `left` are the source's, into a cache row."""
        whole = Boolean(False)
        if cutlass.const_expr(not self.maps_ids):
            whole = (left >= PIECE // self.cache_bytes) & (c.cache_vector != 0)
            ptx.stg_b128_if(written & whole, row + Int64(draft) * self.cache_bytes, words)
        if written & (not whole):
            for e in cutlass.range_constexpr(PIECE // self.cache_bytes):
                column = draft + cutlass.min(e, left - 1)
                there = e < left
                if cutlass.const_expr(self.maps_ids):
                    column = Int32(ptx.ldg_b32(c.target_ids + Int64(column) * TARGET_ID_BYTES))
                    there = there & (column < self.sampling_limit)
                address = row + Int64(column) * self.cache_bytes
                if cutlass.const_expr(self.cache_bytes == 4):
                    ptx.stg_words_if(there, address, [words[e]])
                else:
                    ptx.stg_u16_if(there, address, words[e // 2] >> Uint32(16 * (e % 2)))
