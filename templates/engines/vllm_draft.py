"""What the vLLM hook reads from a draft model and its speculator: why the engine's loop must draw, or what kernels must compute.

Nothing here builds or changes anything.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import vllm_contract
from .matching import DraftFacts, Transform

if TYPE_CHECKING:
    import torch

PACKAGE = "vllm"


def why_not(model: Any, speculator: Any) -> str | None:
    """Why the engine's loop must draw a draft, whichever kernels there are, or None."""
    return (
        why_contract_differs(model)
        or why_attribute_missing(model, speculator)
        or why_more_than_sampling(speculator)
        or why_other_arithmetic(model, speculator)
    )


def why_contract_differs(model: Any) -> str | None:
    """Why this engine's loop or draft model class is not the one that the kernels stand in for, or None."""
    package = vllm_folder()
    if package is None:
        return f"no installed {PACKAGE} package is found"
    reason = vllm_contract.why_loop_differs(package)
    if reason is not None:
        return reason
    known = {vllm_contract.module_name(path): path for path in vllm_contract.DRAFTS}
    draft = type(model)
    if draft.__module__ not in known:
        return f"{draft.__module__}.{draft.__qualname__} is no draft model that the hook knows"
    return vllm_contract.why_draft_differs(package, known[draft.__module__], draft.__qualname__)


def vllm_folder() -> Path | None:
    """Folder of the installed vLLM package."""
    spec = importlib.util.find_spec(PACKAGE)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def why_attribute_missing(model: Any, speculator: Any) -> str | None:
    """Which attribute of speculator or draft model the hook misses, or None."""
    needed = {
        "speculator": (speculator, vllm_contract.SPECULATOR),
        "input_buffers": (getattr(speculator, "input_buffers", None), ("input_ids",)),
        "draft model": (model, ("lm_head", "logits_processor", "model")),
        "draft model's backbone": (getattr(model, "model", None), ("markov_head",)),
    }
    for name, (owner, attributes) in needed.items():
        for attribute in attributes:
            if not hasattr(owner, attribute):
                return f"expected an attribute {attribute} of the {name}, got none"
    return None


def why_more_than_sampling(speculator: Any) -> str | None:
    """What the engine's loop does beside sampling, or None."""
    if speculator.use_confidence_head:
        return "a confidence head is used: the loop also collects Markov embeddings for it"
    if speculator.use_acceptance_estimator or speculator.acceptance_estimator is not None:
        return "an acceptance estimator is used: the loop also feeds it the logits"
    if speculator.draft_watermarker is not None:
        return "a draft watermarker samples in place of Gumbel noise"
    import torch

    if not isinstance(speculator.draft_logits, torch.Tensor | None):
        given = type(speculator.draft_logits).__name__
        return f"draft logits: expected a tensor, got {given}: a row mapping is not supported"
    return None


def why_other_arithmetic(model: Any, speculator: Any) -> str | None:
    """What the draft computes otherwise than any kernel, or None."""
    import torch

    processor, head = model.logits_processor, model.model.markov_head
    quantisation = type(head.markov_w2.quant_method).__name__
    if type(processor).__name__ != "LogitsProcessor" or processor.logits_as_input:
        return (
            f"logits processor: expected the engine's LogitsProcessor of hidden states, got {type(processor).__name__}"
        )
    if quantisation != "UnquantizedEmbeddingMethod":
        return f"Markov head: expected an unquantised weight, got {quantisation}"
    if head.markov_w1.weight.dtype != torch.bfloat16 or head.markov_w2.weight.dtype != torch.bfloat16:
        dtypes = f"{head.markov_w1.weight.dtype} and {head.markov_w2.weight.dtype}"
        return f"Markov embedding and head: expected torch.bfloat16, got {dtypes}"
    if processor.head_dtype not in (None, torch.bfloat16):
        return f"LM head dtype {processor.head_dtype}: the engine does not round the bias to bf16 with it"
    if processor.soft_cap is not None and processor.scale != 1.0:
        return "logits processor: scales after its soft cap, which no spec can say"
    if hasattr(model, "apply_output_logit_transform") and (processor.soft_cap is not None or processor.scale != 1.0):
        return "logits are transformed by the logits processor and once more before sampling, which no spec can say"
    if import_module(f"{PACKAGE}.envs").VLLM_BATCH_INVARIANT:
        return "batch-invariant mode: the kernels' sums differ from row count to row count"
    return None


def facts_of(model: Any, speculator: Any) -> DraftFacts:
    """What kernels depend on, read from a draft that `why_not` has no objection to."""
    head, processor = model.model.markov_head, model.logits_processor
    vocabulary, rank_dim = head.markov_w1.weight.shape
    draft_vocabulary = processor.org_vocab_size
    d2t = getattr(model, "draft_id_to_target_id", None)
    # A map of zero offsets over the whole vocabulary maps nothing.
    mapped = d2t is not None and (draft_vocabulary != vocabulary or bool(d2t.any()))
    return DraftFacts(
        vocabulary=vocabulary,
        draft_vocabulary=draft_vocabulary,
        d2t=mapped,
        rank_dim=rank_dim,
        num_steps=speculator.num_speculative_steps,
        transform=transform_of(model),
        noise_scheme="murmur3_64" if speculator.use_fp64_gumbel else "murmur3_32",
        base_dtype=dtype_name(base_dtype_of(model, speculator)),
        cache_dtype=None if speculator.draft_logits is None else dtype_name(speculator.draft_logits.dtype),
    )


def transform_of(model: Any) -> Transform:
    """What happens to logits between LM head and sampling, in the spec's words."""
    processor = model.logits_processor
    if hasattr(model, "apply_output_logit_transform"):
        placement, multiplier, cap = "sum", model.output_multiplier, model.output_soft_cap_temp
    else:
        # One processor serves LM head and Markov head: base logits arrive transformed, the bias is left to do.
        placement, multiplier, cap = "both", processor.scale, processor.soft_cap
    if multiplier == 1.0 and cap is None:
        return Transform()
    return Transform(placement, multiplier, cap, base_capped=placement == "both")


def base_dtype_of(model: Any, speculator: Any) -> torch.dtype:
    """Dtype of the base logits: the LM head's where the engine has set one, else the model's."""
    return model.logits_processor.head_dtype or speculator.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The spec's name of a dtype, or torch's for one that no spec has."""
    return {"torch.bfloat16": "bf16", "torch.float32": "fp32"}.get(str(dtype), str(dtype))
