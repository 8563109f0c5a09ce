"""Known failures of sharded samplers: their inputs through the fused loop, whose vocabulary is whole, and the host's part of them.

tests/kernels has the inputs with emulated ranks on a GPU.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import chain_simulator, fake_gpu, fake_kernels  # noqa: E402
from tests.harness.cases import Case  # noqa: E402
from tests.harness.fake_gpu import Recorder, V  # noqa: E402
from tests.harness.known_cases import Known, Outputs, run  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402
from tests.harness.rank_cases import RANK_CASES, WORLDS  # noqa: E402

from dspark_kernels._device import chain_emulated, chain_setup, chain_share, host, plan_line, rank_group  # noqa: E402


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


@pytest.mark.parametrize("pdl", [True, 1, None])
def test_case_33_emulated_ranks_are_not_launched_programmatically(gpu: Recorder, pdl: Any) -> None:
    """Such a launch is not cooperative: CTAs of one rank could wait for those of another that are not resident."""
    expected = f"pdl: expected False with emulated ranks, got {pdl!r}: they need a cooperative launch"
    kind = type(emulated(gpu, 2, pdl=False))
    assert kind.why_not(**fake_gpu.weights(), world=2) is None
    assert kind.why_not(**fake_gpu.weights(), world=2, pdl=False) is None
    assert (kind.why_not(**fake_gpu.weights(), world=2, pdl=pdl) or "").startswith(expected)
    gpu.compiled.clear()
    with pytest.raises(rank_group.Declined, match=expected):
        emulated(gpu, 2, pdl=pdl)
    assert gpu.compiled == []


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


# --- residency of lines that no plan holds as they are ---

ROOT = Path(__file__).parents[2]
MODELS = tuple(json.loads((ROOT / "generated" / "MANIFEST.json").read_text())["models"])


def _config(model: str) -> ModuleType:
    config = importlib.import_module(f"dspark_kernels.{model}.config")
    if not config.PLANS:
        pytest.skip(f"{model} has no chain kernel")
    return config


def _facts(config: ModuleType, device: str) -> host.DeviceFacts:
    capability, sms, shared = config.DEVICES[device]
    return host.DeviceFacts(device, tuple(capability), sms, shared)


@pytest.mark.parametrize("model", MODELS)
def test_emulated_ranks_fit_on_every_gpu_or_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Every number of ranks, row slots and dtype. Only on the GPU with least shared memory too many tiles are left to a warp."""
    config = _config(model)
    options = chain_share.Options(config.MAX_ROWS, None)
    for device in config.DEVICES:
        facts = _facts(config, device)
        monkeypatch.setattr(host, "read_device", lambda _, facts=facts: facts)
        for world in range(chain_emulated.FEWEST_RANKS, chain_emulated.MOST_RANKS + 1):
            share = chain_share.emulated_share(config, world)
            lines = chain_share.lines_of(config, facts, share, options).values()
            placed = [(line, base) for line in lines for base in config.BASE_DTYPES]
            shared = [chain_share.block_shape(config, line, base)["shared"] for line, base in placed]
            items = [plan_line.most_items(line, config.DTYPE_BYTES[base]) for line, base in placed]
            fits = all(size <= facts.smem_per_block for size in shared) and max(items) <= plan_line.MOST_ITEMS
            reason = chain_share.why_no_place(config, torch.device("cpu"), share, options)
            assert fits == (reason is None), (device, world, reason)
            assert fits or device == "rtx_pro_6000", (device, world, reason)


@pytest.mark.parametrize("model", MODELS)
def test_planned_lines_stay_as_they_are_planned(model: str) -> None:
    config = _config(model)
    for (device, tp, slots), line in config.PLANS.items():
        facts = _facts(config, device)
        share, options = (
            chain_share.share_of(config, tp, 0),
            chain_share.Options(config.MAX_ROWS, None, device_name=device),
        )
        assert chain_share.lines_of(config, facts, share, options)[slots] == line


def test_tiles_that_are_streamed_to_fit_meet_their_inputs() -> None:
    """The kernel of each model's emulated line that was changed to fit, simulated for a first and a last CTA."""
    changed = set()
    for model in MODELS:
        config = importlib.import_module(f"dspark_kernels.{model}.config")
        world, device = chain_emulated.MOST_RANKS, "h200"
        share, options = chain_share.emulated_share(config, world), chain_share.Options(config.MAX_ROWS, None)
        shape = (share.shard_width, config.DRAWN_COLUMNS, config.RANK_DIM, config.NUM_STEPS)
        for slots, line in chain_share.lines_of(config, _facts(config, device), share, options).items():
            before = plan_line.emulated(config.PLANS[device, 1, slots], world, *shape)
            for base in config.BASE_DTYPES:
                residency = getattr(line, base)
                place = (config.RANK_DIM, line.tiles, residency)
                if residency == getattr(before, base) or place in changed:
                    continue
                changed.add(place)
                simulator = chain_simulator.Simulator(
                    rank_dim=config.RANK_DIM,
                    num_steps=2,
                    vocab_size=config.DRAFT_VOCAB_SIZE,
                    line=line,
                    base_dtype=base,
                    width=share.columns[1].width,
                    rank=1,
                )
                for cta in (0, line.ctas - 1):
                    simulator.run(cta)
    assert len(changed) > 1


def test_a_line_that_does_not_fit_streams_more() -> None:
    config = fake_gpu.make_config()
    line = next(iter(fake_gpu.real_lines(8, tp=2).values()))
    whole = plan_line.shared_layout(line, config.RANK_DIM, config.NUM_STEPS, 2).total
    assert chain_share.fitted(config, line, 2 * whole) == line._replace(shared_bytes=whole)
    slot = plan_line.slot_bytes(config.RANK_DIM)
    for missing in (1, 3, 20):
        found = chain_share.fitted(config, line, whole - missing * slot)
        # A ring of four slots takes the place of resident tiles.
        assert found.bf16.resident + found.bf16.ring <= line.bf16.resident - missing and found.bf16.ring >= 4
        assert found.shared_bytes <= whole - missing * slot and found.fp32.resident < found.bf16.resident
    parked = line.bf16._replace(register_tiles=2, register_chunks=1, resident=0, ring=12)
    line = line._replace(bf16=parked, fp32=parked, tiles=60)
    whole = plan_line.shared_layout(line, config.RANK_DIM, config.NUM_STEPS, 2).total
    found = chain_share.fitted(config, line, whole - 1).bf16
    # Below a slot a warp nothing is saved while register tiles come in through them: one of these goes.
    assert found.register_tiles == 1 and found.ring == 12
    assert chain_share.fitted(config, line, 1) == line._replace(
        shared_bytes=whole
    )  # nothing fits: the reason is given elsewhere
