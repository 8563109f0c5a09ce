"""The step kernels with a sharded head on a GPU a rank: packets, shards of the cache and graphs, equal to one rank alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from tests.harness import step_real_ranks  # noqa: E402


@pytest.mark.parametrize("model", ["deepseek_v41", "muse_spark"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_draw_what_one_rank_draws(world: int, model: str) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < world:
        pytest.skip(f"needs {world} CUDA devices, found {found}")
    ended = step_real_ranks.run(world, model)
    assert [one["failure"] for one in ended] == [None] * world
    assert len({tuple(one["checked"]) for one in ended}) == 1
