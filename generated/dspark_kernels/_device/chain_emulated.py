"""Several ranks of a chain on one GPU, for tests and for anyone without several GPUs."""

from __future__ import annotations

import torch

from . import chain_share, rank_group
from .chain_calls import ChainCalls
from .chain_share import Options
from .rank_group import RankGroup
from .symmetric_buffer import MOST_RANKS

FEWEST_RANKS = 2
# A launch that may start early is not cooperative, and nothing else promises that the CTAs of all ranks are on the chip at once.
WITHOUT_PDL = (
    "pdl: expected False with emulated ranks, got {!r}: "
    "they need a cooperative launch, which starts behind the kernel ahead of it"
)


class EmulatedChainLauncher(ChainCalls):
    """All tensor-parallel ranks of a chain in one cooperative launch: rank = block // (CTAs of a rank).

    The ranks run the code that they run on GPUs of their own, with an equal part of this GPU's SMs each, and exchange
    records and logits through buffers in this GPU's memory. Nothing assumes that two launches run at once. Calls are
    those of ChainLauncher, but every rank has outputs of its own: logits_cache [world, >= max_reqs, NUM_STEPS,
    >= VOCAB_SIZE], draft_tokens [world, >= rows, NUM_STEPS]; base logits and head are whole. One report serves all ranks.

    Args:
        world: number of ranks, from 2 to MOST_RANKS.
        pdl: False; anything else is refused.
        others: as for ChainLauncher.

    Raises:
        Declined: a ValueError with the reason, when this sampler cannot be built.
    """

    def __init__(
        self,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        *,
        world: int,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        shard_width: int | None = None,
        check_ranks: bool = False,
        device_name: str | None = None,
        timeout_ms: int = 30_000,
        pdl: bool = False,
    ) -> None:
        options = Options(max_reqs, cache_dtype, check_ranks, device_name, timeout_ms)
        self._refuse(self._why_not_emulated(embed_weight, head_weight, d2t, world, shard_width, pdl, options))
        assert embed_weight is not None and head_weight is not None  # _why_not_emulated
        share = chain_share.emulated_share(self.config, world, shard_width)
        self._set_up(RankGroup(None), share, embed_weight, head_weight, d2t, options)

    @classmethod
    def why_not(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        *,
        world: int,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        shard_width: int | None = None,
        check_ranks: bool = False,
        device_name: str | None = None,
        timeout_ms: int = 30_000,
        pdl: bool = False,
    ) -> str | None:
        """Why this GPU cannot play so many ranks, or None. Depends on shapes, dtypes and the device only."""
        options = Options(max_reqs, cache_dtype, check_ranks, device_name, timeout_ms)
        return cls._why_not_emulated(embed_weight, head_weight, d2t, world, shard_width, pdl, options)

    @classmethod
    def _why_not_emulated(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        d2t: torch.Tensor | None,
        world: int,
        shard_width: int | None,
        pdl: bool,
        options: Options,
    ) -> str | None:
        if pdl is not False:
            return WITHOUT_PDL.format(pdl)
        if not isinstance(world, int) or isinstance(world, bool) or not FEWEST_RANKS <= world <= MOST_RANKS:
            return f"world: expected an int from {FEWEST_RANKS} to {MOST_RANKS}, got {world!r}"
        if shard_width is not None:
            reason = rank_group.why_not_width(cls.config.DRAFT_VOCAB_SIZE, world, shard_width)
            if reason is not None:
                return reason
        share = chain_share.emulated_share(cls.config, world, shard_width)
        return cls._why_not_share(embed_weight, head_weight, d2t, share, options)
