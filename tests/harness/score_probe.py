"""A kernel that applies one function of score_ops.py to an array, so that tests can compare the function alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from dspark_kernels._device import ptx, score_ops

THREADS = 256


class _Elementwise:
    """out[i] = function(x[i]) for fp32 arrays."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, count: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < count:
            value = ptx.float_of(ptx.ldg_b32(x + Int64(i) * 4))
            ptx.stg_b32(out + Int64(i) * 4, ptx.bits_of(self.function(value)))

    @cute.jit
    def __call__(self, x: Int64, out: Int64, count: Int32, stream: Any) -> None:
        self.kernel(x, out, count).launch(
            grid=[(count + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )


def compile_tanh(arch: str | None = None) -> Any:
    """The probe of tanh: takes the addresses of input and output, the number of values, and a stream."""
    flags = f"--gpu-arch {arch}" if arch else ""
    return cute.compile(_Elementwise(score_ops.tanh), Int64(16), Int64(16), Int32(1), make_fake_stream(), options=flags)
