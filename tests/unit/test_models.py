"""The checked-in specs against the public numbers, entered a second time, and what all of them must have."""

from pathlib import Path

import pytest

from dsparkgen.device import load_devices
from dsparkgen.plan import plan_model
from dsparkgen.spec import read_specs

ROOT = Path(__file__).parents[2]
SPECS = read_specs(ROOT / "specs")
# Target vocabulary, draft vocabulary, rank, positions, whether the anchor's row is drafted from; as the drafts' configs say.
PUBLIC = {
    "deepseek_v41": (129280, 129280, 256, 5, True),
    "deepseek_v4_flash": (129280, 129280, 256, 5, True),
    "deepseek_v4_pro": (129280, 129280, 512, 5, True),
    "gemma4_12b": (262144, 262144, 256, 7, True),
    "gemma4_26b_a4b": (262144, 32000, 256, 6, False),
    "glm_5_2": (154880, 154880, 256, 7, False),
    "glm_5_3": (154880, 154880, 256, 8, True),
    "kimi_k3": (163840, 163840, 256, 7, True),
    "laguna_xs": (100352, 100352, 256, 15, False),  # not stated either, and no class was seen: 15 of a block of 16
    "minimax_m3": (200064, 200064, 256, 8, True),
    "muse_spark": (202048, 202048, 256, 15, True),  # not stated anywhere: the default of its vLLM class
    "qwen3_4b": (151936, 151936, 256, 7, True),
    "qwen3_8_27b": (248320, 248320, 256, 7, True),
    "qwen3_8b": (151936, 151936, 256, 7, True),
}
# What no public text states, or states of a related model, must be marked so.
OPEN = {
    "gemma4_12b": {"logits.transform.soft_cap"},
    "gemma4_26b_a4b": {"logits.transform.placement"},
    "laguna_xs": {"draft.sample_from_anchor"},
    "minimax_m3": {"draft.sample_from_anchor"},
    "muse_spark": {"draft.sample_from_anchor", "logits.transform.multiplier", "logits.transform.soft_cap"},
    "qwen3_8b": {"vocabulary.target"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_numbers_are_the_public_ones(name: str) -> None:
    spec = SPECS[name]
    numbers = (spec.vocabulary.target, spec.vocabulary.draft, spec.markov.rank_dim)
    assert (*numbers, spec.draft.num_steps, spec.draft.sample_from_anchor) == PUBLIC[name]
    assert spec.vocabulary.d2t == (spec.vocabulary.draft != spec.vocabulary.target)
    assert OPEN.get(name, set()) <= {*spec.provenance.unknown, *spec.provenance.unverified}


def test_transforms_are_those_of_the_engine() -> None:
    transforms = {name: SPECS[name].logits.transform for name in PUBLIC}
    found = {name: transform for name, transform in transforms.items() if transform.placement != "none"}
    assert set(found) == {"gemma4_12b", "muse_spark"}
    gemma, muse = found["gemma4_12b"], found["muse_spark"]
    assert (gemma.placement, gemma.multiplier, gemma.soft_cap, gemma.base_capped) == ("both", 1.0, 30.0, True)
    assert (muse.placement, muse.multiplier, muse.soft_cap) == ("sum", 0.19611613513818404, 20.0)
    assert muse.multiplier == pytest.approx(26**-0.5, rel=1e-15)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_model_is_planned_for_every_size_on_the_gpus_that_hold_it(name: str) -> None:
    spec = SPECS[name]
    assert set(spec.parallel.tp) >= {1, 2, 4, 8} and (name != "kimi_k3" or {12, 16} <= set(spec.parallel.tp))
    assert spec.emit.kernels == ("noise", "chain", "fused", "step")
    plan = plan_model(spec, load_devices(ROOT))
    for device in ("h200", "b200"):
        for tp in spec.parallel.tp:
            assert plan.line(device, tp, 1) is not None, (device, tp)
