"""The step kernels over several ranks on one GPU: the ranks run in turn, and copies stand for the all-gathers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from .cases import Case
from .known_cases import Known, Outputs
from .oracle import same_bits
from .rank_cases import RANK_CASES, WORLDS

# The known cases of ranks that the step kernels have: a power of two that divides the vocabulary.
SHARED: list[tuple[Known, int]] = [
    (known, world)
    for known in RANK_CASES
    for world in WORLDS[known.name]
    if world & (world - 1) == 0 and known.model["vocab_size"] % world == 0
]

Gather = Callable[[torch.Tensor, Sequence[torch.Tensor]], object]


def stack(gathered: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """All ranks' tensors, by rank, into one."""
    torch.stack(list(parts), out=gathered)


class EmulatedStepSampler:
    """`world` step samplers, each with its slice of one head, that advance from gather to gather together.

    Args:
        launch: a generated model's launch.py.
        weights: embedding and whole head.
        world: number of ranks.
        max_reqs: request states, and the most rows of a call.
        cache_dtype: of the logits cache; None for greedy drafts.
        d2t: of a reduced draft vocabulary.
        block: vocabulary columns of a CTA for every row count; None takes the model's table.
    """

    def __init__(
        self,
        launch: Any,
        weights: tuple[torch.Tensor, torch.Tensor],
        *,
        world: int,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        block: int | None = None,
    ) -> None:
        embed, head = weights
        constants = vars(launch.StepSampler.config)
        if block is not None:
            constants = constants | {"STEP_BLOCKS": (), "STEP_DEFAULT_BLOCK": block}

        class Rank(launch.StepSampler):  # type: ignore[name-defined, misc]
            config = SimpleNamespace(**constants)

            @classmethod
            def why_not_ranks(cls, head_weight: Any, group: Any, device_group: Any) -> str | None:
                """Emulated ranks have no process groups."""
                return None

        self.ranks = []
        for rank in range(world):
            part = launch.VocabParallelHead(head, vocab_size=constants["DRAFT_VOCAB_SIZE"], rank=rank, world=world)
            sampler = Rank(embed, part, max_reqs=max_reqs, cache_dtype=cache_dtype, d2t=d2t)
            sampler.compile()
            self.ranks.append(sampler)

    def sample(self, case: Case, *, shards: bool = False, gather: Gather = stack) -> list[Case]:
        """Draw a case on every rank; one case with outputs of its own per rank.

        Args:
            case: inputs; its outputs are not touched.
            shards: give each rank its own columns of the base logits alone, not all of them.
            gather: stands for the all-gather of one rank.
        """
        outputs = [case.with_fresh_outputs() for _ in self.ranks]
        loops = []
        for sampler, mine in zip(self.ranks, outputs, strict=True):
            columns = slice(sampler.first, sampler.first + sampler.width) if shards else slice(None)
            base, *others = mine.call_arguments
            loops.append(sampler.steps(base[:, :, columns], *others, query_per_row=mine.query_per_row))
        for exchanges in zip(*loops, strict=True):
            for exchange in exchanges:
                gather(exchange.gathered, [other.own for other in exchanges])
        return outputs


def draw_alike(launch: Any, world: int, case: Case) -> Outputs:
    """What `world` emulated ranks draw for a case; AssertionError unless all of them draw the same."""
    weights, options = (case.embed_weight, case.head_weight), {"max_reqs": case.max_reqs}
    assert case.logits_cache is not None
    ranks = EmulatedStepSampler(launch, weights, world=world, cache_dtype=case.logits_cache.dtype, **options)
    first, *others = ranks.sample(case)
    for rank, other in enumerate(others, 1):
        assert torch.equal(other.draft_tokens, first.draft_tokens), rank
        assert same_bits(other.logits_cache, first.logits_cache), rank
    return first.draft_tokens, first.logits_cache
