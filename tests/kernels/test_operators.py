"""The samplers' operators on a GPU: torch's own checks, a compiled function around the calls, captured and replayed."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.harness.cases import Case, exact_case, exact_weights  # noqa: E402
from tests.harness.oracle import same_bits  # noqa: E402

MODEL, MAX_REQS, REPLAYS = "deepseek_v41", 19, 10


class Setup:
    """A model's sampler, warm, and cases for it."""

    def __init__(self, device: Any) -> None:
        from dspark_kernels import load

        self.model, self.device = load(MODEL), device
        from dspark_kernels.deepseek_v41 import config

        self.config = config
        self.weights = exact_weights(config.VOCAB_SIZE, config.RANK_DIM, seed=5, device=device)
        self.sampler = self.model.DraftSampler(*self.weights, max_reqs=MAX_REQS, cache_dtype=torch.bfloat16)
        self.sampler.warmup()
        self.ops = self.model.SamplerOps(self.sampler)

    def case(self, rows: int, seed: int) -> Case:
        config = self.config
        return exact_case(
            config.VOCAB_SIZE, config.RANK_DIM, config.NUM_STEPS, rows, seed=seed, device=self.device,
            weights=self.weights, max_reqs=MAX_REQS, padding_rows=rows // 4,
        )  # fmt: skip

    def want(self, case: Case) -> Case:
        """What the sampler's own method draws."""
        fresh = case.with_fresh_outputs()
        self.sampler.sample(*fresh.call_arguments, query_per_row=fresh.query_per_row)
        return fresh


@pytest.fixture(scope="module")
def setup(cuda: Any) -> Iterator[Setup]:
    """One sampler for all tests."""
    yield Setup(cuda)


@pytest.mark.parametrize("rows", [2, 16])
def test_operators_pass_torchs_checks(setup: Setup, rows: int) -> None:
    from dspark_kernels._device import torch_ops

    case, ops = setup.case(rows, 1), setup.ops
    state = (case.idx_mapping, case.sample_pos, case.temperature, case.seeds)
    with torch.inference_mode(False):
        arguments = [tensor.clone() for tensor in case.call_arguments]
        torch.library.opcheck(torch_ops.sample, (ops.number, ops.order, *arguments, case.query_per_row))
        torch.library.opcheck(torch_ops.fork_noise, (ops.number, ops.order, *[t.clone() for t in state], case.rows))
        torch.library.opcheck(torch_ops.join_noise, (ops.number, ops.order))


@pytest.mark.parametrize("rows", [3, 16])
def test_a_compiled_step_can_be_captured(setup: Setup, rows: int) -> None:
    """Compiled in one graph by inductor, captured, replayed with other inputs: draws what the plain call draws."""
    ops, steps = setup.ops, setup.config.NUM_STEPS

    @torch.compile(fullgraph=True, dynamic=False)
    def step(half: torch.Tensor, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        input_ids, *state = inputs
        ops.fork_noise(*state, rows)
        base_logits = half * 2
        ops.join_noise()
        ops.sample(base_logits, input_ids, *state, *outputs, query_per_row=steps)

    fixed = setup.case(rows, 2)
    base, *inputs, cache, tokens = fixed.call_arguments
    half = base / 2
    step(half, inputs, [cache, tokens])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(half, inputs, [cache, tokens])
    for seed in range(3, 3 + REPLAYS):
        want = setup.want(setup.case(rows, seed))
        half.copy_(want.base_logits / 2)
        for mine, theirs in zip(inputs, want.call_arguments[1:6], strict=True):
            mine.copy_(theirs)
        fixed.poison()
        graph.replay()
        assert torch.equal(tokens, want.draft_tokens) and same_bits(cache, want.logits_cache), seed
