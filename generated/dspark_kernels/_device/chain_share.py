"""What a chain sampler is made of and what its launches cover: options, ranks and their columns, plans, weights.

Nothing here allocates or launches; every refusal says what was expected and given.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import host, plan_line
from .host import Expected
from .rank_group import Columns, columns_of, even_width

NOISE_ALIGNMENT = 4  # fp32 values in 16 bytes: a noise row starts on a vector boundary
OFFSETS = (
    2**31
)  # the kernel counts the entries of base logits and noise in 32 bits; half of them leave room for its sums
WARP_LANES = 32
RING_OF_A_LINE_WITHOUT = 4  # slots, where tiles must be streamed that were planned to stay on the chip


class Share(NamedTuple):
    """What one launch covers: the ranks that it plays, one or all of them, and the vocabulary columns of each."""

    world: int  # ranks that the vocabulary is split over
    rank: int  # the launch's first rank
    shard_width: int  # columns of a rank, the last ranks taking what is left
    columns: tuple[Columns, ...]  # of each rank of the launch

    @property
    def emulated(self) -> bool:
        """Whether one launch plays all ranks."""
        return len(self.columns) > 1

    @property
    def first(self) -> int:
        """The launch's first column."""
        return self.columns[0].first

    @property
    def width(self) -> int:
        """The first rank's columns."""
        return self.columns[0].width


def share_of(config: ModuleType, world: int, rank: int, shard_width: int | None = None) -> Share:
    """What a launch of one rank covers. ``shard_width`` None divides the vocabulary evenly; one rank has all of it."""
    even = shard_width is None or world == 1
    width = even_width(config.DRAFT_VOCAB_SIZE, world) if even else shard_width
    return Share(world, rank, width, (columns_of(config.DRAWN_COLUMNS, width, rank),))


def emulated_share(config: ModuleType, world: int, shard_width: int | None = None) -> Share:
    """What a launch of all ranks on one GPU covers; ``shard_width`` None divides the vocabulary evenly."""
    shares = [share_of(config, world, rank, shard_width) for rank in range(world)]
    return shares[0]._replace(columns=tuple(share.columns[0] for share in shares))


def noise_pitch(width: int) -> int:
    """fp32 values from one noise row to the next, for so many columns."""
    return -(-width // NOISE_ALIGNMENT) * NOISE_ALIGNMENT


def why_noise_too_large(width: int, samples: int) -> str | None:
    """Why the noise of so many samples is beyond the kernel's offsets, or None."""
    entries = samples * noise_pitch(width)
    if entries < OFFSETS:
        return None
    return f"noise of {samples} samples: expected fewer than {OFFSETS} entries, got {entries}; lower draft.max_rows"


class Options(NamedTuple):
    """A sampler's arguments beside its weights and its ranks, as ChainLauncher documents them."""

    max_reqs: int
    cache_dtype: torch.dtype | None
    check_ranks: bool = False
    device_name: str | None = None
    timeout_ms: int = 30_000
    pdl: bool = False

    def misfit(self, config: ModuleType) -> str | None:
        """Which of them does not fit, or None."""
        for name, value, least in (("max_reqs", self.max_reqs, 1), ("timeout_ms", self.timeout_ms, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                return f"{name}: expected an int of at least {least}, got {value!r}"
        for name, flag in (("check_ranks", self.check_ranks), ("pdl", self.pdl)):
            if not isinstance(flag, bool):
                return f"{name}: expected a bool, got {flag!r}"
        cached = [host.DTYPES[name] for name in config.CACHE_DTYPES] or [None]
        if self.cache_dtype not in cached:
            return f"cache_dtype: expected {' or '.join(config.CACHE_DTYPES) or None}, got {self.cache_dtype}"
        return None


def why_not_fitting(
    config: ModuleType, embed_weight: torch.Tensor, head_weight: torch.Tensor, share: Share
) -> str | None:
    """Why weights do not fit their model and a rank's share of it, or None."""
    whole = share.emulated or not is_head_shard(config, head_weight, share)
    for name, weight, tokens in (
        ("embed_weight", embed_weight, config.VOCAB_SIZE),
        ("head_weight", head_weight, config.DRAFT_VOCAB_SIZE if whole else share.width),
    ):
        wanted = Expected(
            (torch.bfloat16,), (tokens, config.RANK_DIM), (0,), contiguous=True, alignment=host.VECTOR_BYTES
        )
        found = wanted.misfit(name, weight, embed_weight.device)
        if found is not None:
            return found.message
    return None


def is_head_shard(config: ModuleType, head_weight: Any, share: Share) -> bool:
    """Whether a head holds the rows of one rank alone: with several ranks, one of fewer rows than the vocabulary."""
    if share.world == 1 or not isinstance(head_weight, torch.Tensor) or head_weight.dim() != 2:
        return False
    return head_weight.shape[0] < config.DRAFT_VOCAB_SIZE


def rank_head(config: ModuleType, head_weight: torch.Tensor, share: Share) -> torch.Tensor:
    """The view of a head, whole or a rank's shard, that starts at the launch's first row."""
    return head_weight if is_head_shard(config, head_weight, share) else head_weight[share.first :]


def lines_of(
    config: ModuleType, facts: host.DeviceFacts, share: Share, options: Options
) -> dict[int, plan_line.PlanLine]:
    """The plan lines that a share's launches take, by row slots, ascending: none beyond the most rows that a call can have.
    Ask ``why_no_place`` first."""
    lines = _shard_lines(config, facts, share, options.device_name)
    most = host.row_slots_for(lines, min(config.MAX_ROWS, options.max_reqs))
    lines = {slots: line for slots, line in lines.items() if most is None or slots <= most}
    if not options.pdl:
        return lines
    shape = (config.RANK_DIM, config.NUM_STEPS, facts.smem_per_block)
    return {slots: plan_line.overlapping(line, *shape) for slots, line in lines.items()}


def _shard_lines(
    config: ModuleType, facts: host.DeviceFacts, share: Share, device_name: str | None
) -> dict[int, plan_line.PlanLine]:
    planned = 1 if share.emulated else share.world
    lines = host.plan_lines(config.PLANS, config.DEVICES, facts, planned, device_name)
    if share.world == 1:
        return lines
    shape = (share.shard_width, config.DRAWN_COLUMNS, config.RANK_DIM, config.NUM_STEPS)
    if share.emulated:
        # Each rank has its part of the SMs, and about as many tiles on each of them as one rank alone.
        lines = {slots: plan_line.emulated(line, share.world, *shape) for slots, line in lines.items()}
    else:
        lines = {slots: plan_line.for_shard(line, *shape) for slots, line in lines.items()}
    return {slots: fitted(config, line, facts.smem_per_block) for slots, line in lines.items()}


def fitted(config: ModuleType, line: plan_line.PlanLine, limit: int) -> plan_line.PlanLine:
    """A line whose CTAs take at most ``limit`` bytes of shared memory: the line itself, or with more tiles streamed.

    A line that is not planned as it is, because shards have another width or a GPU plays several ranks, has a few tiles more
    or other parts of them in shared memory. Where no residency fits, that of the line stays, and ``why_no_place`` says so.
    """
    for name, base_bytes in config.DTYPE_BYTES.items():
        for x in _smaller(getattr(line, name), line.warps):
            placed = line._replace(**{name: x})
            layout = plan_line.shared_layout(placed, config.RANK_DIM, config.NUM_STEPS, base_bytes)
            if layout.total <= limit and plan_line.most_items(placed, base_bytes) <= plan_line.MOST_ITEMS:
                line = placed
                break
    layout = plan_line.shared_layout(line, config.RANK_DIM, config.NUM_STEPS, config.DTYPE_BYTES["bf16"])
    return line._replace(shared_bytes=layout.total)


def _smaller(x: plan_line.Residency, warps: int) -> Iterator[plan_line.Residency]:
    """A residency, then those that stream more: fewer tiles resident first, then a smaller ring, then fewer tiles in registers.

    Fewer register tiles leave room for others, as the part of them that is in shared memory goes with them.
    """
    yield x
    ring = x.ring or RING_OF_A_LINE_WITHOUT
    for register_tiles in range(x.register_tiles, -1, -1):
        placed = x._replace(register_tiles=register_tiles, register_chunks=x.register_chunks if register_tiles else 0)
        for resident in range(x.resident + (x.register_tiles - register_tiles) * warps, -1, -1):
            yield placed._replace(resident=resident, ring=ring)
        for fewer in range(ring - 1, 0, -1):
            yield placed._replace(resident=0, ring=fewer)


def why_no_place(config: ModuleType, device: torch.device, share: Share, options: Options) -> str | None:
    """Why no plan of the model fits a device, or None. With ``pdl`` also why its CTAs would not all be on the chip: the
    launch is then without the driver's own check of that."""
    reason = why_noise_too_large(share.shard_width, min(config.MAX_ROWS, options.max_reqs) * config.NUM_STEPS)
    if reason is not None:
        return reason
    facts, device_name = host.read_device(device), options.device_name
    reason = host.why_no_plan(config.PLANS, config.DEVICES, facts, 1 if share.emulated else share.world, device_name)
    if reason is not None:
        return reason
    sm = host.read_sm(device) if options.pdl else None
    for line in lines_of(config, facts, share, options).values():
        for base in config.BASE_DTYPES:
            shape = block_shape(config, line, base)
            if shape["shared"] > facts.smem_per_block:
                return (
                    f"the plan for {line.row_slots} row slots and shards of {share.shard_width} columns: expected a CTA to "
                    f"take at most {facts.smem_per_block} bytes of shared memory, got {shape['shared']}"
                )
            most = plan_line.most_items(line, config.DTYPE_BYTES[base])
            if most > plan_line.MOST_ITEMS:
                return (
                    f"the plan for {line.row_slots} row slots and shards of {share.shard_width} columns: expected at most "
                    f"{plan_line.MOST_ITEMS} tiles a warp, got {most}"
                )
            reason = None if sm is None else host.why_not_resident(facts, sm, ctas=line.ctas, **shape)
            if reason is not None:
                return f"pdl: the plan for {line.row_slots} row slots: {reason}"
    return None


def block_shape(config: ModuleType, line: plan_line.PlanLine, base: str) -> dict[str, int]:
    """Threads and shared memory in bytes of a CTA of one build; `base` is the base logits' dtype, "bf16" or "fp32"."""
    layout = plan_line.shared_layout(line, config.RANK_DIM, config.NUM_STEPS, config.DTYPE_BYTES[base])
    return {"threads": line.warps * WARP_LANES, "shared": layout.total}
