"""Which generated model serves a draft, and the spec that is given for one that none serves."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from dspark_kernels import MODELS
from dspark_kernels.engines import matching
from dspark_kernels.engines.matching import DraftFacts, Transform
from dsparkgen.render import render
from dsparkgen.spec import read_spec

ROOT = Path(__file__).parents[2]
PLAIN = DraftFacts(32000, 32000, False, 256, 6, Transform(), "murmur3_32", "bf16", "bf16")


def facts_of(config: Any) -> DraftFacts:
    """A draft that a model was generated for."""
    return DraftFacts(
        config.VOCAB_SIZE,
        config.DRAFT_VOCAB_SIZE,
        config.D2T,
        config.RANK_DIM,
        config.NUM_STEPS,
        Transform(config.TRANSFORM, config.MULTIPLIER, config.SOFT_CAP, config.BASE_CAPPED),
        config.NOISE_SCHEME,
        config.BASE_DTYPES[0],
        config.CACHE_DTYPES[0],
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_model_serves_its_draft(model: str) -> None:
    config = importlib.import_module(f"dspark_kernels.{model}.config")
    found = matching.find_model(facts_of(config))
    assert found.model is not None
    twin = importlib.import_module(f"dspark_kernels.{found.model}.config")
    assert facts_of(twin)[:-2] == facts_of(config)[:-2]  # a twin may come first, with more dtypes


@pytest.mark.parametrize(
    "change, words",
    [
        ({"vocabulary": 129281, "draft_vocabulary": 129281}, "vocabulary.target is 129280, the draft's 129281"),
        ({"draft_vocabulary": 32000, "d2t": True}, "vocabulary.draft is 129280, the draft's 32000"),
        ({"d2t": True}, "vocabulary.d2t is False, the draft's True"),
        ({"rank_dim": 320}, "markov.rank_dim is 256, the draft's 320"),
        ({"num_steps": 4}, "draft.num_steps is 5, the draft's 4"),
        ({"transform": Transform("sum", 0.1, 20.0)}, "logits.transform is 'none'"),
        ({"noise_scheme": "murmur3_64"}, "noise.scheme is 'murmur3_32', the draft's 'murmur3_64'"),
        ({"cache_dtype": None}, "the draft's none"),
    ],
)
def test_a_difference_is_named(change: dict[str, Any], words: str) -> None:
    draft = facts_of(importlib.import_module("dspark_kernels.deepseek_v41.config"))._replace(**change)
    config = importlib.import_module("dspark_kernels.deepseek_v41.config")
    assert any(words in text for text in matching.differences(config, draft))
    found = matching.find_model(draft)
    assert found.model is None and "nearest: " in found.reason and "format = 1" in found.reason


def test_a_sampling_limit_is_not_the_engines() -> None:
    """The engine's loop can draw any id: a model that cannot draws something else."""
    config: Any = importlib.import_module("dspark_kernels.deepseek_v41.config")
    limited = type("config", (), {**vars(config), "SAMPLING_LIMIT": 129000})
    assert "vocabulary.sampling_limit is 129000, the draft's 129280" in matching.differences(limited, facts_of(config))


@pytest.mark.parametrize("change", [{"base_dtype": "torch.float16"}, {"cache_dtype": "torch.float64"}])
def test_a_dtype_that_no_kernel_takes_gets_no_spec(change: dict[str, Any]) -> None:
    found = matching.find_model(PLAIN._replace(**change))
    assert found.model is None and "expected bf16 or fp32, got torch.float" in found.reason
    assert "format" not in found.reason


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"draft_vocabulary": 8000, "d2t": True},
        {"transform": Transform("sum", 26**-0.5, 20.0)},
        {"transform": Transform("both", 1.0, 30.0, base_capped=True)},
        {"transform": Transform("both", 0.375, None, base_capped=True)},
        {"noise_scheme": "murmur3_64"},
        {"base_dtype": "fp32", "cache_dtype": "fp32"},
        {"cache_dtype": None},
        {"rank_dim": 80},
        {"num_steps": 15, "rank_dim": 512},
    ],
)
def test_the_given_spec_serves_the_draft(tmp_path: Path, change: dict[str, Any]) -> None:
    from dsparkgen.device import load_devices

    draft = PLAIN._replace(**change)
    (tmp_path / "my_draft.toml").write_text(matching.spec_text(draft))
    spec = read_spec(tmp_path / "my_draft.toml")
    files = render(spec, load_devices(ROOT), templates=ROOT / "templates")
    assert "DraftSampler" in files["dspark_kernels/my_draft/__init__.py"]
    source = files["dspark_kernels/my_draft/config.py"].replace("from .._device", "from dspark_kernels._device")
    config: dict[str, Any] = {}
    exec(compile(source, "config.py", "exec"), config)
    assert matching.differences(type("config", (), config), draft) == []
