"""Arithmetic of the step kernels against Triton's and torch's on this machine's GPU, over every value that there is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
pytest.importorskip("cutlass")

CHUNK = 1 << 28  # values compared at once: 1 GiB each
WORDS = 1 << 32
HALVES = 1 << 16  # bf16 values
WIDE = 1 << 26  # pairs of words compared at once


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("scheme", ["murmur3_32", "philox_32"])
def test_noise_equals_the_engines_for_every_random_word(cuda: Any, scheme: str) -> None:
    """Of the step kernels, and of the noise kernel and the fused loop."""
    from tests.harness import noise_probe, step_probe

    probe = step_probe.compile_noise(scheme)
    got, want = (torch.empty(CHUNK, dtype=torch.float32, device=cuda) for _ in range(2))
    draws = {
        "step_math": lambda first: probe(got.data_ptr(), first, CHUNK, _stream()),
        "noise_math": lambda first: noise_probe.noise_of_words(got, first, scheme),
    }
    for first in range(-WORDS // 2, WORDS // 2, CHUNK):
        noise_probe.engine_noise_of_words(want, first, scheme)
        for name, draw in draws.items():
            draw(first)
            wrong = got.view(torch.int32) != want.view(torch.int32)
            assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} of the words from {first} on differ"


def test_wide_noise_equals_tritons(cuda: Any) -> None:
    """Of random words, of those next to both ends of the uniform, and of those round each power of two."""
    from tests.harness import noise_probe, step_probe

    probe = step_probe.compile_wide_noise()
    generator = torch.Generator(cuda).manual_seed(WORDS)
    got, want = (torch.empty(WIDE, dtype=torch.float64, device=cuda) for _ in range(2))
    low = torch.empty(WIDE, dtype=torch.int32, device=cuda)
    high = torch.empty_like(low)
    edges = torch.tensor([1 << k for k in range(64 - 1)], dtype=torch.int64, device=cuda)
    for scale in (0, 8, 24, 31):
        for words in (low, high):
            words.random_(-WORDS // 2, WORDS // 2, generator=generator)
        high >>= scale  # towards u = 0, from negative words towards u = 1
        near = (edges[:, None] + torch.arange(-2048, 2048, device=cuda) * 1024).view(-1)
        both = torch.cat([near, ~near])
        low[: len(both)], high[: len(both)] = both.to(torch.int32), (both >> 32).to(torch.int32)
        probe(high.data_ptr(), low.data_ptr(), got.data_ptr(), WIDE, _stream())
        noise_probe.wide_noise_of_words(want, high, low)
        wrong = got.view(torch.int64) != want.view(torch.int64)
        assert bool(want.isfinite().all())
        assert not bool(wrong.any()), (scale, int(wrong.sum()), high[wrong][:1].tolist(), low[wrong][:1].tolist())


def test_sums_equal_torchs_for_every_pair_of_bf16(cuda: Any) -> None:
    """Also that one rounding of the exact sum is the rounding of the fp32 sum, which is what torch computes."""
    from tests.harness import step_probe

    probe = step_probe.compile_sums()
    halves = torch.arange(HALVES, dtype=torch.int32, device=cuda).to(torch.int16)
    right = halves.repeat(CHUNK // HALVES)
    got = torch.empty_like(right)
    for lefts in halves.split(CHUNK // HALVES):
        left = lefts.repeat_interleave(HALVES)
        probe(left.data_ptr(), right.data_ptr(), got.data_ptr(), CHUNK // 2, _stream())
        want = left.view(torch.bfloat16) + right.view(torch.bfloat16)
        wrong = (got != want.view(torch.int16)) & ~(got.view(torch.bfloat16).isnan() & want.isnan())
        assert not bool(wrong.any()), f"{int(wrong.sum())} sums of {left[wrong][:1].tolist()} and others differ"


def test_tanh_of_small_values_equals_torchs(cuda: Any) -> None:
    """Every fp32 below the split in size, of both signs."""
    from tests.harness import step_probe

    from dspark_kernels._device import step_math

    probe = step_probe.compile_small_tanh()
    split = int(torch.tensor(step_math.TANH_SPLIT, dtype=torch.float32).view(torch.int32))
    got = torch.empty(CHUNK, dtype=torch.float32, device=cuda)
    for sign in (0, -(2**31)):
        for first in range(0, split, CHUNK):
            values = torch.arange(first, first + CHUNK, dtype=torch.int32, device=cuda).clamp_(max=split - 1) + sign
            probe(values.data_ptr(), got.data_ptr(), CHUNK, _stream())
            wrong = got.view(torch.int32) != torch.tanh(values.view(torch.float32)).view(torch.int32)
            assert not bool(wrong.any()), f"{int(wrong.sum())} values from {first} on differ"
