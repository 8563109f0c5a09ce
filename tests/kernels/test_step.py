"""The step kernels on this machine's GPU: tokens and cache equal the engine's eager loop to the bit.

Models with the trained number of positions, as they are checked in, and with another one, rendered here; every row count around the borders of the block table; operands
where vectors are allowed and where they are not; every build. Rows with NaN follow the oracle, on weights whose dot products are
exact. Where the GEMM of the engine and of the sampler could differ, both run it on the same weights and the same shapes.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import oracle  # noqa: E402
from tests.harness.checks import DTYPES  # noqa: E402
from tests.harness.eager import EagerLoop  # noqa: E402
from tests.harness.known_cases import Known, run  # noqa: E402
from tests.harness.step_ranks import SHARED, EmulatedStepSampler, draw_alike  # noqa: E402
from tests.harness.step_stage import (  # noqa: E402
    BLOCKS,
    MAX_REQS,
    SEED,
    Stage,
    nan_cases,
    product_for,
    why_replays_differ,
    why_unequal,
    why_unlike_the_engine,
    why_unlike_the_oracle,
)

ROWS = (1, 2, 3, 7, 8, 16, 33, 64, 128)
STEPS = (5, 15)
MODELS = ("deepseek_v41", "muse_spark")
BF16 = torch.bfloat16
REPLAYS = 20
LATE_US = 100.0  # how long a kernel ahead lets the step kernels wait for what it writes


@pytest.fixture(scope="module", params=list(itertools.product(MODELS, STEPS)), ids=lambda p: f"{p[0]}-{p[1]}")
def stage(request: pytest.FixtureRequest, cuda: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    model, num_steps = request.param
    yield Stage(product_for(tmp_path_factory.mktemp(f"{model}_{num_steps}"), model, num_steps), cuda)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", ROWS)
def test_equal_to_the_engines_loop(stage: Stage, rows: int) -> None:
    case = stage.case(rows, seed=SEED + rows, padding_rows=rows // 4)
    assert stage.sampler.variant(rows, case.base_logits, case.logits_cache).vector
    assert why_unlike_the_engine(case, stage.sampler) is None


@pytest.mark.parametrize("layout", ["odd", "steps_first"])
@pytest.mark.parametrize("rows", [1, 3, 8, 33, 128])
def test_equal_with_operands_out_of_alignment(stage: Stage, rows: int, layout: Any) -> None:
    case = stage.case(rows, seed=SEED + rows, layout=layout, query_per_row=stage.config.NUM_STEPS + 1)
    assert stage.sampler.variant(rows, case.base_logits, case.logits_cache).vector == (layout == "steps_first")
    assert why_unlike_the_engine(case, stage.sampler) is None


@pytest.mark.parametrize("operand", ["base", "cache"])
def test_each_operand_alone_out_of_alignment(stage: Stage, operand: str) -> None:
    plain, odd = (stage.case(9, seed=SEED, layout=layout) for layout in ("plain", "odd"))
    if operand == "base":
        case = plain.replace(base_logits=odd.base_logits)
    else:
        case = plain.replace(logits_cache=odd.logits_cache)
    assert not stage.sampler.variant(9, case.base_logits, case.logits_cache).vector
    assert why_unlike_the_engine(case, stage.sampler) is None


@pytest.mark.parametrize("more", [64, 3], ids=["aligned", "misaligned"])
def test_a_padded_head_is_multiplied_as_it_is(stage: Stage, more: int) -> None:
    """The product runs over the padding as the engine's does, and leaves its stride under the bias; the padding is NaN."""
    embed, head = stage.weights
    padding = torch.full((more, stage.rank_dim), float("nan"), dtype=BF16, device=stage.device)
    weights = embed, torch.cat([head, padding])
    sampler = stage.make(weights)
    for rows in (1, 5, 40):
        case = stage.case(rows, seed=SEED + rows, weights=weights)
        assert stage.sampler.variant(rows, case.base_logits, case.logits_cache).vector
        assert sampler.variant(rows, case.base_logits, case.logits_cache).vector == (more == 64 or rows == 1)
        assert why_unlike_the_engine(case, sampler) is None, rows


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("pdl", [0, MAX_REQS], ids=["plain", "pdl"])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_build_draws_the_same(stage: Stage, block: int, pdl: int) -> None:
    sampler = stage.make(STEP_BLOCKS=(), STEP_DEFAULT_BLOCK=block, STEP_PDL_MAX_ROWS=pdl)
    for rows, layout in ((1, "plain"), (6, "odd"), (20, "plain"), (20, "odd")):
        case = stage.case(rows, seed=SEED + rows, layout=layout)
        variant = sampler.variant(rows, case.base_logits, case.logits_cache)
        assert variant == (block, bool(pdl), layout == "plain")
        assert why_unlike_the_engine(case, sampler) is None, (rows, layout)


@pytest.mark.parametrize(("base", "cache"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32")])
def test_other_dtypes(stage: Stage, base: str, cache: str) -> None:
    if base not in stage.config.BASE_DTYPES or cache not in stage.config.CACHE_DTYPES:
        pytest.skip(f"{stage.config.MODEL} has no kernels for {base} base logits and a {cache} cache")
    sampler = stage.make(cache=DTYPES[cache], max_reqs=24)
    for rows, layout in ((2, "plain"), (7, "odd"), (24, "plain")):
        options = {"base_dtype": DTYPES[base], "cache_dtype": DTYPES[cache], "layout": layout, "max_reqs": 24}
        assert why_unlike_the_engine(stage.case(rows, seed=SEED + rows, **options), sampler) is None, (rows, layout)


@pytest.mark.usefixtures("compiler")
def test_rows_with_nan(stage: Stage) -> None:
    """The lowest id with a NaN score, at every block size; the other rows of the batch draw as without."""
    weights = stage.exact_weights()
    for block in BLOCKS:
        for name, case in nan_cases(stage, weights):
            sampler = stage.make(
                (case.embed_weight, case.head_weight), max_reqs=MAX_REQS, STEP_BLOCKS=(), STEP_DEFAULT_BLOCK=block
            )
            assert why_unlike_the_oracle(case, sampler) is None, (block, name)


def test_equal_to_the_oracle_on_exact_weights(stage: Stage) -> None:
    weights = stage.exact_weights()
    sampler = stage.make(weights)
    for rows, layout in ((1, "odd"), (10, "plain")):
        case = stage.case(rows, seed=SEED + rows, weights=weights, layout=layout, padding_rows=rows // 4)
        assert why_unlike_the_oracle(case, sampler) is None, rows


# --- ranks, emulated ---


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_vocabulary_parallel_ranks_draw_what_one_rank_draws(stage: Stage, world: int) -> None:
    """On weights whose dot products are exact, so that no GEMM's order of sums can differ between the shards."""
    weights = stage.exact_weights()
    alone = stage.make(weights, max_reqs=33)
    ranks = EmulatedStepSampler(stage.launch, weights, world=world, max_reqs=33, cache_dtype=BF16, block=2048)
    for rows, layout, shards in ((1, "plain", True), (3, "odd", False), (33, "steps_first", True)):
        case = stage.case(rows, seed=SEED + rows, weights=weights, layout=layout, padding_rows=rows // 4, max_reqs=33)
        if rows == 3:
            case.base_logits[1, :, stage.vocab - 2] = float("nan")
        want = case.with_fresh_outputs()
        alone.sample(*want.call_arguments, query_per_row=want.query_per_row)
        for rank, got in enumerate(ranks.sample(case, shards=shards)):
            assert why_unequal(got, want) is None, (rows, rank)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("known", "world"), SHARED, ids=str)
def test_known_cases_of_ranks(toy_models: Callable[..., ModuleType], cuda: Any, known: Known, world: int) -> None:
    model = toy_models(**known.model, kernels=("fused", "step"))
    launch = importlib.import_module(f"{model.__name__}.launch")
    run(known, partial(draw_alike, launch, world), cuda, model.config, oracle.why_unequal)


# --- builds and graphs ---


def test_warmup_compiles_all_and_later_calls_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 40
    sampler = stage.make(max_reqs=most)
    sampler.warmup()

    def refuse(*args: Any) -> None:
        raise AssertionError(f"asked for a kernel after warmup: {args}")

    monkeypatch.setattr(type(sampler), "provide", staticmethod(refuse))
    cases = [
        stage.case(rows, seed=SEED, layout=layout, max_reqs=most)
        for rows in (1, 2, 3, 8, 9, 16, 17, 33, most)
        for layout in ("plain", "odd")
    ]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for case in cases:
        sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_nothing_compiles_under_capture(stage: Stage) -> None:
    sampler = stage.make(max_reqs=4)
    case = stage.case(2, seed=SEED, max_reqs=4)
    with pytest.raises(RuntimeError, match="is not compiled; call warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)


@pytest.mark.parametrize("rows", [8, 40])
def test_case_35_one_graph_serves_other_requests(stage: Stage, rows: int) -> None:
    """Rows in use, states, seeds, positions, temperatures, anchors and logits differ from replay to replay."""
    assert why_replays_differ(stage, rows, REPLAYS) is None


# --- kernels ahead that write late (case 34) ---


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rows", [1, 24])
def test_case_34_a_step_behind_a_product_that_is_written_late(
    stage: Stage, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right bias is written late, over a wrong one, by a kernel that lets its dependents start at once."""
    from benchmarks.producer import Producer

    sampler, producer = stage.make(STEP_PDL_MAX_ROWS=MAX_REQS), Producer(stage.device)
    case = stage.case(rows, seed=SEED + rows)
    assert why_unlike_the_engine(case, sampler) is None
    product = sampler.product

    def late(embeddings: Any, out: Any) -> None:
        right = torch.empty_like(out)
        product(embeddings, right)
        torch.neg(right, out=out)
        producer.copy(right.view(-1).view(torch.int32), out.view(-1).view(torch.int32), LATE_US)

    monkeypatch.setattr(sampler, "product", late)
    for _ in range(3):
        assert why_unlike_the_engine(case, sampler) is None


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("rows", [1, 24])
def test_case_34_anchors_that_are_written_late(stage: Stage, rows: int) -> None:
    from benchmarks.producer import Producer

    sampler, producer = stage.make(STEP_PDL_MAX_ROWS=MAX_REQS), Producer(stage.device)
    case = stage.case(rows, seed=SEED + rows)
    want = case.with_fresh_outputs()
    EagerLoop(want)()
    right = case.input_ids.clone()
    for _ in range(3):
        case.poison()
        case.input_ids.copy_((right + 1) % stage.vocab)
        producer.copy(right, case.input_ids, LATE_US)
        sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
        assert why_unequal(case, want) is None


@pytest.mark.usefixtures("compiler")
def test_case_34_packets_and_shards_that_arrive_late(stage: Stage) -> None:
    from benchmarks.producer import Producer

    weights = stage.exact_weights()
    alone = stage.make(weights, max_reqs=4)
    ranks = EmulatedStepSampler(stage.launch, weights, world=2, max_reqs=4, cache_dtype=BF16, block=1024)
    case = stage.case(3, seed=SEED, weights=weights, max_reqs=4)
    want = case.with_fresh_outputs()
    alone.sample(*want.call_arguments, query_per_row=want.query_per_row)
    producer = Producer(stage.device)

    def late(gathered: Any, parts: list[Any]) -> None:
        right = torch.stack(parts).view(-1).view(torch.int32)
        # Token 0 with score 0 in every packet, zeros in every shard: valid, and wrong.
        gathered.zero_()
        producer.copy(right, gathered.view(-1).view(torch.int32), LATE_US)

    for rank, got in enumerate(ranks.sample(case, gather=late)):
        assert why_unequal(got, want) is None, rank
