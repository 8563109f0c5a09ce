"""The generated noise of given random words, by Triton, so that other implementations can be compared with it word by word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dspark_kernels._device.noise_math import log1p_negated, uniform32

BLOCK = 1024


@triton.jit
def _noise_kernel(out, first, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = (first + i).to(tl.uint32, bitcast=True)
    tl.store(out + i, -tl.log(-log1p_negated(uniform32(word))))


def noise_of_words(out: torch.Tensor, first: int) -> None:
    """out[i] = noise of the word whose int32 value is first + i; out: fp32, contiguous, a multiple of 1024 entries."""
    _noise_kernel[(out.numel() // BLOCK,)](out, first, BLOCK=BLOCK)
