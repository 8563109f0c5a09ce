"""Gumbel noise of {{ spec.model.title }}: one launch for all samples of a call, and a side stream to draw it on.

Noise depends only on seeds, positions and target token ids, never on logits, so it can be drawn while the LM head runs.

Shapes: sample s = row * {{ spec.draft.num_steps }} + step; out[s, j] is the noise of draft column vocab_start + j in that sample, fp32.
Cost: one launch; num_samples * width * 4 bytes written, nothing read but a few words a sample and the target ids of a reduced
draft vocabulary.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

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
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


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
    share,  # blocks of a program
    BLOCK: tl.constexpr,
):
    if COMPILED:
        # A chain that is launched programmatically dependent starts on an SM when this grid has left it. It loads the head, and
        # waits for the end of this grid, with what it wrote, before it reads noise.
        gdc_launch_dependents()
    sample = tl.program_id(1).to(tl.int64)
    # All that a sample's noise follows from is asked for before the branch, so that the latencies overlap. The position would be
    # loaded behind it, where it is used, were its load not volatile.
    state = tl.load(idx_mapping + sample)
    key = tl.load(sample_pos + sample, volatile=True) - 1 + DRAFT_SALT
    heat = tl.load(temperature + state, mask=state >= 0, other=0.0)
    seed = tl.load(seeds + state, mask=state >= 0, other=0)
    # Padding rows and greedy rows use no noise.
    if heat == 0.0:
        return
    seed = step_seed(seed, sample % NUM_STEPS, STEP_MIX)
    row = out + sample * (pitch_vectors * VECTOR)
    # A multiple of a vector, so that masked stores stay vector stores; it may fill up to 3 columns of padding.
    columns = (width + VECTOR - 1) // VECTOR * VECTOR
    block = tl.program_id(0) * share
    end = tl.minimum(block + share, tl.cdiv(columns, BLOCK))
    while block < end:
        column = block * BLOCK + tl.arange(0, BLOCK)
        # % if spec.vocabulary.d2t
        token = tl.load(target_ids + vocab_start + column, mask=column < width, other=0)
        # % else
        token = vocab_start + column
        # % endif
        noise = gumbel_noise(seed, key, token, NOISE_SCHEME)
        tl.store(tl.multiple_of(row + column, VECTOR_BYTES), noise, mask=column < columns)
        block += 1


_launcher = noise_launcher.NoiseLauncher(_noise_kernel, config)
draw_noise = _launcher.draw
compile_builds = _launcher.builds


class NoiseStream(noise_launcher.NoiseStream):
    """A side stream that this model's noise is drawn on; documented in noise_launcher."""

    launcher = _launcher
