"""What a chain sampler prepares once, alone or with the other ranks of its group: checks, kernels, memory.

With several ranks every step that one rank may fail is agreed before another rank waits for it: checks of the arguments,
compiling, allocating, and the rendezvous of symmetric memory, in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch

from . import chain_share, host, kernel_recipes, kernel_store, symmetric_buffer, vocabulary
from .chain_call import Expectations, Variant
from .chain_memory import ALONE, PeerMemory
from .chain_noise import NoiseBuffer
from .chain_share import Options, Share
from .cubin_launch import CubinKernel
from .kernel_store import Recipe
from .plan_line import PlanLine
from .rank_group import Declined, RankGroup

NS_PER_MS = 1_000_000

T = TypeVar("T")

log = logging.getLogger("dspark_kernels")


def device_type(tensor: Any) -> str | None:
    """The kind of device an argument lies on, or None when it is no tensor."""
    return tensor.device.type if isinstance(tensor, torch.Tensor) else None


class ChainSetup:
    """The part of a chain sampler that runs before its first call; ChainLauncher documents its arguments."""

    config: ClassVar[ModuleType]
    noise: ClassVar[ModuleType | None]
    load_chain: ClassVar[Callable[[], ModuleType]]
    _peers: PeerMemory | None  # None for one rank alone
    provide: ClassVar[Callable[[Recipe, torch.device], CubinKernel]] = staticmethod(kernel_store.provide)

    @classmethod
    def _why_not_share(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        d2t: torch.Tensor | None,
        share: Share,
        options: Options,
    ) -> str | None:
        """Why no sampler can be built whose launches cover this share, or None."""
        if embed_weight is None or head_weight is None:
            return f"the Markov {'embedding' if embed_weight is None else 'head'} is missing"
        if device_type(embed_weight) != "cuda":
            return f"embed_weight: expected a tensor on a CUDA device, got {host.describe(embed_weight)}"
        reason = options.misfit(cls.config)
        if reason is None:
            reason = chain_share.why_not_fitting(cls.config, embed_weight, head_weight, share)
        if reason is None:
            reason = vocabulary.why_not(cls.config, d2t, embed_weight.device)
        if reason is not None:
            return reason
        if share.world > symmetric_buffer.MOST_RANKS:
            return f"expected at most {symmetric_buffer.MOST_RANKS} ranks, got {share.world}"
        device = embed_weight.device
        reason = chain_share.why_no_place(cls.config, device, share, options)
        if reason is not None:
            return reason
        lines = chain_share.lines_of(cls.config, host.read_device(device), share, options)
        recipes = (
            cls._recipe(line, base, share, options) for line in lines.values() for base in cls.config.BASE_DTYPES
        )
        return kernel_store.why_none(recipes, device)

    @classmethod
    def _recipe(cls, line: PlanLine, base: str, share: Share, options: Options) -> Recipe:
        """How to come by one build."""
        return kernel_recipes.chain_recipe(
            cls.config,
            cls.load_chain,
            line,
            base,
            None if options.cache_dtype is None else host.dtype_name(options.cache_dtype),
            world=share.world,
            emulated=share.emulated,
            check_ranks=options.check_ranks and share.world > 1,
            pdl=options.pdl,
        )

    def _set_up(
        self,
        ranks: RankGroup,
        share: Share,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        d2t: torch.Tensor | None,
        options: Options,
    ) -> None:
        """Everything that a sampler needs before its first call."""
        config = self.config
        self.ranks, self.share, self.device = ranks, share, embed_weight.device
        self.embed_weight, self.head_weight = embed_weight, chain_share.rank_head(config, head_weight, share)
        self.max_reqs, self.cache_dtype, self.check_ranks, _, self.timeout_ms, self.pdl = options
        self._lines = chain_share.lines_of(config, host.read_device(self.device), share, options)
        self.max_rows = min(config.MAX_ROWS, self.max_reqs, max(self._lines))
        self._expected = Expectations(
            config,
            self.device,
            max_rows=self.max_rows,
            max_reqs=self.max_reqs,
            cache_dtype=self.cache_dtype,
            share=share,
        )
        self._builds = [(slots, dtype) for dtype in self._expected.base_dtypes for slots in self._lines]
        self._variants: dict[tuple[int, torch.dtype], Variant] = {}
        self._refuse(ranks.compare(self._facts()))
        if options.timeout_ms == 0:
            log.warning("%s: timeout_ms=0: a wait in the chain kernel that never ends hangs the GPU", config.MODEL)
        self._attempt(ranks, "preparing the sampler", lambda: self._allocate(d2t))
        if share.world > 1:
            # Before a rank waits for another, and before a graph can be captured.
            self._attempt(ranks, "compiling the kernels", self.compile)
            try:
                self._peers = PeerMemory(
                    ranks,
                    share,
                    self.device,
                    builds=len(self._builds),
                    ctas=max(line.ctas for line in self._lines.values()),
                    row_slots=max(self._lines),
                    num_steps=config.NUM_STEPS,
                    cache_bytes=0 if self.cache_dtype is None else self.cache_dtype.itemsize,
                )
                self._report.keep_after_trap(self._peers.buffer)
            except Declined as error:
                self._refuse(str(error))

    def _facts(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        return {
            "model": self.config.MODEL,
            "vocabulary": self.config.DRAFT_VOCAB_SIZE,
            "positions": self.config.NUM_STEPS,
            "shard_width": self.share.shard_width,
            "max_reqs": self.max_reqs,
            "CTAs by row slots": {slots: line.ctas for slots, line in self._lines.items()},
            "base dtypes": list(self.config.BASE_DTYPES),
            "cache_dtype": self._cache_name,
            "check_ranks": self.check_ranks,
            # A rank that waits for ever would not see that a peer has given up.
            "timeout_ms": self.timeout_ms,
        }

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise Declined(f"{self.config.MODEL}: no chain sampler: {reason}")

    @classmethod
    def _attempt(cls, ranks: RankGroup, what: str, action: Callable[[], T]) -> T:
        """Do what may fail on one rank alone; raises Declined on every rank when it failed on any."""
        try:
            return ranks.attempt(what, action)
        except Declined as error:
            raise Declined(f"{cls.config.MODEL}: no chain sampler: {error}") from error.__cause__

    @property
    def _cache_name(self) -> str | None:
        return None if self.cache_dtype is None else host.dtype_name(self.cache_dtype)

    def _allocate(self, d2t: torch.Tensor | None) -> None:
        """Allocate what no other rank touches."""
        config, share = self.config, self.share
        self._report = host.TimeoutReport(pinned=True)
        self._peers = None
        self._target_ids = vocabulary.target_ids(config, d2t, self.device)
        self._draft_ids = vocabulary.draft_ids(config, self._target_ids)
        pitch = chain_share.noise_pitch(share.shard_width)
        self._noise = NoiseBuffer(
            self.noise,
            self.device,
            samples=self.max_rows * config.NUM_STEPS,
            num_steps=config.NUM_STEPS,
            pitch=pitch,
            columns=share.columns if self.cache_dtype is not None else (),  # greedy drafts use none
            target_ids=self._target_ids,
        )
        self._constant_arguments = ALONE | {
            "head": self.head_weight.data_ptr(),
            "embed": self.embed_weight.data_ptr(),
            "target_ids": 0 if self._target_ids is None else self._target_ids.data_ptr(),
            "draft_ids": 0 if self._draft_ids is None else self._draft_ids.data_ptr(),
            "noise": self._noise.values.data_ptr(),
            "noise_pitch": pitch,
            "noise_rank_stride": self._noise.rank_stride if share.emulated else 0,
            "report": self._report.address,
            "timeout_ns": self.timeout_ms * NS_PER_MS,
            "rank": share.rank,
            "shard_width": share.shard_width,
        }

    def compile(self) -> None:
        """Compile every variant that a call can need. Launches nothing, and waits for no other rank."""
        for build in self._builds:
            if build not in self._variants:
                self._build(*build)

    def _build(self, slots: int, base_dtype: torch.dtype) -> Variant:
        """Find or compile one variant and allocate its device state."""
        line, share = self._lines[slots], self.share
        base = host.dtype_name(base_dtype)
        options = Options(self.max_reqs, self.cache_dtype, self.check_ranks, pdl=self.pdl)
        kernel = self.provide(self._recipe(line, base, share, options), self.device)
        if self.pdl and kernel.blocks_per_sm() == 0:
            shape = chain_share.block_shape(self.config, line, base)
            raise RuntimeError(
                f"{self.config.MODEL}: pdl: the chain kernel for {slots} row slots and {base} base logits: expected one "
                f"CTA on an SM, {shape}, but the driver places none; build the sampler without pdl"
            )
        played = len(share.columns)
        words = played * kernel.image.description.facts["records_words"]
        made = Variant(
            kernel,
            line.ctas,
            # torch has few uint64 operations; int64 zeros are the same bits.
            torch.zeros(words, dtype=torch.int64, device=self.device),
            torch.zeros(played, dtype=torch.int32, device=self.device),
            self._builds.index((slots, base_dtype)),
        )
        self._variants[slots, base_dtype] = made
        return made
