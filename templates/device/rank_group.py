"""The tensor-parallel ranks that share a vocabulary: their shards, and what they agree on before one waits for another.

A rank that fails alone would leave its peers waiting. So every step of a set-up that can fail on one rank is followed by a
collective on the CPU group in which each rank says how it went; all ranks then go on, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

CPU_BACKEND = "gloo"

T = TypeVar("T")


class Declined(ValueError):
    """A set-up that the ranks gave up together; the same message on every rank, naming the rank that could not go on."""


class Columns(NamedTuple):
    """The vocabulary columns of one rank: draft ids first .. first + width - 1. A rank may own none."""

    first: int
    width: int


def even_width(vocab_size: int, world: int) -> int:
    """Columns of a rank when the vocabulary is divided evenly, the last ranks taking what is left."""
    return -(-vocab_size // world)


def columns_of(vocab_size: int, shard_width: int, rank: int) -> Columns:
    """The columns [rank * shard_width, (rank + 1) * shard_width) that exist; none of them lies beyond the vocabulary."""
    first = min(rank * shard_width, vocab_size)
    return Columns(first, min(shard_width, vocab_size - first))


def why_not_width(vocab_size: int, world: int, shard_width: Any) -> str | None:
    """Why a shard width does not divide a vocabulary among ``world`` ranks, or None."""
    if not isinstance(shard_width, int) or isinstance(shard_width, bool) or shard_width < 1:
        return f"shard_width: expected an int of at least 1 or None, got {shard_width!r}"
    if shard_width * world < vocab_size:
        return (
            f"shard_width: expected at least {even_width(vocab_size, world)} columns on each of {world} ranks for a "
            f"vocabulary of {vocab_size}, got {shard_width}"
        )
    return None


def why_not_group(group: Any) -> str | None:
    """Why an argument is no group of ranks that can agree on the CPU, or None. None stands for one rank alone."""
    if group is None:
        return None
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        return f"group: expected a process group of this rank or None, got {type(group).__name__}"
    backend = torch.distributed.get_backend(group)
    if backend != CPU_BACKEND:
        return f"group: expected the ranks' CPU group, of backend {CPU_BACKEND}, got backend {backend}"
    return None


def first_reason(reasons: Sequence[str | None]) -> str | None:
    """Of what each rank says, by rank, the first reason with its rank; the bare reason where all ranks give the same one."""
    if None not in reasons and len(set(reasons)) == 1:
        return reasons[0]
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def first_difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first fact, in rank 0's order, that differs between two ranks, in words; None when all are equal."""
    for name, expected in facts[0].items():
        for rank, other in enumerate(facts):
            if other.get(name) != expected:
                return f"{name}: expected the same on every rank, got {expected} on rank 0, {other.get(name)} on rank {rank}"
    return None


class RankGroup:
    """The ranks of a CPU process group; without a group, one rank that agrees with itself.

    ``rank`` is this process's, ``size`` the number of ranks. Every method is a collective: all ranks call it, in the same
    order. The group's own timeout bounds the wait for a rank that does not come; torch then raises.

    Raises:
        ValueError: the group cannot agree on the CPU (``why_not_group``).
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        reason = why_not_group(group)
        if reason is not None:
            raise ValueError(reason)
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank. Any object that can be pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, reason: str | None) -> str | None:
        """None on every rank when no rank has a reason; else the first rank's reason, the same on every rank."""
        return first_reason(self.gather(reason))

    def compare(self, facts: Mapping[str, Any]) -> str | None:
        """None on every rank when the ranks' facts are equal; else the first difference, the same on every rank."""
        return first_difference(self.gather(dict(facts)))

    def attempt(self, what: str, action: Callable[[], T]) -> T:
        """Do what may fail on one rank alone; returns its result when it succeeded on every rank.

        Raises Declined on every rank when it failed on any. A barrier as well: no rank returns before all have done it.
        """
        result: T | None = None
        reason: str | None = None
        cause: Exception | None = None
        try:
            result = action()
        except Exception as error:  # whatever it is, the peers must hear of it
            reason, cause = f"{what}: {type(error).__name__}: {error}", error
        refused = self.agree(reason)
        if refused is not None:
            raise Declined(refused) from cause
        return result  # type: ignore[return-value]
