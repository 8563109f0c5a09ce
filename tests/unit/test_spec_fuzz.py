"""Any spec, whatever it combines: either errors in words, or a plan and kernels that are Python. Never a traceback."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dsparkgen.device import DeviceSpec, load_devices
from dsparkgen.locate import dotted
from dsparkgen.render import render
from dsparkgen.spec import ModelSpec, read_spec

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"

numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1.0, -0.5, 0.19611613513818404, 30.0, 1e-45, 1e38, 2.0**-126, 2.0**126, 2.0**127]),
)
vocabularies = st.one_of(
    st.sampled_from([2, 17, 255, 256, 257, 65_536, 129_280, 202_048, 262_144, 1 << 24]), st.integers(2, 1 << 24)
)
one_dtype = st.sampled_from(["bf16", "fp32"])
dtypes = st.one_of(st.lists(one_dtype, min_size=1, max_size=2, unique=True), st.lists(one_dtype, max_size=2))


KERNELS = [["noise", "chain", "fused", "step"], ["noise", "chain", "fused"], ["fused", "step"], ["fused"], ["noise"]]
WIDE_KERNELS = [["fused", "step"], ["fused"]]  # that take fp64 noise
GREEDY_KERNELS = [["chain", "fused", "step"], ["chain", "fused"]]
ROLES = ("score", "score64", "token", "nan", "spare")
BLOCKS = (1024, 2048, 4096, 8192)
steps = st.fixed_dictionaries(
    {},
    optional={
        "block_sizes": st.lists(
            st.fixed_dictionaries({"max_rows": st.integers(0, 64), "block": st.sampled_from([*BLOCKS, 512, 3000])}),
            max_size=9,
        ),
        "default_block": st.sampled_from([*BLOCKS, 3000, 16384]),
        "pdl_max_rows": st.one_of(st.integers(0, 4096), st.just(-1)),
    },
)
packets = st.fixed_dictionaries(
    {},
    optional={
        "words": st.sampled_from([2, 4, 6, 16, 3, 18]),
        "fields": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(ROLES), "word": st.integers(0, 16)}, optional={"words": st.integers(1, 3)}
            ),
            max_size=5,
        ),
    },
)


@cache
def _devices() -> dict[str, DeviceSpec]:
    """One GPU with much shared memory and one with little."""
    known = load_devices(ROOT)
    return {name: known[name] for name in ("h200", "rtx_pro_6000")}


@cache
def _base() -> dict[str, Any]:
    return read_spec(ROOT / "specs" / "deepseek_v41.toml").model_dump()


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Values of every key that changes what is generated, most of them in range, alone or in combinations that make no sense."""
    target = draw(vocabularies)
    vocabulary: dict[str, Any] = {"target": target, "d2t": draw(st.booleans())}
    if draw(st.booleans()):
        vocabulary["draft"] = draw(st.integers(1, target))
    if draw(st.booleans()):
        vocabulary["sampling_limit"] = draw(st.integers(1, target + 1))
    transform: dict[str, Any] = {"placement": draw(st.sampled_from(["none", "sum", "base", "both"]))}
    for key, values in (("multiplier", numbers), ("soft_cap", numbers), ("base_capped", st.booleans())):
        if draw(st.booleans()):
            transform[key] = draw(values)
    kernels = draw(st.lists(st.sampled_from(["noise", "chain", "fused", "step"]), min_size=1, unique=True))
    tables = {"packet": draw(st.none() | packets), "step": draw(st.none() | steps)}
    base = {key: value for key, value in _base().items() if key not in tables}
    return (
        base
        | {key: value for key, value in tables.items() if value is not None}
        | {
            "vocabulary": vocabulary,
            "markov": {
                "rank_dim": 16 * draw(st.integers(3, 33)),
                "head_type": draw(st.sampled_from(["vanilla", "vanilla", "gated", "rnn"])),
                "bias_rounding": draw(st.sampled_from(["bf16", "bf16", "none"])),
            },
            "draft": {
                "num_steps": draw(st.integers(1, 16)),
                "sample_from_anchor": draw(st.booleans()),
                "top_k": draw(st.sampled_from([0, 0, 1, 50, 1 << 24])),
                "max_rows": draw(st.integers(1, 8)),
            },
            "logits": {"base_dtypes": draw(dtypes), "cache_dtypes": draw(dtypes), "transform": transform},
            "noise": {
                "scheme": draw(st.sampled_from(["murmur3_32", "murmur3_64", "philox_32"])),
                "draft_salt": draw(st.integers(0, (1 << 32) - 1)),
                "step_mix": draw(st.booleans()),
            },
            "parallel": {
                "tp": sorted(draw(st.sets(st.integers(1, 16), min_size=1, max_size=2))),
                "exchange": draw(st.sampled_from(["mailbox", "mailbox", "packet"])),
            },
            "emit": {"kernels": kernels, "archs": ["sm_90a"]},
        }
    )


@st.composite
def sound_packets(draw: st.DrawFn, score: str) -> dict[str, Any]:
    """Packets with a score and a token in any order, and perhaps other fields and words between them."""
    others = draw(st.lists(st.sampled_from(["nan", "spare"]), unique=True))
    fields: list[dict[str, Any]] = []
    at = 0
    for name in draw(st.permutations([score, "token", *others])):
        words = 2 if name == "score64" else draw(st.integers(1, 2)) if name in ("token", "spare") else 1
        at += draw(st.integers(0, 1))
        at += at % 2 if words == 2 else 0
        fields.append({"name": name, "word": at, "words": words})
        at += words
    return {"words": min(at + at % 2 + 2 * draw(st.integers(0, 2)), 16), "fields": fields}


@st.composite
def sound_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Launches of the step kernels."""
    rows = sorted(draw(st.sets(st.integers(1, 4096), max_size=8)))
    return {
        "block_sizes": [{"max_rows": most, "block": draw(st.sampled_from(BLOCKS))} for most in rows],
        "default_block": draw(st.sampled_from(BLOCKS)),
        "pdl_max_rows": draw(st.integers(0, 4096)),
    }


@st.composite
def sound_specs(draw: st.DrawFn) -> dict[str, Any]:
    """Specs whose parts fit together, so that most of them are valid."""
    values = draw(specs())
    target = values["vocabulary"]["target"]
    mapped = draw(st.booleans())
    factor = st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-6)
    cap = st.floats(2.0**-126, 2.0**126)
    placement = draw(st.sampled_from(["none", "sum", "base", "both"]))
    transform: dict[str, Any] = {"placement": placement}
    if placement != "none":
        transform |= {"multiplier": draw(factor), "soft_cap": draw(st.one_of(st.none(), cap))}
    if placement in ("base", "both"):
        transform["base_capped"] = draw(st.booleans())
    cached = draw(st.sampled_from([["bf16"], ["bf16", "fp32"], ["fp32"], []]))
    scheme = draw(st.sampled_from(["murmur3_32", "philox_32", "murmur3_64"]))
    narrow = KERNELS if cached else GREEDY_KERNELS
    kernels = draw(st.sampled_from(WIDE_KERNELS if scheme == "murmur3_64" else narrow))
    score = "score64" if scheme == "murmur3_64" and cached else "score"
    tables = {"packet": draw(st.none() | sound_packets(score)), "step": draw(st.none() | sound_steps())}
    values = {key: value for key, value in values.items() if key not in tables}
    values |= {key: value for key, value in tables.items() if value is not None}
    if kernels != ["noise"]:  # which computes no bias
        values["draft"]["top_k"] = 0
        values["markov"] |= {"head_type": "vanilla", "bias_rounding": "bf16"}
    if "chain" in kernels:
        values["parallel"]["exchange"] = "mailbox"
    return values | {
        "vocabulary": {
            "target": target,
            "d2t": mapped,
            "draft": draw(st.integers(1, target)) if mapped else target,
            "sampling_limit": draw(st.one_of(st.just(target), st.integers(1, target))),
        },
        "markov": values["markov"] | {"rank_dim": 16 * draw(st.integers(4, 32))},
        "logits": {
            "base_dtypes": draw(st.sampled_from([["bf16"], ["bf16", "fp32"], ["fp32"]])),
            "cache_dtypes": cached,
            "transform": transform,
        },
        "noise": values["noise"] | {"scheme": scheme},
        "emit": {"kernels": kernels, "archs": ["sm_90a"]},
    }


def _frozen(value: Any) -> Any:
    """Arrays as the reader hands them on."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _errors(values: dict[str, Any]) -> list[str]:
    """What a reader of the spec is told is wrong. Anything but a ValidationError that is raised is a fault of the reader."""
    try:
        ModelSpec.model_validate(_frozen(values))
    except ValidationError as error:
        return [line for one in error.errors() for line in _lines(one)]
    return []


def _lines(error: Any) -> list[str]:
    """Broken rules, or one error of a value, each with its key."""
    if error["type"] == "rules":
        return [f"{dotted(where)}: {message}" for where, message in error["ctx"]["broken"]]
    return [f"{dotted(error['loc'])}: {error['msg']}, got {error['input']!r}"]


@settings(max_examples=400, deadline=None)
@given(specs())
def test_every_combination_is_valid_or_says_why_not(values: dict[str, Any]) -> None:
    for line in _errors(values):
        assert re.fullmatch(r"[a-z_0-9.\[\]]+: .*(\bgot .+|must not .+)", line, re.DOTALL), line


@settings(max_examples=60, deadline=None)
@given(sound_specs())
def test_every_valid_spec_has_a_plan_and_kernels_that_are_python(values: dict[str, Any]) -> None:
    assume(not _errors(values))
    spec = ModelSpec.model_validate(_frozen(values))
    files = render(spec, _devices(), templates=TEMPLATES)
    assert {f"dspark_kernels/{spec.model.name}/{kernel}.py" for kernel in spec.emit.kernels} <= set(files)
    for name, text in files.items():
        parsed = ast.parse(text, name)
        loads = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
        assert not loads & {"inf", "nan"}, name  # numbers that a template could not print
    found = _constants(files[f"dspark_kernels/{spec.model.name}/config.py"])
    assert found["STEP_BLOCKS"] == tuple((line.max_rows, line.block) for line in spec.step.block_sizes)
    assert (found["STEP_DEFAULT_BLOCK"], found["STEP_PDL_MAX_ROWS"]) == (
        spec.step.default_block,
        spec.step.pdl_max_rows,
    )
    assert found["PACKET_WORDS"] == spec.packet.words
    assert found["PACKET_FIELDS"] == {field.name: (field.word, field.words) for field in spec.packet.fields}


def _constants(text: str) -> dict[str, Any]:
    """The literals of a generated config."""
    found = {}
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id[:4] in ("STEP", "PACK")
        ):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@pytest.mark.parametrize("key", ["multiplier", "soft_cap"])
@pytest.mark.parametrize("value", [2.0**-127, 2.0**127, float("inf"), float("nan"), 1e-300])
def test_a_factor_that_fp32_cannot_hold_is_refused(key: str, value: float) -> None:
    values = _base()
    transform = {"placement": "sum", "multiplier": 0.5, "soft_cap": 20.0} | {key: value}
    errors = _errors(values | {"logits": values["logits"] | {"transform": transform}})
    assert any(line.startswith(f"logits.transform.{key}: ") for line in errors)
