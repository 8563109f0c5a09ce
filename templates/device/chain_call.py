"""One call of the chain kernel: what its tensors must look like, and the arguments that it gives the kernel.

Nothing here launches or synchronises; every refusal says what was expected and given.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import host
from .chain_share import OFFSETS, Share
from .cubin_launch import CubinKernel
from .host import Expected, Misfit

RANK_STRIDES = ("base_rank_stride", "token_rank_stride")  # between two emulated ranks
BATCH_SHAPE_BITS = 28  # of the word that ranks compare in a debugging build


class Expectations:
    """What the tensors of a call must look like, by row count; made once, so that a call only compares.

    Args:
        config: the model's config.py.
        device: device of every tensor.
        max_rows: most request rows of a call.
        max_reqs: number of request states.
        cache_dtype: dtype of the logits cache.
        share: what a launch covers. With emulated ranks the cache and the draft tokens have one more dimension, the
            rank's, in front, and base logits are whole; with one of several ranks they may be its shard.
    """

    def __init__(
        self,
        config: ModuleType,
        device: torch.device,
        *,
        max_rows: int,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        share: Share,
    ) -> None:
        steps = config.NUM_STEPS
        self.device, self.max_rows, self.num_steps, self.width = device, max_rows, steps, config.DRAFT_VOCAB_SIZE
        self.share, self.takes_shards = share, share.world > 1 and not share.emulated
        self.base_dtypes = tuple(host.DTYPES[name] for name in config.BASE_DTYPES)
        ranks = (share.world,) if share.emulated else ()
        at = len(ranks)
        counts = range(max_rows + 1)
        self.base_logits = [Expected(self.base_dtypes, (rows, steps, self.width), extendable=(2,)) for rows in counts]
        self.base_shard = [Expected(self.base_dtypes, (rows, steps, share.width), extendable=(2,)) for rows in counts]
        self.samples = [Expected((torch.int64,), (rows * steps,), extendable=(0,), contiguous=True) for rows in counts]
        self.draft_tokens = [Expected((torch.int64,), (*ranks, rows, steps), extendable=(at,)) for rows in counts]
        self.temperature = Expected((torch.float32,), (max_reqs,), extendable=(0,), contiguous=True)
        self.seeds = Expected((torch.int64,), (max_reqs,), extendable=(0,), contiguous=True)
        cached = (*ranks, max_reqs, steps, config.VOCAB_SIZE)
        self.logits_cache: Expected | None = None  # greedy drafts fill none
        if cache_dtype is not None:
            self.logits_cache = Expected((cache_dtype,), cached, extendable=(at, at + 2))

    def is_shard(self, base_logits: torch.Tensor) -> bool:
        """Whether base logits are one rank's shard: with several ranks, those of fewer columns than the vocabulary."""
        return self.takes_shards and base_logits.shape[-1] < self.width

    def base_logits_misfit(self, rows: int, base_logits: Any) -> Misfit | None:
        """Why base logits do not fit a call of ``rows`` rows, or None. Values are not looked at.

        The last entry must lie less than 2^31 entries behind the first. torch has no negative strides.
        """
        shard = isinstance(base_logits, torch.Tensor) and base_logits.dim() == 3 and self.is_shard(base_logits)
        wanted = self.base_shard if shard else self.base_logits
        found = wanted[rows].misfit("base_logits", base_logits, self.device)
        if found is None and shard and base_logits.shape[2] > self.share.shard_width:
            whole, most = f"all {self.width} columns", self.share.shard_width
            found = Misfit(
                ValueError,
                f"base_logits: expected {whole}, or a shard of {self.share.width} to {most}, got {host.describe(base_logits)}",
            )
        if found is not None:
            return found
        row_stride, pos_stride, _ = base_logits.stride()
        columns = self.share.width if shard else self.width
        entries = (rows - 1) * row_stride + (self.num_steps - 1) * pos_stride + columns
        if entries < OFFSETS:
            return None
        return Misfit(
            ValueError,
            f"base_logits: expected a span of fewer than {OFFSETS} entries from the first to the last, got {entries}: "
            f"{host.describe(base_logits)}",
        )

    def check_state(
        self,
        rows: int,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """Check what the noise depends on. Raises TypeError or ValueError."""
        self.samples[rows].check("idx_mapping", idx_mapping, self.device)
        self.samples[rows].check("sample_pos", sample_pos, self.device)
        self.temperature.check("temperature", temperature, self.device)
        self.seeds.check("seeds", seeds, self.device)

    def check(
        self,
        rows: int,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor | None,
        draft_tokens: torch.Tensor,
        query_per_row: int,
    ) -> None:
        """Check every argument of a call, as documented at the sampler's ``sample``. Raises TypeError or ValueError."""
        host.check_int("rows of base_logits", rows, 1, self.max_rows)
        found = self.base_logits_misfit(rows, base_logits)
        if found is not None:
            raise found.error(found.message)
        host.check_int("query_per_row", query_per_row, 1, (OFFSETS - 1) // max(rows - 1, 1))
        anchors = Expected((torch.int32,), ((rows - 1) * query_per_row + 1,), (0,), contiguous=True)
        anchors.check("input_ids", input_ids, self.device)
        self.check_state(rows, idx_mapping, sample_pos, temperature, seeds)
        if self.logits_cache is not None:
            self.logits_cache.check("logits_cache", logits_cache, self.device)
        elif logits_cache is not None:
            raise ValueError(f"logits_cache: expected None for greedy drafts, got {host.describe(logits_cache)}")
        self.draft_tokens[rows].check("draft_tokens", draft_tokens, self.device)

    def call_arguments(
        self,
        rows: int,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        logits_cache: torch.Tensor | None,
        draft_tokens: torch.Tensor,
        query_per_row: int,
    ) -> dict[str, int]:
        """The kernel's arguments that a checked call brings, by name: device addresses, strides in elements, flags."""
        share = self.share
        base_row_stride, base_pos_stride, _ = base_logits.stride()
        first = 0 if self.is_shard(base_logits) else share.first
        base_vector = host.vector_ok(base_logits, first)
        arguments = dict.fromkeys(RANK_STRIDES, 0)
        if share.emulated:
            base_vector &= host.vector_step(share.shard_width, base_logits)
            arguments["base_rank_stride"] = share.shard_width
            arguments["token_rank_stride"] = draft_tokens.stride(0)
        return (
            arguments
            | self._cache_arguments(logits_cache)
            | {
                "base": base_logits.data_ptr() + first * base_logits.element_size(),
                "base_row_stride": base_row_stride,
                "base_pos_stride": base_pos_stride,
                "base_vector": base_vector,
                "input_ids": input_ids.data_ptr(),
                "query_per_row": query_per_row,
                "idx_mapping": idx_mapping.data_ptr(),
                "temperature": temperature.data_ptr(),
                "draft_tokens": draft_tokens.data_ptr(),
                "token_stride": draft_tokens.stride(-2),
                "rows": rows,
            }
        )

    def _cache_arguments(self, logits_cache: torch.Tensor | None) -> dict[str, int]:
        if logits_cache is None:
            return dict.fromkeys(
                ("cache", "cache_req_stride", "cache_pos_stride", "cache_vector", "cache_rank_stride"), 0
            )
        share = self.share
        cache_req_stride, cache_pos_stride, _ = logits_cache.stride()[-3:]
        cache_vector = host.vector_ok(logits_cache)
        if share.world > 1:
            # The other ranks' columns start a multiple of the shard width further on.
            cache_vector &= host.vector_step(share.shard_width, logits_cache)
        return {
            "cache": logits_cache.data_ptr(),
            "cache_req_stride": cache_req_stride,
            "cache_pos_stride": cache_pos_stride,
            "cache_vector": cache_vector,
            "cache_rank_stride": logits_cache.stride(0) if share.emulated else 0,
        }

    def batch_shape(self, rows: int, base_logits: torch.Tensor, query_per_row: int) -> int:
        """What ranks of one group must agree on in a call, in BATCH_SHAPE_BITS bits. Base logits may be whole on one rank
        and a shard on another; their dtype may not differ, nor may the anchors' distance."""
        word = (query_per_row * len(host.DTYPES) + self.base_dtypes.index(base_logits.dtype)) * (
            self.max_rows + 1
        ) + rows
        return word % (1 << BATCH_SHAPE_BITS)


class Variant(NamedTuple):
    """One compiled chain kernel and the device state that belongs to it alone."""

    kernel: CubinKernel
    ctas: int  # of one rank
    # uint64 words of each rank of the launch, zeroed once: every launch tags its own records. Behind them staged logits (chain_fill.py).
    records: torch.Tensor
    epoch: torch.Tensor  # int32, one of each rank of the launch, zeroed once, counted by the kernel
    number: int  # of this build among the sampler's, the same on every rank
