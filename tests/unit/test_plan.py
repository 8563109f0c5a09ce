"""Plans: they fit their device, the kernel that follows one visits every tile, and what is printed is what was planned."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.harness import chain_simulator

from dsparkgen import floors, plan
from dsparkgen.device import load_devices
from dsparkgen.spec import ModelSpec, read_spec

ROOT = Path(__file__).parents[2]
DEVICES = load_devices(ROOT)
MODEL = read_spec(ROOT / "specs" / "deepseek_v41.toml")
PLAN = plan.plan_model(MODEL, DEVICES)
BASE_DTYPES = ("bf16", "fp32")
TP = (1, 2, 4, 8)
LARGEST_VOCABULARY = 300_000


def make_spec(vocab: int, rank_dim: int, num_steps: int, max_rows: int, tp: tuple[int, ...] = TP) -> ModelSpec:
    values = MODEL.model_dump()
    values["vocabulary"] = {"target": vocab}
    values["markov"]["rank_dim"] = rank_dim
    values["draft"] |= {"num_steps": num_steps, "max_rows": max_rows}
    values["parallel"]["tp"] = tp
    return ModelSpec.model_validate(values)


def specs(most_steps: int) -> st.SearchStrategy[ModelSpec]:
    """Any model that the chain kernel serves."""
    vocab = st.one_of(
        st.integers(2, LARGEST_VOCABULARY), st.integers(2, 3000), st.integers(1, 9375).map(lambda n: 32 * n)
    )
    rank_dim = st.integers(4, 32).map(lambda halves: halves * plan.layout.CHUNK_DIMS // 2)
    return st.builds(make_spec, vocab, rank_dim, st.integers(1, most_steps), st.integers(1, 8))


# --- residency ---


def check_line(spec: ModelSpec, line: Any) -> None:
    """A plan line fits its device and places every tile of the CTA that has most."""
    device = DEVICES[line.device]
    assert line.ctas == device.sms and line.warps * 32 <= 1024
    assert line.row_slots * spec.draft.num_steps <= line.warps * 32  # one thread fills one entry of the row table
    assert line.tiles == max(
        _tiles_of(plan_width(spec, line.tp), line.ctas, cta) for cta in (0, line.ctas // 2, line.ctas - 1)
    )
    assert line.shared_bytes == plan.shared_bytes(line, spec, "bf16")
    for dtype in BASE_DTYPES:
        placed = getattr(line, dtype)
        layout = plan.layout.shared_layout(line, spec.markov.rank_dim, spec.draft.num_steps, plan.BYTES[dtype])
        offsets = list(layout)
        assert offsets == sorted(offsets) and all(offset % 128 == 0 for offset in offsets)
        assert layout.total <= device.smem_per_block_bytes
        rest = max(line.tiles - placed.register_tiles * line.warps, 0)
        assert 0 <= placed.resident <= rest
        if placed.ring:
            assert plan.SMALLEST_RING <= placed.ring <= rest - placed.resident
        else:
            assert placed.resident == rest
        assert 0 <= placed.keep <= rest - placed.resident
        assert placed.register_chunks * placed.register_tiles <= plan.REGISTER_CHUNKS
        assert placed.register_chunks <= plan.layout.chunks_of(spec.markov.rank_dim)
        assert plan.layout.most_items(line, plan.BYTES[dtype]) <= plan.layout.MOST_ITEMS
        slots = plan.layout.slot_count(line, spec.markov.rank_dim, plan.BYTES[dtype])
        assert slots >= placed.ring + placed.resident


def plan_width(spec: ModelSpec, tp: int) -> int:
    return -(-spec.vocabulary.draft // tp)


def _tiles_of(width: int, ctas: int, cta: int) -> int:
    tiles = -(-width // plan.TILE_ROWS)
    return tiles * (cta + 1) // ctas - tiles * cta // ctas


@settings(max_examples=60, deadline=None)
@given(spec=specs(most_steps=16))
def test_every_line_fits_its_device(spec: ModelSpec) -> None:
    planned = plan.plan_model(spec, DEVICES)
    assert 1 << planned.id_bits >= spec.vocabulary.target and planned.id_bits + planned.tag_bits == 32
    keys = [(line.device, line.tp, line.row_slots) for line in planned.lines]
    assert len(set(keys)) == len(keys)
    for line in planned.lines:
        check_line(spec, line)
        assert line.row_slots in plan.ROW_SLOTS and line.row_slots < 2 * spec.draft.max_rows


def test_every_device_has_every_line_of_the_checked_in_model() -> None:
    keys = {(line.device, line.tp, line.row_slots) for line in PLAN.lines}
    assert keys == {(device, tp, slots) for device in DEVICES for tp in TP for slots in plan.ROW_SLOTS}


# --- the kernel follows the plan ---


def simulate(
    spec: ModelSpec,
    line: Any,
    dtype: str,
    width: int,
    cta: int,
    cache_dtype: str = "bf16",
    base_vector: bool = True,
    rank: int | None = None,
) -> None:
    """Every tile of the CTA is multiplied, cached, made a candidate and, with ranks, staged at each peer once per position."""
    simulator = chain_simulator.Simulator(
        rank_dim=spec.markov.rank_dim, num_steps=spec.draft.num_steps, vocab_size=spec.vocabulary.target, line=line,
        base_dtype=dtype, cache_dtype=cache_dtype, width=width, rank=rank,
    )  # fmt: skip
    found = simulator.run(cta, base_vector=base_vector)
    tiles = _tiles_of(width, line.ctas, cta)
    assert tiles <= line.tiles
    assert len({column // plan.TILE_ROWS for _, column in found.cached}) == tiles


def rank_width(spec: ModelSpec, tp: int, rank: int) -> int:
    """Columns of a rank's shard; the last ones' may be narrower, or empty."""
    return max(min(plan_width(spec, tp), spec.vocabulary.draft - rank * plan_width(spec, tp)), 0)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), spec=specs(most_steps=3), name=st.sampled_from(sorted(DEVICES)), dtype=st.sampled_from(BASE_DTYPES)
)
def test_every_tile_is_visited_once_per_position(data: st.DataObject, spec: ModelSpec, name: str, dtype: str) -> None:
    lines = plan.plan_model(spec, {name: DEVICES[name]}).lines
    if not lines:
        return
    line = data.draw(st.sampled_from(lines))
    rank = data.draw(st.integers(0, line.tp - 1))
    width = rank_width(spec, line.tp, rank)
    cta, cache_dtype = data.draw(st.integers(0, line.ctas - 1)), data.draw(st.sampled_from(BASE_DTYPES))
    exchanging = rank if line.tp > 1 else None
    simulate(spec, line, dtype, width, cta, cache_dtype, data.draw(st.booleans()), exchanging)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), spec=specs(most_steps=3), partial=st.booleans())
def test_every_tile_is_visited_whatever_the_residency(data: st.DataObject, spec: ModelSpec, partial: bool) -> None:
    """Residencies that no device asks for: the schedule does not depend on the shared memory that there is."""
    warps = data.draw(st.integers(1, plan.WARPS))
    chunks = plan.layout.chunks_of(spec.markov.rank_dim)
    width = data.draw(st.integers(0, 1500))
    ctas = data.draw(st.integers(1, 8))
    tiles = math.ceil(math.ceil(width / plan.TILE_ROWS) / ctas)
    register_tiles = data.draw(st.integers(0, 3))
    rest = max(tiles - register_tiles * warps, 0)
    ring = data.draw(st.integers(0, min(warps, rest)))
    resident = data.draw(st.integers(0, rest - ring)) if ring else rest
    placed = plan.Residency(
        register_tiles=register_tiles,
        register_chunks=data.draw(st.integers(1, chunks)) if register_tiles else 0,
        resident=resident,
        ring=ring,
        ahead=data.draw(st.integers(1, 5)),
        keep=data.draw(st.integers(0, rest - resident)),
    )
    line = plan.PlanLine(
        device="", tp=1, row_slots=data.draw(st.sampled_from([n for n in plan.ROW_SLOTS if n <= warps])), ctas=ctas,
        warps=warps, tiles=tiles, bf16=placed, fp32=placed, shared_bytes=0,
        partial=partial or width % plan.TILE_ROWS != 0,
    )  # fmt: skip
    assume(plan.layout.most_items(line, 2) <= plan.layout.MOST_ITEMS)
    for cta in range(ctas):
        simulate(spec, line, "bf16", width, cta)


@pytest.mark.parametrize("vocab", [2, 15, 16, 17, 1000, 2112, 2113, 129280, 262144])
@pytest.mark.parametrize("slots", plan.ROW_SLOTS)
def test_every_cta_of_known_vocabularies(vocab: int, slots: int) -> None:
    """One row of small, ragged and served vocabularies on the H200; a few CTAs of the large ones, as they differ little."""
    spec = make_spec(vocab, 256, 2, 8, (1,))
    line = plan.plan_model(spec, {"h200": DEVICES["h200"]}).line("h200", 1, slots)
    assert line is not None
    ctas = range(line.ctas) if vocab == 1000 and slots == 1 else (0, 1, line.ctas // 2, line.ctas - 1)
    for cta in ctas:
        simulate(spec, line, "bf16", vocab, cta)


@pytest.mark.parametrize(
    ("name", "vocab", "rank_dim"), [("h20", 300_000, 384), ("h20", 262_144, 416), ("h100", 300_000, 512)]
)
@pytest.mark.parametrize("slots", [1, 8])
def test_no_warp_has_more_tiles_than_it_can_write_down(name: str, vocab: int, rank_dim: int, slots: int) -> None:
    """Where the fastest ring would be short: its warps would have more tiles than lanes."""
    spec = make_spec(vocab, rank_dim, 2, 8, (1,))
    line = plan.plan_model(spec, {name: DEVICES[name]}).line(name, 1, slots)
    assert line is not None
    check_line(spec, line)
    simulate(spec, line, "fp32", vocab, 0)


def _wrong_refill(kernel: Any) -> None:
    original = kernel.refill
    kernel.refill = lambda self, c, step, slot, tile: original(self, c, step, slot, tile + self.ring)


def _no_refill(kernel: Any) -> None:
    kernel.refill = lambda self, c, step, slot, tile: None


def _early_refill(kernel: Any) -> None:
    original = kernel.wait_tile

    def wait(self: Any, c: Any, tile: int, step: int) -> None:
        original(self, c, tile, step)
        if tile < c.streamed:
            self.refill(c, step, self.slot_of(c, tile), tile)

    kernel.wait_tile = wait


def _swapped_registers(kernel: Any) -> None:
    original = kernel.register_fragments
    kernel.register_fragments = lambda self, c, i, q: original(self, c, i, self.tile.chunks - 1 - q)


def _stale_phase(kernel: Any) -> None:
    original = kernel.wait_tile
    kernel.wait_tile = lambda self, c, tile, step: original(self, c, tile, 0)


def _no_wait(kernel: Any) -> None:
    kernel.wait_tile = lambda self, c, tile, step: None


def _no_inputs(kernel: Any) -> None:
    kernel.fetch_inputs = lambda self, c, *arguments: None


@pytest.mark.parametrize(
    "damage", [_wrong_refill, _no_refill, _early_refill, _swapped_registers, _stale_phase, _no_wait, _no_inputs]
)
def test_the_simulation_notices_damage(damage: Callable[[Any], None]) -> None:
    line = PLAN.line("h200", 1, 1)
    simulator = chain_simulator.Simulator(
        rank_dim=256, num_steps=5, vocab_size=129280, line=line, base_dtype="bf16", width=129280
    )
    assert line.bf16.ring and line.bf16.register_tiles
    simulator.run(7)
    damage(simulator.kernel_type)
    with pytest.raises(AssertionError):
        simulator.run(7)


def _no_parked(kernel: Any) -> None:
    kernel.fetch_parked = lambda self, c: None


def _unwaited_parked(kernel: Any) -> None:
    """With 8 row slots inputs are waited for behind the product, too late for what it reads."""
    ptx = kernel.multiply_tiles.__globals__["ptx"]
    wait = ptx.copy_async_wait
    ptx.copy_async_wait = lambda pending: None if pending == plan.STAGED_LARGE_TILES else wait(pending)


def _wrong_fragments(kernel: Any) -> None:
    original = kernel.fragment_source

    def source(self: Any, c: Any, i: int, q: int, group: int) -> tuple[int, bool]:
        return original(self, c, i, q, 1 - group)

    kernel.fragment_source = source


@pytest.mark.parametrize(
    ("damage", "slots"),
    [(_no_parked, 1), (_no_parked, 8), (_unwaited_parked, 8), (_wrong_fragments, 1), (_wrong_fragments, 8)],
)
def test_the_simulation_notices_damage_to_large_register_tiles(damage: Callable[[Any], None], slots: int) -> None:
    """Tiles whose fragments each lane loads for itself, some chunks into shared memory."""
    spec = make_spec(129280, 512, 2, 8, (1,))
    line = plan.plan_model(spec, {"h200": DEVICES["h200"]}).line("h200", 1, slots)
    simulator = chain_simulator.Simulator(
        rank_dim=512, num_steps=2, vocab_size=129280, line=line, base_dtype="bf16", width=129280
    )
    assert line.bf16.register_tiles == 1 and 0 < line.bf16.register_chunks < 16
    simulator.run(7)
    damage(simulator.kernel_type)
    with pytest.raises(AssertionError):
        simulator.run(7)


@pytest.mark.parametrize("rank_dim", [384, 400, 448, 512])
@pytest.mark.parametrize("slots", plan.ROW_SLOTS)
def test_every_warp_has_a_register_tile_whatever_the_rank(rank_dim: int, slots: int) -> None:
    """On one GPU. Twelve slots to bring tiles of 16 KB in through would leave no room for what is parked."""
    spec = make_spec(129280, rank_dim, 5, 8, (1,))
    line = plan.plan_model(spec, {"h200": DEVICES["h200"]}).line("h200", 1, slots)
    assert line.bf16.register_tiles == line.fp32.register_tiles == 1
    assert plan.numbers(plan.plan_model(spec, {"h200": DEVICES["h200"]}), line).register_tiles == plan.WARPS


@pytest.mark.parametrize("slots", plan.ROW_SLOTS)
def test_emulated_ranks_have_no_large_register_tiles(slots: int) -> None:
    """What was parked of them holds resident tiles instead, in no more shared memory."""
    spec = make_spec(129280, 512, 5, 8, (1,))
    line = plan.plan_model(spec, {"h200": DEVICES["h200"]}).line("h200", 1, slots)
    found = plan.layout.emulated(line, 2, 64640, 129280, 512, 5)
    assert found.bf16.register_tiles == 0 and found.bf16.ring == line.bf16.ring
    assert found.bf16.resident > line.bf16.resident
    smaller = found._replace(tp=1)  # the addresses of two ranks take some more
    assert plan.layout.shared_layout(smaller, 512, 5, 2).total <= line.shared_bytes


# --- floors ---


@pytest.mark.parametrize(
    ("vocab", "steps", "rows", "expected"),
    [
        (129280, 5, 1, 24),
        (129280, 5, 8, 33),
        (151936, 7, 1, 30),
        (151936, 7, 8, 43),
        (262144, 7, 1, 44),
        (262144, 7, 8, 68),
        (64640, 5, 1, 16),
        (64640, 5, 8, 20),
        (32320, 5, 1, 12),
        (32320, 5, 8, 14),
        (16160, 5, 1, 10),
        (16160, 5, 8, 11),
    ],
)
def test_floor(vocab: int, steps: int, rows: int, expected: int) -> None:
    """The floors of an H200 as worked out by hand, in whole microseconds."""
    floor = plan.floor_us(DEVICES["h200"], vocab_size=vocab, rank_dim=256, num_steps=steps, rows=rows)
    assert abs(floor - expected) < 1.0


def test_floor_counts_the_bytes_of_base_logits_and_cache() -> None:
    shape = {"vocab_size": 1_000_000, "rank_dim": 64, "num_steps": 4, "rows": 2}
    device = DEVICES["h200"].model_copy(update={"hbm_bytes_per_s": 1e12, "grid_barrier_us": 2.0, "launch_us": 3.0})
    assert plan.floor_us(device, **shape) == pytest.approx(128 + 8 * 8 + 4 * 2 + 3)
    assert plan.floor_us(device, **shape, base_bytes=4, cache_bytes=4) == pytest.approx(128 + 8 * 12 + 4 * 2 + 3)


def test_every_rank_fills_the_whole_cache_and_waits_for_a_hop_a_position() -> None:
    shape = {"vocab_size": 1_000_000, "rank_dim": 64, "num_steps": 4, "rows": 2}
    device = DEVICES["h200"].model_copy(update={"hbm_bytes_per_s": 1e12, "grid_barrier_us": 2.0, "rank_hop_us": 0.5})
    alone = plan.floor_us(device, **shape)
    assert plan.floor_us(device, **shape, cache_columns=3_000_000) == pytest.approx(alone + 8 * 2 * 2)
    assert [plan.floor_us(device, **shape, ranks=ranks) - alone for ranks in (1, 2, 8)] == pytest.approx([0, 2, 2])


@pytest.mark.parametrize("model", ["deepseek_v41", "gemma4_26b_a4b"])
def test_the_plans_floor_is_the_one_that_timings_are_compared_with(model: str) -> None:
    made = plan.plan_model(read_spec(ROOT / "specs" / f"{model}.toml"), DEVICES)
    vocabulary, draft = made.spec.vocabulary, made.spec.draft
    for line in (x for x in made.lines if x.device == "h200"):
        sizes = floors.Sizes(vocabulary.draft, vocabulary.target, 256, draft.num_steps, line.row_slots, 2, 2)
        timed = floors.chain_floor_us(DEVICES["h200"], sizes)
        if line.tp > 1:
            timed = floors.rank_floor_us(DEVICES["h200"], sizes, line.tp)
            hops = f"{draft.num_steps} hops to another GPU of 0.7 us (measured)"
        assert plan.numbers(made, line).floor_us == pytest.approx(timed)
        assert line.tp == 1 or hops in plan.reasons(made, line)["floor_us"]
        assert line.tp > 1 or "hops" not in plan.reasons(made, line)["floor_us"]


# --- what is shown ---


def test_numbers_add_up() -> None:
    for line in PLAN.lines:
        for dtype in BASE_DTYPES:
            found = plan.numbers(PLAN, line, base_dtype=dtype)
            assert found.register_tiles + found.resident_tiles + found.streamed_tiles == line.tiles
            assert found.shared_bytes <= DEVICES[line.device].smem_per_block_bytes
            assert found.head_bytes == PLAN.shards[line.tp] * 512
            assert (found.l2_bytes_per_position > 0) == (getattr(line, dtype).ring > 0)


def test_json_holds_the_lines_asked_for_and_says_why() -> None:
    found = json.loads(json.dumps(plan.to_json(PLAN, "h200", (1, 8), (1, 4))))
    assert (found["model"], found["device"], found["id_bits"], found["tag_bits"]) == ("deepseek_v41", "h200", 17, 15)
    assert [(line["tp"], line["row_slots"]) for line in found["lines"]] == [(1, 1), (1, 4), (8, 1), (8, 4)]
    for line in found["lines"]:
        asked = PLAN.line("h200", line["tp"], line["row_slots"])
        assert line["width"] == PLAN.shards[line["tp"]] and line["tiles"] == asked.tiles
        for name, value in dataclasses.asdict(plan.numbers(PLAN, asked)).items():
            assert line[name] == value, name
        assert all(reason for reason in line["reasons"].values())


SHOWN = {
    "ctas",
    "warps",
    "tiles",
    "register_tiles",
    "resident",
    "ring",
    "ahead",
    "keep",
    "shared_bytes",
    "l2_bytes",
    "hbm_bytes",
    "floor_us",
}


@pytest.mark.parametrize("model", ["deepseek_v41", "deepseek_v4_pro", "gemma4_26b_a4b"])
def test_reasons_are_of_the_case_that_the_line_is(model: str) -> None:
    made = plan.plan_model(read_spec(ROOT / "specs" / f"{model}.toml"), DEVICES)
    seen = set()
    for line in made.lines:
        found, said = plan.numbers(made, line), plan.reasons(made, line)
        assert set(said) == SHOWN
        streams = found.streamed_tiles > 0
        for name in ("keep", "l2_bytes"):
            assert (said[name] == "nothing is streamed") == (not streams)
        assert (said["ring"] == "everything stays on the chip") == (not streams)
        assert said["register_tiles"].startswith("none: ") == (line.bf16.register_tiles == 0)
        assert said["resident"].startswith("none: ") == (found.resident_tiles == 0)
        assert ("what is left of" in said["resident"]) == streams
        moved = found.l2_bytes_per_position // (line.ctas * 32 * made.spec.markov.rank_dim)
        assert not streams or said["l2_bytes"].startswith(f"{moved} tiles of each of {line.ctas} CTAs")
        assert said["ahead"].startswith(f"{line.bf16.ahead} tile")
        seen.add((streams, found.resident_tiles > 0))
    assert model != "deepseek_v41" or seen >= {(True, True), (False, True), (False, False)}


def test_reasons_for_bytes_add_up_to_them() -> None:
    """Kibibytes of shared memory, and megabytes of memory, up to what one decimal of each part leaves out."""
    for model in ("deepseek_v41", "deepseek_v4_pro"):
        made = plan.plan_model(read_spec(ROOT / "specs" / f"{model}.toml"), DEVICES)
        for line in made.lines:
            found, said = plan.numbers(made, line), plan.reasons(made, line)
            limit, _, parts = said["shared_bytes"].removeprefix("of ").partition(": ")
            assert int(limit) == DEVICES[line.device].smem_per_block_bytes
            sizes = [float(part.split()[-2]) for part in parts.split(", ")]
            assert sum(sizes) == pytest.approx(found.shared_bytes / 1024, abs=0.05 * len(sizes))
            memory = [float(part.split()[0]) for part in said["hbm_bytes"].split(", ")]
            assert sum(memory) == pytest.approx(found.hbm_bytes_per_position / 1e6, abs=0.05 * len(memory))


def test_reasons_tell_why_fewer_inputs_are_staged() -> None:
    """All that a warp has, the time that they stand for, or less than that where shared memory is short."""
    of_eight = {PLAN.line("h200", 8, 1).bf16.ahead: plan.reasons(PLAN, PLAN.line("h200", 8, 1))["ahead"]}
    assert of_eight == {1: "1 tile whose base logits and noise a warp has under way: all that the warp with most has"}
    assert plan.reasons(PLAN, PLAN.line("h200", 1, 1))["ahead"].endswith(": about 2 us of work")
    other = plan.plan_model(read_spec(ROOT / "specs" / "kimi_k3.toml"), DEVICES)
    short = other.line("h200", 2, 2)
    assert short.bf16.ahead == 3 and plan.STAGED_TILES[2] == 4
    assert plan.reasons(other, short)["ahead"].endswith(": 4 do not fit beside the tiles")


def test_text_shows_every_line_and_the_reasons_of_the_first() -> None:
    text = plan.render_text(PLAN, "h200", TP, (1, 8))
    rows = [line for line in text.splitlines() if line.split()[:2] and line.split()[0].isdigit()]
    assert [tuple(map(int, row.split()[:2])) for row in rows] == [(tp, slots) for tp in TP for slots in (1, 8)]
    for row, tp, slots in zip(rows, (1, 1, 2, 2, 4, 4, 8, 8), (1, 8) * 4, strict=True):
        line = PLAN.line("h200", tp, slots)
        found = plan.numbers(PLAN, line)
        shown = [int(cell) for cell in row.split()[2:6]]
        assert shown == [line.tiles, found.register_tiles, found.resident_tiles, found.streamed_tiles]
        bar = row.split()[-1]
        assert len(bar) == plan.BAR_CELLS and ("." in bar) == (found.streamed_tiles > 0)
    for name, reason in plan.reasons(PLAN, PLAN.line("h200", 1, 1)).items():
        assert any(line.split() == [name, *reason.split()] for line in text.splitlines()), name


def test_text_without_a_line_says_so() -> None:
    assert "no plan line" in plan.render_text(PLAN, "h200", (3,), (1,))
    other = make_spec(1000, 64, 2, 1).model_dump()
    other["emit"]["kernels"] = ("noise", "fused")
    planned = plan.plan_model(ModelSpec.model_validate(other), DEVICES)
    assert planned.lines == () and "no plan line" in plan.render_text(planned, "h200", TP, (1,))


def test_picture_shows_a_bar_of_every_line() -> None:
    root = ET.fromstring(plan.to_svg(PLAN, "h200", TP, plan.ROW_SLOTS))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in root.iter(f"{space}text")]
    for line in PLAN.lines:
        if line.device == "h200":
            assert f"tp {line.tp}, rows {line.row_slots}" in texts
    bars = [rect for rect in root.iter(f"{space}rect") if rect.get("height") == "18"]
    assert len(bars) == 4 * len(TP) * len(plan.ROW_SLOTS)
    for first in range(0, len(bars), 4):
        assert sum(float(bar.get("width", "0")) for bar in bars[first : first + 4]) == pytest.approx(
            plan.SVG_BAR, abs=0.3
        )
        edges = [(float(bar.get("x", "0")), float(bar.get("width", "0"))) for bar in bars[first : first + 4]]
        for (x, wide), (after, _) in zip(edges, edges[1:], strict=False):
            assert after == pytest.approx(x + wide, abs=0.11)
