"""Kernels that apply one function of step_math.py to words, so that tests can compare the function alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from dspark_kernels._device import ptx, step_math

THREADS = 256


class _Noise:
    """out[i] = noise of the random word first + i, by a function of step_math.py."""

    def __init__(self, noise: Callable[[Uint32], Float32]) -> None:
        self.noise = noise

    @cute.kernel
    def kernel(self, out: Int64, first: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        ptx.stg_b32(out + Int64(i) * 4, ptx.bits_of(self.noise(Uint32(first + i))))

    @cute.jit
    def __call__(self, out: Int64, first: Int32, count: Int32, stream: Any) -> None:
        self.kernel(out, first).launch(grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


class _WideNoise:
    """out[i] = fp64 noise of the random words high[i] and low[i]."""

    @cute.kernel
    def kernel(self, high: Int64, low: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = Int64(block * THREADS + thread)
        noise = step_math.gumbel_wide(ptx.ldg_b32(high + i * 4), ptx.ldg_b32(low + i * 4))
        for half, word in enumerate(reversed(step_math.words_of(noise))):
            ptx.stg_b32(out + i * 8 + half * 4, word)

    @cute.jit
    def __call__(self, high: Int64, low: Int64, out: Int64, count: Int32, stream: Any) -> None:
        self.kernel(high, low, out).launch(grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


class _Sums:
    """out[i] = the sums of the two pairs of bf16 in a[i] and b[i]."""

    @cute.kernel
    def kernel(self, a: Int64, b: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = Int64(block * THREADS + thread) * 4
        ptx.stg_b32(out + at, step_math.add_bf16x2(ptx.ldg_b32(a + at), ptx.ldg_b32(b + at)))

    @cute.jit
    def __call__(self, a: Int64, b: Int64, out: Int64, count: Int32, stream: Any) -> None:
        self.kernel(a, b, out).launch(grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


class _SmallTanh:
    """out[i] = tanh_of_small(x[i])."""

    @cute.kernel
    def kernel(self, x: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = Int64(block * THREADS + thread) * 4
        ptx.stg_b32(out + at, ptx.bits_of(step_math.tanh_of_small(ptx.float_of(ptx.ldg_b32(x + at)))))

    @cute.jit
    def __call__(self, x: Int64, out: Int64, count: Int32, stream: Any) -> None:
        self.kernel(x, out).launch(grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


def compile_noise(scheme: str) -> Any:
    """Takes the address of fp32 results, the first word, the number of results (a multiple of THREADS), and a stream."""
    noise = {"murmur3_32": step_math.gumbel, "philox_32": step_math.gumbel_of_philox}[scheme]
    return cute.compile(_Noise(noise), Int64(16), Int32(0), Int32(1), make_fake_stream())


def compile_wide_noise() -> Any:
    """Takes the addresses of the upper and lower words and of the fp64 results, their number (likewise), and a stream."""
    return cute.compile(_WideNoise(), Int64(16), Int64(16), Int64(16), Int32(1), make_fake_stream())


def compile_sums() -> Any:
    """Takes the addresses of both operands and of the results, the number of 32-bit words (likewise), and a stream."""
    return cute.compile(_Sums(), Int64(16), Int64(16), Int64(16), Int32(1), make_fake_stream())


def compile_small_tanh() -> Any:
    """Takes the addresses of fp32 operands and results, their number (likewise), and a stream."""
    return cute.compile(_SmallTanh(), Int64(16), Int64(16), Int32(1), make_fake_stream())
