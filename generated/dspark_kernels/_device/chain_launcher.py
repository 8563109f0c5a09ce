"""The chain sampler of one GPU, or of one GPU of several ranks.

A model's launch.py subclasses ChainLauncher and names its constants and kernels.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import torch

from . import chain_share, rank_group
from .chain_calls import ChainCalls
from .chain_share import Options
from .rank_group import Declined, RankGroup

log = logging.getLogger("dspark_kernels")


class ChainLauncher(ChainCalls):
    """One chain kernel launch for all draft positions of up to ``max_rows`` request rows, on one GPU or on one a rank.

    With a ``group`` of several tensor-parallel ranks each rank computes its shard of the vocabulary and the launches
    exchange each token's winner. Building a sampler is then a collective: what fails on one rank, compiling included, is
    agreed before a rank waits for it, and every rank raises the same reason. ``create`` returns None instead. Then:

    - Every rank must make the same launches in the same order: ``warmup``, ``sample``, graph replays. What a batch takes
      may depend on its padded shape only. ``check_ranks`` builds kernels that compare launch counts and batch shapes.
    - A launch waits for the peers' launches, at most ``timeout_ms``. No kernel that waits for a peer may be in flight
      beside it, such as a collective on another stream: it could keep SMs that the chain needs, on one rank, while the
      peer's waits for its chain.
    - Keep the sampler until no rank launches any more: peers write into its memory. A rank that ends leaves the others
      with ChainTimeoutError.

    One sampler's launches, graph replays included, must follow each other: by one stream, or by events between streams.
    They share the noise buffer and the exchange records; run at once, they would take each other's. Nothing detects
    that, as a replay does not pass through the host. Samplers of their own may run on streams of their own, also on one
    GPU, where the launches follow each other, because each takes every SM. Calls from several host threads need a lock.

    The launch is cooperative: it starts when all SMs can take it, after the kernels that fill them. A kernel that waits
    for something behind the chain, such as a collective that waits for a rank that runs its chain first, must not be
    in flight: each would wait for the other until the timeout.

    With ``pdl`` (programmatic dependent launch) the chain starts while the kernel ahead of it in the stream still runs,
    loads the head, and waits for that kernel's end before it reads anything else. What the caller must then know:

    - The kernel ahead must write neither weight: the head may be read before it ends. A reload of the weights needs an
      event, a copy or any ordinary kernel between itself and the chain.
    - The kernel ahead must end by itself. The chain's CTAs take their SMs while they wait for it, so that a kernel ahead
      that waits for something launched after it, on whatever stream, hangs the GPU: no timeout bounds this wait.
    - The chain waits for the kernel just ahead. Where that one was launched programmatically too, it must itself have
      waited for the one before it, or what the earlier one writes may be read too early.
    - It is launched without the cooperative attribute, with which nothing overlaps. That all CTAs are on the chip at
      once is then checked beforehand (``why_not``, and the driver's occupancy of each build), and holds where all other
      kernels on the GPU end by themselves. Two such samplers on streams that nothing orders may each take a part of the
      SMs and wait for the rest until the timeout: order them by events.
    - Only a launch right behind a kernel overlaps. Behind an event that another stream recorded, such as the join of
      forked noise, it is an ordinary launch: call ``join_noise`` ahead of the last kernel that the base logits need.
      Noise that was not forked is drawn right ahead of the chain, which then overlaps with the noise kernel's end.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, on a CUDA device.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], contiguous, same device; with several ranks also
            this rank's rows alone. Rows beyond the vocabulary are ignored; both weights are read where they lie, so a
            reload into the same storage is seen. None: this rank cannot, which the others are told.
        max_reqs: number of request states, the first size of temperature, seeds and logits_cache.
        cache_dtype: dtype of the logits cache: torch.bfloat16 or torch.float32; None for a model that drafts greedily.
        d2t: int64 [DRAFT_VOCAB_SIZE], target id minus draft id, for a model whose ids differ; read once.
        group: the tensor-parallel ranks' CPU process group (gloo), or None for one rank alone.
        shard_width: columns of a rank: rank r owns draft ids r * shard_width to (r + 1) * shard_width - 1, as far as they
            exist. None divides the vocabulary evenly, rounded up.
        check_ranks: build kernels that compare the ranks' launches, and raise RanksDifferError. For debugging: slower.
        device_name: name of the device description whose plan is used; None matches the GPU itself.
        timeout_ms: bound of every wait inside the kernel, in milliseconds. A wait that runs out traps, which loses the
            CUDA context, and raises ChainTimeoutError. 0 leaves the waits unbounded.
        pdl: launch programmatically, as above. The results are the same.

    Raises:
        Declined: a ValueError with the reason, when this sampler cannot be built; on every rank of the group.
    """

    def __init__(
        self,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        shard_width: int | None = None,
        check_ranks: bool = False,
        device_name: str | None = None,
        timeout_ms: int = 30_000,
        pdl: bool = False,
    ) -> None:
        ranks = RankGroup(group)
        options = Options(max_reqs, cache_dtype, check_ranks, device_name, timeout_ms, pdl)

        def check() -> str | None:
            return self.why_not(
                embed_weight, head_weight, d2t=d2t, group=group, shard_width=shard_width, **options._asdict()
            )

        self._refuse(ranks.agree(self._attempt(ranks, "checking the arguments", check)))
        assert embed_weight is not None and head_weight is not None  # why_not
        share = chain_share.share_of(self.config, ranks.size, ranks.rank, shard_width)
        self._set_up(ranks, share, embed_weight, head_weight, d2t, options)

    @classmethod
    def create(cls, *weights: torch.Tensor | None, **options: Any) -> Self | None:
        """A compiled sampler on every rank, or None on every rank. Arguments as for the class; a collective.

        The reason for None is logged once, by rank 0; a caller that wants it builds the class and catches Declined.
        """
        ranks = RankGroup(options.get("group"))
        try:
            sampler = cls(*weights, **options)
            cls._attempt(ranks, "compiling the kernels", sampler.compile)
        except Declined as error:
            if ranks.rank == 0:
                log.warning("%s", error)
            return None
        return sampler

    @classmethod
    def why_not(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        *,
        d2t: torch.Tensor | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        shard_width: int | None = None,
        **options: Any,
    ) -> str | None:
        """Why this rank cannot build a chain sampler from these, or None. Depends on shapes, dtypes and the device only.

        Arguments as for the class. No collective: the other ranks may have reasons of their own.
        """
        reason = rank_group.why_not_group(group)
        if reason is not None:
            return reason
        ranks = RankGroup(group)
        if shard_width is not None:
            reason = rank_group.why_not_width(cls.config.DRAFT_VOCAB_SIZE, ranks.size, shard_width)
            if reason is not None:
                return reason
        share = chain_share.share_of(cls.config, ranks.size, ranks.rank, shard_width)
        return cls._why_not_share(embed_weight, head_weight, d2t, share, Options(**options))

    def why_not_shard(self, shard: tuple[int, int] | None) -> str | None:
        """Why base logits are not accepted as shards of these columns, or None; the same on every rank. A collective.

        A rank that took its LM head's shard while a peer gathers would leave that peer waiting in the collective.

        Args:
            shard: first column and number of columns of this rank's LM head; None where it has none.
        """
        own, most = self.share.columns[0], self.share.shard_width
        first = self.share.rank * most
        fits = shard is not None and own.width <= shard[1] <= most and (shard[0] == first or own.width == 0)
        reason = (
            None if fits else f"shard: expected columns from {first} on, {own.width} to {most} of them, got {shard}"
        )
        return self.ranks.agree(reason)

    def accepts_shard(self, shard: tuple[int, int] | None) -> bool:
        """Whether every rank takes its shard of the base logits, ``why_not_shard``. A collective."""
        return self.why_not_shard(shard) is None
