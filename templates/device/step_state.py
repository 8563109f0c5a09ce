"""What a block of the step kernel knows of its row: addresses, temperature, what noise starts from, the best score so far."""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from . import ptx, step_noise, step_scores

INT64_BYTES, FP32_BYTES = 8, 4
STEP_SHIFT = 32  # of the position's index, which is mixed into the seed's upper word
LOG2_E = 1.4426950408889634
STEEPEST = 2.0**100  # log2(e) / T from here on: products overflow where quotients do not, so every column is scored
NAN = 0x7FFFFFFF

# What the parts of the step kernel share: this thread's place, its row's state and addresses, and small tensors as state.
CONTEXT = """
tid lane warp first_column end vocab_start base bias cache cached target_ids
greedy temperature slope keyed known_hint shared_hint floor best staged logits bounds
"""
Context = namedtuple("Context", CONTEXT.split(), defaults=[None] * len(CONTEXT.split()))


class RowState:
    """The part of the step kernel that reads a row's state."""

    def __init__(self, config, cache_dtype: str, by_row: bool) -> None:
        self.noise, self.scores = step_noise.SCHEMES[config.NOISE_SCHEME], step_scores.scores_of(config)
        # Greedy drafts, which have no cache, compare logits that no cache has rounded, and break ties by draft id.
        self.greedy_drafts = not config.CACHE_DTYPES
        self.cache_bytes = config.DTYPE_BYTES[cache_dtype or "fp32"]
        self.num_steps, self.draft_salt, self.step_mix = config.NUM_STEPS, config.DRAFT_SALT, config.STEP_MIX
        self.by_row = by_row

    @cute.jit
    def with_state(
        self,
        c,
        row: Int32,
        step: Int32,
        idx_mapping: Int64,
        sample_pos: Int64,
        temperature: Int64,
        seeds: Int64,
        cache: Int64,
        cache_row_stride: Int64,
    ):
        """The context with the row's request state. `cache`: of state 0 or, `by_row`, of row 0."""
        if cutlass.const_expr(self.greedy_drafts):
            return c
        sample = Int64(row) * self.num_steps + Int64(step)
        state = ptx.ldg_s64(idx_mapping + sample * INT64_BYTES)
        position = ptx.ldg_s64(sample_pos + sample * INT64_BYTES)
        heat, seed = Float32(0.0), Int64(0)
        if state >= 0:  # a padding row is greedy and reads nothing at its index
            heat = ptx.float_of(ptx.ldg_b32(temperature + state * FP32_BYTES))
            seed = ptx.ldg_s64(seeds + state * INT64_BYTES)
        if cutlass.const_expr(self.step_mix):
            seed = seed ^ (Int64(step) << STEP_SHIFT)
        slope = ptx.div_full(Float32(LOG2_E), heat)
        if not ((slope < Float32(STEEPEST)) & (slope > Float32(-STEEPEST))):
            slope = ptx.float_of(Uint32(NAN))
        cache_row = Int64(row) if cutlass.const_expr(self.by_row) else state
        return c._replace(
            cached=state >= 0,
            cache=cache + cache_row * cache_row_stride * self.cache_bytes,
            greedy=heat == Float32(0.0),
            temperature=heat,
            slope=slope,
            keyed=self.noise.keyed(Uint64(seed), Uint64(position - 1 + self.draft_salt)),
        )
