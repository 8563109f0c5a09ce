"""Known failures of other samplers, by name, for the fused loop in Triton's interpreter. tests/kernels has them for a GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import Case  # noqa: E402
from tests.harness.known_cases import KNOWN, Known, Outputs, run  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")


def block_of(vocab_size: int) -> int | None:
    """Head rows of a program, so that small vocabularies take a few, as each costs the interpreter time."""
    return None if vocab_size > 1000 else 16 if vocab_size <= 40 else 64


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_fused_loop(toy_models: Callable[..., ModuleType], known: Known) -> None:
    model = toy_models(**known.model, kernels=("fused",))
    block = block_of(known.model["vocab_size"])

    def draw(case: Case) -> Outputs:
        fresh = case.with_fresh_outputs()
        weights = case.embed_weight, case.head_weight
        loop = model.fused.FusedLoop(*weights, max_reqs=case.max_reqs, d2t=case.d2t, block=block)
        loop.sample(*fresh.call_arguments, query_per_row=case.query_per_row)
        return fresh.draft_tokens, fresh.logits_cache

    run(known, draw, torch.device("cpu"), model.config, why_unequal_on_cpu)


def test_cases_have_names_of_their_own() -> None:
    names = [known.name for known in KNOWN]
    assert len(set(names)) == len(names)
    numbers = {int(name.split("_")[1]) for name in names if name.startswith("case_")}
    assert numbers >= {3, 4, 5, 6, 7, 8, 11, 12, 13, 18, 21, 23, 24, 25, 38}
