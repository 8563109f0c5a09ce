"""Several ranks of the chain, emulated on this machine's GPU: results of every rank, replays, waits that run out, known cases."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from tests.harness.known_cases import KNOWN, Known, run  # noqa: E402
from tests.harness.rank_cases import RANK_CASES, WORLDS  # noqa: E402

from dsparkgen.spec import read_spec  # noqa: E402

ROOT = Path(__file__).parents[2]
SEED = 17
WORLDS_OF_ALL = (2, 3, 4, 8)  # 3: padded shards, 8: the most that most models' specs plan for
FIRST_MODEL = "deepseek_v41"
# Ranks beyond those, of the model whose spec plans for them, with shards as they come and padded to whole tiles: of 12 ranks the last has 13,646
# or 13,536 columns of its 13,654 or 13,664.
WIDE_MODEL = "kimi_k3"
WIDE_WORLDS = ((12, None), (12, 13664), (16, None))
WIDE_BATCHES = 8  # one of each row count
BATCHES = 16  # two of each row count
REPLAYS = 100
TIMEOUT_MS = 500
GRAPH_TURNS = 3
TIES_OF_RANKS = 4  # ranks that the known cases of one vocabulary are drawn with


@pytest.fixture
def checks() -> Any:
    from tests.harness import checks

    return checks


@pytest.mark.parametrize("world", WORLDS_OF_ALL)
def test_every_rank_equals_the_oracle_to_the_bit(product: Any, checks: Any, cuda: Any, world: int) -> None:
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    if product.model != FIRST_MODEL and world != WORLDS_OF_ALL[0]:
        pytest.skip(
            f"the other models differ by vocabulary and transform alone: one number of ranks, {WORLDS_OF_ALL[0]}"
        )
    # Each dtype of the base logits and each of the cache, not their products: the ranks exchange cached logits.
    pairs = checks.dtype_pairs(product)
    for pair in {pairs[0], pairs[-1]} if product.model == FIRST_MODEL else pairs[:1]:
        subject = checks.EmulatedSubject.of(checks.exact_subject(product, *pair, cuda, seed=SEED), world)
        checks.check_bitwise(subject, batches=BATCHES, seed=SEED)
        checks.check_directed(subject, seed=SEED)
        checks.check_graph(subject, replays=REPLAYS, seed=SEED)


@pytest.mark.parametrize(("world", "shard_width"), WIDE_WORLDS)
def test_the_most_ranks_that_a_spec_plans_for_and_padded_shards(
    product_of: Callable[[str], Any], checks: Any, cuda: Any, world: int, shard_width: int | None
) -> None:
    product = product_of(WIDE_MODEL)
    spec = read_spec(ROOT / "specs" / f"{WIDE_MODEL}.toml")
    assert world in spec.parallel.tp and (shard_width is None or spec.vocabulary.draft < world * shard_width)
    pair = checks.dtype_pairs(product)[0]
    subject = checks.EmulatedSubject.of(checks.exact_subject(product, *pair, cuda, seed=SEED), world, shard_width)
    checks.check_bitwise(subject, batches=WIDE_BATCHES, seed=SEED)
    checks.check_directed(subject, seed=SEED)
    columns = subject.chain.share.columns
    assert sum(count for _, count in columns) == spec.vocabulary.draft and len(columns) == world
    assert columns[0][1] == (shard_width or -(-spec.vocabulary.draft // world))


def _toy(toy_models: Callable[..., ModuleType], known: Known) -> Any:
    """A toy model with a chain kernel, as `checks` takes a product."""
    model = toy_models(**known.model, kernels=("noise", "fused", "chain"))
    return SimpleNamespace(
        config=model.config, module=lambda name: importlib.import_module(f"{model.__name__}.{name}"), model="toy"
    )


def _draw_with_ranks(known: Known, model: Any, cuda: Any, checks: Any, world: int) -> None:
    """A trial whose every call is drawn by `world` ranks: all of them must agree, and `run` judges what they agree on."""
    from tests.harness.oracle import same_bits, why_unequal

    launch = model.module("launch")

    def draw(case: Any) -> Any:
        options = {"max_reqs": case.max_reqs, "cache_dtype": case.logits_cache.dtype, "d2t": case.d2t}
        sampler = launch.EmulatedChainSampler(case.embed_weight, case.head_weight, **options, world=world)
        mine = checks.stacked(case, world)
        sampler.sample(*mine.call_arguments, query_per_row=case.query_per_row)
        sampler.synchronize()
        for rank in range(1, world):
            assert torch.equal(mine.draft_tokens[rank], mine.draft_tokens[0]), rank
            assert same_bits(mine.logits_cache[rank], mine.logits_cache[0]), rank
        return mine.draft_tokens[0], mine.logits_cache[0]

    run(known, draw, cuda, model.config, why_unequal)


@pytest.mark.parametrize(
    ("known", "world"), [(known, world) for known in RANK_CASES for world in WORLDS[known.name]], ids=str
)
def test_known_cases_of_ranks(toy_models: Any, known: Known, world: int, cuda: Any, checks: Any) -> None:
    model = _toy(toy_models, known)
    _draw_with_ranks(known, model, cuda, checks, world)


# Of the cases of one vocabulary those that ranks could get wrong: order, NaN, masks, the map to target ids, padding rows.
SPLIT = [known for known in KNOWN if known.name.split("_")[1] in ("03", "07", "08", "11", "12", "13", "18")]


@pytest.mark.parametrize("known", SPLIT, ids=str)
def test_known_cases_of_one_vocabulary(toy_models: Any, known: Known, cuda: Any, checks: Any) -> None:
    if known.model.get("logits", {}).get("cache_dtypes") == ():
        pytest.skip("drafts greedily: without a cache there is no staging to get wrong")
    model = _toy(toy_models, known)
    _draw_with_ranks(known, model, cuda, checks, TIES_OF_RANKS)


@pytest.mark.parametrize("num_steps", [4, 5])
def test_case_31_each_replay_of_a_graph_uses_its_own_records(
    toy_models: Any, num_steps: int, cuda: Any, checks: Any
) -> None:
    """Three replays with other inputs each, with an even and an odd number of exchanges in the graph."""
    from tests.harness.cases import exact_case
    from tests.harness.oracle import why_unequal

    world, known = 4, replace(RANK_CASES[0], model={"vocab_size": 99, "num_steps": num_steps})
    model = _toy(toy_models, known)
    captured = exact_case(99, 64, num_steps, 3, seed=SEED, device=cuda)
    options = {"max_reqs": captured.max_reqs, "cache_dtype": captured.logits_cache.dtype}
    sampler = model.module("launch").EmulatedChainSampler(
        captured.embed_weight, captured.head_weight, **options, world=world
    )
    sampler.warmup()
    mine = checks.stacked(captured, world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(*mine.call_arguments, query_per_row=mine.query_per_row)
    for turn in range(GRAPH_TURNS):
        weights = captured.embed_weight, captured.head_weight
        case = exact_case(99, 64, num_steps, 3, seed=SEED + turn, device=cuda, weights=weights)
        for name in ("base_logits", "input_ids", "idx_mapping", "sample_pos", "temperature", "seeds"):
            getattr(mine, name).copy_(getattr(case, name))
        mine.poison()
        graph.replay()
        torch.cuda.synchronize(cuda)
        for rank in range(world):
            reason = why_unequal(case, mine.draft_tokens[rank], mine.logits_cache[rank])
            assert reason is None, f"replay {turn}, rank {rank}: {reason}"


@pytest.mark.parametrize(("phase", "world"), [("lone", 2), ("lone", 4), ("grid", 2), ("grid", 4)])
def test_case_33_a_wait_for_what_never_comes_ends_with_its_place(cuda: Any, phase: str, world: int) -> None:
    """A rank whose peers never launch, and a CTA that does not exist: the error names what was waited for, in time."""
    from tests.harness import ranks

    arguments = ["--emulated", "--world", str(world), "--timeout-ms", str(TIMEOUT_MS), "--phases", phase]
    task, phases, seconds, _ = ranks.parse(arguments)
    summary = ranks.run_phases(task, phases, seconds=seconds)
    assert summary["passed"], json.dumps(summary)
    (rank,) = summary["phases"][phase]["ranks"]
    # At the grid barrier every emulated rank waits, and the first to run out reports.
    place = "row 0, position 0" if phase == "grid" else "rank 0, row 0, position 0"
    assert place in rank["covered"]["message"] and rank["covered"]["ms"] >= TIMEOUT_MS
