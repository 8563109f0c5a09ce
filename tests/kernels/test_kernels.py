"""The checked-in kernels on this machine's GPU: what `dsparkgen verify` checks, with fewer batches."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
BATCHES = 16  # two of each row count
REPLAYS = 200
SEED = 11
BASES, CACHES = ("bf16", "fp32"), ("bf16", "fp32")


@pytest.fixture
def checks() -> Any:
    from tests.harness import checks

    return checks


@pytest.fixture(params=[(base, cache) for base in BASES for cache in CACHES], ids="/".join)
def pair(request: pytest.FixtureRequest, product: Any, checks: Any) -> tuple[str, str]:
    if request.param not in checks.dtype_pairs(product):
        pytest.skip(f"{product.model} has no kernel for {request.param}")
    return request.param


def test_noise(product: Any, checks: Any, cuda: Any) -> None:
    assert checks.check_noise(product, cuda, batches=BATCHES, seed=SEED)["values"] > 0


def test_chain_and_fused_equal_the_oracle_to_the_bit(product: Any, checks: Any, cuda: Any, pair: Any) -> None:
    subject = checks.exact_subject(product, *pair, cuda, seed=SEED)
    checks.check_bitwise(subject, batches=BATCHES, seed=SEED)
    checks.check_directed(subject, seed=SEED)
    checks.check_seed_dependence(subject, seed=SEED)


def test_one_graph_serves_other_inputs(product: Any, checks: Any, cuda: Any, pair: Any) -> None:
    subject = checks.exact_subject(product, *pair, cuda, seed=SEED)
    for rows in (1, product.config.MAX_ROWS):
        checks.check_graph(subject, replays=REPLAYS, seed=SEED, rows=rows)


def test_tokens_agree_with_the_eager_loop(product: Any, checks: Any, cuda: Any, pair: Any) -> None:
    checks.check_agreement(checks.random_subject(product, *pair, cuda, seed=SEED), batches=50, seed=SEED)


def test_a_wait_that_never_ends_times_out(product: Any, cuda: Any) -> None:
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    from dsparkgen.verify import Task

    task = Task(str(ROOT), str(ROOT / "generated"), product.model, "timeout", 0, 0, SEED)
    ran = subprocess.run(
        [sys.executable, "-m", "dsparkgen.verify", json.dumps(dataclasses.asdict(task))],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "generator"), *sys.path]))},
        check=False,
    )
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["failure"] is None and ran.returncode == 0
    assert "CUDA context is lost" in json.loads(line)["covered"]["message"]


def test_the_draft_sampler_takes_the_chain_and_what_takes_any_row_count(product: Any, checks: Any, cuda: Any) -> None:
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    from tests.harness.oracle import why_unequal

    config = product.config
    base, cache = config.BASE_DTYPES[0], config.CACHE_DTYPES[0]
    subject = checks.exact_subject(product, base, cache, cuda, seed=SEED)
    draft = product.module("launch").DraftSampler(
        *subject.weights, max_reqs=checks.MAX_REQS, cache_dtype=checks.DTYPES[cache]
    )
    draft.warmup()
    beyond = "step" if product.has("step") else "fused"
    for rows, expected in ((1, "chain"), (config.MAX_ROWS, "chain"), (config.MAX_ROWS + 1, beyond)):
        case = checks.make_case(subject, rows, seed=rows)
        assert draft.path(rows, case.base_logits)[0] == expected, draft.path(rows, case.base_logits)
        draft.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, rows)
        draft.sample(*case.call_arguments, query_per_row=case.query_per_row)
        assert why_unequal(case, case.draft_tokens, case.logits_cache) is None


def test_nothing_allocates_after_warmup(product: Any, checks: Any, cuda: Any) -> None:
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    config = product.config
    base, cache = config.BASE_DTYPES[0], config.CACHE_DTYPES[0]
    subject = checks.exact_subject(product, base, cache, cuda, seed=SEED)
    subject.chain.warmup()
    cases = [checks.make_case(subject, rows, seed=rows) for rows in range(1, config.MAX_ROWS + 1)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for case in cases:
        subject.chain.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
        subject.chain.sample(*case.call_arguments, query_per_row=case.query_per_row)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def _chains(product: Any, checks: Any, subject: Any, count: int) -> list[Any]:
    launch = product.module("launch")
    dtype = checks.DTYPES[subject.cache]
    return [launch.ChainSampler(*subject.weights, max_reqs=checks.MAX_REQS, cache_dtype=dtype) for _ in range(count)]


def test_samplers_of_their_own_run_on_streams_of_their_own(product: Any, checks: Any, cuda: Any) -> None:
    """Two samplers on one GPU, launched by turns on two streams that nothing orders, noise on side streams of their own."""
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    from tests.harness.oracle import why_unequal

    config = product.config
    subject = checks.exact_subject(product, config.BASE_DTYPES[0], config.CACHE_DTYPES[0], cuda, seed=SEED)
    samplers = _chains(product, checks, subject, 2)
    cases = [checks.make_case(subject, rows, seed=rows) for rows in (1, config.MAX_ROWS)]
    for sampler, case in zip(samplers, cases, strict=True):
        sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)  # compiles
        case.poison()
    streams = [torch.cuda.Stream(cuda) for _ in samplers]
    torch.cuda.synchronize(cuda)
    for _ in range(200):
        for sampler, case, stream in zip(samplers, cases, streams, strict=True):
            with torch.cuda.stream(stream):
                sampler.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
                sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    torch.cuda.synchronize(cuda)
    for sampler, case in zip(samplers, cases, strict=True):
        sampler.raise_if_failed()
        assert why_unequal(case, case.draft_tokens, case.logits_cache) is None


def test_a_busy_gpu_delays_the_chain_and_nothing_else(product: Any, checks: Any, cuda: Any) -> None:
    """The launch is cooperative: it starts when every SM can take it, behind kernels of another stream that fill them."""
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    from tests.harness.oracle import why_unequal

    config = product.config
    subject = checks.exact_subject(product, config.BASE_DTYPES[0], config.CACHE_DTYPES[0], cuda, seed=SEED)
    (sampler,) = _chains(product, checks, subject, 1)
    case = checks.make_case(subject, config.MAX_ROWS, seed=SEED)
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)  # compiles
    factor = torch.randn(8192, 8192, dtype=torch.bfloat16, device=cuda)
    product_of = torch.empty_like(factor)
    other = torch.cuda.Stream(cuda)
    case.poison()
    torch.cuda.synchronize(cuda)
    for _ in range(20):
        with torch.cuda.stream(other):
            torch.mm(factor, factor, out=product_of)
        sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    torch.cuda.synchronize(cuda)
    sampler.raise_if_failed()
    assert why_unequal(case, case.draft_tokens, case.logits_cache) is None
