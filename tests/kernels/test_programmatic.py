"""Programmatic dependent launch on this machine's GPU: the same results, also behind a kernel that writes late."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

SEED = 23
BATCHES = 16  # two of each row count
TURNS = 20
LATE_US = 100.0  # how long the kernel ahead lets the chain wait for its results


@pytest.fixture
def checks() -> Any:
    from tests.harness import checks

    return checks


@pytest.fixture(params=["bf16", "fp32"])
def subject(request: pytest.FixtureRequest, product: Any, checks: Any, cuda: Any) -> Any:
    """A model on exact weights whose chain is launched programmatically; the base logits' dtype is the parameter."""
    if not product.has("chain"):
        pytest.skip(f"{product.model} has no chain kernel")
    if request.param not in product.config.BASE_DTYPES:
        pytest.skip(f"{product.model} has no kernel for {request.param} base logits")
    cache = product.config.CACHE_DTYPES[0]
    found = checks.exact_subject(product, request.param, cache, cuda, seed=SEED)
    found.fused = None  # the chain alone is checked here
    found.chain = product.module("launch").ChainSampler(
        *found.weights, max_reqs=checks.MAX_REQS, cache_dtype=checks.DTYPES[cache], pdl=True
    )
    return found


def test_a_programmatic_chain_equals_the_oracle_to_the_bit(subject: Any, checks: Any) -> None:
    checks.check_bitwise(subject, batches=BATCHES, seed=SEED)
    checks.check_directed(subject, seed=SEED)


class Late:
    """A batch whose base logits and anchors a kernel ahead of the chain writes late, over wrong ones."""

    def __init__(self, subject: Any, checks: Any, rows: int) -> None:
        from benchmarks.producer import Producer
        from tests.harness.oracle import oracle

        given = checks.make_case(subject, rows, seed=SEED + rows, temperatures=(0.0, 0.7))
        base, anchors = given.base_logits.contiguous(), given.input_ids
        self.source = torch.cat([base.view(-1).view(torch.int32), anchors])
        self.target = torch.empty_like(self.source)
        split = self.source.numel() - anchors.numel()
        self.case = given.replace(
            base_logits=self.target[:split].view(base.dtype).view(base.shape), input_ids=self.target[split:]
        )
        # Valid ids of other tokens, and logits whose winners are others: read too early, they change every draft.
        wrong = (-base).view(-1).view(torch.int32)
        self.wrong = torch.cat([wrong, (anchors + 1) % given.vocab_size])
        self.tokens, self.cache = oracle(given)
        self.subject, self.producer = subject, Producer(given.device)

    def launch(self) -> None:
        """Wrong inputs, the noise, then the kernel that writes the right ones late, and the chain right behind it."""
        case, chain = self.case, self.subject.chain
        self.target.copy_(self.wrong)
        chain.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
        chain.join_noise()  # ahead of the kernel: an event between it and the chain would leave no overlap
        self.producer.copy(self.source, self.target, LATE_US)
        chain.sample(*case.call_arguments, query_per_row=case.query_per_row)

    def check(self) -> None:
        from tests.harness.oracle import same_bits

        torch.cuda.synchronize(self.case.device)
        self.subject.chain.raise_if_failed()
        assert torch.equal(self.target, self.source)
        assert torch.equal(self.case.draft_tokens, self.tokens)
        assert same_bits(self.case.logits_cache, self.cache)


@pytest.fixture(params=["one row", "most rows"])
def late(request: pytest.FixtureRequest, compiler: None, subject: Any, checks: Any, product: Any) -> Late:
    found = Late(subject, checks, 1 if request.param == "one row" else product.config.MAX_ROWS)
    found.case.poison()
    found.launch()  # compiles
    found.check()
    return found


def test_a_chain_behind_a_kernel_that_writes_late_reads_what_it_wrote(late: Late) -> None:
    for _ in range(TURNS):
        late.case.poison()
        late.launch()
        late.check()


def test_a_captured_chain_behind_a_kernel_that_writes_late(late: Late) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        late.launch()
    for _ in range(TURNS):
        late.case.poison()
        graph.replay()
        late.check()
