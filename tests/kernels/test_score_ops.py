"""Arithmetic of the CuTe DSL kernels against torch's on this machine's GPU, over every fp32 value."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

CHUNK = 1 << 28  # values compared at once: 1 GiB each


def test_tanh_equals_torchs_for_every_fp32_value(cuda: Any) -> None:
    from tests.harness import score_probe

    probe = score_probe.compile_tanh()
    out = torch.empty(CHUNK, dtype=torch.float32, device=cuda)
    for first in range(-(2**31), 2**31, CHUNK):
        bits = torch.arange(first, first + CHUNK, dtype=torch.int32, device=cuda)
        values = bits.view(torch.float32)
        probe(values.data_ptr(), out.data_ptr(), CHUNK, torch.cuda.current_stream().cuda_stream)
        want = torch.tanh(values)
        wrong = (out.view(torch.int32) != want.view(torch.int32)) & ~(out.isnan() & want.isnan())
        assert not bool(wrong.any()), (
            f"{int(wrong.sum())} values differ, the first of bits {int(bits[wrong][0]) & 0xFFFFFFFF:#010x}: "
            f"expected {float(want[wrong][0])!r}, got {float(out[wrong][0])!r}"
        )
