"""How every rank of a chain comes by everybody's logits: staged by their ranks, copied by the others.

A rank's logits go into its own cache at once, and into its staging in every peer's symmetric buffer. There CTA k of a peer copies what
CTA k of the rank has staged into its own rank's cache: both ends divide a shard's tiles among CTAs alike. Warps that do not gather records
copy the logits of the position before meanwhile; after the last product all copy those of the last two positions, as they arrive.

Nobody is told that logits are there: they tell themselves. A word of staging that is BLANK holds none, a logit never makes such a word, and
whoever has copied a piece blanks it. Why this is lawful: a word is written by one 32-bit relaxed store of system scope, read by loads of the
same width and scope (a vector is so many of them), and blanked by such stores; so each word is whole, and its writes keep their order, since
the blanking follows a load that saw what it replaces. The next logits follow the blanking because of the greeting: CTA 0 of a rank says
at the start of a launch, behind a fence, that it has started, so that all its launches before have ended with their staging blanked.
Its peers acquire that word before their own launch ends, and write the same staging, of one parity of the launches' number, in the launch after.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import chain_scores, exchange, plan_line, ptx, staging_memory, symmetric_buffer

LANES = 32
TILE_ROWS = plan_line.TILE_ROWS
PIECE = 16  # bytes that a lane copies at once
PIECES_AHEAD, BUSY_PIECES_AHEAD = (
    4,
    2,
)  # of them it has under way; fewer in builds whose entries take more registers, which would spill
WORD_BYTES = 4
BLANK = symmetric_buffer.BLANK
TARGET_ID_BYTES = chain_scores.ID_BYTES


class RankLogits:
    """The part of a chain kernel that moves logits between ranks; comes with chain_ranks.Ranks, which has the addresses."""

    def pieces_ahead(self) -> int:
        """Pieces that a lane has under way."""
        return BUSY_PIECES_AHEAD if self.maps_ids or self.soft_cap is not None else PIECES_AHEAD

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

    def stage_logits(self, c, tile: Int32, column: Int32, rows) -> None:
        """Stages the lane's entries of a tile at every peer; `rows`: of each row, whether it is live, its mark in the row table, and its entries
        packed as for the cache. Words that start past the shard's end are not written: nobody would blank them."""
        if self.peers and rows and self.cache_bytes == 2 and self.entries == 1:
            rows, column = self.pair_entries(c, column, rows)
        for live, mark, words in rows if self.peers else ():
            words = [staging_memory.min_u32(word, Uint32(BLANK - 1)) for word in words]  # changes no logit: see BLANK
            offset = Int64(mark - Uint32(1)) + Int64(tile * self.tile_bytes() + column * self.cache_bytes)
            for j in range(self.peers):
                address = self.rank_address(c, self.world + j) + offset
                if self.line.partial:
                    for n in range(len(words)):
                        there = tile * TILE_ROWS + column + n < c.span
                        staging_memory.st_relaxed_sys_words_if(live & there, address + n * WORD_BYTES, [words[n]])
                else:
                    staging_memory.st_relaxed_sys_words_if(live, address, words)

    def pair_entries(self, c, column: Int32, rows):
        """stage_logits' rows in whole words, where a lane has one bf16 entry of each of its rows: lanes that are 2 apart have two
        neighbours' and swap them, so that the lower lane has both of the first row and the upper one both of the second, if there is one."""
        lower = c.lane % 4 < 2
        (live, mark, words), (upper_live, upper_mark, upper_words) = rows[0], rows[-1]
        got = ptx.shuffle_xor(ptx.select(lower, upper_words[0], words[0]), 2)
        word = ptx.select(lower, words[0] | (got << Uint32(16)), got | (upper_words[0] << Uint32(16)))
        live = ptx.select(lower, live, upper_live) if len(rows) > 1 else live & lower
        return [(live, ptx.select(lower, mark, upper_mark), [word])], column - ptx.select(lower, Int32(0), Int32(1))

    def piece_place(self, row: Int32, piece: Int32) -> Int32:
        """Byte offset of a request row's piece in the staging of a CTA and position."""
        tile = piece // self.cache_bytes  # a tile of a row has as many pieces as an entry has bytes
        at = (tile * self.rows + self.row_place(row)) * (TILE_ROWS * self.cache_bytes)
        return at + piece % self.cache_bytes * PIECE

    @cute.jit
    def copy_position(self, c, step: Int32, first_warp: Int32):
        """Copies what the peers' CTAs of this number stage of one position into this rank's cache, as it arrives, by the warps from
        `first_warp` on."""
        workers = self.threads - first_warp * LANES
        for j in cutlass.range(self.peers, unroll=1):
            source = self.peer(c, j)
            first_id, width = self.shard_of(source, c.shard_width)
            tiles = (width + TILE_ROWS - 1) // TILE_ROWS
            first = tiles * c.cta // self.line.ctas
            columns = cutlass.min(
                (tiles * (c.cta + 1) // self.line.ctas - first) * TILE_ROWS, width - first * TILE_ROWS
            )
            staged = self.rank_address(c, 2 * self.world - 1)
            staged += Int64(self.staging_place(source, c.rank)) * self.source_bytes(c)
            staged += Int64(step * c.shard_tiles + first) * self.tile_bytes()
            first_id += first * TILE_ROWS
            pieces = (columns * self.cache_bytes + PIECE - 1) // PIECE  # of a row
            items = pieces * c.rows
            for start in cutlass.range((c.warp - first_warp) * LANES, items, workers * self.pieces_ahead(), unroll=1):
                self.copy_pieces(c, start + c.lane, workers, items, pieces, first_id, columns, staged, step, source)

    @cute.jit
    def copy_pieces(
        self,
        c,
        start: Int32,
        workers: Int32,
        items: Int32,
        pieces: Int32,
        first_id: Int32,
        columns: Int32,
        staged: Int64,
        step: Int32,
        source: Int32,
    ):
        """A few of the lane's 16-byte pieces of `columns` columns from a draft id on: waits for them, copies and blanks them. A whole warp.

        A piece belongs to one lane, which blanks it; a lane without one, or with one of a padding row, waits for none.
        """
        held = cute.make_rmem_tensor(cute.make_layout(self.pieces_ahead() * PIECE // WORD_BYTES), Uint32)
        places = cute.make_rmem_tensor(cute.make_layout(self.pieces_ahead()), Int32)
        for n in cutlass.range_constexpr(self.pieces_ahead()):
            item = start + n * workers
            row, piece = item // pieces, item % pieces
            places[n] = Int32(-1)
            if item < items:
                written, _ = self.cache_row(c, row, step)
                if written:
                    places[n] = self.piece_place(row, piece)
            for i in cutlass.range_constexpr(PIECE // WORD_BYTES):
                held[n * (PIECE // WORD_BYTES) + i] = Uint32(BLANK)
        waiting, polls, started = Int32(1), Int32(0), Int64(0)
        while waiting != 0:
            missing = Int32(-1)
            for n in cutlass.range_constexpr(self.pieces_ahead()):
                left = columns - (start + n * workers) % pieces * (PIECE // self.cache_bytes)
                if (places[n] >= 0) & self.is_missing(held, n, left):
                    words = staging_memory.ld_relaxed_sys_x4(staged + Int64(places[n]))
                    for i in cutlass.range_constexpr(PIECE // WORD_BYTES):
                        held[n * (PIECE // WORD_BYTES) + i] = words[i]
            for n in cutlass.range_constexpr(self.pieces_ahead()):
                left = columns - (start + n * workers) % pieces * (PIECE // self.cache_bytes)
                if (places[n] >= 0) & self.is_missing(held, n, left):
                    missing = start + n * workers
            waiting = Int32(1)
            if cute.arch.vote_all_sync(missing < 0):
                waiting = Int32(0)
            polls += 1
            if (polls & (exchange.POLLS_PER_CLOCK_READ - 1)) == 0:
                now = ptx.globaltimer()
                if started == 0:
                    started = now
                if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (missing >= 0):
                    what = (exchange.REPORT_LOGITS, c.rank, missing // pieces, step, source)
                    exchange.report(c, c.claim, what)
        for n in cutlass.range_constexpr(self.pieces_ahead()):
            item = start + n * workers
            if places[n] >= 0:
                row, at = item // pieces, item % pieces * (PIECE // self.cache_bytes)
                words = [held[n * (PIECE // WORD_BYTES) + i] for i in range(PIECE // WORD_BYTES)]
                written, address = self.cache_row(c, row, step)
                self.store_piece(c, written, address, first_id + at, columns - at, words)
                staging_memory.st_relaxed_sys_words_if(
                    Boolean(True), staged + Int64(places[n]), [Uint32(BLANK)] * (PIECE // WORD_BYTES)
                )

    def is_missing(self, held, n: int, left: Int32) -> Boolean:
        """Whether a word of the n-th piece is not there yet, of those that hold any of the `left` columns that the source has from there on."""
        blank = Boolean(False)
        for i in range(PIECE // WORD_BYTES):
            word = held[n * (PIECE // WORD_BYTES) + i] == Uint32(BLANK)
            if self.line.partial:
                word = word & (i * (WORD_BYTES // self.cache_bytes) < left)
            blank = blank | word
        return blank

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
