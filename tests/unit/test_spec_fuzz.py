"""Any spec, whatever it combines: either errors in words, or a plan and kernels that are Python. Never a traceback."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dsparkgen.device import DeviceSpec, load_devices
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
dtypes = st.lists(st.sampled_from(["bf16", "fp32"]), max_size=2)


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
    return _base() | {
        "vocabulary": vocabulary,
        "markov": {"rank_dim": 16 * draw(st.integers(3, 33))},
        "draft": {
            "num_steps": draw(st.integers(1, 16)),
            "sample_from_anchor": draw(st.booleans()),
            "max_rows": draw(st.integers(1, 8)),
        },
        "logits": {"base_dtypes": draw(dtypes), "cache_dtypes": draw(dtypes), "transform": transform},
        "noise": {
            "scheme": draw(st.sampled_from(["murmur3_32", "murmur3_64", "philox_32"])),
            "draft_salt": draw(st.integers(0, (1 << 32) - 1)),
            "step_mix": draw(st.booleans()),
        },
        "parallel": {"tp": sorted(draw(st.sets(st.integers(1, 16), min_size=1, max_size=2)))},
        "emit": {"kernels": kernels, "archs": ["sm_90a"]},
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
    kernels = draw(st.sampled_from([["noise"], ["fused"], ["noise", "chain", "fused"], ["fused", "step"]]))
    return values | {
        "vocabulary": {
            "target": target,
            "d2t": mapped,
            "draft": draw(st.integers(1, target)) if mapped else target,
            "sampling_limit": draw(st.one_of(st.just(target), st.integers(1, target))),
        },
        "markov": {"rank_dim": 16 * draw(st.integers(4, 32))},
        "logits": {
            "base_dtypes": draw(st.sampled_from([["bf16"], ["bf16", "fp32"], ["fp32"]])),
            "cache_dtypes": cached,
            "transform": transform,
        },
        "noise": values["noise"] | {"scheme": draw(st.sampled_from(["murmur3_32", "philox_32", "murmur3_64"]))},
        "emit": {"kernels": kernels if cached else ["chain", "fused"], "archs": ["sm_90a"]},
    }


def _frozen(value: Any) -> Any:
    """Arrays as the reader hands them on."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _errors(values: dict[str, Any]) -> str | None:
    """The errors of a spec in words, or None. Anything else that is raised is a fault of the reader."""
    try:
        ModelSpec.model_validate(_frozen(values))
    except ValidationError as error:
        return str(error)
    return None


@settings(max_examples=400, deadline=None)
@given(specs())
def test_every_combination_is_valid_or_says_why_not(values: dict[str, Any]) -> None:
    errors = _errors(values)
    assert errors is None or errors.strip()


@settings(max_examples=60, deadline=None)
@given(sound_specs())
def test_every_valid_spec_has_a_plan_and_kernels_that_are_python(values: dict[str, Any]) -> None:
    assume(_errors(values) is None)
    spec = ModelSpec.model_validate(_frozen(values))
    files = render(spec, _devices(), templates=TEMPLATES)
    assert {f"dspark_kernels/{spec.model.name}/{kernel}.py" for kernel in spec.emit.kernels} <= set(files)
    for name, text in files.items():
        parsed = ast.parse(text, name)
        loads = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
        assert not loads & {"inf", "nan"}, name  # numbers that a template could not print


@pytest.mark.parametrize("key", ["multiplier", "soft_cap"])
@pytest.mark.parametrize("value", [2.0**-127, 2.0**127, float("inf"), float("nan"), 1e-300])
def test_a_factor_that_fp32_cannot_hold_is_refused(key: str, value: float) -> None:
    values = _base()
    transform = {"placement": "sum", "multiplier": 0.5, "soft_cap": 20.0} | {key: value}
    errors = _errors(values | {"logits": values["logits"] | {"transform": transform}})
    assert errors is not None and f"logits.transform.{key}" in errors
