"""Compiling ahead for a run over ranks: every build once, shared out over processes, found again by the samplers' recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dsparkgen import gpu, prefill  # noqa: E402

ROOT = Path(__file__).parents[2]
WHOLE = prefill.Slice(str(ROOT / "generated"), ("deepseek_v41",), "h200", "sm_90a", (2,), (4, 8))


@pytest.fixture
def product() -> gpu.Product:
    return gpu.load_product(ROOT / "generated", "deepseek_v41")


def test_every_build_is_made_once(product: gpu.Product, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    store = product.device_module("kernel_store")
    monkeypatch.setattr(store, "find_or_compile", lambda recipe, arch: made.append(str(recipe.build(arch))))
    config = product.config
    slots = len({key[2] for key in config.PLANS if key[:2] == ("h200", 2)})
    builds = slots * len(config.BASE_DTYPES) * len(config.CACHE_DTYPES) * 3
    shares = [prefill.work(replace(WHOLE, part=part, parts=5)) for part in range(5)]
    assert sum(shares) == len(made) == len(set(made)) == builds and max(shares) - min(shares) <= 1


def test_the_builds_are_those_that_samplers_ask_for(product: gpu.Product) -> None:
    launch, shares = product.module("launch"), product.device_module("chain_share")
    facts = product.device_module("host").DeviceFacts("h200", *product.config.DEVICES["h200"])
    options = shares.Options(8, gpu.harness(ROOT, "tests.harness.checks").DTYPES["bf16"], device_name="h200")
    ahead = {str(recipe.build("sm_90a")) for recipe in prefill.recipes(product, "h200", (2,), (4,))}
    for sampler, share in (
        (launch.ChainSampler, shares.share_of(product.config, 2, 1)),
        (launch.EmulatedChainSampler, shares.emulated_share(product.config, 4)),
    ):
        for line in shares.lines_of(product.config, facts, share, options).values():
            assert str(sampler._recipe(line, "bf16", share, options).build("sm_90a")) in ahead


def test_processes_share_the_work_out(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    class Fake:
        def __init__(self, module: str, task: dict[str, Any], *, seconds: float) -> None:
            started.append(task)

        def finish(self) -> None: ...

    monkeypatch.setattr(prefill, "Worker", Fake)
    prefill.fill(ROOT, ["toy"], "h200", "sm_90a", worlds=(2,), jobs=3, seconds=5.0)
    assert [(task["part"], task["parts"], task["worlds"]) for task in started] == [
        (0, 3, (2,)),
        (1, 3, (2,)),
        (2, 3, (2,)),
    ]
