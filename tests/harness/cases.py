"""Inputs of one sampling call, with poisoned outputs.

A case is reproducible from its seed on a given kind of device. What a kernel must not touch holds a value that no kernel
writes, so that a missing or a stray store shows.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

POISON_TOKEN = -7_777_777  # no token id, and not the -1 of a padding row
POISON_LOGIT = -54_272.0  # exact in bf16
DRAFT_SALT = 1 << 30
EXACT_UNIT = 16  # exact weights are multiples of 1/16 ...
EXACT_LARGEST = 4  # ... up to 4/16, so that a sum of 512 products is exact in fp32 in any order
TEMPERATURES = (0.0, 1.0, 0.7, 1.3, 0.05)

Layout = Literal["plain", "odd", "steps_first"]
Placement = Literal["none", "sum", "base", "both"]


@dataclass(frozen=True)
class Transform:
    """The output transform, as `logits.transform` in a spec: multiplier, then soft cap."""

    placement: Placement = "none"
    multiplier: float = 1.0
    soft_cap: float | None = None
    base_capped: bool = False  # whether base logits arrive transformed

    @classmethod
    def of(cls, config: Any) -> "Transform":
        """The transform of a generated model's config.py."""
        return cls(config.TRANSFORM, config.MULTIPLIER, config.SOFT_CAP, config.BASE_CAPPED)


@dataclass(frozen=True)
class Case:
    """One call's tensors, named and shaped as in the samplers' `sample`, and the constants that the oracle needs.

    V = vocab_size, D = draft_vocab_size, R = rank_dim, N = num_steps.
    """

    embed_weight: torch.Tensor  # bf16 [V, R], by target id
    head_weight: torch.Tensor  # bf16 [D, R], by draft id
    base_logits: torch.Tensor  # bf16 or fp32 [rows, N, D], last stride 1
    input_ids: torch.Tensor  # int32, anchor of row r at r * query_per_row
    idx_mapping: torch.Tensor  # int64 [rows * N], negative for padding
    sample_pos: torch.Tensor  # int64 [rows * N]
    temperature: torch.Tensor  # fp32 [max_reqs]
    seeds: torch.Tensor  # int64 [max_reqs]
    logits_cache: torch.Tensor | None  # bf16 or fp32 [max_reqs, N, >= V], poisoned; None for greedy drafts
    draft_tokens: torch.Tensor  # int64 [max_reqs, N], poisoned
    query_per_row: int
    sampling_limit: int
    draft_salt: int = DRAFT_SALT
    step_mix: bool = True
    transform: Transform = Transform()
    noise_scheme: str = "murmur3_32"
    d2t: torch.Tensor | None = None  # int64 [D], target id = draft id + d2t[draft id]; None where the ids are the same
    target_vocab: int | None = None  # V of a reduced draft vocabulary

    @property
    def rows(self) -> int:
        return self.base_logits.shape[0]

    @property
    def num_steps(self) -> int:
        return self.base_logits.shape[1]

    @property
    def vocab_size(self) -> int:
        """Target ids."""
        return self.draft_vocab_size if self.target_vocab is None else self.target_vocab

    @property
    def draft_vocab_size(self) -> int:
        return self.base_logits.shape[2]

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [D]: the target id of every draft id."""
        ids = torch.arange(self.draft_vocab_size, device=self.device)
        return ids if self.d2t is None else ids + self.d2t

    @property
    def rank_dim(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def max_reqs(self) -> int:
        return self.temperature.shape[0]

    @property
    def device(self) -> torch.device:
        return self.base_logits.device

    @property
    def call_arguments(self) -> tuple[torch.Tensor | None, ...]:
        """The positional arguments of a sampler's `sample`; outputs are this case's own tensors."""
        return (
            self.base_logits,
            self.input_ids,
            self.idx_mapping,
            self.sample_pos,
            self.temperature,
            self.seeds,
            self.logits_cache,
            self.draft_tokens,
        )

    def poison(self) -> None:
        """Fill both outputs in place with values that no kernel writes."""
        if self.logits_cache is not None:
            self.logits_cache.fill_(POISON_LOGIT)
        self.draft_tokens.fill_(POISON_TOKEN)

    def with_fresh_outputs(self) -> "Case":
        """The same inputs with new poisoned outputs of the same layout."""
        cache = None if self.logits_cache is None else _clone(self.logits_cache)
        fresh = replace(self, logits_cache=cache, draft_tokens=_clone(self.draft_tokens))
        fresh.poison()
        return fresh

    def replace(self, **changes: Any) -> "Case":
        """A case with other values in some fields; the remaining tensors are shared."""
        return replace(self, **changes)


def random_case(
    vocab_size: int,
    rank_dim: int,
    num_steps: int,
    rows: int,
    *,
    seed: int,
    base_dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    max_reqs: int | None = None,
    query_per_row: int | None = None,
    padding_rows: int = 0,
    temperatures: tuple[float, ...] = TEMPERATURES,
    layout: Layout = "plain",
    cache_columns: int | None = None,
    sampling_limit: int | None = None,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    draft_vocab_size: int | None = None,
    d2t: torch.Tensor | None = None,
    transform: Transform = Transform(),
    noise_scheme: str = "murmur3_32",
) -> Case:
    """A case with normally distributed weights and logits.

    Args:
        seed: of everything random in the case.
        cache_dtype: None for greedy drafts without a cache.
        max_reqs: number of request states; default: 3 more than the rows, so that some stay unused.
        query_per_row: default: num_steps.
        padding_rows: how many of the rows, the last ones, have state -1, stale positions and an anchor out of range.
        temperatures: given to the request states in turn.
        layout: of base logits and cache. "plain" is contiguous; "odd" gives rows an odd pitch and an address that is no
            multiple of 4 bytes (bf16) or 8 (fp32); "steps_first" has memory order [N, rows, V].
        cache_columns: width of the cache, at least vocab_size; default: vocab_size, or 5 more where the layout is odd.
        sampling_limit: default: vocab_size.
        weights: (embedding, head) to use instead of drawing them.
        draft_vocab_size: of a reduced draft vocabulary; its ids are mapped to random target ids, out of order.
        d2t: that map, instead of a random one.
    """
    generator = torch.Generator(device).manual_seed(seed)
    max_reqs = rows + 3 if max_reqs is None else max_reqs
    query_per_row = num_steps if query_per_row is None else query_per_row
    cache_columns = vocab_size + (5 if layout == "odd" else 0) if cache_columns is None else cache_columns

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device) * scale

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    drafts = vocab_size if draft_vocab_size is None else draft_vocab_size
    if weights is None:
        embed = normal(vocab_size, rank_dim, scale=rank_dim**-0.5).bfloat16()
        weights = embed, normal(drafts, rank_dim, scale=2.0).bfloat16()
    if d2t is None and draft_vocab_size is not None:
        chosen = torch.randperm(vocab_size, generator=generator, device=device)[:drafts]
        d2t = chosen - torch.arange(drafts, device=device)
    states = torch.randperm(max_reqs, generator=generator, device=device)[:rows].repeat_interleave(num_steps)
    anchors = integers(0, vocab_size, rows * query_per_row).int()
    positions = integers(1, 100_000, rows * num_steps)
    live = rows - padding_rows
    states[live * num_steps :] = -1
    anchors[live * query_per_row :] = integers(vocab_size, 2**31 - 1, padding_rows * query_per_row).int()
    anchors[live * query_per_row + query_per_row :] *= -1
    heat = torch.tensor(temperatures, dtype=torch.float32, device=device).repeat(max_reqs)[:max_reqs]
    case = Case(
        embed_weight=weights[0],
        head_weight=weights[1],
        base_logits=_laid_out(normal(rows, num_steps, drafts, scale=3.0).to(base_dtype), layout),
        input_ids=anchors,
        idx_mapping=states,
        sample_pos=positions,
        temperature=heat,
        seeds=integers(-(2**63), 2**63 - 1, max_reqs),
        logits_cache=None
        if cache_dtype is None
        else _laid_out(torch.empty(max_reqs, num_steps, cache_columns, dtype=cache_dtype, device=device), layout),
        draft_tokens=torch.empty(max_reqs, num_steps, dtype=torch.int64, device=device),
        query_per_row=query_per_row,
        sampling_limit=vocab_size if sampling_limit is None else sampling_limit,
        transform=transform,
        noise_scheme=noise_scheme,
        d2t=d2t,
        target_vocab=None if d2t is None else vocab_size,
    )
    case.poison()
    return case


def exact_weights(
    vocab_size: int,
    rank_dim: int,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    draft_vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(embedding, head), bf16 [vocab_size, rank_dim], the head with draft_vocab_size rows where that is given: every dot product of two rows is exact in fp32 in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (2, vocab_size, rank_dim)
    units = torch.randint(-EXACT_LARGEST, EXACT_LARGEST + 1, shape, generator=generator, device=device)
    embed, head = (units.float() / EXACT_UNIT).bfloat16()
    return embed.contiguous(), head[:draft_vocab_size].contiguous()


def exact_case(vocab_size: int, rank_dim: int, num_steps: int, rows: int, *, seed: int, **options: Any) -> Case:
    """`random_case` with `exact_weights`: results do not depend on the order of a kernel's sums."""
    device = options.get("device", "cpu")
    weights = options.pop("weights", None)
    if weights is None:
        drafts = options.get("draft_vocab_size")
        weights = exact_weights(vocab_size, rank_dim, seed=seed, device=device, draft_vocab_size=drafts)
    return random_case(vocab_size, rank_dim, num_steps, rows, seed=seed, weights=weights, **options)


def _laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same values in another memory layout; the last stride stays 1."""
    first, second, columns = tensor.shape
    if layout == "plain":
        return tensor
    if layout == "steps_first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    pitch = columns + 6 + columns % 2 + 1
    storage = torch.zeros(first * second * pitch + 1, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:].view(first, second, pitch)[:, :, :columns]
    view.copy_(tensor)
    return view


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same alignment, in storage of its own."""
    offset, storage = tensor.storage_offset(), tensor.untyped_storage()
    fresh = torch.empty(len(storage) // tensor.element_size(), dtype=tensor.dtype, device=tensor.device)
    return fresh.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)
