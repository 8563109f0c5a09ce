"""The step kernels by other noise than the models' own, and as greedy drafts: to the bit the eager loop's and the oracle's.

Screening by a bound differs by scheme (step_noise.py), and so do scores, keys and packets (step_scores.py): each scheme is run where a
bound is at its limits, over rows with NaN and ties, and over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness.checks import DTYPES  # noqa: E402
from tests.harness.step_extremes import HEATS, MAX_REQS, ROWS, logits_of_one_kind  # noqa: E402
from tests.harness.step_ranks import EmulatedStepSampler  # noqa: E402
from tests.harness.step_stage import (  # noqa: E402
    BLOCKS,
    SEED,
    Stage,
    nan_cases,
    product_for,
    why_replays_differ,
    why_unequal,
    why_unlike_the_engine,
    why_unlike_the_oracle,
)

GREEDY: dict[str, Any] = {"logits": {"cache_dtypes": ()}, "emit": {"kernels": ("fused", "step")}}
REPLAYS = 10


def noise(scheme: str) -> dict[str, Any]:
    """Keys of a spec with another noise scheme."""
    return {"noise": {"scheme": scheme}, "emit": {"kernels": ("fused", "step")}}


# By name: the model, its positions, and what its spec is changed to.
STAGES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "murmur3_64": ("deepseek_v41", 3, noise("murmur3_64")),
    "murmur3_64, soft cap": ("muse_spark", 3, noise("murmur3_64")),
    "murmur3_64, reduced": ("gemma4_26b_a4b", 3, noise("murmur3_64")),
    "philox_32": ("deepseek_v41", 3, noise("philox_32")),
    "philox_32, soft cap": ("muse_spark", 3, noise("philox_32")),
    "greedy": ("deepseek_v41", 3, GREEDY),
    "greedy, soft cap": ("muse_spark", 3, GREEDY),
    "greedy, reduced": ("gemma4_26b_a4b", 3, GREEDY),
}


@pytest.fixture(scope="module", params=STAGES)
def stage(request: pytest.FixtureRequest, cuda: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    model, num_steps, changes = STAGES[request.param]
    yield Stage(product_for(tmp_path_factory.mktemp("stage"), model, num_steps, **changes), cuda)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["plain", "odd"])
@pytest.mark.parametrize("rows", [1, 8, 33, 128])
def test_equal_to_the_engines_loop(stage: Stage, rows: int, layout: Any) -> None:
    case = stage.case(rows, seed=SEED + rows, layout=layout, padding_rows=rows // 4)
    assert stage.sampler.variant(rows, case.base_logits, case.logits_cache).vector == (layout == "plain")
    assert why_unlike_the_engine(case, stage.sampler) is None


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_and_dtype_draws_the_same(stage: Stage, block: int) -> None:
    for base in stage.config.BASE_DTYPES:
        for cache in stage.config.CACHE_DTYPES or ("none",):
            options = {"cache": DTYPES[cache], "STEP_BLOCKS": (), "STEP_DEFAULT_BLOCK": block}
            sampler = stage.make(max_reqs=20, **options)
            case = stage.case(20, seed=SEED, base_dtype=DTYPES[base], cache_dtype=DTYPES[cache], max_reqs=20)
            assert why_unlike_the_engine(case, sampler) is None, (base, cache)


def test_rows_with_nan(stage: Stage) -> None:
    weights = stage.exact_weights()
    for block in (BLOCKS[0], BLOCKS[-1]):
        for name, case in nan_cases(stage, weights):
            options = {"STEP_BLOCKS": (), "STEP_DEFAULT_BLOCK": block}
            sampler = stage.make((case.embed_weight, case.head_weight), **options)
            assert why_unlike_the_oracle(case, sampler) is None, (block, name)


@pytest.mark.parametrize("heats", HEATS)
def test_screening_at_its_limits(stage: Stage, heats: str) -> None:
    """Extreme temperatures and logits, ties, masked and equal rows, on weights of which a third of the columns have no bias."""
    if stage.cache is None and heats != "odd":
        pytest.skip("greedy drafts have no temperature")
    weights = stage.exact_weights()
    weights[1][::3] = 0
    sampler = stage.make(weights, max_reqs=MAX_REQS)
    case = stage.case(ROWS, seed=SEED, weights=weights, max_reqs=MAX_REQS, temperatures=HEATS[heats])
    for name, logits in logits_of_one_kind(SEED, tuple(case.base_logits.shape), stage.device):
        case.base_logits.copy_(logits)
        assert why_unlike_the_oracle(case, sampler) is None, name


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_draw_what_one_rank_draws(stage: Stage, world: int) -> None:
    """Ties between ranks and NaN of a later one included: a third of the logits of a row are the same, and large."""
    weights = stage.exact_weights()
    weights[1][::3] = 0
    alone = stage.make(weights, max_reqs=33)
    options = {"world": world, "max_reqs": 33, "cache_dtype": stage.cache, "d2t": stage.d2t}
    ranks = EmulatedStepSampler(stage.launch, weights, **options)
    for rows, layout, shards in ((1, "plain", True), (3, "odd", False), (33, "steps_first", True)):
        case = stage.case(rows, seed=SEED + rows, weights=weights, layout=layout, padding_rows=rows // 4, max_reqs=33)
        case.base_logits[0, :, ::3] = 3e4
        if rows == 3:
            case.base_logits[1, :, stage.drafts - 2] = float("nan")
        want = case.with_fresh_outputs()
        alone.sample(*want.call_arguments, query_per_row=want.query_per_row)
        for rank, got in enumerate(ranks.sample(case, shards=shards)):
            assert why_unequal(got, want) is None, (rows, rank)


def test_one_graph_serves_other_requests(stage: Stage) -> None:
    assert why_replays_differ(stage, 9, REPLAYS) is None
