"""Memory that every rank of a group can write: one buffer a rank, and a table of their addresses on each GPU.

Ranks on several GPUs: torch's symmetric memory, exchanged through the CPU group. Between hosts of one NVLink domain it uses
fabric handles, by the same calls; that has not been run. Where GPUs cannot address each other's memory (other interconnects,
no peer access), there is a reason and no buffer. Emulated ranks: slices of one tensor.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .rank_group import Declined, RankGroup
from .symmetric_buffer import BLANK_BYTE

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells hosts apart that have the same name


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    boot: str  # of the host's kernel, empty where it has none
    gpu: str  # the GPU's UUID
    fabric: bool  # whether this GPU's memory can be shared with other hosts

    @property
    def machine(self) -> tuple[str, str]:
        """Equal for the ranks of one host."""
        return self.host, self.boot


class PeerBuffer(NamedTuple):
    """This rank's buffer and everybody's addresses. Keep it while any rank may still launch: peers write into it."""

    local: torch.Tensor  # uint8 [bytes]; emulated: [world, bytes]
    addresses: torch.Tensor  # int64 [world] on the device: the ranks' buffers, by rank
    handle: Any  # what keeps the peers' memory mapped


def gpu_uuid(ordinal: int) -> str:
    """A GPU's UUID: the same in every process, whichever GPUs each of them sees."""
    return str(torch.cuda.get_device_properties(ordinal).uuid)


def has_fabric_handles(device: torch.device) -> bool:
    """Whether CUDA reports that this GPU's memory can be shared by fabric handles, as within an NVLink domain of several hosts."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    status, value = driver.cuDeviceGetAttribute(attribute, device.index)
    return status == driver.CUresult.CUDA_SUCCESS and bool(value)


def place_of(device: torch.device) -> Place:
    """Where this rank runs."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
    return Place(socket.gethostname(), boot, gpu_uuid(device.index), has_fabric_handles(device))


def visible_gpus() -> dict[str, int]:
    """The GPUs that this process sees: ordinal by UUID."""
    return {gpu_uuid(ordinal): ordinal for ordinal in range(torch.cuda.device_count())}


def why_unreachable(rank: int, places: Sequence[Place], device: torch.device, visible: Mapping[str, int]) -> str | None:
    """Why this rank cannot write into the memory of every other rank, or None as far as that can be told beforehand.

    Args:
        rank: this rank.
        places: of all ranks, by rank.
        device: this rank's GPU.
        visible: ``visible_gpus()``. A GPU of this host that the process does not see is left to the rendezvous.
    """
    own = places[rank]
    for other, place in enumerate(places):
        if other == rank:
            continue
        if place.machine != own.machine:
            if not (own.fabric and place.fabric):
                lacking = rank if not own.fabric else other
                return (
                    f"rank {other} is on another host ({place.host}, this one is {own.host}) and the GPU of rank {lacking} "
                    "has no fabric handles: expected pointers to every peer's memory"
                )
        elif place.gpu == own.gpu:
            return f"rank {other} has the same GPU ({own.gpu}): expected a GPU for each rank, as their launches wait for each other"
        elif place.gpu in visible and not torch.cuda.can_device_access_peer(device.index, visible[place.gpu]):
            return f"no peer access from GPU {device.index} to GPU {visible[place.gpu]}, that of rank {other}: expected pointers to every peer's memory"
    return None


def why_no_pointers(pointers: Sequence[int], rank: int, own: int) -> str | None:
    """Why the addresses of a rendezvous do not serve, or None. ``own``: the address of this rank's buffer."""
    missing = [peer for peer, pointer in enumerate(pointers) if not pointer]
    if missing:
        return f"no pointer to the memory of rank {missing[0]}: the interconnect does not give any"
    if pointers[rank] != own:
        return f"symmetric memory: expected this rank's buffer at its own address {own:#x}, got {pointers[rank]:#x}"
    return None


def share_buffer(ranks: RankGroup, size: int, device: torch.device, blank_from: int) -> PeerBuffer:
    """A buffer of ``size`` bytes on every rank of a group, of zeros and from a byte on of BLANK_BYTE. A collective; on return every
    rank's buffer is filled.

    The allocation is agreed before the rendezvous, in which a rank would wait for its peers.

    Raises:
        Declined: on every rank, when one cannot allocate, or not reach a peer's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric

    group = ranks.group
    assert group is not None  # several ranks
    places = ranks.gather(ranks.attempt("place of the rank", lambda: place_of(device)))
    unreachable = ranks.attempt(
        "looking for the peers' GPUs", lambda: why_unreachable(ranks.rank, places, device, visible_gpus())
    )
    refused = ranks.agree(unreachable)
    if refused is not None:
        raise Declined(refused)

    def allocate() -> torch.Tensor:
        return symmetric.empty(size, dtype=torch.uint8, device=device)

    local = ranks.attempt(f"allocating {size} bytes of symmetric memory", allocate)
    handle = ranks.attempt("rendezvous of symmetric memory", lambda: symmetric.rendezvous(local, group))
    pointers = list(handle.buffer_ptrs)
    refused = ranks.agree(why_no_pointers(pointers, ranks.rank, local.data_ptr()))
    if refused is not None:
        raise Declined(refused)

    def clear() -> torch.Tensor:
        fill_buffer(local, blank_from)
        addresses = torch.tensor(pointers, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        return addresses

    # The agreement behind it is the barrier: no rank can launch before every buffer is filled.
    return PeerBuffer(local, ranks.attempt("filling symmetric memory", clear), handle)


def fill_buffer(local: torch.Tensor, blank_from: int) -> None:
    """What a buffer, uint8 [..., bytes], holds before any launch."""
    local.zero_()
    local[..., blank_from:] = BLANK_BYTE


def emulate_buffers(world: int, size: int, device: torch.device, blank_from: int) -> PeerBuffer:
    """The buffers of ``world`` ranks that one GPU plays, filled as share_buffer's: uint8 [world, size]."""
    local = torch.empty((world, size), dtype=torch.uint8, device=device)
    fill_buffer(local, blank_from)
    addresses = [local[rank].data_ptr() for rank in range(world)]
    return PeerBuffer(local, torch.tensor(addresses, dtype=torch.int64, device=device), None)
