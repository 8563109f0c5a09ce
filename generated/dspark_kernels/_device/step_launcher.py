"""The step sampler's mechanics, the same for every model: the loop over draft positions with one kernel behind each GEMM.

A model's launch.py subclasses StepLauncher and names its constants and kernels. All per-call state (seeds, positions,
temperatures, anchors, row mapping) is read from device memory by the kernels, so a captured graph has nothing of one
call baked in but addresses, strides and the row count.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch

from . import host, step_call
from .chain_call import ArgumentBlock
from .rank_group import RankGroup
from .step_call import CallViews, Exchange, Operands, Variant
from .vocab_parallel_head import VocabParallelHead

log = logging.getLogger("dspark_kernels")

Head = torch.Tensor | VocabParallelHead


class StepLauncher:
    """The engine's loop over the draft positions, each position's tail as one kernel; any number of request rows.

    The bias is the engine's own product, embedding times head, by cuBLAS and over all rows of the head that was given, its
    padding included, so that tokens and cache equal the engine's eager loop to the bit on rows without NaN. Per call: one
    launch that gathers the anchors' embeddings, and per position the product and one launch.

    With a ``VocabParallelHead`` each rank computes its columns only. Per position the ranks gather one packet a row, and
    a kernel picks the token; after the last position they gather their shards of the cache. Every rank must then make the
    same calls in the same order, warmup included, with the same rows; the results are the same on every rank.

    One sampler's calls, graph replays included, must follow each other by one stream or by events between streams: they
    share buffers. Calls from several host threads need a lock.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, on a CUDA device.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], last stride 1, same device, or this rank's
            ``VocabParallelHead``. Both weights are read where they lie, so a reload into the same storage is seen.
        max_reqs: number of request states, and the most rows of a call.
        cache_dtype: dtype of the logits cache: torch.bfloat16.
        group: the ranks' CPU process group, on which they agree before one waits for another; with a sharded head only.
        device_group: the ranks' process group of backend nccl, which gathers packets and shards; likewise.

    Raises:
        ValueError: with ``why_not``'s reason, when this sampler cannot be built; the same on every rank.
    """

    config: ClassVar[ModuleType]
    load_step: ClassVar[Callable[[], ModuleType]]

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: Head,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype,
        group: torch.distributed.ProcessGroup | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self._ranks = RankGroup(group)
        reason = self._ranks.agree(
            self.why_not(
                embed_weight,
                head_weight,
                max_reqs=max_reqs,
                cache_dtype=cache_dtype,
                group=group,
                device_group=device_group,
            )
        )
        if reason is not None:
            raise ValueError(f"{self.config.MODEL}: no step sampler: {reason}")
