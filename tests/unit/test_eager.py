"""The engine's loop as the harness has it, in Triton's interpreter, against the oracle: the two state the contract apart."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import Transform, exact_case  # noqa: E402
from tests.harness.eager import EagerLoop  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

CASES = {
    "full vocabulary": {},
    "fp32": {"base_dtype": torch.float32, "cache_dtype": torch.float32},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "fp64 noise": {"noise_scheme": "murmur3_64"},
    "multiplier on the sum": {"transform": Transform("sum", multiplier=0.25)},
    "multiplier on the base": {"transform": Transform("base", multiplier=0.25)},
    "multiplier on both": {"transform": Transform("both", multiplier=0.25)},
    "greedy": {"cache_dtype": None},
    "greedy, reduced vocabulary": {"cache_dtype": None, "draft_vocab_size": 40, "base_dtype": torch.float32},
}  # no caps: torch's tanh on a CPU is not the oracle's there; no Philox: its logarithm is libdevice's


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    case = exact_case(97, 64, 3, 3, seed=6, **CASES[name])
    EagerLoop(case)()
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_mix": False}, "expected step_mix and a sampling_limit of vocab_size"),
        ({"input_ids": torch.full((9,), 97, dtype=torch.int32)}, r"expected every anchor in \[0, 97\)"),
    ],
)
def test_cases_that_the_engine_does_not_have(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagerLoop(exact_case(97, 64, 3, 3, seed=6).replace(**change))
