"""Least times that no kernel of this design can beat, for what is timed beside the chain of one GPU (whose floor is plan.py's).

Like that one: bytes that must move at the device's copy bandwidth, what a position waits for, one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsparkgen.device import DeviceSpec
from dsparkgen.plan import floor_us

BIAS_BYTES = 2  # bf16, as the engine's GEMM leaves it


@dataclass(frozen=True)
class Sizes:
    """What a call's bytes follow from."""

    vocab_size: int  # draft vocabulary
    cache_columns: int  # target vocabulary: what a row of the logits cache is filled to
    rank_dim: int
    num_steps: int
    rows: int
    base_bytes: int
    cache_bytes: int

    def shard(self, world: int) -> int:
        """Draft columns of the widest of `world` shards."""
        return -(-self.vocab_size // world)


def chain_floor_us(device: DeviceSpec, sizes: Sizes) -> float:
    """Microseconds of the chain on one GPU that holds the whole head."""
    return _floor_us(device, sizes, width=sizes.vocab_size, cached=sizes.cache_columns)


def rank_floor_us(device: DeviceSpec, sizes: Sizes, world: int) -> float:
    """Microseconds of one of `world` ranks: its shard of head, base logits and noise, the whole cache, and one hop a position."""
    return _floor_us(device, sizes, width=sizes.shard(world), cached=sizes.cache_columns, ranks=world)


def emulated_floor_us(device: DeviceSpec, sizes: Sizes, world: int) -> float:
    """Microseconds of `world` ranks on one GPU: the whole head, and every rank's cache."""
    return _floor_us(device, sizes, width=sizes.vocab_size, cached=world * sizes.cache_columns)


def step_floor_us(device: DeviceSpec, sizes: Sizes) -> float:
    """Microseconds of the loop over positions with the engine's GEMM: every position reads the head and the base logits,
    writes and reads the bias and writes the cache. Noise costs no bytes."""
    entries = sizes.vocab_size * (sizes.base_bytes + 2 * BIAS_BYTES) + sizes.cache_columns * sizes.cache_bytes
    moved = sizes.num_steps * (sizes.vocab_size * 2 * sizes.rank_dim + sizes.rows * entries)
    return moved / device.hbm_bytes_per_s * 1e6 + device.launch_us


def _floor_us(device: DeviceSpec, sizes: Sizes, *, width: int, cached: int, ranks: int = 1) -> float:
    return floor_us(
        device,
        vocab_size=width,
        rank_dim=sizes.rank_dim,
        num_steps=sizes.num_steps,
        rows=sizes.rows,
        base_bytes=sizes.base_bytes,
        cache_bytes=sizes.cache_bytes,
        cache_columns=cached,
        ranks=ranks,
    )
