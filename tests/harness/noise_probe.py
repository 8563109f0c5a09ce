"""Noise of given random words, by Triton, so that other implementations can be compared with it word by word.

The generated noise, and for the schemes of 32 bits the engine's too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from dspark_kernels._device.noise_math import SMALLEST_PHILOX, log1p, neg_log, neg_log_complement, uniform32, uniform64
from tests.harness.engine_math import gumbel_of_bits

BLOCK = 1024


@triton.jit
def _generated(word, PHILOX: tl.constexpr):
    if PHILOX:
        noise = neg_log(-log1p(-tl.maximum(tl.random.uint_to_uniform_float(word), SMALLEST_PHILOX)))
    else:
        # The hash's last operation is its own inverse, and uniform32 does it.
        noise = neg_log(neg_log_complement(uniform32(word ^ (word >> 16))))
    return noise


@triton.jit
def _engine(word, PHILOX: tl.constexpr):
    if PHILOX:
        u = tl.maximum(tl.random.uint_to_uniform_float(word), 4.6566127342e-10)
        noise = -tl.log(-libdevice.log1p(-u))
    else:
        noise = gumbel_of_bits(word)
    return noise


@triton.jit
def _noise_kernel(out, first, NOISE: tl.constexpr, PHILOX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, NOISE((first + i).to(tl.uint32, bitcast=True), PHILOX))


@triton.jit
def _wide_noise_kernel(out, high, low, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = uniform64(tl.load(high + i).to(tl.uint32, bitcast=True), tl.load(low + i).to(tl.uint32, bitcast=True))
    tl.store(out + i, -tl.log(-tl.log(u)))


def noise_of_words(out: torch.Tensor, first: int, scheme: str) -> None:
    """out[i] = generated noise of the word whose int32 value is first + i; out: fp32, contiguous, a multiple of 1024 entries."""
    _noise_kernel[(out.numel() // BLOCK,)](out, first, NOISE=_generated, PHILOX=scheme == "philox_32", BLOCK=BLOCK)


def engine_noise_of_words(out: torch.Tensor, first: int, scheme: str) -> None:
    """The same by the engine's instructions."""
    _noise_kernel[(out.numel() // BLOCK,)](out, first, NOISE=_engine, PHILOX=scheme == "philox_32", BLOCK=BLOCK)


def wide_noise_of_words(out: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """out[i] = fp64 noise of the random words high[i] and low[i], int32; all contiguous, a multiple of 1024 entries."""
    _wide_noise_kernel[(out.numel() // BLOCK,)](out, high, low, BLOCK=BLOCK)
