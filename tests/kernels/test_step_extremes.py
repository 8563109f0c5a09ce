"""The step kernels where screening by a bound is at its limits: extreme temperatures and logits, ties, masked and equal rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SEED = 47
ROWS, MAX_REQS = 6, 8
BLOCKS = (1024, 2048, 4096, 8192)
HEATS = {
    "tiny": (1e-6, 1e-30, 1e-38, 1e-40, 1e-45, 1e-3),  # 1e-40 and 1e-45 are subnormal
    "huge": (1e3, 1e6, 1e30, 3e38, float("inf"), 8e37),
    "odd": (-1.0, -1e-6, float("nan"), -0.0, 1.0, -float("inf")),
}


def logits_of_one_kind(generator: Any, shape: tuple[int, ...], device: Any) -> Iterator[tuple[str, Any]]:
    """Base logits by name, fp32."""
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


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("heats", HEATS)
def test_draws_what_the_oracle_draws(product: Any, heats: str) -> None:
    """On weights whose dot products are exact, at every block size."""
    from tests.harness.cases import Transform, exact_case
    from tests.harness.oracle import oracle, same_bits

    if not product.has("step"):
        pytest.skip(f"{product.config.MODEL} has no step kernels")
    config, launch = product.config, product.module("launch")
    device = torch.device("cuda", torch.cuda.current_device())
    case = exact_case(
        config.VOCAB_SIZE,
        config.RANK_DIM,
        config.NUM_STEPS,
        ROWS,
        seed=SEED,
        device=device,
        max_reqs=MAX_REQS,
        temperatures=HEATS[heats],
        transform=Transform.of(config),
    )
    case.head_weight[::3] = 0  # a third of the columns with no bias: equal logits stay equal
    samplers = []
    for block in BLOCKS:
        given = SimpleNamespace(**vars(config) | {"STEP_BLOCKS": (), "STEP_DEFAULT_BLOCK": block})
        kind = type("Changed", (launch.StepSampler,), {"config": given})
        samplers.append(kind(case.embed_weight, case.head_weight, max_reqs=MAX_REQS, cache_dtype=torch.bfloat16))
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (ROWS, config.NUM_STEPS, config.VOCAB_SIZE)
    for name, logits in logits_of_one_kind(generator, shape, device):
        case.base_logits.copy_(logits)
        tokens, cache = oracle(case)
        for block, sampler in zip(BLOCKS, samplers, strict=True):
            case.poison()
            sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
            wrong = torch.nonzero(case.draft_tokens != tokens).tolist()
            assert not wrong, (name, block, wrong[0], case.draft_tokens.tolist(), tokens.tolist())
            assert same_bits(case.logits_cache, cache), (name, block)
