"""What a thread of the step kernel does with its vocabulary columns: logits, cache, and the best candidate.

Exact noise costs about a hundred instructions a column, and one column in thousands wins. So a column is screened first: the noise
scheme (step_noise.py) gives a number x with noise log2(e) <= BITS - log2(x), hence

    score log2(e) <= bound + BITS,    bound = logit (log2(e) / T) - log2(x)

within rounding; where x is negative the bound is NaN, which no comparison excludes. Only where the bound reaches the best exact score
known so far, of this block or of any block of the row that has finished, is the exact score computed. Whatever floor a thread happens
to see, no column that could win or tie is left out, so the winner does not depend on it. A greedy row has bound = logit = score.

Scores may be fp64 (step_scores.py). Bounds and floors are fp32 then too: the margin below covers a score's rounding to fp32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from . import ptx, score_ops, step_math, step_memory, step_scores, step_state

LANES = 32
ENTRIES = 8  # columns that a thread takes at a time
BF16_BYTES, FP32_BYTES, ID_BYTES = 2, 4, 4
PAIRS = ENTRIES // 2
NO_ENTRY = -1
ALL_ONES = 0xFFFFFFFF
MOST_DEPTH = 2  # turns whose loads are under way at once

LOG2_E = step_state.LOG2_E
# Margin of the comparison, in units of bound: what rounding can add to a score or take from a bound. Relative to the floor: division
# 2^-22, log2(e) / T 2^-21, products and sums 2^-23 each, an fp64 score as fp32 2^-24; absolute: log2 2^-17, noise 2^-19 and its
# series 2^-18, u and x as fp32 2^-23 each.
MARGIN, RELATIVE_MARGIN = 2.0**-10, 2.0**-18
MINUS_INFINITY = -float("inf")


class Scan(step_state.RowState):
    """The part of a step kernel that a thread does alone or with its warp. Methods take the kernel's context `c`."""

    def __init__(
        self, config, base_dtype: str, cache_dtype: str, by_row: bool, vector: bool, threads: int, most_turns: int
    ) -> None:
        step_state.RowState.__init__(self, config, cache_dtype, by_row)
        self.base_bytes = config.DTYPE_BYTES[base_dtype]
        self.vector, self.threads = vector, threads
        self.transform = config.TRANSFORM
        self.multiplier, self.soft_cap, self.inverse_soft_cap = (
            config.MULTIPLIER,
            config.SOFT_CAP,
            config.INVERSE_SOFT_CAP,
        )
        self.base_capped = config.BASE_CAPPED
        self.maps_ids, self.vocab_size, self.sampling_limit = config.D2T, config.VOCAB_SIZE, config.SAMPLING_LIMIT
        # Greedy drafts need token ids for the sampling limit alone.
        self.reads_ids = config.D2T and not (self.greedy_drafts and self.sampling_limit >= self.vocab_size)
        self.base_words, self.id_words = ENTRIES * self.base_bytes // FP32_BYTES, ENTRIES if self.reads_ids else 0
        self.staged_words = self.base_words + PAIRS + self.id_words  # of one turn: base logits, biases, token ids
        self.most_turns = most_turns
        # Addresses of single entries leave no registers for more than one turn, and token ids more blocks of an SM without a second.
        self.depth = min(most_turns, MOST_DEPTH if vector and not self.reads_ids else 1)

    # ---- columns and their inputs

    def column(self, c, turn: Int32, e: Int32 | int) -> Int32:
        """The thread's e-th column of a turn: neighbours by thread with vectors, by lane without, so that accesses coalesce."""
        if self.vector:
            return c.first_column + turn * (self.threads * ENTRIES) + c.tid * ENTRIES + e
        return c.first_column + turn * (self.threads * ENTRIES) + e * self.threads + c.tid

    def there(self, c, turn: Int32) -> list[Boolean]:
        """Which of the thread's columns exist. Vectors are whole: the width is a multiple of them."""
        if self.vector:
            return [self.column(c, turn, 0) < c.end] * ENTRIES
        return [self.column(c, turn, e) < c.end for e in range(ENTRIES)]

    def turns(self, c) -> Int32:
        """Turns in which the thread's warp has a column."""
        warp_first = c.first_column + c.warp * (LANES * ENTRIES if self.vector else LANES)
        left = cutlass.max(c.end - warp_first, 0)
        return cutlass.min((left + (self.threads * ENTRIES - 1)) // (self.threads * ENTRIES), self.most_turns)

    def fetch(self, c, turn: Int32, place: int) -> None:
        """Starts loading a turn's words into one place of c.staged, packed as vectors pack them."""
        there = self.there(c, turn)
        base = self._load(c, c.base, turn, there, self.base_bytes)
        bias = self._load(c, c.bias, turn, there, BF16_BYTES)
        ids = self._load(c, c.target_ids, turn, there, ID_BYTES) if self.reads_ids else []
        for i, word in enumerate([*base, *bias, *ids]):
            c.staged[place * self.staged_words + i] = word

    def fetch_first(self, c) -> None:
        """Starts loading the first turns."""
        for turn in range(self.depth):
            self.fetch(c, Int32(turn), turn)

    def take_staged(self, c, turn: Int32) -> list[Uint32]:
        """The turn's words, once they have arrived; the loads of a later turn start in their place."""
        words = [c.staged[i] for i in range(self.staged_words)]
        for i in range((self.depth - 1) * self.staged_words):
            c.staged[i] = c.staged[i + self.staged_words]
        if self.most_turns > self.depth:
            self.fetch(c, turn + self.depth, self.depth - 1)
        return words

    def _load(self, c, row: Int64, turn: Int32, there: list[Boolean], entry_bytes: int) -> list[Uint32]:
        if self.vector:
            address = row + Int64(self.column(c, turn, 0)) * entry_bytes
            vectors = range(ENTRIES * entry_bytes // step_memory.VECTOR_BYTES)
            loaded = [step_memory.load_vector_if(there[0], address + i * step_memory.VECTOR_BYTES) for i in vectors]
            return [word for vector in loaded for word in vector]
        addresses = [row + Int64(self.column(c, turn, e)) * entry_bytes for e in range(ENTRIES)]
        if entry_bytes == FP32_BYTES:
            return [step_memory.load_b32_if(t, a) for t, a in zip(there, addresses, strict=True)]
        halves = [step_memory.load_u16_if(t, a) for t, a in zip(there, addresses, strict=True)]
        return [halves[2 * i] | (halves[2 * i + 1] << Uint32(16)) for i in range(PAIRS)]

    def token_ids(self, c, turn: Int32, words: list[Uint32]) -> list[Int32]:
        """The token ids of a turn's columns, from its words where draft and token ids differ."""
        if self.reads_ids:
            return [Int32(word) for word in words[self.base_words + PAIRS :]]
        return [c.vocab_start + self.column(c, turn, e) for e in range(ENTRIES)]

    def candidate(self, c, column: Int32, there: Boolean) -> Int32:
        """The id by which ties are broken: the token id, or the draft id where drafts are greedy."""
        if self.greedy_drafts or not self.maps_ids:
            return c.vocab_start + column
        return Int32(step_memory.load_b32_if(there, c.target_ids + Int64(column) * ID_BYTES))

    # ---- logits

    def logits(self, c, words: list[Uint32]):
        """Logits of packed base logits and biases, as fp32 in the cache's precision, and as the cache's words."""
        base, bias = words[: self.base_words], words[self.base_words : self.base_words + PAIRS]
        if self.transform in ("base", "both"):
            bases, biases = self._floats(base, self.base_bytes), unpacked(bias)
            if not self.base_capped:
                bases = self._transformed(c, bases, self.base_bytes)
            if self.transform == "both":
                biases = self._transformed(c, biases, BF16_BYTES)
            sums = rounded([ptx.add_rn(a, b) for a, b in zip(bases, biases, strict=True)], self.base_bytes)
        elif self.base_bytes == BF16_BYTES:
            packed = [step_math.add_bf16x2(a, b) for a, b in zip(base, bias, strict=True)]
            if self.transform == "none" and self.cache_bytes == BF16_BYTES:
                return unpacked(packed), packed
            sums = unpacked(packed)
        else:
            biases = unpacked(bias)
            sums = [ptx.add_rn(ptx.float_of(a), b) for a, b in zip(base, biases, strict=True)]
        if self.transform == "sum":
            sums = self._transformed(c, sums, FP32_BYTES)
        if self.cache_bytes == BF16_BYTES:
            packed = packed_bf16(sums)
            return unpacked(packed), packed
        return sums, [ptx.bits_of(x) for x in sums]

    def _floats(self, words: list[Uint32], entry_bytes: int) -> list[Float32]:
        return unpacked(words) if entry_bytes == BF16_BYTES else [ptx.float_of(word) for word in words]

    def _transformed(self, c, x: list[Float32], entry_bytes: int) -> list[Float32]:
        """Multiplier and soft cap as the engine's tensor operations: each result has the dtype of the tensor it works on."""
        if self.multiplier != 1.0:
            x = rounded([score_ops.mul_rn(v, Float32(self.multiplier)) for v in x], entry_bytes)
        if self.soft_cap is not None:
            x = rounded([score_ops.mul_rn(v, Float32(self.inverse_soft_cap)) for v in x], entry_bytes)
            for e, v in enumerate(x):
                c.logits[e] = v
            self.take_tanh(c)
            x = rounded([c.logits[e] for e in range(ENTRIES)], entry_bytes)
            x = rounded([score_ops.mul_rn(v, Float32(self.soft_cap)) for v in x], entry_bytes)
        return x

    @cute.jit
    def take_tanh(self, c):
        """tanh of c.logits in place. Its exponential is left out where no entry of the warp needs it, which is most often."""
        largest = Float32(0.0)
        for e in cutlass.range_constexpr(ENTRIES):
            largest = step_math.larger_size(largest, c.logits[e])
        if cute.arch.vote_any_sync(largest >= Float32(step_math.TANH_SPLIT)):
            for e in cutlass.range_constexpr(ENTRIES):
                c.logits[e] = score_ops.tanh(c.logits[e])
        else:
            for e in cutlass.range_constexpr(ENTRIES):
                c.logits[e] = step_math.tanh_of_small(c.logits[e])

    def limited(self, ids: list[Int32], there, logits, words):
        """Ids from the sampling limit on: -inf in the cache, and no candidates. Returns candidates, logits, cache words."""
        if self.sampling_limit >= self.vocab_size:
            return there, logits, words
        drawn = [token < self.sampling_limit for token in ids]
        logits = [ptx.select(d, x, Float32(MINUS_INFINITY)) for d, x in zip(drawn, logits, strict=True)]
        words = [ptx.bits_of(x) for x in logits] if self.cache_bytes == FP32_BYTES else packed_bf16(logits)
        return [a & b for a, b in zip(there, drawn, strict=True)], logits, words

    def store(self, c, turn: Int32, there: list[Boolean], words: list[Uint32]) -> None:
        """The columns' cache words, if the row's cache is written."""
        if self.greedy_drafts:
            return
        if self.vector:
            address = c.cache + Int64(self.column(c, turn, 0)) * self.cache_bytes
            for i in range(0, len(words), 4):
                step_memory.store_vector_if(there[0] & c.cached, address + FP32_BYTES * i, words[i : i + 4])
            return
        for e in range(ENTRIES):
            address = c.cache + Int64(self.column(c, turn, e)) * self.cache_bytes
            if self.cache_bytes == FP32_BYTES:
                ptx.stg_words_if(there[e] & c.cached, address, [words[e]])
            else:
                ptx.stg_u16_if(there[e] & c.cached, address, words[e // 2] >> Uint32(16 * (e % 2)))

    # ---- candidates

    @cute.jit
    def lower_floor(self, c, score: Float32) -> Float32:
        """The floor in units of bound that stands for an exact score."""
        if cutlass.const_expr(self.greedy_drafts):
            return score
        floor = score
        if not c.greedy:
            scaled = score * Float32(LOG2_E)
            size = ptx.select(scaled < Float32(0.0), -scaled, scaled)
            floor = scaled - Float32(self.noise.BITS) - (size * Float32(RELATIVE_MARGIN) + Float32(MARGIN))
        return floor

    @cute.jit
    def scan_turn(self, c, turn: Int32):
        """One turn: logits of the staged columns into the cache; whichever may beat the best known score is scored."""
        staged, there = self.take_staged(c, turn), self.there(c, turn)
        ids = self.token_ids(c, turn, staged)
        candidates, logits, words = self.limited(ids, there, *self.logits(c, staged))
        self.store(c, turn, there, words)
        for e in cutlass.range_constexpr(ENTRIES):
            c.logits[e] = logits[e]
        self.take_bounds(c, ids)
        self.take_floor(c)
        left = Boolean(False)
        for e in cutlass.range_constexpr(ENTRIES):
            left = left | (candidates[e] & (not (c.bounds[e] < c.floor[0])))
        if cute.arch.vote_any_sync(left):
            done = Uint32(0)
            for e in cutlass.range_constexpr(ENTRIES):
                done = done | ptx.select(candidates[e], Uint32(0), Uint32(1 << e))
            self.score_open(c, turn, done)

    @cute.jit
    def take_bounds(self, c, ids):
        """The bounds of the turn's columns."""
        if cutlass.const_expr(self.greedy_drafts):
            for e in cutlass.range_constexpr(ENTRIES):
                c.bounds[e] = c.logits[e]
        else:
            if c.greedy:
                for e in cutlass.range_constexpr(ENTRIES):
                    c.bounds[e] = c.logits[e]
            else:
                for e in cutlass.range_constexpr(ENTRIES):
                    screen = self.noise.screen(c.keyed, ids[e])
                    c.bounds[e] = step_math.fma(c.logits[e], c.slope, -step_math.log2_approx(screen))

    @cute.jit
    def score(self, c, logit: Float32, id: Int32):
        """The exact score of a logit."""
        score = self.scores.of_logit(logit)
        if cutlass.const_expr(self.greedy_drafts):
            return score
        if not c.greedy:
            score = self.scores.noised(ptx.div_full(logit, c.temperature), self.noise.noise(c.keyed, id))
        return score

    @cute.jit
    def take_floor(self, c):
        """The floor of the best score that is known here: of the row's finished blocks, and of this block's warps."""
        hint = ptx.lds_b32(c.shared_hint)
        c.floor[0] = self.lower_floor(c, step_scores.score_of_hint(cutlass.max(hint, c.known_hint)))

    @cute.jit
    def score_open(self, c, turn: Int32, done: Uint32):
        """Scores the warp's columns that may win, each lane its most promising one first, until none is left. `done`: entries that are
        none. Comparisons are negated so that NaN is open and is taken."""
        more = Boolean(True)
        while more:
            pick, top, logit = Int32(NO_ENTRY), Float32(MINUS_INFINITY), Float32(0.0)
            for e in cutlass.range_constexpr(ENTRIES):
                bound = c.bounds[e]
                is_open = ((done & Uint32(1 << e)) == 0) & (not (bound < c.floor[0]))
                taken = is_open & ((pick < 0) | (not (bound <= top)))
                pick = ptx.select(taken, Int32(e), pick)
                top = ptx.select(taken, bound, top)
                logit = ptx.select(taken, c.logits[e], logit)
            found = pick >= 0
            pick = cutlass.max(pick, 0)
            done = done | ptx.select(found, Uint32(1) << Uint32(pick), Uint32(0))
            id = self.candidate(c, self.column(c, turn, pick), found)
            score = self.score(c, logit, id)
            key = [
                ptx.select(found, word, Uint32(0)) for word in [*self.scores.rank(score), Uint32(id) ^ Uint32(ALL_ONES)]
            ]
            key = step_scores.larger(key, [c.best[i] for i in range(self.scores.KEY_WORDS)])
            for i in cutlass.range_constexpr(self.scores.KEY_WORDS):
                c.best[i] = key[i]
            hint = ptx.warp_max_u32(ptx.select(found, self.scores.hint(score), Uint32(0)))
            if c.lane == 0:
                step_memory.raise_shared(c.shared_hint, hint)
            self.take_floor(c)
            left = Boolean(False)
            for e in cutlass.range_constexpr(ENTRIES):
                left = left | (((done & Uint32(1 << e)) == 0) & (not (c.bounds[e] < c.floor[0])))
            more = cute.arch.vote_any_sync(left)


def unpacked(words: list[Uint32]) -> list[Float32]:
    """Pairs of bf16 as fp32."""
    return [x for word in words for x in step_math.unpack_bf16(word)]


def packed_bf16(x: list[Float32]) -> list[Uint32]:
    """fp32 rounded to bf16, two a word."""
    return [ptx.bf16x2_bits(x[i], x[i + 1]) for i in range(0, len(x), 2)]


def rounded(x: list[Float32], entry_bytes: int) -> list[Float32]:
    """Entries rounded to a dtype of `entry_bytes` an entry, as fp32."""
    return unpacked(packed_bf16(x)) if entry_bytes == BF16_BYTES else x
