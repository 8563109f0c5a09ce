"""Noise of given random words, by Triton, so that other implementations can be compared with it word by word.

The generated noise for murmur3_32 and murmur3_64; for philox_32, whose words Triton draws itself, the engine's lines on a word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from dspark_kernels._device.noise_math import log1p_negated, uniform32, uniform64

BLOCK = 1024


@triton.jit
def _noise_kernel(out, first, PHILOX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = (first + i).to(tl.uint32, bitcast=True)
    if PHILOX:
        u = tl.maximum(tl.random.uint_to_uniform_float(word), 4.6566127342e-10)
        noise = -tl.log(-libdevice.log1p(-u))
    else:
        noise = -tl.log(-log1p_negated(uniform32(word)))
    tl.store(out + i, noise)


@triton.jit
def _wide_noise_kernel(out, high, low, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = uniform64(tl.load(high + i).to(tl.uint32, bitcast=True), tl.load(low + i).to(tl.uint32, bitcast=True))
    tl.store(out + i, -tl.log(-tl.log(u)))


def noise_of_words(out: torch.Tensor, first: int, scheme: str) -> None:
    """out[i] = noise of the word whose int32 value is first + i; out: fp32, contiguous, a multiple of 1024 entries."""
    _noise_kernel[(out.numel() // BLOCK,)](out, first, PHILOX=scheme == "philox_32", BLOCK=BLOCK)


def wide_noise_of_words(out: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """out[i] = fp64 noise of the random words high[i] and low[i], int32; all contiguous, a multiple of 1024 entries."""
    _wide_noise_kernel[(out.numel() // BLOCK,)](out, high, low, BLOCK=BLOCK)
