"""The step kernels with a sharded head on a GPU a rank: packets, shards of the cache and graphs, equal to one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from tests.harness import step_real_ranks  # noqa: E402

from dsparkgen import bench  # noqa: E402
from dsparkgen.device import load_devices  # noqa: E402
from dsparkgen.spec import ModelSpec, read_specs  # noqa: E402

ROOT = Path(__file__).parents[2]
# What a spec's keys are replaced by, by table.
CHANGES: dict[str, dict[str, dict[str, object]]] = {
    "as it is": {},
    "murmur3_64": {"noise": {"scheme": "murmur3_64"}},
    "greedy": {"logits": {"cache_dtypes": ()}},
}


@pytest.mark.parametrize(
    ("model", "change"), [("deepseek_v41", name) for name in CHANGES] + [("muse_spark", "as it is")]
)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_draw_what_one_rank_draws(world: int, model: str, change: str, tmp_path: Path) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < world:
        pytest.skip(f"needs {world} CUDA devices, found {found}")
    generated = ROOT / "generated"
    if CHANGES[change]:
        generated = tmp_path
        values = read_specs(ROOT / "specs")[model].model_dump(exclude={"packet"})
        values["emit"]["kernels"] = ("fused", "step")
        for table, keys in CHANGES[change].items():
            values[table] |= keys
        spec = ModelSpec.model_validate(values)
        bench.write_package([spec], load_devices(ROOT), ROOT / "templates", generated)
    ended = step_real_ranks.run(world, model, generated=generated)
    assert [one["failure"] for one in ended] == [None] * world
    assert len({tuple(one["checked"]) for one in ended}) == 1
