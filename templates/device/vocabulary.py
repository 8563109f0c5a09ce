"""From draft to target ids: the d2t tensor of a checkpoint, checked once, as the table that kernels read."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from . import host

PIECE_COLUMNS = 8  # cache columns that a thread writes at a time


def why_not(config: ModuleType, d2t: Any, device: torch.device) -> str | None:
    """Why a d2t tensor does not fit a model, or None. Waits for the device once where there is one to look at.

    Args:
        config: the model's constants.
        d2t: int64 [DRAFT_VOCAB_SIZE], target id = draft id + d2t[draft id], on ``device``; None where draft and target ids
            are the same, which a tensor of zeros says too.
        device: of the weights.
    """
    draft, target, limit = config.DRAFT_VOCAB_SIZE, config.VOCAB_SIZE, config.SAMPLING_LIMIT
    if d2t is None:
        return f"d2t: expected int64 [{draft}] that maps draft to target ids, got None" if config.D2T else None
    found = host.Expected((torch.int64,), (draft,), contiguous=True).misfit("d2t", d2t, device)
    if found is not None:
        return found.message
    ids = d2t + torch.arange(draft, device=device)
    if not config.D2T:
        moved = int((d2t != 0).sum())
        return (
            f"d2t: expected None or zeros, as draft and target ids are the same, got {moved} others" if moved else None
        )
    low, high, distinct = (int(x) for x in (ids.min(), ids.max(), torch.unique(ids).numel()))
    if low < 0 or high >= target:
        return f"d2t: expected target ids in [0, {target}), got {low} to {high}"
    if distinct != draft:
        return f"d2t: expected {draft} different target ids, got {distinct}"
    if low >= limit:
        return f"d2t: expected a target id below the sampling limit, {limit}, got {low} as the lowest"
    return None


def target_ids(config: ModuleType, d2t: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """int32 [DRAFT_VOCAB_SIZE], the target id of every draft id; None for a model without d2t.

    Raises ValueError with `why_not`'s reason.
    """
    reason = why_not(config, d2t, device)
    if reason is not None:
        raise ValueError(f"{config.MODEL}: {reason}")
    if not config.D2T or d2t is None:
        return None
    return (d2t + torch.arange(config.DRAFT_VOCAB_SIZE, device=device)).to(torch.int32)


def draft_ids(config: ModuleType, targets: torch.Tensor | None) -> torch.Tensor | None:
    """int32 [VOCAB_SIZE, rounded up to 8], the draft id of every target id; None for a model without d2t.

    -1 for a target id that nothing drafts: no draft id has it, or it is at or above the sampling limit. The padding, which holds 0, is
    for kernels that read the ids of 8 neighbouring columns.

    Args:
        config: the model's constants.
        targets: int32 [DRAFT_VOCAB_SIZE] from `target_ids`.
    """
    if targets is None:
        return None
    padded = -(-config.VOCAB_SIZE // PIECE_COLUMNS) * PIECE_COLUMNS
    found = torch.zeros(padded, dtype=torch.int32, device=targets.device)
    found[: config.VOCAB_SIZE] = -1
    found[targets.long()] = torch.arange(targets.numel(), dtype=torch.int32, device=targets.device)
    found[config.SAMPLING_LIMIT : config.VOCAB_SIZE] = -1
    return found
