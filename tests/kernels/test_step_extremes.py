"""The step kernels where screening by a bound is at its limits: extreme temperatures and logits, ties, masked and equal rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness.step_extremes import HEATS, MAX_REQS, ROWS, logits_of_one_kind  # noqa: E402

SEED = 47
BLOCKS = (1024, 2048, 4096, 8192)


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
        draft_vocab_size=config.DRAFT_VOCAB_SIZE if config.D2T else None,
        sampling_limit=config.SAMPLING_LIMIT,
    )
    case.head_weight[::3] = 0  # a third of the columns with no bias: equal logits stay equal
    samplers = []
    for block in BLOCKS:
        given = SimpleNamespace(**vars(config) | {"STEP_BLOCKS": (), "STEP_DEFAULT_BLOCK": block})
        kind = type("Changed", (launch.StepSampler,), {"config": given})
        samplers.append(
            kind(case.embed_weight, case.head_weight, max_reqs=MAX_REQS, cache_dtype=torch.bfloat16, d2t=case.d2t)
        )
    shape = tuple(case.base_logits.shape)
    for name, logits in logits_of_one_kind(SEED, shape, device):
        case.base_logits.copy_(logits)
        tokens, cache = oracle(case)
        for block, sampler in zip(BLOCKS, samplers, strict=True):
            case.poison()
            sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
            wrong = torch.nonzero(case.draft_tokens != tokens).tolist()
            assert not wrong, (name, block, wrong[0], case.draft_tokens.tolist(), tokens.tolist())
            assert same_bits(case.logits_cache, cache), (name, block)
