"""What the vLLM hook relies on: the engine's functions that the kernels stand in for, and the attributes that it reads.

A kernel computes what the engine's loop computes, so the hook serves only an engine whose loop is the one it was
written against. Each function's digest is of its syntax, without comments, docstrings and formatting: another release
with the same functions is served, one with another loop, noise or rounding is declined, by the name of the function
that differs.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

RELEASE = "0.33.0"  # of vLLM, whose functions have the digests below
DIGEST_LENGTH = 12

_SPECULATOR = "v1/worker/gpu/spec_decode/dspark/speculator.py"
_DFLASH = "v1/worker/gpu/spec_decode/dflash/speculator.py"
_BASE = "v1/worker/gpu/spec_decode/speculator.py"
_GUMBEL = "v1/worker/gpu/sample/gumbel.py"
_LOGITS = "model_executor/layers/logits_processor.py"
_EMBEDDING = "model_executor/layers/vocab_parallel_embedding.py"
_QWEN = "model_executor/models/qwen3_dspark.py"
_GEMMA = "model_executor/models/gemma4_dspark.py"
_MUSE = "models/muse_spark/common/dspark.py"
_DEEPSEEK_V4 = "models/deepseek_v4/nvidia/dspark.py"
_DEEPSEEK_V41 = "models/deepseek_v41/nvidia/dspark.py"
_KIMI = "models/kimi_k3/nvidia/dspark_mla.py"
_PARALLEL = "distributed/parallel_state.py"

# The loop that the hook replaces, and what it calls: by file below the vllm package, name -> digest.
LOOP: Mapping[str, Mapping[str, str]] = {
    _SPECULATOR: {
        "DSparkSpeculator._sample_sequential": "1d0b82097667",
        "DSparkSpeculator._sample_logits": "60b1efb42715",
    },
    _BASE: {"DraftModelSpeculator._maybe_predict_acceptance": "3cf07b188a75"},
    _GUMBEL: {
        "_DRAFT_NOISE_SALT": "1ab2b38ba779",
        "spec_step_seed": "2e0aa03549c9",
        "_murmur3_rotl32": "a80bdab84d2f",
        "_murmur3_mix": "37ef62ac1c70",
        "_murmur3_fmix32": "9c4ded3bb28b",
        "murmur3_hash32": "495d9c1ed92f",
        "murmur3_uniform32": "5ad15d4b8d78",
        "_uniform64_from_random53": "cdc7d4dd4c4e",
        "murmur3_uniform64": "3d001f1d8a1d",
        "_log1p_neg_stable": "923d1c37332d",
        "gumbel_noised_argmax": "9b31a49e299e",
        "gumbel_block_argmax": "193331928be1",
        "_gumbel_sample_kernel": "bebd06785582",
        "gumbel_sample": "10533e09af59",
    },
    _LOGITS: {
        "LogitsProcessor.forward": "d6d197a7df0b",
        "LogitsProcessor._apply_head": "970e1de4f674",
        "LogitsProcessor._get_logits": "efd0bb96f0b3",
    },
    _QWEN: {
        "DSparkMarkovHead.embed": "8b9c7c61bad7",
        "DSparkMarkovHead.bias": "8d894eeb403f",
    },
}

# Methods of a draft model that decide what is drawn.
METHODS = (
    "compute_logits",
    "compute_draft_logits",
    "map_draft_to_target",
    "markov_embed",
    "markov_bias",
    "apply_output_logit_transform",
)

# The draft model classes that the hook serves, by file: class -> those METHODS that it defines itself -> digest.
DRAFTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    _QWEN: {
        "Qwen3DSparkForCausalLM": {
            "compute_draft_logits": "b911710018f7",
            "map_draft_to_target": "6adb11e19ec8",
            "markov_embed": "b9cdb44d3316",
            "markov_bias": "1e7f0f1dbfda",
        },
    },
    _GEMMA: {
        "Gemma4DSparkForCausalLM": {},
    },
    _MUSE: {
        "MuseSparkDSparkForCausalLM": {
            "compute_draft_logits": "4b73836a96e7",
            "apply_output_logit_transform": "9640ef0c46d2",
        },
    },
    _DEEPSEEK_V4: {
        "DSparkDeepseekV4ForCausalLM": {
            "compute_logits": "a6cb2764e181",
            "compute_draft_logits": "0101744c0d8f",
            "map_draft_to_target": "341be26dcac6",
            "markov_embed": "b9cdb44d3316",
            "markov_bias": "1e7f0f1dbfda",
        },
    },
    _DEEPSEEK_V41: {
        "DSparkDeepseekV4ForCausalLM": {
            "compute_logits": "a6cb2764e181",
            "compute_draft_logits": "0101744c0d8f",
            "map_draft_to_target": "341be26dcac6",
            "markov_embed": "b9cdb44d3316",
            "markov_bias": "1e7f0f1dbfda",
        },
    },
    _KIMI: {
        "K3DSparkForCausalLM": {
            "compute_logits": "b7bda3626694",
            "compute_draft_logits": "0101744c0d8f",
            "map_draft_to_target": "341be26dcac6",
            "markov_embed": "b9cdb44d3316",
            "markov_bias": "1e7f0f1dbfda",
        },
    },
}

# Attributes that the hook reads, and where the engine sets them: (file, class) -> names.
ATTRIBUTES: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_BASE, "DraftModelSpeculator"): (
        "acceptance_estimator",
        "draft_logits",
        "draft_tokens",
        "draft_watermarker",
        "dtype",
        "input_buffers",
        "max_num_reqs",
        "model",
        "num_speculative_steps",
        "seeds",
        "temperature",
        "use_acceptance_estimator",
        "use_fp64_gumbel",
    ),
    (_DFLASH, "DFlashSpeculator"): ("sample_idx_mapping", "sample_indices", "sample_pos"),
    (_SPECULATOR, "DSparkSpeculator"): ("num_query_per_req", "use_confidence_head"),
    ("v1/worker/gpu/input_batch.py", "InputBuffers"): ("input_ids",),
    (_QWEN, "DSparkMarkovHead"): ("markov_w1", "markov_w2"),
    (_QWEN, "Qwen3DSparkModel"): ("markov_head",),
    (_QWEN, "Qwen3DSparkForCausalLM"): ("draft_id_to_target_id", "lm_head", "logits_processor", "model"),
    (_GEMMA, "Gemma4DSparkForCausalLM"): ("draft_id_to_target_id", "lm_head", "logits_processor", "model"),
    (_MUSE, "MuseSparkDSparkForCausalLM"): (
        "draft_id_to_target_id",
        "lm_head",
        "logits_processor",
        "model",
        "output_multiplier",
        "output_soft_cap_temp",
    ),
    (_DEEPSEEK_V4, "DSparkDeepseekV4ForCausalLM"): ("lm_head", "logits_processor", "model"),
    (_DEEPSEEK_V41, "DSparkDeepseekV4ForCausalLM"): ("lm_head", "logits_processor", "model"),
    (_KIMI, "K3DSparkForCausalLM"): ("draft_id_to_target_id", "lm_head", "logits_processor", "model"),
    (_LOGITS, "LogitsProcessor"): ("head_dtype", "logits_as_input", "org_vocab_size", "scale", "soft_cap"),
    (_EMBEDDING, "VocabParallelEmbedding"): ("quant_method", "shard_indices", "tp_size"),
    (_EMBEDDING, "VocabParallelEmbeddingShardIndices"): (
        "num_added_elements_padded",
        "org_vocab_start_index",
        "padded_org_vocab_end_index",
        "padded_org_vocab_start_index",
    ),
    (_PARALLEL, "GroupCoordinator"): ("cpu_group", "rank_in_group", "world_size"),
}


# Those of the speculator.
SPECULATOR = tuple(
    name for (path, _), names in ATTRIBUTES.items() if path in (_BASE, _DFLASH, _SPECULATOR) for name in names
)


def module_name(path: str) -> str:
    """The module of a file below the vllm package."""
    return "vllm." + path.removesuffix(".py").replace("/", ".")


def why_loop_differs(package: Path) -> str | None:
    """Why the loop of an installed vLLM is not the one that the hook stands in for, or None. Imports nothing.

    Args:
        package: folder of the vllm package.
    """
    return next(filter(None, (_why_differs(package / path, names) for path, names in LOOP.items())), None)


def why_draft_differs(package: Path, path: str, name: str) -> str | None:
    """Why a draft model class is not the one that the hook knows, or None.

    Args:
        package: folder of the vllm package.
        path: the class's file below it.
        name: the class.
    """
    own = DRAFTS.get(path, {}).get(name)
    if own is None:
        return f"{name} of {path} is no draft model that vLLM {RELEASE} has"
    return _why_differs(package / path, {f"{name}.{method}": own.get(method) for method in METHODS})


def _why_differs(path: Path, wanted: Mapping[str, str | None]) -> str | None:
    try:
        found = digests(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        return f"{path.name}: {error}"
    for name, digest in wanted.items():
        if found.get(name) != digest:
            was = "none" if digest is None else f"the one of digest {digest}"
            return f"{path.name}: expected {name} as in vLLM {RELEASE}, {was}, got {found.get(name, 'none')}"
    return None


@lru_cache(maxsize=32)
def digests(source: str) -> Mapping[str, str]:
    """Digest of every function, method and module constant in a Python file, by qualified name."""
    found = {}
    waiting: list[tuple[str, ast.AST]] = [("", node) for node in ast.parse(source).body]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            waiting += [(f"{prefix}{node.name}.", child) for child in node.body]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[prefix + node.name] = _digest(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[prefix + node.targets[0].id] = _digest(node)
    return found


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(_text(node).encode()).hexdigest()[:DIGEST_LENGTH]


def _text(node: object) -> str:
    """Syntax as text, the same for every Python version: empty fields and texts that stand alone are left out."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name != "kind")
        return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(_text(item) for item in node if not _is_text(item))}]"
    return repr(node)


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
