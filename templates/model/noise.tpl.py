"""Gumbel noise of {{ spec.model.title }}: one launch for all samples of a call, and a side stream to draw it on.

Noise depends only on seeds, positions and target token ids, never on logits, so it can be drawn while the LM head runs.

Shapes: sample s = row * {{ spec.draft.num_steps }} + step; out[s, j] is the noise of draft column vocab_start + j in that sample, fp32.
Cost: one launch; num_samples * width * 4 bytes written, nothing read but a few words a sample and the target ids of a reduced
draft vocabulary.
"""

import triton
import triton.language as tl

from .._device import noise_launcher
from .._device.noise_math import gumbel_noise, step_seed
from . import config

NUM_STEPS = tl.constexpr(config.NUM_STEPS)
STEP_MIX = tl.constexpr(config.STEP_MIX)
NOISE_SCHEME = tl.constexpr(config.NOISE_SCHEME)
# Added to the position key, so that a draft token and the token that replaces it when it is rejected never share noise.
DRAFT_SALT = tl.constexpr(config.DRAFT_SALT)
VECTOR = tl.constexpr(noise_launcher.VECTOR)
VECTOR_BYTES = tl.constexpr(noise_launcher.VECTOR_BYTES)


# No argument is specialised: Triton would compile another binary for a value that is 1 or a multiple of 16, or for another
# pointer alignment, and a first such call under graph capture would compile there. The alignment that the stores need is
# checked by draw_noise and stated in the body.
@triton.jit(do_not_specialize=noise_launcher.RUNTIME_ARGUMENTS)
def _noise_kernel(
    out,  # fp32 [num_samples, pitch], 16-byte aligned rows
    pitch_vectors: tl.int64,  # row pitch in 16-byte vectors
    # % if spec.vocabulary.d2t
    target_ids,  # int32 [DRAFT_VOCAB_SIZE], by draft id
    # % endif
    idx_mapping,  # int64 [num_samples]
    sample_pos,  # int64 [num_samples]
    temperature,  # fp32 [max_reqs]
    seeds,  # int64 [max_reqs]
    vocab_start,  # draft id of column 0
    width,  # columns to fill
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    state = tl.load(idx_mapping + sample)
    # All that the state leads to is asked for before the branch, so that the latencies overlap.
    heat = tl.load(temperature + state, mask=state >= 0, other=0.0)
    seed = tl.load(seeds + state, mask=state >= 0, other=0)
    key = tl.load(sample_pos + sample) - 1 + DRAFT_SALT
    # Padding rows and greedy rows use no noise.
    if heat == 0.0:
        return
    seed = step_seed(seed, sample % NUM_STEPS, STEP_MIX)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # % if spec.vocabulary.d2t
    token = tl.load(target_ids + vocab_start + column, mask=column < width, other=0)
    # % else
    token = vocab_start + column
    # % endif
    noise = gumbel_noise(seed, key, token, NOISE_SCHEME)
    target = tl.multiple_of(out + sample * (pitch_vectors * VECTOR) + column, VECTOR_BYTES)
    # The bound is a multiple of a vector, so that masked stores stay vector stores; it may fill up to 3 columns of padding.
    tl.store(target, noise, mask=column < (width + VECTOR - 1) // VECTOR * VECTOR)


_launcher = noise_launcher.NoiseLauncher(_noise_kernel, config)
draw_noise = _launcher.draw
compile_builds = _launcher.builds


class NoiseStream(noise_launcher.NoiseStream):
    """A side stream that this model's noise is drawn on; documented in noise_launcher."""

    launcher = _launcher
