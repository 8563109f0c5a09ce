"""From a model and the GPUs to plans: where every tile of the Markov head lives, with the reason of each number.

All arithmetic of the generator is here; templates only print it. The byte layout of shared memory is defined once, in
templates/device/plan_line.py, which this module loads: the kernel and the plan cannot disagree.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dsparkgen.device import DeviceSpec
from dsparkgen.device_code import load_device_code
from dsparkgen.spec import ModelSpec

WARPS = 12  # of a CTA: 3 a scheduler, 168 registers a lane; 8, 10 and 11 warps were slower
REGISTER_CHUNKS = (
    12  # chunks of head tiles per warp in registers: 8 words a lane each, 96 of 168; with more, the compiler spills
)
FEWER_REGISTER_CHUNKS = {
    "sm_100a": 2,
    "sm_103a": 2,
}  # the compiler's own needs are larger there, with 8 row slots twice that
SPARE_CHUNKS = 4  # of these, left free where nothing is streamed
BUSY_CHUNKS = 2  # of these, left free in builds whose entries take more registers
CAPPED_ROWS = 4  # row slots whose tanh of a sum takes BUSY_CHUNKS too where tiles are streamed
SPARE_WITH_RANKS = 2  # of these, left free where tiles are streamed and logits go to other ranks
SPARE_CUT = 1  # of these, left free there where ranks stage the words of a cut last tile one by one
SPARE_DIRECT = 1  # of these, left free where lanes load their own fragments from memory
MOST_WITHOUT_RING = 2  # register tiles a warp where nothing is streamed
WIDE_ROWS = 8  # row slots from which a tile takes two MMAs a chunk
ROW_SLOTS = (1, 2, 4, 8)  # builds by the most request rows they serve
TILE_ROWS = 16
RING_TILES = {
    1: 9,
    2: 9,
    4: 9,
    8: 8,
}  # slots of the ring by row slots, where there are so many: 7 to 12 differ by 2 % at most
RING_BYTES = 64 * 1024  # of the ring at least, where tiles are small: under way and being read at 8.3 TB/s
SMALLEST_RING = 4
STAGED_TILES = {1: 4, 2: 4, 4: 4, 8: 3}  # by row slots: tiles whose inputs a warp stages, about 2 us of work
STAGED_LARGE_TILES = 2  # the same of tiles of more than plan_line.STAGED_CHUNKS chunks
L2_WHOLE = 0.75  # of L2: so many bytes of streamed tiles it keeps whole (45 MB of 60 MB on an H200)
L2_SHARE = 0.62  # of L2 that is asked to keep some of more streamed tiles: 36 of 89 a CTA beat 24, 28 and 32 on an H200
BYTES = {"bf16": 2, "fp32": 4}
FORMULA_WIDTH = 49  # columns of a docstring's formulas, beside which comments stand


layout = load_device_code("plan_line")
PlanLine = layout.PlanLine
Residency = layout.Residency


@dataclass(frozen=True)
class Numbers:
    """What follows from a plan line: where a CTA's tiles live and what a position costs. Bytes are of the whole GPU."""

    register_tiles: int  # per CTA
    resident_tiles: int
    streamed_tiles: int
    head_bytes: int  # of the shard
    l2_bytes_per_position: int  # streamed tiles, but for those that stay in the ring
    hbm_bytes_per_position: int  # those that L2 is not asked to keep, base logits, noise and cache
    shared_bytes: int
    floor_us: float  # of the whole chain


@dataclass(frozen=True)
class ModelPlan:
    """A model's plans for all devices, tensor-parallel sizes and row slots."""

    spec: ModelSpec
    devices: Mapping[str, DeviceSpec]
    id_bits: int  # of a token id in an exchange record
    tag_bits: int  # of its sequence tag
    query_per_row: int  # query rows of a request: where its anchor is in input_ids
    shards: Mapping[int, int]  # vocabulary columns of the widest shard, by tensor-parallel size
    lines: tuple[Any, ...]  # PlanLine

    @property
    def drawn(self) -> int:
        """Columns of the Markov head that can be drawn, see `drawn_columns`."""
        return drawn_columns(self.spec)

    @property
    def first_query(self) -> int:
        """Query row of a request that the first draft token is drawn from: the anchor's own, or the one after it."""
        return 0 if self.spec.draft.sample_from_anchor else 1

    @property
    def transforms_base(self) -> bool:
        """Whether the kernel transforms the base logits: those that do not arrive transformed."""
        transform = self.spec.logits.transform
        return transform.placement in ("base", "both") and not transform.base_capped

    @property
    def multiplier(self) -> float:
        """The transform's factor as an fp32 value."""
        return fp32(self.spec.logits.transform.multiplier)

    @property
    def soft_cap(self) -> float | None:
        """The transform's bound as an fp32 value; None without one."""
        cap = self.spec.logits.transform.soft_cap
        return None if cap is None else fp32(cap)

    @property
    def inverse_soft_cap(self) -> float | None:
        """1 / `soft_cap`, divided in fp32: torch divides a tensor by a number through this factor. None without a cap."""
        cap = self.soft_cap
        return None if cap is None else fp32(1.0 / cap)

    @property
    def target_order(self) -> str:
        """Where the chain's next tile stands in the written order, by which target ids are found: where tiles are streamed, every other
        position goes backwards. Without a map from draft to target ids none is looked up."""
        if not self.spec.vocabulary.d2t:
            return "item"
        return "ptx.select(chain_head.goes_up(step), item, c.items - 1 - item) if self.ring else item"

    @property
    def chain_formula(self) -> str:
        """How the chain's docstring puts logits and scores."""
        placement = self.spec.logits.transform.placement
        base = "transform(base[i, v])" if self.transforms_base else "base[i, v]"
        bias = "transform(bias[v])" if placement == "both" else "bias[v]"
        logit = f"transform({base} + {bias})" if placement == "sum" else f"{base} + {bias}"
        if not self.spec.logits.cache_dtypes:
            return f"score[v] = {logit}"
        lines = (
            (f"cache[v] = round({logit})", "before temperature; not written for padding rows"),
            ("score[v] = cache[v] / T + noise[i, v]", "cache[v] alone where T == 0"),
        )
        width = max(FORMULA_WIDTH, *(len(formula) + 2 for formula, _ in lines))
        return "\n    ".join(formula.ljust(width) + comment for formula, comment in lines)

    @property
    def planned_devices(self) -> tuple[DeviceSpec, ...]:
        """The GPUs, in the order of their names."""
        return tuple(self.devices[name] for name in sorted(self.devices))

    def line(self, device: str, tp: int, row_slots: int) -> Any | None:
        """The plan line of that key; None when nothing fits the device."""
        return next((x for x in self.lines if (x.device, x.tp, x.row_slots) == (device, tp, row_slots)), None)


def plan_model(spec: ModelSpec, devices: Mapping[str, DeviceSpec]) -> ModelPlan:
    """Plans a model for every device, tensor-parallel size and row slot count.

    Args:
        spec: The model. Without the chain kernel under `emit` there are no plan lines.
        devices: GPU descriptions by name.
    """
    id_bits = max((spec.vocabulary.target - 1).bit_length(), 1)
    return ModelPlan(
        spec=spec,
        devices=dict(devices),
        id_bits=id_bits,
        tag_bits=32 - id_bits,
        query_per_row=spec.draft.num_steps + (0 if spec.draft.sample_from_anchor else 1),
        shards={tp: _shard(spec, tp) for tp in spec.parallel.tp},
        lines=tuple(_lines(spec, devices)) if "chain" in spec.emit.kernels else (),
    )


def fp32(value: float) -> float:
    """The fp32 number nearest to a value. 1 / x of an fp32 x rounds once: fp64 has more than twice the bits."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def drawn_columns(spec: ModelSpec) -> int:
    """Columns of the Markov head from the first on that can be drawn: all, or those below the sampling limit.

    With a d2t tensor the limit is one of target ids: which columns it leaves out stands in the tensor.
    """
    draft = spec.vocabulary.draft
    return draft if spec.vocabulary.d2t else min(draft, spec.vocabulary.sampling_limit)


def _shard(spec: ModelSpec, tp: int) -> int:
    return -(-spec.vocabulary.draft // tp)


def _lines(spec: ModelSpec, devices: Mapping[str, DeviceSpec]) -> Iterator[Any]:
    most = next(slots for slots in ROW_SLOTS if slots >= spec.draft.max_rows)
    for name in sorted(devices):
        for tp in spec.parallel.tp:
            for slots in ROW_SLOTS:
                line = _plan(spec, devices[name], tp, slots) if slots <= most else None
                if line is not None:
                    yield line


def _plan(spec: ModelSpec, device: DeviceSpec, tp: int, row_slots: int) -> Any | None:
    """The plan line of that key, or None when nothing fits."""
    drawn = drawn_columns(spec)
    width = min(_shard(spec, tp), drawn)
    none = Residency(0, 0, 0, 0, 0, 0)
    line = PlanLine(
        device=device.name,
        tp=tp,
        row_slots=row_slots,
        ctas=device.sms,
        warps=WARPS,
        tiles=math.ceil(math.ceil(width / TILE_ROWS) / device.sms),
        bf16=none,
        fp32=none,
        shared_bytes=0,
        partial=width % TILE_ROWS != 0 or drawn != width * tp,
    )
    found = {dtype: place(line, spec, device, dtype) for dtype in BYTES}
    if None in found.values():
        return None
    line = line._replace(**found)
    return line._replace(shared_bytes=shared_bytes(line, spec, "bf16"))


def shared_bytes(line: Any, spec: ModelSpec, base_dtype: str) -> int:
    """Shared memory of a CTA of that line in bytes, with base logits of that dtype."""
    return layout.shared_layout(line, spec.markov.rank_dim, spec.draft.num_steps, BYTES[base_dtype]).total


def place(line: Any, spec: ModelSpec, device: DeviceSpec, base_dtype: str) -> Any | None:
    """The residency with most tiles in registers that fits, and of those the one that streams fastest; None when nothing fits."""
    chunks = layout.chunks_of(spec.markov.rank_dim)
    fewer = FEWER_REGISTER_CHUNKS.get(device.arch, 0)
    budget = REGISTER_CHUNKS - (2 * fewer if line.row_slots == WIDE_ROWS else fewer)
    direct = not layout.stages_register_tiles(spec.markov.rank_dim)
    # A wide build's tanh, or its target ids, takes registers of its own; where everything stays on the chip, those of a second tile.
    busy = spec.logits.transform.placement != "none" or spec.vocabulary.d2t
    busy = busy and (line.row_slots == WIDE_ROWS or direct)
    halved = spec.markov.rank_dim % layout.CHUNK_DIMS != 0  # a row's last chunk is a half, which takes selections
    budget -= BUSY_CHUNKS * (busy + halved)
    if direct:
        # What several ranks need beside these loads spills: all tiles in shared memory then.
        budget = budget - SPARE_DIRECT if line.tp == 1 else 0
    ahead = STAGED_LARGE_TILES if direct else STAGED_TILES[line.row_slots]
    ahead = min(ahead, -(-line.tiles // line.warps))

    def taken(x: Any) -> int:
        return shared_bytes(line._replace(**{base_dtype: x}), spec, base_dtype)

    def fits(x: Any) -> bool:
        if taken(x) > device.smem_per_block_bytes:
            return False
        placed = line._replace(**{base_dtype: x})
        return layout.most_items(placed, BYTES[base_dtype]) <= layout.MOST_ITEMS

    if direct and fits(Residency(0, 0, line.tiles, 0, ahead, 0)):
        return Residency(0, 0, line.tiles, 0, ahead, 0)  # by bulk copies, which beat the loads of lanes
    # Where everything stays on the chip anyway, few register tiles do: no more than every warp has, and some chunks fewer. They come in
    # one after the other, so the second one waits for the first; and with more of them the compiler spills.
    most = min(-(-budget // chunks), -(-line.tiles // line.warps))
    few = max(min(most, 1 if busy else MOST_WITHOUT_RING, line.tiles // line.warps), min(most, 1))
    cut = SPARE_CUT * (busy and line.tp > 1 and line.partial)
    in_registers = min(chunks, (budget - SPARE_CHUNKS - cut) // max(few, 1))
    for staged in range(ahead, max(ahead - 2, 0), -1):
        whole = Residency(few, in_registers, max(line.tiles - few * line.warps, 0), 0, staged, 0)
        if few and in_registers and fits(whole):
            return whole
    spare = SPARE_WITH_RANKS if line.tp > 1 else 0
    if line.row_slots == CAPPED_ROWS and spec.logits.transform.placement == "sum":
        spare += BUSY_CHUNKS
    for tiles in range(most, -1, -1):
        need = max(line.tiles - tiles * line.warps, 0)
        in_registers = min(chunks, (budget - spare) // tiles) if tiles else 0
        spills = tiles > MOST_WITHOUT_RING and line.row_slots == WIDE_ROWS
        if not spills and fits(Residency(tiles, in_registers, need, 0, ahead, 0)):
            return Residency(tiles, in_registers, need, 0, ahead, 0)
        # A ring slot takes the place of a resident tile, and saves as much: how many fit is found by halving.
        room = bisect_right(
            range(need),
            device.smem_per_block_bytes,
            key=lambda slots: taken(Residency(tiles, in_registers, slots, 0, ahead, 0)),
        )
        # With 8 row slots, register tiles that lanes load for themselves and no resident tile the compiler spills.
        apart = int(direct and tiles > 0 and line.row_slots == WIDE_ROWS)
        for slots in range(room - 1, SMALLEST_RING + apart - 1, -1):
            ring = min(slots - apart, ring_slots(spec.markov.rank_dim, line.row_slots))
            keep = kept_tiles(need - slots + ring, spec.markov.rank_dim, device)
            placed = Residency(tiles, in_registers, slots - ring, ring, ahead, keep)
            if fits(placed):
                return placed
    return None


def ring_slots(rank_dim: int, row_slots: int) -> int:
    """Slots of a ring that streams tiles of that Markov rank as fast as L2 gives them."""
    return max(RING_TILES[row_slots], RING_BYTES // layout.slot_bytes(rank_dim))


def kept_tiles(streamed: int, rank_dim: int, device: DeviceSpec) -> int:
    """Streamed tiles per CTA for which L2 gets evict_last: all that it keeps whole, else as many as fit into a share of it, so that there is
    room for what is read but once."""
    tile = device.sms * TILE_ROWS * 2 * rank_dim
    if streamed * tile <= L2_WHOLE * device.l2_bytes:
        return streamed
    return min(streamed, int(L2_SHARE * device.l2_bytes) // tile)


def numbers(plan: ModelPlan, line: Any, *, base_dtype: str = "bf16", cache_dtype: str = "bf16") -> Numbers:
    """What follows from a plan line, for base logits and cache of these dtypes."""
    spec, device = plan.spec, plan.devices[line.device]
    placed = getattr(line, base_dtype)
    in_registers = min(line.tiles, placed.register_tiles * line.warps)
    resident = min(line.tiles - in_registers, placed.resident)
    streamed = line.tiles - in_registers - resident
    moved = max(streamed - placed.ring, 0)  # the others are in the ring when a position begins
    kept = moved if placed.keep >= streamed else min(placed.keep, max(moved - placed.ring, 0))
    tile = line.ctas * TILE_ROWS * 2 * spec.markov.rank_dim
    width = plan.shards[line.tp]
    base_bytes, cache_bytes = BYTES[base_dtype], BYTES[cache_dtype]
    # Every rank has base logits and noise of its shard, and the whole cache row.
    entries = line.row_slots * (width * (base_bytes + layout.NOISE_BYTES) + spec.vocabulary.target * cache_bytes)
    return Numbers(
        register_tiles=in_registers,
        resident_tiles=resident,
        streamed_tiles=streamed,
        head_bytes=width * 2 * spec.markov.rank_dim,
        l2_bytes_per_position=moved * tile,
        hbm_bytes_per_position=(moved - kept) * tile + entries,
        shared_bytes=shared_bytes(line, spec, base_dtype),
        floor_us=floor_us(
            device,
            vocab_size=width,
            rank_dim=spec.markov.rank_dim,
            num_steps=spec.draft.num_steps,
            rows=line.row_slots,
            base_bytes=base_bytes,
            cache_bytes=cache_bytes,
            cache_columns=spec.vocabulary.target,
            ranks=line.tp,
        ),
    )


def floor_us(
    device: DeviceSpec,
    *,
    vocab_size: int,
    rank_dim: int,
    num_steps: int,
    rows: int,
    base_bytes: int = 2,
    cache_bytes: int = 2,
    cache_columns: int | None = None,
    ranks: int = 1,
) -> float:
    """Microseconds below which no chain can run: each input read once, the head among them, and each output written once at the
    device's copy bandwidth, one launch, and for each position one grid barrier and, with several ranks, one store that a peer sees.
    What is streamed again from L2 is not counted.

    Args:
        device: The GPU, of several ranks each one's.
        vocab_size: Draft columns, of several ranks those of one's shard.
        rank_dim: Markov rank.
        num_steps: Draft positions.
        rows: Request rows.
        base_bytes: Of a base logit.
        cache_bytes: Of a cached logit.
        cache_columns: Of a row of the logits cache, which every rank fills; default `vocab_size`.
        ranks: Tensor-parallel ranks.
    """
    cached = cache_bytes * (vocab_size if cache_columns is None else cache_columns)
    moved = vocab_size * 2 * rank_dim + rows * num_steps * (vocab_size * (base_bytes + 4) + cached)
    agreement = device.grid_barrier_us + (device.rank_hop_us if ranks > 1 else 0.0)
    return moved / device.hbm_bytes_per_s * 1e6 + num_steps * agreement + device.launch_us


def reasons(plan: ModelPlan, line: Any) -> dict[str, str]:
    """Why each number of a plan line is what it is."""
    spec, device = plan.spec, plan.devices[line.device]
    n, placed = numbers(plan, line), line.bf16
    hop = f"{device.rank_hop_us} us ({device.provenance['rank_hop_us']})"
    hops = f"{spec.draft.num_steps} hops to another GPU of {hop}, " if line.tp > 1 else ""
    return {
        "ctas": f"one a streaming multiprocessor of {device.title}",
        "warps": f"{WARPS}: 3 a scheduler with 168 registers a lane",
        "tiles": f"ceil(ceil({plan.shards[line.tp]} / {TILE_ROWS}) / {line.ctas}): contiguous, balanced to one tile",
        "register_tiles": _register_reason(spec, line),
        "resident": _resident_reason(n, line, device),
        "ring": f"{placed.ring * layout.slot_bytes(spec.markov.rank_dim) // 1024} KiB under way or being read, so that L2 gives "
        f"{device.l2_bytes_per_s / 1e12:.1f} TB/s; {max(n.streamed_tiles - placed.ring, 0)} of {n.streamed_tiles} tiles a position"
        if n.streamed_tiles
        else "everything stays on the chip",
        "ahead": _ahead_reason(spec, line),
        "keep": _keep_reason(n, line, device),
        "shared_bytes": _shared_reason(spec, line, device),
        "l2_bytes": f"{max(n.streamed_tiles - placed.ring, 0)} tiles of each of {line.ctas} CTAs: those streamed, but for the "
        f"{placed.ring} that wait in the ring when a position begins"
        if n.streamed_tiles
        else "nothing is streamed",
        "hbm_bytes": _hbm_reason(plan, line, n),
        "floor_us": f"{n.head_bytes / 1e6:.1f} MB of head and the inputs and outputs once at {device.hbm_bytes_per_s / 1e12:.2f} TB/s "
        "(what is streamed again from L2 is not counted), "
        f"{spec.draft.num_steps} barriers of {device.grid_barrier_us} us, {hops}{device.launch_us} us of launch",
    }


def _register_reason(spec: ModelSpec, line: Any) -> str:
    chunks, placed = layout.chunks_of(spec.markov.rank_dim), line.bf16
    staged = layout.stages_register_tiles(spec.markov.rank_dim)
    if placed.register_tiles == 0:
        if staged:
            return f"none: the {WARPS} slots that such tiles come in through do not fit beside embeddings and staged inputs"
        if not placed.ring:
            return "none: shared memory holds all tiles, and bulk copies beat the loads of lanes"
        if line.tp > 1:
            return "none: what several ranks need beside tiles that lanes load for themselves would spill"
        return "none: their chunks in shared memory would leave no room for a ring"
    how = "through a slot of each warp" if staged else "by loads of each lane"
    return (
        f"{placed.register_tiles} a warp, {placed.register_chunks} of {chunks} chunks in registers "
        f"({placed.register_tiles * placed.register_chunks * 8} words a lane), the rest in shared memory; {how}"
    )


def _resident_reason(n: Numbers, line: Any, device: DeviceSpec) -> str:
    beside = f"{line.row_slots} row(s) of staged inputs and the embeddings"
    if n.streamed_tiles:
        left = f"what is left of {device.smem_per_block_bytes} bytes beside the ring, {beside}"
        return left if n.resident_tiles else f"none: the ring takes {left}"
    if n.resident_tiles:
        return f"all tiles that are not in registers; with {beside} {n.shared_bytes} of {device.smem_per_block_bytes} bytes"
    return "none: all tiles are in registers"


def _ahead_reason(spec: ModelSpec, line: Any) -> str:
    ahead, most = line.bf16.ahead, -(-line.tiles // line.warps)
    large = not layout.stages_register_tiles(spec.markov.rank_dim)
    wanted = STAGED_LARGE_TILES if large else STAGED_TILES[line.row_slots]
    what = f"{ahead} tile{'s' if ahead > 1 else ''} whose base logits and noise a warp has under way"
    if ahead == most <= wanted:
        return f"{what}: all that the warp with most has"
    if ahead < wanted:
        return f"{what}: {wanted} do not fit beside the tiles"
    return f"{what}: about 2 us of work" + (", large tiles take longer each" if large else "")


def _keep_reason(n: Numbers, line: Any, device: DeviceSpec) -> str:
    if not n.streamed_tiles:
        return "nothing is streamed"
    l2 = f"{device.l2_bytes / 2**20:.0f} MiB of L2"
    if line.bf16.keep == n.streamed_tiles:
        return f"all streamed tiles fit into {L2_WHOLE} of {l2}"
    return f"{L2_SHARE} of {l2}; the others are read from memory each position"


def _shared_reason(spec: ModelSpec, line: Any, device: DeviceSpec) -> str:
    """What shared memory goes to. Sizes are those of the layout, with its padding to 128 bytes."""
    at = layout.shared_layout(line, spec.markov.rank_dim, spec.draft.num_steps, BYTES["bf16"])
    parts = {
        "slots of tiles": at.embedding - at.slots,
        "embeddings": at.parked - at.embedding,
        "register tiles' other chunks": at.keys - at.parked,
        "staged inputs": at.total - at.inputs,
        "tables and barriers": at.inputs - at.keys,
    }
    shares = ", ".join(f"{name} {size / 1024:.1f} KiB" for name, size in parts.items() if size)
    return f"of {device.smem_per_block_bytes}: {shares}"


def _hbm_reason(plan: ModelPlan, line: Any, n: Numbers) -> str:
    spec = plan.spec
    base = line.row_slots * plan.shards[line.tp] * (BYTES["bf16"] + layout.NOISE_BYTES)
    cache = line.row_slots * spec.vocabulary.target * BYTES["bf16"]
    head = n.hbm_bytes_per_position - base - cache
    tiles = f"{head / 1e6:.1f} MB of streamed tiles that L2 is not asked to keep, " if head else ""
    return f"{tiles}{base / 1e6:.1f} MB of base logits and noise, {cache / 1e6:.1f} MB of cache for {line.row_slots} row(s)"


def _asked(plan: ModelPlan, device: str, tps: Sequence[int], rows: Sequence[int]) -> list[Any]:
    return [x for x in plan.lines if x.device == device and x.tp in tps and x.row_slots in rows]


def to_json(plan: ModelPlan, device: str, tps: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
    """The plan lines asked for, with what follows from them and the reasons."""
    return {
        "model": plan.spec.model.name,
        "device": device,
        "id_bits": plan.id_bits,
        "tag_bits": plan.tag_bits,
        "lines": [
            {
                **line._asdict(),
                "width": plan.shards[line.tp],
                **vars(numbers(plan, line)),
                "reasons": reasons(plan, line),
            }
            for line in _asked(plan, device, tps, rows)
        ],
    }


BAR_CELLS = 40


def _shares(n: Numbers, cells: int) -> tuple[int, int, int]:
    total = max(n.register_tiles + n.resident_tiles + n.streamed_tiles, 1)
    first = round(cells * n.register_tiles / total)
    second = round(cells * (n.register_tiles + n.resident_tiles) / total) - first
    return first, second, cells - first - second


def render_text(plan: ModelPlan, device: str, tps: Sequence[int], rows: Sequence[int]) -> str:
    """A table of the plan lines asked for, a residency bar each, and the reasons of the first line."""
    spec, gpu = plan.spec, plan.devices[device]
    out = [
        f"{spec.model.title}: vocabulary {spec.vocabulary.draft}, rank {spec.markov.rank_dim}, {spec.draft.num_steps} positions, "
        f"on {gpu.title}, bf16 base logits and cache",
        f"exchange record: score 32 bits, token id {plan.id_bits}, sequence tag {plan.tag_bits}",
        "",
        f"{'tp':>3} {'rows':>4} {'tiles/SM':>8} {'regs':>5} {'smem':>5} {'stream':>6} {'ring':>4} {'keep':>4} "
        f"{'smem KiB':>8} {'L2 MB/pos':>9} {'mem MB/pos':>10} {'floor us':>8}  # registers  = shared  . streamed",
    ]
    lines = _asked(plan, device, tps, rows)
    for line in lines:
        n = numbers(plan, line)
        a, b, c = _shares(n, BAR_CELLS)
        out.append(
            f"{line.tp:>3} {line.row_slots:>4} {line.tiles:>8} {n.register_tiles:>5} {n.resident_tiles:>5} {n.streamed_tiles:>6} "
            f"{line.bf16.ring:>4} {line.bf16.keep:>4} {n.shared_bytes / 1024:>8.1f} {n.l2_bytes_per_position / 1e6:>9.1f} "
            f"{n.hbm_bytes_per_position / 1e6:>10.1f} {n.floor_us:>8.1f}  {'#' * a}{'=' * b}{'.' * c}"
        )
    if not lines:
        return "\n".join([*out, "no plan line: nothing fits, or the spec does not emit the chain kernel"])
    out += ["", f"Why (tp {lines[0].tp}, rows {lines[0].row_slots}):"]
    out += [f"  {name:<14} {reason}" for name, reason in reasons(plan, lines[0]).items()]
    return "\n".join(out)


SVG_BAR, SVG_ROW, SVG_LEFT = 520, 26, 150
SVG_COLOURS = (
    ("registers", "#2f6f8f"),
    ("shared memory", "#6fb1a0"),
    ("streamed from L2", "#e3a857"),
    ("streamed from memory", "#c8553d"),
)


def to_svg(plan: ModelPlan, device: str, tps: Sequence[int], rows: Sequence[int]) -> str:
    """The residency of the plan lines asked for, as a picture."""
    lines = _asked(plan, device, tps, rows)
    height = 70 + SVG_ROW * len(lines)
    title = f"{plan.spec.model.title} on {plan.devices[device].title}: where the Markov head lives"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SVG_LEFT + SVG_BAR + 170}" height="{height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for i, (name, colour) in enumerate(SVG_COLOURS):
        x = 10 + 160 * i
        parts.append(
            f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="42">{name}</text>'
        )
    for i, line in enumerate(lines):
        n = numbers(plan, line)
        y = 58 + SVG_ROW * i
        kept = min(line.bf16.keep, n.streamed_tiles)
        counts = (n.register_tiles, n.resident_tiles, kept, n.streamed_tiles - kept)
        parts.append(f'<text x="10" y="{y + 14}">tp {line.tp}, rows {line.row_slots}</text>')
        left = float(SVG_LEFT)
        for count, (_, colour) in zip(counts, SVG_COLOURS, strict=True):
            wide = SVG_BAR * count / max(line.tiles, 1)
            parts.append(f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="18" fill="{colour}"/>')
            left += wide
        parts.append(f'<text x="{SVG_LEFT + SVG_BAR + 8}" y="{y + 14}">{line.tiles} tiles a CTA</text>')
    return "\n".join([*parts, "</svg>", ""])
