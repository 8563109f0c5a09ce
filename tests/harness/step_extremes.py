"""Inputs at which the step kernels' screening by a bound is at its limits: extreme temperatures and logits, ties, masked and equal rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ROWS, MAX_REQS = 6, 8
HEATS = {
    "tiny": (1e-6, 1e-30, 1e-38, 1e-40, 1e-45, 1e-3),  # 1e-40 and 1e-45 are subnormal
    "huge": (1e3, 1e6, 1e30, 3e38, float("inf"), 8e37),
    "odd": (-1.0, -1e-6, float("nan"), -0.0, 1.0, -float("inf")),
}


def logits_of_one_kind(seed: int, shape: tuple[int, ...], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Base logits by name, fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = torch.randn(shape, generator=generator, device=device)
    yield "normal", normal
    yield "equal", torch.full(shape, -2.5, device=device)
    yield "zeros of both signs", torch.where(normal > 0, 0.0, -0.0)
    yield "two values", torch.where(normal > 3, 100.0, -100.0)
    yield "huge", normal * 1e38
    yield "one far above", torch.where(torch.arange(shape[-1], device=device) == shape[-1] - 1, 3e38, normal)
    yield "masked but for a few", torch.where(normal > 4, normal, float("-inf"))
    yield "masked", torch.full(shape, float("-inf"), device=device)
    yield "one infinite", torch.where(torch.arange(shape[-1], device=device) == 77, float("inf"), normal)
    yield "rising", torch.linspace(-30, 30, shape[-1], device=device).expand(shape)
