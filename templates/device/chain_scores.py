"""What a chain kernel does with a base logit and a bias beyond adding them: the output transform, and a draft vocabulary of its own.

The transform's steps and their roundings are the engine's tensor operations: a factor, a division by the cap (torch multiplies by
the reciprocal), tanh, and the cap as a factor, each of them fp32 arithmetic whose result has the dtype of the tensor it works on.

With a d2t tensor, keys carry target ids, and the cache's row is as wide as the target vocabulary: a logit goes to its target's column.
chain_fill.py fills the columns that nothing drafts, and those at or above the sampling limit.
"""

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from . import head_tiles, keys, plan_line, ptx, score_ops

LANES = 32
ID_BYTES = 4  # int32
WORD_BYTES = 4
BF16_BYTES = 2


class Scores:
    """The part of a chain kernel for transforms and reduced vocabularies; comes with chain_inputs.Inputs."""

    def __init__(self, config: ModuleType) -> None:
        self.drawn_columns, self.sampling_limit, self.maps_ids = config.DRAWN_COLUMNS, config.SAMPLING_LIMIT, config.D2T
        self.multiplier, self.soft_cap, self.inverse_soft_cap = (
            config.MULTIPLIER,
            config.SOFT_CAP,
            config.INVERSE_SOFT_CAP,
        )
        # A bf16 base makes a bf16 sum, which transformed_sum rounds already where it is transformed; a bf16 cache a bf16 logit.
        self.rounds = self.cache_bytes == BF16_BYTES or (self.base_bytes == BF16_BYTES and config.TRANSFORM != "sum")

    # ---- the transform

    def transformed(self, x: list[Float32], entry_bytes: int) -> list[Float32]:
        """Multiplier and soft cap of entries whose tensor has `entry_bytes` an entry: each step is rounded to it."""
        if self.multiplier != 1.0:
            x = rounded([score_ops.mul_rn(v, Float32(self.multiplier)) for v in x], entry_bytes)
        if self.soft_cap is not None:
            x = rounded([score_ops.mul_rn(v, Float32(self.inverse_soft_cap)) for v in x], entry_bytes)
            x = rounded([score_ops.tanh(v) for v in x], entry_bytes)
            x = rounded([score_ops.mul_rn(v, Float32(self.soft_cap)) for v in x], entry_bytes)
        return x

    def transformed_sum(self, sums: list[Float32]) -> list[Float32]:
        """The transform of base + bias: the sum is rounded to the base logits' dtype, the rest is fp32."""
        return self.transformed(rounded(sums, self.base_bytes), WORD_BYTES)

    def round_logits(self, logits: list[Float32]):
        """The lane's logits of one row in the dtype that they are compared and cached in, as fp32 and as packed words for the cache."""
        words = []
        if self.rounds:
            logits, words = self.round_bf16(logits)
        if self.cache_bytes == WORD_BYTES:
            words = [ptx.bits_of(x) for x in logits]
        return logits, words

    # ---- candidates

    def score(self, logit: Float32, noise: Float32, temperature: Float32) -> Float32:
        """What the row's candidates are compared by: logit / T + noise, the logit alone where T == 0."""
        noised = ptx.add_rn(ptx.div_full(logit, temperature), noise)
        return ptx.select(temperature == Float32(0.0), logit, noised)

    @cute.jit
    def best_column(self, c, live: Boolean, at: Int32, scores):
        """The key of the best of the lane's entries of one row from the CTA's `at`-th column on. The key's id is the column."""
        top, low = Uint32(0), Uint32(0)
        for e in cutlass.range_constexpr(self.entries):
            there = live
            if cutlass.const_expr(self.line.partial):
                there = live & (at + e < c.span)
            if cutlass.const_expr(self.maps_ids and self.sampling_limit < self.vocab_size):
                there = there & (self.target_id(c, at + e) < self.sampling_limit)
            rank = ptx.select(there, keys.ordered(scores[e]), Uint32(0))
            if rank > top:  # entries come by rising id: the first of equals stays
                top = rank
                low = keys.low_word(c.first_token + at + e, self.id_bits)
        return top, low

    def token_of(self, c, low: Uint32) -> Int32:
        """The token of a key's lower word. Keys of greedy drafts carry draft ids: of equal logits the lowest draft id wins."""
        token = keys.token_of(low, self.id_bits)
        if self.maps_ids and not self.draws:
            return Int32(ptx.ldg_b32(c.target_ids + Int64(token) * ID_BYTES))
        return token

    # ---- a reduced draft vocabulary

    def target_id(self, c, at: Int32) -> Int32:
        """The token id of the CTA's `at`-th column; past its last column, that one's."""
        draft = c.first_token + (cutlass.min(at, c.span - 1) if self.line.partial else at)
        return Int32(ptx.ldg_b32(c.target_ids + Int64(draft) * ID_BYTES))

    def load_targets(self, c, item: Int32) -> list[Int32]:
        """The token ids of the lane's entries of the warp's item-th tile, where they are not the columns; asked for ahead of their use."""
        if not (self.maps_ids and self.draws):
            return []
        tile = Int32(ptx.lds_u16(c.order + item * plan_line.ORDER_BYTES))
        at = tile * plan_line.TILE_ROWS + head_tiles.bias_entry(self.rows, c.lane)
        return [self.target_id(c, at + e) for e in range(self.entries)]

    @cute.jit
    def finish_targets(self, c, live: Boolean, at: Int32, targets, state, noise, logits, words):
        """The lane's entries of one row from the CTA's `at`-th column on, by target ids: their cache entries and the best key.

        The map need not rise, so equal scores are settled by comparing whole keys."""
        temperature = ptx.float_of(state[2])
        top, low = Uint32(0), Uint32(0)
        for e in cutlass.range_constexpr(self.entries):
            target = targets[e]
            there = live
            if cutlass.const_expr(self.line.partial):
                there = there & (at + e < c.span)
            if cutlass.const_expr(self.sampling_limit < self.vocab_size):
                there = there & (target < self.sampling_limit)
            self.keep_entry(c, there & (state[3] != 0), state, at + e, target, words, e)
            score = self.score(logits[e], noise[e], temperature)
            rank = ptx.select(there, keys.ordered(score), Uint32(0))
            top, low = keys.larger(rank, keys.low_word(target, self.id_bits), top, low)
        return top, low

    def store_entry(self, mine: Boolean, address: Int64, words, e: int) -> None:
        """One of the lane's cache entries; `words` are packed as round_logits packs them."""
        if self.cache_bytes == BF16_BYTES:
            ptx.stg_u16_if(mine, address, words[0] >> Uint32(16 * e))
        else:
            ptx.stg_words_if(mine, address, [words[e]])

    # ---- rows of the cache

    def cache_row(self, c, row: Int32, step: Int32):
        """Whether a row's cache is written at one position, and the address of the row's column 0."""
        state = self.row_state(c, row, step)
        address = Int64((Uint64(state[1]) << Uint64(32)) | Uint64(state[0]))
        return state[3] != 0, address - Int64(self.cache_column(c)) * self.cache_bytes

    def cache_column(self, c) -> Int32:
        """The column that the row table's cache addresses point to: of logits that go to their targets' columns, the first of all."""
        return Int32(0) if self.maps_ids else c.first_token


def rounded(x: list[Float32], entry_bytes: int) -> list[Float32]:
    """A lane's entries of one row, rounded to a dtype of `entry_bytes` an entry, as fp32."""
    if entry_bytes != BF16_BYTES:
        return x
    if len(x) == 1:
        return [ptx.float_of(ptx.bf16_bits(x[0]) << Uint32(16))]
    return head_tiles.round_pair(*x)
