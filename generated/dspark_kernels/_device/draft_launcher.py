"""Chain, step kernels or fused loop: the sampler that takes every batch, and says which kernels draw it and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch

from .chain_launcher import ChainLauncher
from .step_launcher import StepLauncher
from .vocab_parallel_head import VocabParallelHead

log = logging.getLogger("dspark_kernels")


class Choice(NamedTuple):
    """One of the kernels that could draw a batch: whether it takes it, and why or why not."""

    kernel: str  # "chain", "step" or "fused"
    takes: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {'takes it' if self.takes else 'not'}: {self.reason}"


class DraftLauncher:
    """Draws draft tokens by the first of chain, step kernels and fused loop that takes the batch, and says which and why.

    The chain is the fastest for its few rows; the step kernels take more rows, and draw what the engine's own loop draws to
    the bit, because their bias is the engine's product; the fused loop takes what is left, also on the CPU, in Triton's
    interpreter. The choice depends on the weights, the device, the row count and the base logits' dtype and shape: never on
    values. ``explain`` tells it, and ``served`` counts the calls of ``sample`` by kernel; a graph's replays pass by it.

    With a ``group`` of several ranks building a sampler, ``warmup`` and every ``sample`` are collectives.

    Args:
        embed_weight: Markov embedding, as for the samplers.
        head_weight: the whole Markov head, or this rank's ``VocabParallelHead``, which chain and step kernels share out. No
            fused loop stands behind a sharded head.
        max_reqs: number of request states, and the most rows of a call.
        cache_dtype: dtype of the logits cache; None for a model that drafts greedily, without one.
        d2t: int64 offsets from draft to target ids, for a reduced draft vocabulary.
        group: the ranks' CPU process group; None for one rank alone.
        device_group: the same ranks' group of backend nccl, by which the step kernels gather; with a sharded head only.
        engine_bias: take the step kernels alone, so that every draft is the engine's to the bit.
        chain_options: the chain's own arguments: device_name, timeout_ms, pdl, shard_width, check_ranks. Where their
            conditions do not hold there is no chain.

    Raises:
        ValueError: no kernel is left for what was asked: says why each declined.
    """

    config: ClassVar[ModuleType]
    chain_sampler: ClassVar[type[ChainLauncher] | None] = None
    step_sampler: ClassVar[type[StepLauncher] | None] = None
    fused_loop: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor | VocabParallelHead,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
        engine_bias: bool = False,
        **chain_options: Any,
    ) -> None:
        self.device, self.max_reqs, self.cache_dtype = embed_weight.device, max_reqs, cache_dtype
        self.served: Counter[str] = Counter()
        self.declined: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()
        sharded, rows = False, head_weight
        if isinstance(head_weight, VocabParallelHead):
            sharded, rows = head_weight.world > 1, head_weight.weight
            chain_options |= {"shard_width": head_weight.width} if sharded else {}
        shared: dict[str, Any] = {"max_reqs": max_reqs} | ({} if d2t is None else {"d2t": d2t})
        cached = shared | {"cache_dtype": cache_dtype}
        only_step = "engine_bias keeps to the engine's product for the bias" if engine_bias else None
        whole = "the head is sharded: no rank has all of its rows" if sharded else None
        self.chain: ChainLauncher | None = self._build(
            "chain", self.chain_sampler, only_step, embed_weight, rows, group=group, **chain_options, **cached
        )
        # With a whole head every rank draws alone: there is nothing to gather.
        groups = {"group": group, "device_group": device_group} if sharded else {}
        self.step: StepLauncher | None = self._build(
            "step", self.step_sampler, None, embed_weight, head_weight, **groups, **cached
        )
        self.fused: Any = self._build("fused", self.fused_loop, only_step or whole, embed_weight, rows, **shared)
        if (engine_bias or sharded) and self.step is None:
            reasons = "; ".join(f"{kernel}: {reason}" for kernel, reason in self.declined.items())
            raise ValueError(f"{self.config.MODEL}: expected the step kernels to take every batch, but {reasons}")

    def _build(
        self, kernel: str, make: Callable[..., Any] | None, declined: str | None, *args: Any, **options: Any
    ) -> Any:
        """A sampler, or None with the reason noted and logged. The fused loop, which others rely on, raises its own."""
        if make is None:
            declined = f"the model has no {kernel} kernel"
        if declined is None and make is not None:
            try:
                return make(*args, **options)
            except ValueError as error:
                if kernel == "fused":
                    raise
                # Whoever reads the reason is told the kernel beside it.
                declined = str(error).removeprefix(f"{self.config.MODEL}: no {kernel} sampler: ")
        self.declined[kernel] = str(declined)
        log.info("%s: no batch takes %s: %s", self.config.MODEL, kernel, declined)
        return None

    def explain(self, num_reqs: int, base_logits: torch.Tensor | None = None) -> tuple[Choice, ...]:
        """What each kernel says of a batch, in the order of preference; the first that takes it draws it.

        Args:
            num_reqs: request rows of the (padded) batch.
            base_logits: the batch's base logits; without them the row count alone is judged.
        """
        return tuple(self._choices(num_reqs, base_logits))

    def _choices(self, num_reqs: int, base_logits: torch.Tensor | None) -> Iterator[Choice]:
        for kernel, sampler, reason in (
            ("chain", self.chain, "one launch for few request rows"),
            ("step", self.step, "one kernel a position behind the engine's product, for any number of rows"),
        ):
            if sampler is None:
                yield Choice(kernel, False, self.declined[kernel])
                continue
            declined = sampler.why_not_call(num_reqs, base_logits)
            yield Choice(kernel, declined is None, declined or reason)
        takes = self.fused is not None
        reason = "one launch a position, for any number of rows" if takes else self.declined["fused"]
        yield Choice("fused", takes, reason)

    def path(self, num_reqs: int, base_logits: torch.Tensor | None = None) -> tuple[str, str]:
        """The kernel that a batch takes, "chain", "step" or "fused", and the reason in words.

        The reason says why each kernel that comes before it was passed over.

        Raises:
            ValueError: no kernel takes the batch.
        """
        passed: list[str] = []
        for choice in self._choices(num_reqs, base_logits):
            if choice.takes:
                return choice.kernel, "; ".join([choice.reason, *passed])
            passed.append(f"no {choice.kernel}: {choice.reason}")
        raise ValueError(f"{self.config.MODEL}: expected a batch that a kernel takes: {'; '.join(passed)}")

    def fork_noise(
        self,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Draw the chain's noise on a side stream; nothing to do for a batch that others take, which draw their own."""
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
        logits_cache: torch.Tensor | None,
        draft_tokens: torch.Tensor,
        *,
        query_per_row: int | None = None,
    ) -> None:
        """Draw every draft token of the batch; arguments and errors as for the chain's ``sample``."""
        rows = base_logits.shape[0]
        kernel, reason = self.path(rows, base_logits)
        if (kernel, reason) not in self._told:
            self._told.add((kernel, reason))
            log.info("%s: %d rows: %s: %s", self.config.MODEL, rows, kernel, reason)
        if kernel != "chain" and self.chain is not None:
            self.chain.discard_noise()
        sampler = {"chain": self.chain, "step": self.step, "fused": self.fused}[kernel]
        sampler.sample(
            base_logits,
            input_ids,
            idx_mapping,
            sample_pos,
            temperature,
            seeds,
            logits_cache,
            draft_tokens,
            query_per_row=self.config.QUERY_PER_ROW if query_per_row is None else query_per_row,
        )
        self.served[kernel] += 1

    def accepts_shard(self, shard: tuple[int, int] | None) -> bool:
        """Whether base logits can be this rank's columns alone, in every batch and on every rank. A collective.

        Args:
            shard: first column and number of columns of this rank's LM head; None where it has none.
        """
        if self.step is None or self.step.world == 1:
            return False
        return self.step.accepts_shard(shard)

    def warmup(self) -> None:
        """Compile everything that a later call can need. With several ranks a collective."""
        if self.fused is not None:
            self.fused.warmup(cache_dtype=self.cache_dtype)
        if self.chain is not None:
            self.chain.warmup()
        if self.step is not None:
            self.step.warmup()

    def raise_if_failed(self) -> None:
        """Raise ChainTimeoutError when a chain launch has given up waiting."""
        if self.chain is not None:
            self.chain.raise_if_failed()
