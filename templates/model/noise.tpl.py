"""Gumbel noise of {{ spec.model.title }}: one launch for all samples of a call, and a side stream to draw it on.

Noise depends only on seeds, positions and token ids, never on logits, so it can be drawn while the LM head runs.

Shapes: sample s = row * {{ spec.draft.num_steps }} + step; out[s, j] is the noise of target id vocab_start + j in that sample, fp32.
Cost: one launch; num_samples * width * 4 bytes written, nothing read but a few words a sample.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .._device import host
from .._device.noise_math import gumbel32, hash_prefix
from . import config

NUM_STEPS = tl.constexpr(config.NUM_STEPS)
# Added to the position key, so that a draft token and the token that replaces it when it is rejected never share noise.
DRAFT_SALT = tl.constexpr(config.DRAFT_SALT)
# Bits that the draft step is shifted by before it is mixed into the seed: the step fills the seed's high word.
STEP_SHIFT = tl.constexpr(32)

VECTOR = tl.constexpr(4)  # fp32 values of one 16-byte store
VECTOR_BYTES = tl.constexpr(16)
BLOCK = 1024  # vocabulary ids of a program: 2 vector stores a thread, and enough programs that 5 samples fill 132 SMs evenly
INTERPRETER_BLOCK = 8192  # the interpreter's cost is per program more than per element
NUM_WARPS = 4
RUNTIME_ARGUMENTS = range(8)  # of the kernel, by place: all but its compile-time constants


# No argument is specialised: Triton would compile another binary for a value that is 1 or a multiple of 16, or for another
# pointer alignment, and a first such call under graph capture would compile there. The alignment that the stores need is
# checked by draw_noise and stated in the body.
@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def _noise_kernel(
    out,  # fp32 [num_samples, pitch], 16-byte aligned rows
    pitch_vectors: tl.int64,  # row pitch in 16-byte vectors
    idx_mapping,  # int64 [num_samples]
    sample_pos,  # int64 [num_samples]
    temperature,  # fp32 [max_reqs]
    seeds,  # int64 [max_reqs]
    vocab_start,  # target id of column 0
    width_vectors,  # columns to fill, in 16-byte vectors
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
    # % if spec.noise.step_mix
    seed = seed ^ ((sample % NUM_STEPS) << STEP_SHIFT)
    # % endif
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = gumbel32(hash_prefix(seed, key), vocab_start + column)
    target = tl.multiple_of(out + sample * (pitch_vectors * VECTOR) + column, VECTOR_BYTES)
    # The bound is a multiple of a vector, so that masked stores stay vector stores; it may fill up to 3 columns of padding.
    tl.store(target, noise, mask=column < width_vectors * VECTOR)


def draw_noise(
    out: torch.Tensor,
    idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    *,
    num_samples: int,
    vocab_start: int = 0,
    width: int = config.VOCAB_SIZE,
) -> None:
    """Draw the noise of `num_samples` samples on the current stream. Allocates nothing and does not synchronise.

    Args:
        out: fp32 [>= num_samples, >= width rounded up to a multiple of 4], contiguous, 16-byte aligned rows. Columns beyond
            that are left alone, and so is the whole row of a padding sample (negative state) or one with temperature 0.
        idx_mapping: int64 [>= num_samples], request-state index of each sample; negative for padding rows.
        sample_pos: int64 [>= num_samples], position of the token being predicted.
        temperature: fp32 [max_reqs], by request-state index.
        seeds: int64 [max_reqs], by request-state index.
        vocab_start: target id of column 0, the first id of a vocabulary shard.
        width: ids to draw for.

    Raises:
        TypeError: for an argument of another dtype.
        ValueError: for an argument of another shape, alignment or device, or a size out of range.
    """
    host.check_int("num_samples", num_samples, 1)
    host.check_int("vocab_start", vocab_start, 0)
    host.check_int("width", width, 1)
    columns = triton.cdiv(width, VECTOR.value) * VECTOR.value
    wanted = host.Expected(
        (torch.float32,), (num_samples, columns), (0, 1), contiguous=True, alignment=VECTOR_BYTES.value
    )
    wanted.check("out", out, out.device)
    if out.stride(0) % VECTOR.value:
        raise ValueError(f"out: expected rows of a multiple of {VECTOR.value} columns, got {out.stride(0)}")
    samples = host.Expected((torch.int64,), (num_samples,), (0,), contiguous=True)
    samples.check("idx_mapping", idx_mapping, out.device)
    samples.check("sample_pos", sample_pos, out.device)
    host.Expected((torch.float32,), (1,), (0,), contiguous=True).check("temperature", temperature, out.device)
    host.Expected((torch.int64,), (1,), (0,), contiguous=True).check("seeds", seeds, out.device)
    block = BLOCK if out.is_cuda else INTERPRETER_BLOCK
    with torch.cuda.device_of(out):
        _noise_kernel[triton.cdiv(columns, block), num_samples](
            out,
            out.stride(0) // VECTOR.value,
            idx_mapping,
            sample_pos,
            temperature,
            seeds,
            vocab_start,
            columns // VECTOR.value,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


class NoiseStream:
    """Draws noise on a side stream, so that it overlaps the current stream's work. Both calls may be captured in a graph.

    On the CPU the draw runs at once.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pending = False

    def fork(
        self,
        out: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *,
        num_samples: int,
        vocab_start: int = 0,
        width: int = config.VOCAB_SIZE,
    ) -> None:
        """Draw after the current stream's work so far. Arguments and errors as for `draw_noise`.

        All tensors must stay as they are until `join`.
        """
        arguments = (out, idx_mapping, sample_pos, temperature, seeds)
        if self._stream is None:
            draw_noise(*arguments, num_samples=num_samples, vocab_start=vocab_start, width=width)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                draw_noise(*arguments, num_samples=num_samples, vocab_start=vocab_start, width=width)
        self._pending = True

    def join(self) -> None:
        """Make the current stream wait for the draw.

        Raises RuntimeError when no draw was forked since the last join.
        """
        if not self._pending:
            raise RuntimeError("join: expected a fork before it, got none since the last join")
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._pending = False


def compile_builds() -> dict[str, tuple[Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """Every binary that this module launches: name -> (jit function, argument types, constants, compiler options)."""
    signature = {
        "out": "*fp32",
        "pitch_vectors": "i64",
        "idx_mapping": "*i64",
        "sample_pos": "*i64",
        "temperature": "*fp32",
        "seeds": "*i64",
        "vocab_start": "i32",
        "width_vectors": "i32",
        "BLOCK": "constexpr",
    }
    return {"any": (_noise_kernel, signature, {"BLOCK": BLOCK}, {"num_warps": NUM_WARPS})}
