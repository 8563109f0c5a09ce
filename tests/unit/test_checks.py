"""What `verify` checks on a GPU, tried on the fused loop in Triton's interpreter: it covers a model's features, and it can fail."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import checks  # noqa: E402
from tests.harness.toy import toy_model  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

CPU = torch.device("cpu")
REDUCED: dict[str, Any] = {"vocabulary": {"draft": 40, "d2t": True, "sampling_limit": 60}}
CAPPED: dict[str, Any] = {"logits": {"transform": {"placement": "both", "soft_cap": 30.0}}}


def subject_of(model: ModuleType, base: str = "bf16", cache: str = "bf16") -> checks.Subject:
    product = SimpleNamespace(
        config=model.config, module=lambda name: getattr(model, name), has=lambda kernel: kernel in ("noise", "fused")
    )
    return checks.exact_subject(product, base, cache, CPU, seed=3)


@pytest.mark.parametrize("features", [{}, REDUCED, CAPPED], ids=["plain", "reduced", "capped"])
def test_a_right_kernel_passes(tmp_path: Path, features: dict[str, Any]) -> None:
    subject = subject_of(toy_model(tmp_path, 67, num_steps=2, **features))
    assert (subject.d2t is not None) == (features is REDUCED)
    found = checks.check_bitwise(subject, batches=4, seed=5, rows=(1, 3))
    assert found == {"batches": 4, "rows": "1,3", "base": "bf16", "cache": "bf16"}
    assert subject.step_sampler(3) is None  # this model has none


class Wrong:
    """A sampler whose results are right but for one entry."""

    def __init__(self, right: Any, spoil: Any) -> None:
        self.right, self.spoil = right, spoil

    def sample(self, *arguments: Any, query_per_row: int) -> None:
        self.right.sample(*arguments, query_per_row=query_per_row)
        self.spoil(*arguments[-2:])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda cache, tokens: cache[-1, 1, 66:67].fill_(3.0), "cache"),
        (lambda cache, tokens: tokens[0, 1:].fill_(5_000), "expected token"),
    ],
)
def test_a_wrong_entry_is_found(tmp_path: Path, spoil: Any, message: str) -> None:
    subject = subject_of(toy_model(tmp_path, 67, num_steps=2))
    subject.fused = Wrong(subject.fused, spoil)
    with pytest.raises(checks.CheckFailed, match=message) as caught:
        checks.check_bitwise(subject, batches=2, seed=5)
    assert set(caught.value.failures) == {"fused"}


def test_the_step_kernels_are_held_to_the_eager_loop(tmp_path: Path) -> None:
    subject = subject_of(toy_model(tmp_path, 67, num_steps=2))
    right = subject.fused_loop(3)
    subject.product.has = lambda kernel: True
    subject._steps[3] = right
    assert checks.check_step_loop(subject, rows=(1, 3), seed=5) == {"rows": [1, 3], "layouts": ["plain", "odd"]}
    subject._steps[3] = Wrong(right, lambda cache, tokens: cache[0, 0, :1].fill_(3.0))
    with pytest.raises(checks.CheckFailed, match="0 of . tokens differ from the eager loop's; caches differ"):
        checks.check_step_loop(subject, rows=(1, 3), seed=5)


def test_greedy_drafts_have_no_cache() -> None:
    config = SimpleNamespace(BASE_DTYPES=("bf16", "fp32"), CACHE_DTYPES=())
    assert checks.dtype_pairs(SimpleNamespace(config=config)) == [("bf16", "none"), ("fp32", "none")]
    assert checks.DTYPES["none"] is None and checks.same_cache(None, None)
    assert not checks.same_cache(None, torch.zeros(1)) and checks.same_cache(torch.zeros(1), torch.zeros(1))
