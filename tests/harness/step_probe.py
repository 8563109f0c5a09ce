"""Kernels that apply one function of step_math.py to words, so that tests can compare the function alone."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_stream

from dspark_kernels._device import ptx, step_math

THREADS = 256


class _Noise:
    """out[i] = noise of the random word first + i."""

    @cute.kernel
    def kernel(self, out: Int64, first: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        ptx.stg_b32(out + Int64(i) * 4, ptx.bits_of(step_math.gumbel(Uint32(first + i))))

    @cute.jit
    def __call__(self, out: Int64, first: Int32, count: Int32, stream: Any) -> None:
        self.kernel(out, first).launch(grid=[count // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream)


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


def compile_noise() -> Any:
    """Takes the address of fp32 results, the first word, the number of results (a multiple of THREADS), and a stream."""
    return cute.compile(_Noise(), Int64(16), Int32(0), Int32(1), make_fake_stream())


def compile_sums() -> Any:
    """Takes the addresses of both operands and of the results, the number of 32-bit words (likewise), and a stream."""
    return cute.compile(_Sums(), Int64(16), Int64(16), Int64(16), Int32(1), make_fake_stream())


def compile_small_tanh() -> Any:
    """Takes the addresses of fp32 operands and results, their number (likewise), and a stream."""
    return cute.compile(_SmallTanh(), Int64(16), Int64(16), Int32(1), make_fake_stream())
