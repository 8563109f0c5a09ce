"""Known failures of sharded samplers: their inputs through the fused loop, whose vocabulary is whole, and the host's part of them.

tests/kernels has the inputs with emulated ranks on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import fake_gpu, fake_kernels  # noqa: E402
from tests.harness.cases import Case  # noqa: E402
from tests.harness.fake_gpu import Recorder, V  # noqa: E402
from tests.harness.known_cases import Known, Outputs, run  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402
from tests.harness.rank_cases import RANK_CASES, WORLDS  # noqa: E402

from dspark_kernels._device import chain_emulated, chain_setup, chain_share, host, rank_group  # noqa: E402


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("known", RANK_CASES, ids=str)
def test_without_ranks(toy_models: Callable[..., ModuleType], known: Known) -> None:
    model = toy_models(**known.model, kernels=("noise", "fused"))

    def draw(case: Case) -> Outputs:
        fresh = case.with_fresh_outputs()
        loop = model.fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs)
        loop.sample(*fresh.call_arguments, query_per_row=case.query_per_row)
        return fresh.draft_tokens, fresh.logits_cache

    run(known, draw, torch.device("cpu"), model.config, why_unequal_on_cpu)


def test_the_cases_of_ranks_are_there() -> None:
    assert {int(known.name.split("_")[1]) for known in RANK_CASES} == {15, 16, 18, 33}
    assert set(WORLDS) == {known.name for known in RANK_CASES}


# --- case 15: shards that are padded or empty ---


@pytest.mark.parametrize(
    ("vocab", "world", "width", "shards"),
    [
        (10, 4, 3, [(0, 3), (3, 3), (6, 3), (9, 1)]),
        (2, 4, 1, [(0, 1), (1, 1), (2, 0), (2, 0)]),
        (12, 4, 3, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (10, 2, 8, [(0, 8), (8, 2)]),
        (163840, 12, 13664, [(rank * 13664, 13664) for rank in range(11)] + [(150304, 13536)]),
    ],
)
def test_case_15_ranks_own_what_exists_of_their_shard(
    vocab: int, world: int, width: int, shards: list[tuple[int, int]]
) -> None:
    assert [tuple(rank_group.columns_of(vocab, width, rank)) for rank in range(world)] == shards
    assert sum(count for _, count in shards) == vocab
    assert rank_group.why_not_width(vocab, world, width) is None
    assert rank_group.even_width(vocab, world) <= width


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (2, "shard_width: expected at least 3 columns on each of 4 ranks for a vocabulary of 10, got 2"),
        (0, "shard_width: expected an int of at least 1 or None, got 0"),
        (True, "got True"),
        (3.0, "got 3.0"),
    ],
)
def test_case_15_a_width_that_leaves_columns_out_is_refused(width: Any, expected: str) -> None:
    assert expected in (rank_group.why_not_width(10, 4, width) or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    fake_gpu.install(recorder, monkeypatch.setattr)
    monkeypatch.setattr(chain_setup, "device_type", lambda tensor: "cuda")
    return recorder


def emulated(gpu: Recorder, world: Any, **options: Any) -> chain_emulated.EmulatedChainLauncher:
    class Toy(chain_emulated.EmulatedChainLauncher):
        config = fake_gpu.make_config()
        noise = gpu
        load_chain = staticmethod(lambda: gpu)
        provide = staticmethod(fake_kernels.provide)

    return Toy(**(fake_gpu.weights() | options), world=world)


def stacked(world: int, rows: int) -> dict[str, Any]:
    call = fake_gpu.batch(rows)
    for name in ("logits_cache", "draft_tokens"):
        call[name] = call[name].expand(world, *call[name].shape).clone()
    return call


def test_one_launch_plays_all_ranks(gpu: Recorder) -> None:
    world, width = 4, V // 4
    sampler = emulated(gpu, world)
    call = stacked(world, 3)
    sampler.sample(**call)
    draws = [event for event in gpu.events if event[0] == "draw"]
    assert len(draws) == world and gpu.starts == [rank * width for rank in range(world)]
    assert gpu.ranks[0] == {"world": world, "emulated": True, "check_ranks": False}
    (launch,) = [event[2] for event in gpu.events if event[0] == "chain"]
    assert (launch["rank"], launch["shard_width"], launch["ctas"]) == (0, width, 132 // world)
    assert launch["base_rank_stride"] == width
    assert launch["noise_rank_stride"] == sampler.noise_buffer.stride(0) and sampler.noise_buffer.shape[0] == world
    assert launch["cache_rank_stride"] == call["logits_cache"].stride(0)
    assert launch["token_rank_stride"] == call["draft_tokens"].stride(0)
    assert launch["base_vector"] == launch["cache_vector"] == 0  # ranks begin every 20 bytes


def test_the_last_emulated_ranks_may_own_nothing(gpu: Recorder) -> None:
    sampler = emulated(gpu, 6, shard_width=20)
    sampler.sample(**stacked(6, 1))
    assert [tuple(columns) for columns in sampler.share.columns] == [(0, 20), (20, 20)] + [(V, 0)] * 4
    assert gpu.starts == [0, 20]  # no noise for what nobody draws


# --- case 33: waits that never end ---


@pytest.mark.parametrize("world", [1, 17, 2.0, True, None])
def test_case_33_worlds_that_cannot_be_emulated_are_refused(gpu: Recorder, world: Any) -> None:
    with pytest.raises(ValueError, match=f"world: expected an int from 2 to 16, got {world}"):
        emulated(gpu, world)


def test_case_33_a_grid_larger_than_the_gpu_is_refused(gpu: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs that wait for one that is not resident would wait for ever."""
    monkeypatch.setattr(host, "read_device", lambda device: fake_gpu.H200._replace(sms=131))
    with pytest.raises(ValueError, match="does not fit"):
        emulated(gpu, 2, device_name="h200")
    with pytest.raises(ValueError, match="no plan for NVIDIA H200"):
        emulated(gpu, 2)
    assert gpu.compiled == []


@pytest.mark.parametrize("world", [2, 3, 5, 8, 16])
def test_case_33_emulated_ranks_have_an_sm_for_each_cta(gpu: Recorder, world: int) -> None:
    config = fake_gpu.make_config()
    share = chain_share.emulated_share(config, world)
    options = chain_share.Options(1, torch.bfloat16)
    for line in chain_share.lines_of(config, fake_gpu.H200, share, options).values():
        assert 1 <= line.ctas * world <= fake_gpu.H200.sms and line.tp == world
