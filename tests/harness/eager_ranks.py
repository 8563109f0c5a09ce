"""The engine's loop with the head sharded over ranks by vocabulary: a baseline for the chain over several GPUs.

Per position a rank samples its shard as the eager loop samples the whole vocabulary, the ranks all-gather one packet a row
(score and token id), and each picks the best. After the loop they all-gather the shards of the logits cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton

from . import engine_math
from .cases import Case, Transform

Gather = Callable[[torch.Tensor, torch.Tensor], object]  # (out [world, *shape], this rank's [*shape])


class ShardedEagerLoop:
    """One rank's part of a case: draws into the case's own outputs, the same on every rank.

    Captured in a CUDA graph where `gather` can be: run once before, on every rank. All request states of the case must be
    live, as the shards of the whole cache travel; no transform and no reduced vocabulary.

    Args:
        case: the whole call, the same on every rank; the base logits of the whole vocabulary, of which the rank reads its own.
        rank: this rank.
        world: number of ranks; rank r owns the ids [r * W, (r + 1) * W) that exist, W = ceil(V / world).
        gather: collects a tensor of every rank, by rank, on the current stream.
    """

    def __init__(self, case: Case, rank: int, world: int, gather: Gather) -> None:
        live = set(case.idx_mapping.tolist())
        if live != set(range(case.max_reqs)):
            raise ValueError(f"case: expected all of {case.max_reqs} request states in the batch, got {sorted(live)}")
        if case.head_weight.shape[0] != case.vocab_size or case.transform != Transform():
            raise ValueError("case: expected logits without transform over the whole vocabulary")
        self.case, self._gather, self._width = case, gather, -(-case.vocab_size // world)
        self._first = min(rank * self._width, case.vocab_size)
        self._columns = slice(self._first, min(self._first + self._width, case.vocab_size))
        device, count = case.device, self._columns.stop - self._first
        if count == 0:
            raise ValueError(
                f"rank {rank}: expected a share of {case.vocab_size} ids, got none of {world} ranks' {self._width}"
            )
        blocks = triton.cdiv(count, engine_math.BLOCK)
        self._head = case.head_weight[self._columns]
        self._best_score = torch.empty(case.rows, blocks, dtype=torch.float32, device=device)
        self._best_id = torch.empty(case.rows, blocks, dtype=torch.int64, device=device)
        # fp64 holds an fp32 score and a token id exactly.
        self._packets = torch.empty(world, case.rows, 2, dtype=torch.float64, device=device)
        self._packet = torch.empty(case.rows, 2, dtype=torch.float64, device=device)
        shape = (case.max_reqs, case.num_steps, self._width)
        self._shard = torch.zeros(shape, dtype=case.logits_cache.dtype, device=device)
        self._shards = torch.empty((world, *shape), dtype=case.logits_cache.dtype, device=device)

    def __call__(self) -> None:
        """Launch the rank's whole loop on the current stream."""
        case = self.case
        prev = case.input_ids[:: case.query_per_row][: case.rows]
        for step in range(case.num_steps):
            self.propose(step, prev)
            self._gather(self._packets, self._packet)
            prev = self.pick(step, self._packets)
        self._gather(self._shards, self._shard)
        self.fill(self._shards)

    def propose(self, step: int, prev: torch.Tensor) -> torch.Tensor:
        """Sample the shard behind the tokens `prev`; returns this rank's packet, fp64 [rows, 2]: score and id."""
        case = self.case
        bias = F.linear(F.embedding(prev, case.embed_weight), self._head)
        logits = (case.base_logits[:, step, self._columns] + bias).to(case.logits_cache.dtype)
        engine_math.sample_blocks(
            self._best_score,
            self._best_id,
            logits,
            self._shard,
            case.idx_mapping,
            case.sample_pos,
            case.temperature,
            case.seeds,
            step=step,
            num_steps=case.num_steps,
            salt=case.draft_salt,
            first=self._first,
        )
        score, block = self._best_score.max(dim=-1, keepdim=True)
        self._packet[:, :1] = score
        self._packet[:, 1:] = self._best_id.gather(1, block)
        return self._packet

    def pick(self, step: int, packets: torch.Tensor) -> torch.Tensor:
        """The tokens int64 [rows] of every rank's packets, fp64 [world, rows, 2], written to the case as well."""
        best = packets[:, :, 0].argmax(dim=0, keepdim=True)
        tokens = packets[:, :, 1].gather(0, best).view(-1).long()
        self.case.draft_tokens[: self.case.rows, step] = tokens
        return tokens

    def fill(self, shards: torch.Tensor) -> None:
        """Write every rank's shard, [world, max_reqs, N, W], into the case's cache."""
        for rank, shard in enumerate(shards):
            columns = self.case.logits_cache[:, :, rank * self._width : (rank + 1) * self._width][
                ..., : self.case.vocab_size - rank * self._width
            ]
            columns.copy_(shard[..., : columns.shape[-1]])
