"""Known failures of other samplers, by name, for every kernel that they concern, on this machine's GPU and to the bit.

Every trial draws by the fused loop, the chain and the step kernels of a toy model rendered for it. A kernel that cannot serve a spec
must say so, at the field in question.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness.known_cases import KNOWN, Known, Outputs  # noqa: E402

KERNELS = {"fused": ("fused",), "chain": ("noise", "chain", "fused"), "step": ("fused", "step")}
# What a kernel says of a spec that it cannot serve.
DECLINED = {
    ("chain", "case_02_fp64_noise"): r'noise\.scheme: must be "murmur3_32" or "philox_32" for the (chain|noise) kernel',
}


def kernels_of(kernel: str, known: Known) -> tuple[str, ...]:
    """The kernels of a toy model: greedy drafts use no noise kernel."""
    greedy = known.model.get("logits", {}).get("cache_dtypes") == ()
    return tuple(name for name in KERNELS[kernel] if not (greedy and name == "noise"))


def sampler_of(model: ModuleType, kernel: str, case: Any) -> Any:
    """A sampler of one kernel for a case's weights."""
    weights = case.embed_weight, case.head_weight
    if kernel == "fused":
        return model.fused.FusedLoop(*weights, max_reqs=case.max_reqs, d2t=case.d2t)
    launch = importlib.import_module(f"{model.__name__}.launch")
    kind = {"chain": "ChainSampler", "step": "StepSampler"}[kernel]
    cache_dtype = None if case.logits_cache is None else case.logits_cache.dtype
    return getattr(launch, kind)(*weights, max_reqs=case.max_reqs, cache_dtype=cache_dtype, d2t=case.d2t)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_kernel(toy_models: Callable[..., ModuleType], cuda: Any, known: Known, kernel: str) -> None:
    from tests.harness.known_cases import run
    from tests.harness.oracle import why_unequal

    if kernel != "fused":
        pytest.importorskip("cutlass", reason="needs CuTe DSL: compiles kernels that no pack has")
    options = known.model | {"kernels": kernels_of(kernel, known)}
    reason = DECLINED.get((kernel, known.name))
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            toy_models(**options)
        return
    model = toy_models(**options)

    def draw(case: Any) -> Outputs:
        fresh = case.with_fresh_outputs()
        sampler = sampler_of(model, kernel, case)
        sampler.sample(*fresh.call_arguments, query_per_row=case.query_per_row)
        torch.cuda.synchronize(cuda)
        return fresh.draft_tokens, fresh.logits_cache

    run(known, draw, cuda, model.config, why_unequal)
