"""The vLLM hook on two tensor-parallel ranks without a GPU: what one rank cannot do, none does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import engine_ranks, engine_wheel  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

WORLD = 2


@pytest.fixture
def run(toy_models: Callable[..., ModuleType], tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Run a scenario on all ranks."""
    try:
        files = engine_wheel.engine_files()
    except engine_wheel.CannotFetchError as error:
        pytest.skip(f"needs files of the vLLM {engine_wheel.RELEASE} wheel, which could not be fetched: {error}")
    model = toy_models(203, kernels=("noise", "chain", "fused"))
    package, name = model.__name__.split(".")
    path = Path(str(model.__file__)).parents[2]

    def run(scenario: str) -> list[dict[str, Any]]:
        task = engine_ranks.Task(
            WORLD, False, package, name, str(path), str(files), str(tmp_path / "meeting"), scenario, rows=(3,)
        )
        return engine_ranks.run_ranks(task)

    return run


def test_every_rank_draws_what_its_loop_draws(run: Callable[[str], list[dict[str, Any]]]) -> None:
    """Without GPUs there is no chain over the ranks: each draws alone, from whole logits."""
    for answer in run("draw"):
        assert answer["equal"] == {3: True}
        assert answer["served"] == {"fused": 1} and answer["shards"] == 0


def test_a_reason_of_one_rank_is_that_of_all(run: Callable[[str], list[dict[str, Any]]]) -> None:
    for answer in run("decline"):
        assert answer["reason"].startswith("rank 1: a confidence head is used")
        assert answer["asked"] is False


@pytest.mark.parametrize("scenario", ["build", "warm up"])
def test_what_one_rank_cannot_set_up_none_has(run: Callable[[str], list[dict[str, Any]]], scenario: str) -> None:
    for answer in run(scenario):
        assert answer["reason"] == "rank 1: RuntimeError: provoked"
        assert answer["asked"] is False
