"""The samplers' calls as operators of torch.library, so that torch.compile takes them into its graphs.

Each mutates what it is given and returns nothing; its fake does nothing. A sampler is named by a number, since operators take
tensors and numbers. The plain methods stay the faster way where nothing is compiled: an operator passes by the dispatcher.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

# Of this copy of the package: others in the process, vendored ones among them, have operators of their own.
NAMESPACE = (__package__ or "").rpartition(".")[0].replace(".", "_")

STATE = "Tensor idx_mapping, Tensor sample_pos, Tensor temperature, Tensor seeds"
SAMPLE_SCHEMA = (
    f"(int sampler, Tensor(a!) order, Tensor base_logits, Tensor input_ids, {STATE}, Tensor(b!)? logits_cache, "
    "Tensor(c!) draft_tokens, int query_per_row) -> ()"
)
FORK_SCHEMA = f"(int sampler, Tensor(a!) order, {STATE}, int num_reqs) -> ()"
JOIN_SCHEMA = "(int sampler, Tensor(a!) order) -> ()"

_numbers = count()
_samplers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _sampler(number: int) -> Any:
    found = _samplers.get(number)
    if found is None:
        raise RuntimeError(f"sampler {number}: expected a sampler that is still alive, got none; keep its SamplerOps")
    return found


def _sample(
    sampler: int,
    order: torch.Tensor,
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
    state = (idx_mapping, sample_pos, temperature, seeds)
    outputs = (logits_cache, draft_tokens)
    _sampler(sampler).sample(base_logits, input_ids, *state, *outputs, query_per_row=query_per_row)


def _fork_noise(
    sampler: int,
    order: torch.Tensor,
    idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_reqs: int,
) -> None:
    _sampler(sampler).fork_noise(idx_mapping, sample_pos, temperature, seeds, num_reqs)


def _join_noise(sampler: int, order: torch.Tensor) -> None:
    _sampler(sampler).join_noise()


def _nothing(*arguments: Any) -> None:
    """What a fake does: outputs are arguments, whose shapes do not change."""


def _define(name: str, function: Any, schema: str, *mutated: str) -> Any:
    made = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=("order", *mutated), schema=schema)
    made.register_fake(_nothing)
    return made


sample = _define("sample", _sample, SAMPLE_SCHEMA, "logits_cache", "draft_tokens")
fork_noise = _define("fork_noise", _fork_noise, FORK_SCHEMA)
join_noise = _define("join_noise", _join_noise, JOIN_SCHEMA)


class SamplerOps:
    """A sampler's calls as operators: the same methods, for code under torch.compile.

    Args:
        sampler: a DraftSampler, or another sampler with ``fork_noise``, ``join_noise`` and ``sample``. Call its ``warmup``
            before anything is compiled or captured.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.number = sampler, next(_numbers)
        _samplers[self.number] = sampler
        # Written by no one: every call names it as mutated, so that a compiler keeps a sampler's calls in their order.
        self.order = torch.zeros(1, dtype=torch.int32, device=sampler.device)

    def fork_noise(
        self,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Draw the noise of the next ``sample`` on a side stream."""
        fork_noise(self.number, self.order, idx_mapping, sample_pos, temperature, seeds, num_reqs)

    def join_noise(self) -> None:
        """Make the current stream wait for the forked noise."""
        join_noise(self.number, self.order)

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
        """Draw every draft token of the batch; arguments and errors as for the sampler's own ``sample``."""
        state = (idx_mapping, sample_pos, temperature, seeds)
        distance = self.sampler.config.QUERY_PER_ROW if query_per_row is None else query_per_row
        sample(self.number, self.order, base_logits, input_ids, *state, logits_cache, draft_tokens, distance)
