"""The ranks of a run on several GPUs of one host, one process each: their groups, and how they start a call together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 120  # a rank that never comes ends the others
MEETING_BYTES = 256


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup  # the CPU group
    gpu_group: dist.ProcessGroup  # NCCL

    def gather(self, out: torch.Tensor, local: torch.Tensor) -> None:
        """NCCL's all-gather on the current stream: local [*shape] of every rank into out [world, *shape]."""
        dist.all_gather_into_tensor(out, local[None], group=self.gpu_group)


class Meeting:
    """A barrier of the ranks on the current stream, by one small kernel: can be captured in a CUDA graph. A collective."""

    def __init__(self, ranks: Ranks) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        # The barrier lives in the pad that belongs to this memory, which must stay mapped while it can be launched.
        self._memory = symmetric.empty(MEETING_BYTES, dtype=torch.uint8, device=ranks.device)
        self._handle: Any = symmetric.rendezvous(self._memory, ranks.group)

    def __call__(self) -> None:
        self._handle.barrier(channel=0)


def open_ranks() -> Ranks:
    """Join the ranks that "env://" describes, each on the GPU of its LOCAL_RANK. A collective."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", timeout=timeout)
    ranks = list(range(dist.get_world_size()))
    gpu_group = dist.new_group(ranks, timeout=timeout, backend="nccl")
    assert dist.group.WORLD is not None
    return Ranks(dist.get_rank(), len(ranks), device, dist.group.WORLD, gpu_group)
