"""The cache rows of a reduced draft vocabulary, as wide as the target vocabulary: -inf wherever nothing is drafted.

Drafted columns lie among the others in any order, and a store of one logit into a row costs L2 as much as one of 32 bytes. So with several
row slots on one GPU the logits go to a buffer first, where those of all request rows of a column are neighbours, and after the last
position every CTA writes its part of all rows, whole 16-byte vectors of logits and -inf:

    staging[position][draft id][row slot]

One row alone has no neighbours, and several ranks' logits reach the cache at the end in any case: there whole rows of -inf come first, all
positions at once while the head is on its way, and the logits over them.

Either way what one CTA stores another one needs, and a count orders it:
    the stores of a CTA's threads; the CTA's barrier; one thread's red.release on the count, which is cumulative over what the barrier
    ordered before it; an ld.acquire that sees every CTA's part of the count, by each thread, or by one behind which the others have a
    barrier; what they load, or store over it
The count goes on from launch to launch: launch n of a build waits for (n + 1) times as many as there are CTAs, so nothing is reset. No CTA
counts for the next launch before this one has ended, which is also why the staging can be written anew then.

Columns from the sampling limit on, of a vocabulary that is not reduced, lie together behind the last logit. Nobody else writes them: they
need no order, and are filled while the exchange waits.
"""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import exchange, plan_line, ptx, row_memory

LANES = 32
ID_BYTES = 4  # int32
WORD_BYTES = 4
VECTOR_BYTES = 16
VECTOR_WORDS = 4
LINE_BYTES = 128  # of L2
BF16_BYTES = 2
MOST_LOADED_WORDS = (
    64  # of logits that a lane has loaded before it stores a piece; the head's fragments are not needed any more
)
COUNT_OFFSET = 64  # bytes between the word that elects who reports and the count: another sector
LEAST_SLOTS = 2  # row slots from which composing rows is as fast as filling them first
MOST_PIECES_AT_ONCE = 4
MINUS_INFINITY = {2: 0xFF80FF80, 4: 0xFF800000}  # a 32-bit word of them, by bytes of an entry


class Fill:
    """The part of a chain kernel that completes its cache rows; comes with chain_inputs.Inputs and chain_scores.Scores."""

    def __init__(self, config: ModuleType, line: plan_line.PlanLine, world: int, records_words: int) -> None:
        """`records_words`: 64-bit words of the rank's exchange buffer, behind which the staging lies."""
        reduced = self.draws and config.D2T
        self.composes = reduced and world == 1 and line.row_slots >= LEAST_SLOTS
        self.fills_rows = reduced and not self.composes
        self.fills_columns = self.draws and not config.D2T and config.DRAWN_COLUMNS < config.VOCAB_SIZE
        self.counting_warp = line.warps - 1  # gathers no records
        self.row_bytes = config.VOCAB_SIZE * self.cache_bytes
        self.count_offset = (records_words - exchange.CLAIM_WORDS) * 8 + COUNT_OFFSET
        self.staging_offset = records_words * 8
        self.draft_bytes = line.row_slots * self.cache_bytes  # of a draft id's logits at one position
        self.step_bytes = config.DRAFT_VOCAB_SIZE * self.draft_bytes
        self.piece_columns = VECTOR_BYTES // max(self.cache_bytes, 1)
        words = self.piece_columns * max(self.draft_bytes // WORD_BYTES, 1)  # that a lane loads for a piece
        self.pieces_at_once = min(MOST_PIECES_AT_ONCE, max(MOST_LOADED_WORDS // words, 1))
        self.staging_words = -(-self.num_steps * self.step_bytes // 8) if self.composes else 0

    def nothing(self, words: int) -> list[Uint32]:
        """Words of -inf."""
        return [Uint32(MINUS_INFINITY[self.cache_bytes])] * words

    # ---- the order between CTAs

    @cute.jit
    def count_cta(self, c):
        """Counts this CTA. One warp, after a barrier behind the stores that it tells of."""
        if c.lane == 0:
            row_memory.count_release_gpu(c.records + self.count_offset)

    @cute.jit
    def wait_for_ctas(self, c, launches: Int32):
        """One warp waits until every CTA of the rank has counted itself; all its lanes acquire."""
        wanted = (Uint32(launches) + Uint32(1)) * Uint32(self.line.ctas)
        polls, started, missing = Int32(0), Int64(0), Int32(1)
        while missing > 0:
            # The count only rises, and may wrap.
            missing = Int32(wanted - row_memory.load_acquire_gpu(c.records + self.count_offset))
            polls += 1
            if (polls & (exchange.POLLS_PER_CLOCK_READ - 1)) == 0:
                now = ptx.globaltimer()
                if started == 0:
                    started = now
                if (c.timeout_ns > 0) & (now - started > c.timeout_ns) & (missing > 0):
                    exchange.report(c, c.claim, (exchange.REPORT_FILL, c.rank, 0, 0, missing))

    # ---- composed rows

    def staged_place(self, c, row: Int32, step: Int32) -> Uint32:
        """Byte offset in the staging of a row's logit of the CTA's first column at a position."""
        return Uint32((step * self.step_bytes) + c.first_column * self.draft_bytes + row * self.cache_bytes)

    def keep_entry(self, c, mine: Boolean, state: list[Uint32], at: Int32, target: Int32, words, e: int) -> None:
        """One of the lane's logits, of the CTA's `at`-th column: into the staging, or into the row at its target id."""
        if self.composes:
            place = Int64(state[3] - Uint32(1)) + Int64(at * self.draft_bytes)
            self.store_entry(mine, c.records + self.staging_offset + place, words, e)
        else:
            row = Int64((Uint64(state[1]) << Uint64(32)) | Uint64(state[0]))
            self.store_entry(mine, row + Int64(target) * self.cache_bytes, words, e)

    @cute.jit
    def compose_rows(self, c, launches: Int32):
        """Writes this CTA's part of all cache rows of the call, an equal share of the pieces of a row. All warps, after the last position's
        logits were counted. The first ids are on their way while it waits."""
        if cutlass.const_expr(not self.composes):
            return
        places = self.places(c, c.tid)
        drafts = [self.load_drafts(c, column) for _, _, column in places]
        self.wait_for_ctas(c, launches)
        self.compose(c, places, drafts)
        turn = self.line.warps * LANES * self.pieces_at_once
        first, end = self.own_pieces(c)
        for start in cutlass.range(c.tid + turn, (end - first) * self.num_steps, turn, unroll=1):
            places = self.places(c, start)
            self.compose(c, places, [self.load_drafts(c, column) for _, _, column in places])

    def own_pieces(self, c):
        """This CTA's pieces of a row: the first, and the first that is not its own. A piece is a vector of a row."""
        pieces = -(-self.vocab_size // self.piece_columns)
        return pieces * c.cta // self.line.ctas, pieces * (c.cta + 1) // self.line.ctas

    def places(self, c, start: Int32) -> list:
        """A few of a thread's pieces: whether there is one, its position and first column; all of this CTA's, position after position."""
        first, end = self.own_pieces(c)
        count = end - first
        found = []
        for n in range(self.pieces_at_once):
            item = start + n * self.line.warps * LANES
            there = item < count * self.num_steps
            # Of no piece the first one's ids and logits are read, and not stored.
            item = ptx.select(there, item, Int32(0))
            step = item // cutlass.max(count, 1)
            found.append((there, step, (first + item - step * count) * self.piece_columns))
        return found

    def compose(self, c, places: list, drafts: list) -> None:
        """The pieces of every row: all loads, then all stores."""
        loaded = []
        for n, (_, step, _) in enumerate(places):
            staged = c.records + self.staging_offset + Int64(step) * self.step_bytes
            loaded.append([self.load_column(d >= 0, staged + Int64(d) * self.draft_bytes) for d in drafts[n]])
        for n, (there, step, column) in enumerate(places):
            for row in range(self.rows):
                self.store_part(c, row, there, step, column, self.row_words(loaded[n], row))

    def load_drafts(self, c, column: Int32) -> list[Int32]:
        """The draft ids of a piece's columns; a negative one: nothing drafts this column. The map is padded to whole pieces."""
        source = c.draft_ids + Int64(column) * ID_BYTES
        vectors = range(0, self.piece_columns * ID_BYTES, VECTOR_BYTES)
        return [Int32(x) for i in vectors for x in ptx.ldg_b128(source + i)]

    @cute.jit
    def store_part(self, c, row: cutlass.Constexpr, there: Boolean, step: Int32, column: Int32, words):
        """A piece of one row into the cache: a vector where rows start on 16 bytes, else entry by entry."""
        written, address = self.cache_row(c, cutlass.min(row, c.rows - 1), step)
        written = written & there & (row < c.rows)
        address = address + Int64(column) * self.cache_bytes
        whole = (c.cache_vector != 0) & (column + self.piece_columns <= self.vocab_size)
        ptx.stg_b128_if(written & whole, address, words)
        if written & (not whole):
            for e in cutlass.range_constexpr(self.piece_columns):
                word = words[e] if self.cache_bytes == WORD_BYTES else words[e // 2] >> Uint32(16 * (e % 2))
                self.store_entry(column + e < self.vocab_size, address + e * self.cache_bytes, [word], 0)

    def load_column(self, drafted: Boolean, address: Int64) -> list[Uint32]:
        """A draft id's logits of all row slots, packed as they lie; -inf where it is none."""
        count = min(self.draft_bytes // WORD_BYTES, VECTOR_WORDS)
        return [
            word
            for i in range(0, self.draft_bytes, count * WORD_BYTES)
            for word in row_memory.load_words_or(drafted, address + i, count, self.nothing(1)[0])
        ]

    def row_words(self, columns: list[list[Uint32]], row: int) -> list[Uint32]:
        """One row's entries of a piece, packed for the cache."""
        if self.cache_bytes == WORD_BYTES:
            return [words[row] for words in columns]
        pairs = [(columns[e][row // 2], columns[e + 1][row // 2]) for e in range(0, self.piece_columns, 2)]
        if row % 2 == 0:
            return [(low & Uint32(0xFFFF)) | (high << Uint32(16)) for low, high in pairs]
        return [(low >> Uint32(16)) | (high & Uint32(0xFFFF0000)) for low, high in pairs]

    # ---- filled rows

    @cute.jit
    def prefetch_map(self, c):
        """Brings this CTA's part of the map from target to draft ids into L2."""
        if cutlass.const_expr(self.composes):
            first = self.vocab_size * c.cta // self.line.ctas
            at = first + c.tid * (LINE_BYTES // ID_BYTES)
            if at < self.vocab_size * (c.cta + 1) // self.line.ctas:
                ptx.prefetch_l2(c.draft_ids + Int64(at) * ID_BYTES)

    @cute.jit
    def fill_rows(self, c):
        """-inf into this CTA's part of all cache rows of the call, which is counted. All warps, after the row table is there."""
        if cutlass.const_expr(not self.fills_rows):
            return
        for sample in cutlass.range(c.warp, c.rows * self.num_steps, self.line.warps, unroll=1):
            written, address = self.cache_row(c, sample // self.num_steps, sample % self.num_steps)
            if written:
                self.fill_row(c, address)
        cute.arch.sync_threads()  # orders all stores before the count
        if c.warp == self.counting_warp:
            self.count_cta(c)

    @cute.jit
    def fill_row(self, c, address: Int64):
        """This CTA's part of one row, by one warp: of the 16-byte vectors that the row touches, wherever it starts, an equal share."""
        before = Int32(Uint64(address) & Uint64(VECTOR_BYTES - 1))  # bytes of the first vector that are not the row's
        vectors = (before + self.row_bytes + VECTOR_BYTES - 1) // VECTOR_BYTES
        first, end = vectors * c.cta // self.line.ctas, vectors * (c.cta + 1) // self.line.ctas
        for vector in cutlass.range(first + c.lane, end, LANES, unroll=1):
            at = vector * VECTOR_BYTES - before
            whole = (at >= 0) & (at + VECTOR_BYTES <= self.row_bytes)
            ptx.stg_b128_if(whole, address + Int64(at), self.nothing(VECTOR_WORDS))
            if not whole:
                for e in cutlass.range_constexpr(0, VECTOR_BYTES, self.cache_bytes):
                    inside = (at + e >= 0) & (at + e < self.row_bytes)
                    self.store_entry(inside, address + Int64(at + e), self.nothing(1), 0)

    @cute.jit
    def wait_for_rows(self, c, launches: Int32):
        """The counting warp waits for all CTAs' parts of the rows. A barrier behind it orders all warps' logits."""
        if cutlass.const_expr(not self.fills_rows):
            return
        if c.warp == self.counting_warp:
            self.wait_for_ctas(c, launches)

    # ---- between the last product of a position and the exchange

    @cute.jit
    def fill_rest(self, c, step: Int32):
        """After the CTA's barrier behind a position's logits: counts the last ones that rows are composed of; or writes -inf into the columns
        from the sampling limit on of this position's rows, of every row each CTA its part, by the warps that gather no records."""
        if cutlass.const_expr(self.composes):
            if (c.warp == self.counting_warp) & (step + 1 == self.num_steps):
                self.count_cta(c)
        if cutlass.const_expr(self.fills_columns):
            warps = self.line.warps - self.rows
            workers = self.line.ctas * warps * LANES
            first = (c.cta * warps + c.warp - self.rows) * LANES + c.lane
            if c.warp >= self.rows:
                for column in cutlass.range(self.drawn_columns + first, self.vocab_size, workers, unroll=1):
                    for row in cutlass.range(c.rows, unroll=1):
                        written, address = self.cache_row(c, row, step)
                        self.store_entry(written, address + Int64(column) * self.cache_bytes, self.nothing(1), 0)
