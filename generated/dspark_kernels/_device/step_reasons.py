"""Why the step kernels decline a model, an engine's settings, or a group of ranks: each a function that returns a sentence."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import host, kernel_recipes, kernel_store
from .host import Expected
from .vocab_parallel_head import VocabParallelHead

CPU_BACKEND, DEVICE_BACKEND = "gloo", "nccl"
FP64_NOISE = "murmur3_64"  # the noise scheme that is drawn and compared in fp64
LEAST_CAPABILITY = (9, 0)


def why_not_platform(embed_weight: Any) -> str | None:
    """Why the kernels cannot be built here for the device of the weights, or None."""
    if not isinstance(embed_weight, torch.Tensor) or embed_weight.device.type != "cuda":
        return f"embed_weight: expected a tensor on a CUDA device, got {host.describe(embed_weight)}"
    facts = host.read_device(embed_weight.device)
    if facts.capability < LEAST_CAPABILITY:
        return f"platform: expected compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or later, got {facts}"
    return None


def why_not_engine(
    config: ModuleType, fp64_noise: bool | None, draft_topk: int | None, watermark: bool, adaptive_verification: bool
) -> str | None:
    """Why an engine's settings ask for other draft tokens than these kernels draw, or None."""
    if config.CACHE_DTYPES and fp64_noise not in (None, config.NOISE_SCHEME == FP64_NOISE):
        wanted = "fp64" if fp64_noise else "fp32"
        return f"fp64_noise: expected the engine's Gumbel noise as in noise.scheme, {config.NOISE_SCHEME}, got {wanted}"
    if draft_topk is not None:
        return f"draft_topk: expected drafts from the whole vocabulary (None), got the {draft_topk} best candidates"
    if watermark:
        return "watermark: expected drafts by Gumbel noise alone, got a watermark"
    if adaptive_verification:
        return "adaptive_verification: expected none, as no confidence or acceptance is computed, got it enabled"
    return None


def why_not_weights(config: ModuleType, embed_weight: torch.Tensor, head_weight: Any) -> str | None:
    """Why the Markov embedding (w1) or head (w2) does not fit, or None."""
    embedding = Expected(
        (torch.bfloat16,), (config.VOCAB_SIZE, config.RANK_DIM), (0,), contiguous=True, alignment=host.VECTOR_BYTES
    )
    found = embedding.misfit("embed_weight", embed_weight, embed_weight.device)
    if found is not None:
        return found.message
    if isinstance(head_weight, VocabParallelHead):
        if head_weight.vocab_size != config.DRAFT_VOCAB_SIZE:
            return f"head_weight: expected a head of {config.DRAFT_VOCAB_SIZE} rows, got {head_weight.vocab_size}"
        rows, head = head_weight.width, head_weight.storage
    else:
        rows, head = config.DRAFT_VOCAB_SIZE, head_weight
    found = Expected((torch.bfloat16,), (rows, config.RANK_DIM), (0,)).misfit("head_weight", head, embed_weight.device)
    return None if found is None else found.message


def why_not_cache(
    config: ModuleType, max_reqs: Any, cache_dtype: torch.dtype | None, logits_cache: Any, device: torch.device
) -> str | None:
    """Why the sizes or the logits cache do not fit, or None."""
    if not isinstance(max_reqs, int) or isinstance(max_reqs, bool) or max_reqs < 1:
        return f"max_reqs: expected an int of at least 1, got {max_reqs!r}"
    cached = [host.DTYPES[name] for name in config.CACHE_DTYPES] or [None]
    if cache_dtype not in cached:
        return f"cache_dtype: expected {' or '.join(config.CACHE_DTYPES) or None}, got {cache_dtype}"
    if logits_cache is None:
        return None
    if cache_dtype is None:
        return f"logits_cache: expected None for greedy drafts, got {host.describe(logits_cache)}"
    shape = (max_reqs, config.NUM_STEPS, config.VOCAB_SIZE)
    found = Expected((cache_dtype,), shape, (0, 2)).misfit("logits_cache", logits_cache, device)
    return None if found is None else found.message


def why_not_groups(head_weight: Any, group: Any, device_group: Any) -> str | None:
    """Why these process groups cannot share this head, or None."""
    if not isinstance(head_weight, VocabParallelHead) or head_weight.world == 1:
        if group is None and device_group is None:
            return None
        return "group, device_group: expected None without a sharded head, where every rank draws alone, got a group"
    for name, found, backend in (("group", group, CPU_BACKEND), ("device_group", device_group, DEVICE_BACKEND)):
        if found is None:
            return f"{name}: expected the process group of the {head_weight.world} ranks that share the head, got None"
        if torch.distributed.get_backend(found) != backend:
            return f"{name}: expected backend {backend}, got {torch.distributed.get_backend(found)}"
        if found.size() != head_weight.world:
            return f"{name}: expected {head_weight.world} ranks, as the head has, got {found.size()}"
        # Slices are gathered by rank: another one's rows would land in this one's columns.
        if found.rank() != head_weight.rank:
            return f"{name}: expected rank {found.rank()} to hold slice {found.rank()} of the head, got slice {head_weight.rank}"
    return None


def why_no_kernels(
    config: ModuleType,
    load_step: Callable[[], ModuleType],
    embed_weight: torch.Tensor,
    head_weight: Any,
    max_reqs: int,
    cache_dtype: torch.dtype | None,
) -> str | None:
    """Why some kernel can neither be found nor compiled for the weights' device, or None. Compiles nothing."""
    width, sharded = config.DRAFT_VOCAB_SIZE, False
    if isinstance(head_weight, VocabParallelHead):
        width, sharded = head_weight.width, head_weight.world > 1
    recipes = kernel_recipes.step_recipes(
        config, load_step, width=width, sharded=sharded, max_reqs=max_reqs, cache_dtype=cache_dtype
    )
    return kernel_store.why_none(recipes, embed_weight.device)
