"""Memory through which the ranks of a sampler exchange records and logits, as arguments of its launches."""

from __future__ import annotations

import torch

from . import rank_memory, symmetric_buffer
from .chain_share import Share
from .rank_group import RankGroup

ALONE = dict.fromkeys(("peers", "launches", "mailbox", "staging", "staging_bytes"), 0)  # arguments of one rank alone


class PeerMemory:
    """One symmetric buffer a rank: a mailbox for each build, then staging for every peer's logits, shared by the builds.

    The host resets nothing in it between launches. The staging takes its parity from ``launches``, which counts the launches
    of all builds, because one build's launch may still read what another build's next launch would overwrite.

    Args:
        ranks: the group, or one rank that plays them all.
        share: what a launch covers.
        device: this rank's GPU.
        builds: number of the sampler's builds.
        ctas: of one rank's launch.
        row_slots: request rows of the largest build.
        num_steps: positions of a row.
        cache_bytes: of a cached logit.

    Raises:
        Declined: on every rank, when one cannot share memory with the others. A collective.
    """

    def __init__(
        self,
        ranks: RankGroup,
        share: Share,
        device: torch.device,
        *,
        builds: int,
        ctas: int,
        row_slots: int,
        num_steps: int,
        cache_bytes: int,
    ) -> None:
        self.layout = symmetric_buffer.layout(
            world=share.world,
            ctas=ctas,
            variants=builds,
            row_slots=row_slots,
            num_steps=num_steps,
            shard_width=share.shard_width,
            cache_bytes=cache_bytes,
        )
        size = self.layout.total
        if share.emulated:
            self.buffer = rank_memory.emulate_buffers(share.world, size, device, self.layout.staging)
        else:
            self.buffer = rank_memory.share_buffer(ranks, size, device, self.layout.staging)
        self.launches = torch.zeros(len(share.columns), dtype=torch.int32, device=device)

    def arguments(self, build: int) -> dict[str, int]:
        """The kernel's arguments of one build, by name: addresses, and byte offsets in the symmetric buffers."""
        return {
            "peers": self.buffer.addresses.data_ptr(),
            "launches": self.launches.data_ptr(),
            "mailbox": symmetric_buffer.mailbox_offset(self.layout, build),
            "staging": self.layout.staging,
            "staging_bytes": self.layout.staging_bytes,
        }
