"""Which generated model serves a draft: the one that agrees in all that the kernels depend on, whatever its name."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

DRAFT_SALT = 1 << 30  # what engines add to the position of a draft's noise
FP32_NOISE = "murmur3_32"
DTYPES = ("bf16", "fp32")  # of logits, that kernels take


class Transform(NamedTuple):
    """What happens to logits between the LM head and sampling; the spec's `logits.transform`."""

    placement: str = "none"  # "none", "sum", "base" or "both"
    multiplier: float = 1.0
    soft_cap: float | None = None
    base_capped: bool = False  # base logits arrive transformed


class DraftFacts(NamedTuple):
    """What kernels depend on, as an engine's draft has it."""

    vocabulary: int  # rows of the Markov embedding: target ids
    draft_vocabulary: int  # columns of the base logits: draft ids
    d2t: bool  # draft ids are mapped
    rank_dim: int
    num_steps: int
    transform: Transform
    noise_scheme: str
    base_dtype: str  # "bf16" or "fp32"; another name is no kernel's
    cache_dtype: str | None  # None: greedy drafts without a logits cache


class Match(NamedTuple):
    """The generated model that serves a draft, or why none does."""

    model: str | None
    reason: str


def find_model(facts: DraftFacts) -> Match:
    """The first generated model that serves a draft; else the nearest one's differences and the spec to write."""
    for what, dtype in (("base logits", facts.base_dtype), ("logits cache", facts.cache_dtype)):
        if dtype not in (*DTYPES, None):
            return Match(None, f"{what}: expected {' or '.join(DTYPES)}, got {dtype}")
    nearest: tuple[int, str, list[str]] | None = None
    for name, config in _configs():
        found = differences(config, facts)
        if not found:
            return Match(name, "same vocabulary, rank, steps, transform, dtypes and noise")
        if nearest is None or len(found) < nearest[0]:
            nearest = (len(found), name, found)
    closest = "" if nearest is None else f" (nearest: {nearest[1]}, where {'; '.join(nearest[2])})"
    return Match(None, f"no generated model fits{closest}; generate one from this spec:\n{spec_text(facts)}")


def _configs() -> Iterator[tuple[str, ModuleType]]:
    """Name and constants of every model of this package that has a sampler."""
    package = import_module("..", __package__)
    for name in package.MODELS:
        if "DraftSampler" in package.load(name).EXPORTS:
            yield name, import_module(f"..{name}.config", __package__)


def differences(config: ModuleType, facts: DraftFacts) -> list[str]:
    """In what a generated model's constants differ from a draft, in the spec's words; empty when it serves it."""
    wanted = {
        "vocabulary.target": (config.VOCAB_SIZE, facts.vocabulary),
        "vocabulary.draft": (config.DRAFT_VOCAB_SIZE, facts.draft_vocabulary),
        "vocabulary.d2t": (config.D2T, facts.d2t),
        "vocabulary.sampling_limit": (config.SAMPLING_LIMIT, facts.vocabulary),
        "markov.rank_dim": (config.RANK_DIM, facts.rank_dim),
        "draft.num_steps": (config.NUM_STEPS, facts.num_steps),
        "logits.transform": (
            Transform(config.TRANSFORM, config.MULTIPLIER, config.SOFT_CAP, config.BASE_CAPPED),
            rounded(facts.transform),
        ),
    }
    if facts.cache_dtype is not None:  # without a cache nothing is drawn with noise
        wanted["noise.scheme"] = (config.NOISE_SCHEME, facts.noise_scheme)
        wanted["noise.draft_salt"] = (config.DRAFT_SALT, DRAFT_SALT)
        wanted["noise.step_mix"] = (config.STEP_MIX, True)
    found = [
        f"{key} is {_show(ours)}, the draft's {_show(theirs)}"
        for key, (ours, theirs) in wanted.items()
        if ours != theirs
    ]
    if facts.base_dtype not in config.BASE_DTYPES:
        found.append(f"logits.base_dtypes are {list(config.BASE_DTYPES)}, the draft's {facts.base_dtype}")
    cache_dtypes = config.CACHE_DTYPES or (None,)
    if facts.cache_dtype not in cache_dtypes:
        found.append(f"logits.cache_dtypes are {list(config.CACHE_DTYPES)}, the draft's {facts.cache_dtype or 'none'}")
    return found


def rounded(transform: Transform) -> Transform:
    """A transform with its numbers in fp32, as kernels use them."""
    cap = transform.soft_cap
    return transform._replace(multiplier=fp32(transform.multiplier), soft_cap=None if cap is None else fp32(cap))


def fp32(value: float) -> float:
    """The nearest fp32 number."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _show(value: Any) -> str:
    if isinstance(value, Transform):
        numbers = f"multiplier {value.multiplier}, cap {value.soft_cap}, base capped {value.base_capped}"
        return f"{value.placement!r} ({numbers})"
    return repr(value)


def spec_text(facts: DraftFacts) -> str:
    """A spec for a draft, ready for specs/my_draft.toml."""
    # The chain scores in fp32; greedy drafts have no noise.
    if facts.noise_scheme != FP32_NOISE:
        kernels = ["fused", "step"]
    else:
        kernels = [*(["noise"] if facts.cache_dtype is not None else []), "chain", "fused", "step"]
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": "my_draft", "title": "My draft"},
        "vocabulary": {"target": facts.vocabulary},
        "markov": {
            "rank_dim": facts.rank_dim,
            "head_type": "vanilla",
            "embed_dtype": "bf16",
            "head_dtype": "bf16",
            "bias_rounding": "bf16",
        },
        "draft": {"num_steps": facts.num_steps, "sample_from_anchor": True, "max_rows": 8},
        "logits": {
            "base_dtypes": [facts.base_dtype],
            "cache_dtypes": [] if facts.cache_dtype is None else [facts.cache_dtype],
        },
        "logits.transform": {"placement": facts.transform.placement},
        "noise": {"scheme": facts.noise_scheme, "draft_salt": DRAFT_SALT, "step_mix": True},
        "parallel": {"tp": [1], "exchange": "mailbox"},
        "emit": {"kernels": kernels, "archs": ["sm_90a", "sm_100a"]},
        "provenance": {"source": "the engine's draft model"},
    }
    if facts.draft_vocabulary != facts.vocabulary:
        tables["vocabulary"]["draft"] = facts.draft_vocabulary
    if facts.d2t:
        tables["vocabulary"]["d2t"] = True
    if facts.transform.multiplier != 1.0:
        tables["logits.transform"]["multiplier"] = facts.transform.multiplier
    if facts.transform.soft_cap is not None:
        tables["logits.transform"]["soft_cap"] = facts.transform.soft_cap
    if facts.transform.base_capped:
        tables["logits.transform"]["base_capped"] = True
    lines = ["format = 1"]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
