"""The chain over ranks with a GPU each: results of every rank, replays under delays, ranks that fail, come late or die."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from tests.harness import ranks  # noqa: E402

BATCHES, REPLAYS = 100, 1000
WORLDS = (2, 4, 8)


@pytest.fixture(scope="module", params=WORLDS)
def summary(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A run of all phases over so many GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < request.param:
        pytest.skip(f"needs {request.param} CUDA devices, found {found}")
    amounts = ["--batches", str(BATCHES), "--replays", str(REPLAYS)]
    task, phases, seconds, _ = ranks.parse(["--world", str(request.param), *amounts])
    return ranks.run_phases(task, phases, seconds=seconds)


@pytest.mark.parametrize("phase", ranks.REAL_PHASES)
def test_phase(summary: dict[str, Any], phase: str) -> None:
    parts = [found for name, found in summary["phases"].items() if name.split()[0] == phase]
    assert parts
    for found in parts:
        assert found["passed"], json.dumps(found, indent=1)
        assert [rank["rank"] for rank in found["ranks"]] == list(range(summary["world"]))
