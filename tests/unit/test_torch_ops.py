"""The samplers' operators on a CPU: torch's own checks of each, and a compiled function around the calls."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import Case, exact_case  # noqa: E402
from tests.harness.oracle import same_bits  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

VOCAB, RANK, STEPS, MAX_REQS = 67, 64, 3, 5
Models = Callable[..., ModuleType]


class Recorder:
    """A sampler that notes its calls, so that their order shows."""

    def __init__(self) -> None:
        self.device, self.calls = torch.device("cpu"), []

    def fork_noise(self, *state: Any) -> None:
        self.calls.append("fork")

    def join_noise(self) -> None:
        self.calls.append("join")

    def sample(self, *arguments: Any, query_per_row: int) -> None:
        self.calls.append("sample")
        arguments[-1].fill_(query_per_row)


@pytest.fixture
def model(toy_models: Models) -> ModuleType:
    return toy_models(VOCAB, kernels=("noise", "chain", "fused"))


def ops_module(model: ModuleType) -> Any:
    return importlib.import_module(f"{model.__name__.split('.')[0]}._device.torch_ops")


def make_case(seed: int = 1) -> Case:
    return exact_case(VOCAB, RANK, STEPS, 2, seed=seed, max_reqs=MAX_REQS)


def made(model: ModuleType, case: Case) -> Any:
    sampler = model.DraftSampler(
        case.embed_weight, case.head_weight, max_reqs=MAX_REQS, cache_dtype=case.logits_cache.dtype
    )
    return model.SamplerOps(sampler)


def test_sample_passes_torchs_checks(model: ModuleType) -> None:
    case = make_case()
    ops = made(model, case)
    arguments = (ops.number, ops.order, *case.call_arguments, case.query_per_row)
    torch.library.opcheck(ops_module(model).sample, arguments)


def test_noise_operators_pass_torchs_checks(model: ModuleType) -> None:
    case = make_case()
    ops = made(model, case)
    state = (case.idx_mapping, case.sample_pos, case.temperature, case.seeds)
    torch.library.opcheck(ops_module(model).fork_noise, (ops.number, ops.order, *state, case.rows))
    torch.library.opcheck(ops_module(model).join_noise, (ops.number, ops.order))


def test_greedy_drafts_have_no_cache(model: ModuleType) -> None:
    case, recorder = make_case(), Recorder()
    ops = model.SamplerOps(recorder)
    *inputs, _, tokens = case.call_arguments
    ops.sample(*inputs, None, tokens, query_per_row=7)
    assert recorder.calls == ["sample"] and bool((tokens == 7).all())


def test_draws_what_the_sampler_draws(model: ModuleType) -> None:
    case = make_case()
    ops, want, got = made(model, case), case.with_fresh_outputs(), case.with_fresh_outputs()
    ops.sampler.sample(*want.call_arguments, query_per_row=case.query_per_row)
    ops.sample(*got.call_arguments, query_per_row=case.query_per_row)
    assert torch.equal(got.draft_tokens, want.draft_tokens) and same_bits(got.logits_cache, want.logits_cache)


def test_a_compiled_function_draws_the_same(model: ModuleType) -> None:
    """In one graph, with the work around the calls; compiled once for both batches."""
    case = make_case()
    ops = made(model, case)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(fullgraph=True, backend=backend)
    def step(hidden: torch.Tensor, case_inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> torch.Tensor:
        input_ids, *state = case_inputs
        ops.fork_noise(*state, 2)
        base_logits = hidden * 2
        ops.join_noise()
        ops.sample(base_logits, input_ids, *state, *outputs, query_per_row=STEPS)
        return outputs[1] + 1

    for seed in (1, 2):
        want = make_case(seed).replace(embed_weight=case.embed_weight, head_weight=case.head_weight)
        got = want.with_fresh_outputs()
        ops.sampler.sample(*want.call_arguments, query_per_row=STEPS)
        base, *inputs, cache, tokens = got.call_arguments
        after = step(base / 2, inputs, [cache, tokens])
        assert torch.equal(tokens, want.draft_tokens) and same_bits(cache, want.logits_cache)
        assert torch.equal(after, want.draft_tokens + 1)
    assert len(graphs) == 1


def test_a_compiler_keeps_the_order_of_calls(model: ModuleType) -> None:
    """The noise operators touch no tensor that is used: only `order` ties them to the sample."""
    case, recorder = make_case(), Recorder()
    ops = model.SamplerOps(recorder)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(inputs: list[torch.Tensor]) -> None:
        base, input_ids, *state, cache, tokens = inputs
        ops.fork_noise(*state, 2)
        ops.join_noise()
        ops.sample(base, input_ids, *state, cache, tokens, query_per_row=STEPS)
        ops.fork_noise(*state, 2)

    step(list(case.call_arguments))
    assert recorder.calls == ["fork", "join", "sample", "fork"]


def test_two_samplers_do_not_mix(model: ModuleType) -> None:
    case, first, second = make_case(), Recorder(), Recorder()
    ops = [model.SamplerOps(first), model.SamplerOps(second)]
    ops[1].sample(*case.call_arguments, query_per_row=2)
    ops[0].join_noise()
    assert (first.calls, second.calls) == (["join"], ["sample"])


def test_a_sampler_that_is_gone_is_named(model: ModuleType) -> None:
    ops = model.SamplerOps(Recorder())
    number, order = ops.number, ops.order
    del ops
    gc.collect()
    with pytest.raises(RuntimeError, match=f"sampler {number}: expected a sampler that is still alive"):
        ops_module(model).join_noise(number, order)


def test_copies_of_the_package_have_operators_of_their_own(model: ModuleType) -> None:
    module = ops_module(model)
    assert module.NAMESPACE == model.__name__.split(".")[0]
    assert ops_module(importlib.import_module("dspark_kernels.deepseek_v41")).NAMESPACE == "dspark_kernels"


def test_errors_are_the_samplers_own(model: ModuleType) -> None:
    case = make_case()
    ops = made(model, case)
    arguments = list(case.call_arguments)
    arguments[5] = arguments[5].int()
    with pytest.raises(TypeError, match="seeds: expected int64"):
        ops.sample(*arguments, query_per_row=STEPS)
