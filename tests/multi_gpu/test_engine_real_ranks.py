"""The vLLM hook over ranks with a GPU each: the engine's own loop with and without it, with whole logits and with each rank's shard."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import engine_ranks, engine_wheel  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_draw_what_the_loop_draws(world: int, tmp_path: Path) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < world:
        pytest.skip(f"needs {world} CUDA devices, found {found}")
    try:
        files = engine_wheel.engine_files()
    except engine_wheel.CannotFetchError as error:
        pytest.skip(f"needs files of the vLLM {engine_wheel.RELEASE} wheel, which could not be fetched: {error}")
    task = engine_ranks.Task(
        world,
        True,
        "dspark_kernels",
        "deepseek_v41",
        str(ROOT / "generated"),
        str(files),
        str(tmp_path / "meeting"),
        "draw",
    )
    for answer in engine_ranks.run_ranks(task):
        assert answer["equal"] == dict.fromkeys(engine_ranks.ROWS, True), answer
        assert answer["replayed"] == dict.fromkeys(engine_ranks.GRAPH_ROWS, [True] * engine_ranks.REPLAYS), answer
        # Up to 8 rows by the chain over the ranks, which takes each rank's shard of the logits; more by each rank alone.
        assert answer["served"] == {"chain": 3 + 2, "step": 1 + 1} and answer["shards"] == 3, answer
