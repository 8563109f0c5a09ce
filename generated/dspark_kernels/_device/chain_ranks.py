"""The part of a chain kernel that several ranks add: each rank's place, the exchange between them (mailbox.py), and everybody's logits.

A rank's logits go into its own cache at once, and into its staging in every peer's symmetric buffer. After the last position CTA k of a
rank tells CTA k of every peer that its logits are there; that one waits for these peers' CTAs alone and copies their columns into its own
rank's cache: both ends divide a shard's tiles among CTAs alike.

Emulated ranks share one GPU and one launch: rank = block // CTAs of a rank.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import chain_scores, exchange, mailbox, plan_line, ptx, symmetric_buffer

LANES = 32
LINE_BYTES = 128  # of L2
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


class Ranks:
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
        self.grid_wait = mailbox.Wait(line.ctas + 1, self.tag_bits, across=False)
        self.rank_wait = mailbox.Wait(world, self.tag_bits, across=True)
        self.rank_words = mailbox.records_words(line.ctas, line.row_slots)

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

    # ---- a position's winner

    @cute.jit
    def agree_ranks(self, c, step: Int32, sequence: Uint32):
        """Agreement.agree for several ranks. Warp n sees to row n; after the last position the last warp hands over the logits."""
        goes_on = (step + 1 < self.num_steps) | (c.cta == 0)  # only CTA 0 reports the last token
        if c.warp < self.rows:
            hi, lo = self.largest_key(
                c, self.shared.keys + c.warp * (plan_line.RED_WARPS * plan_line.KEY_BYTES), self.line.warps
            )
            tag = exchange.tag_of(sequence, self.tag_bits)
            records = mailbox.records_of(c, sequence, c.warp, self.rows, self.line.ctas)
            if c.lane == 0:
                ptx.st_relaxed_gpu(records + Int64(c.cta) * 8, mailbox.word_of(hi, lo | tag))
            if (c.lane * LINE_BYTES < self.tile.row_bytes) & (hi != 0):
                candidate = c.embed + Int64(self.token_of(c, lo)) * self.tile.row_bytes
                ptx.prefetch_l2(candidate + Int64(c.lane) * LINE_BYTES)
            if c.cta == c.warp * (self.line.ctas // self.rows):  # the row's leader
                target = self.rank_address(c, cutlass.min(c.lane, self.world - 1)) + c.mailbox
                hi, lo = mailbox.largest_record(c, self.grid_wait, records, c.expected, step, c.warp, tag)
                if c.lane < self.world:
                    record = mailbox.mailbox_of(target, sequence, c.warp) + Int64(c.rank) * 8
                    ptx.st_relaxed_sys(record, mailbox.word_of(hi, lo))
            if goes_on:
                own = mailbox.mailbox_of(self.rank_address(c, c.rank) + c.mailbox, sequence, c.warp)
                hi, lo = mailbox.largest_record(c, self.rank_wait, own, Int32(self.world), step, c.warp, tag)
                self.take_winner(c, step, hi, lo)
        if cutlass.const_expr(self.draws):
            if (c.warp == self.last_warp) & (step + 1 == self.num_steps):
                self.hand_over(c)

    # ---- logits of other ranks

    def staged_mark(self, c, row: Int32, step: Int32, state: Int64) -> Uint32:
        """The row table's last word: 0 for a padding row, whose logits are not stored; else not 0, and with several ranks one more than
        the byte offset, in a source's staging, of the row at that position in the CTA's first tile."""
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
    def hand_over(self, c):
        """After the CTA's barrier behind its last logits: tells CTA k of each peer that this CTA k's are staged there, and waits for
        theirs. One warp, one lane a peer.

        Stores: every thread's staging stores, the CTA's barrier, then this lane's fence and store: the fence is cumulative over what the
        barrier ordered before it, and system scope reaches the peer's GPU. Loads: the lane's load that sees the count, its fence, the
        CTA's barrier, then every thread's loads of the staging. The count is the number of launches of the sampler, so nothing is reset;
        a count is seen before the next one replaces it, for the sender's next launch needs a record of this CTA's next launch.
        """
        j = cutlass.min(c.lane, self.peers - 1)
        peer = self.peer(c, j)
        count = Uint32(self.rank_address(c, 2 * self.world)) + Uint32(1)
        target = self.rank_address(c, peer) + c.arrivals + Int64(c.rank * self.line.ctas + c.cta) * 8
        own = self.rank_address(c, c.rank) + c.arrivals + Int64(peer * self.line.ctas + c.cta) * 8
        if c.lane < self.peers:
            ptx.fence_sys()  # see above: stores
            ptx.st_relaxed_sys(target, Uint64(count))
        mailbox.wait_for_counts(c, own, count, peer, Int32(self.num_steps))
        ptx.fence_sys()  # see above: loads

    @cute.jit
    def fill_cache(self, c):
        """Copies what the peers' CTAs of this number have staged into this rank's cache. All warps; after hand_over and a barrier.

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
            items = pieces * (c.rows * self.num_steps)
            for start in cutlass.range(c.tid, items, self.threads * PIECES_AHEAD, unroll=1):
                self.fill_pieces(c, start, items, pieces, first_id, columns, staged)

    @cute.jit
    def fill_pieces(self, c, start: Int32, items: Int32, pieces: Int32, first_id: Int32, columns: Int32, staged: Int64):
        """A few of the lane's 16-byte pieces of `columns` columns from a draft id on: all loads, then all stores."""
        found = []
        for n in cutlass.range_constexpr(PIECES_AHEAD):
            item = cutlass.min(
                start + n * self.threads, items - 1
            )  # past the last one: that one again, with the same result
            pair, piece = item // pieces, item % pieces
            row, step = pair // self.num_steps, pair % self.num_steps
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
