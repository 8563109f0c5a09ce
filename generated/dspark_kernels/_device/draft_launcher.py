"""Chain or fused loop: the sampler that takes every batch, and says which kernel draws it and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch

from .chain_launcher import ChainLauncher

log = logging.getLogger("dspark_kernels")


class DraftLauncher:
    """Draws draft tokens by the chain where it fits and by the fused loop elsewhere, and says which and why.

    The choice depends on the weights, the device, the row count and the base logits' dtype and shape: never on values.
    On the CPU it is always the fused loop, in Triton's interpreter. Arguments as for the chain's sampler; ``pdl`` is the
    chain's alone, with its conditions, and where they do not hold every batch takes the fused loop.
    """

    config: ClassVar[ModuleType]
    chain_sampler: ClassVar[type[ChainLauncher]]
    fused_loop: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype,
        device_name: str | None = None,
        timeout_ms: int = 30_000,
        pdl: bool = False,
    ) -> None:
        self.fused = self.fused_loop(embed_weight, head_weight, max_reqs=max_reqs)
        self.chain: ChainLauncher | None = None
        self.max_reqs, self.cache_dtype = max_reqs, cache_dtype
        self.chain_declined = self.chain_sampler.why_not(
            embed_weight, head_weight, max_reqs=max_reqs, cache_dtype=cache_dtype, device_name=device_name, pdl=pdl
        )
        if self.chain_declined is None:
            self.chain = self.chain_sampler(
                embed_weight,
                head_weight,
                max_reqs=max_reqs,
                cache_dtype=cache_dtype,
                device_name=device_name,
                timeout_ms=timeout_ms,
                pdl=pdl,
            )
        self._told: set[tuple[str, str]] = set()
        model = self.config.MODEL
        if self.chain is None:
            log.info("%s: every batch takes the fused loop: %s", model, self.chain_declined)
        else:
            log.info("%s: the chain takes 1 to %d rows, the fused loop the others", model, self.chain.max_rows)

    def path(self, num_reqs: int, base_logits: torch.Tensor | None = None) -> tuple[str, str]:
        """The kernel that a batch takes, "chain" or "fused", and the reason in words."""
        if self.chain is None:
            return "fused", f"no chain: {self.chain_declined}"
        declined = self.chain.why_not_call(num_reqs, base_logits)
        if declined is not None:
            return "fused", f"not this batch: {declined}"
        return "chain", f"one launch for up to {self.chain.max_rows} request rows"

    def fork_noise(
        self,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Draw the chain's noise on a side stream; nothing to do for a batch that the fused loop takes."""
        if self.chain is not None and self.path(num_reqs)[0] == "chain":
            self.chain.fork_noise(idx_mapping, sample_pos, temperature, seeds, num_reqs)

    def join_noise(self) -> None:
        """Make the current stream wait for the forked noise, if any was forked."""
        if self.chain is not None and self.chain.noise_pending:
            self.chain.join_noise()

    def sample(
        self,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor,
        draft_tokens: torch.Tensor,
        *,
        query_per_row: int | None = None,
    ) -> None:
        """Draw every draft token of the batch; arguments and errors as for the chain's ``sample``."""
        rows = base_logits.shape[0]
        name, reason = self.path(rows, base_logits)
        if (name, reason) not in self._told:
            self._told.add((name, reason))
            log.info("%s: %d rows: %s: %s", self.config.MODEL, rows, name, reason)
        if query_per_row is None:
            query_per_row = self.config.QUERY_PER_ROW
        arguments: Sequence[torch.Tensor] = (
            base_logits,
            input_ids,
            idx_mapping,
            sample_pos,
            temperature,
            seeds,
            logits_cache,
            draft_tokens,
        )
        if name == "chain" and self.chain is not None:
            self.chain.sample(*arguments, query_per_row=query_per_row)
            return
        if self.chain is not None:
            self.chain.discard_noise()
        self.fused.sample(*arguments, query_per_row=query_per_row)

    def warmup(self) -> None:
        """Compile everything that a later call can need."""
        self.fused.warmup(cache_dtype=self.cache_dtype)
        if self.chain is not None:
            self.chain.warmup()

    def raise_if_failed(self) -> None:
        """Raise ChainTimeoutError when a chain launch has given up waiting."""
        if self.chain is not None:
            self.chain.raise_if_failed()
