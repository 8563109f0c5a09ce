"""Every build that the samplers launch, as recipes: what a sampler provides itself with, and what a pack is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import chain_share, host, step_call
from .kernel_image import Description
from .kernel_store import Recipe
from .plan_line import PlanLine

CHAIN, STEP = "chain", "step"
CPU = torch.device("cpu")


def chain_recipe(
    config: ModuleType,
    load_chain: Callable[[], ModuleType],
    line: PlanLine,
    base: str,
    cache: str | None,
    *,
    world: int = 1,
    emulated: bool = False,
    check_ranks: bool = False,
    pdl: bool = False,
) -> Recipe:
    """One build of a model's chain kernel; arguments as for its compile_chain. `load_chain` imports the kernel's module."""
    ranks = {"world": world, "emulated": emulated, "check_ranks": check_ranks, "pdl": pdl}

    def compile_chain(arch: str, options: str) -> Any:
        return load_chain().compile_chain(line, base, cache, **ranks, arch=arch, options=options)

    def describe() -> Description:
        return load_chain().ChainKernel(line, base, cache, **ranks).describe()

    # Devices whose lines differ in the name alone share their builds.
    deciding = {"line": line._replace(device=""), "base": base, "cache": cache, **ranks}
    return Recipe(CHAIN, source_of(config, CHAIN), deciding, compile_chain, describe)


def step_recipe(config: ModuleType, load_step: Callable[[], ModuleType], build: step_call.Build) -> Recipe:
    """One build of a model's step kernels. `load_step` imports their module."""

    def compile_step(arch: str, options: str) -> Any:
        return load_step().compile_build(build, arch=arch, options=options)

    def describe() -> Description:
        return load_step().describe(build)

    return Recipe(STEP, source_of(config, STEP), build._asdict(), compile_step, describe)


def source_of(config: ModuleType, kernel: str) -> Path:
    """The file of a model's kernel module, beside its config.py."""
    assert config.__file__ is not None
    return Path(config.__file__).with_name(f"{kernel}.py")


def chain_recipes(
    config: ModuleType, load_chain: Callable[[], ModuleType], device: str, tp_sizes: Sequence[int], pdl: bool
) -> Iterator[Recipe]:
    """The builds of chain samplers with even shards on a described device.

    Args:
        config: the model's config.py.
        load_chain: imports the chain kernel's module.
        device: name of a device description.
        tp_sizes: tensor-parallel sizes; those without a plan for the device are passed over.
        pdl: also the builds for programmatic dependent launches, on one GPU.
    """
    capability, sms, shared = config.DEVICES[device]
    facts = host.DeviceFacts(device, tuple(capability), sms, shared)
    planned = {key[1] for key in config.PLANS if key[0] == device}
    choices = [(world, False) for world in tp_sizes if world in planned] + ([(1, True)] if pdl and 1 in planned else [])
    for world, early in choices:
        share = chain_share.share_of(config, world, 0)
        options = chain_share.Options(config.MAX_ROWS, None, device_name=device, pdl=early)
        for line in chain_share.lines_of(config, facts, share, options).values():
            for base in config.BASE_DTYPES:
                for cache in config.CACHE_DTYPES or (None,):
                    yield chain_recipe(config, load_chain, line, base, cache, world=world, pdl=early)


def step_recipes(
    config: ModuleType,
    load_step: Callable[[], ModuleType],
    *,
    width: int,
    sharded: bool,
    max_reqs: int,
    cache_dtype: torch.dtype | None,
) -> Iterator[Recipe]:
    """The builds of a step sampler.

    Args:
        config: the model's config.py.
        load_step: imports the step kernels' module.
        width: vocabulary columns of a rank.
        sharded: whether ranks share the vocabulary.
        max_reqs: most request rows of a call.
        cache_dtype: dtype of the logits cache; None for greedy drafts.
    """
    expected = step_call.Expectations(config, CPU, max_reqs=max_reqs, cache_dtype=cache_dtype, width=width)
    fills = cache_dtype is not None and (sharded or config.D2T)
    for build in step_call.all_builds(config, expected, max_reqs, sharded=sharded, fills=fills):
        yield step_recipe(config, load_step, build)


def all_step_recipes(
    config: ModuleType, load_step: Callable[[], ModuleType], tp_sizes: Sequence[int]
) -> Iterator[Recipe]:
    """The builds of step samplers for any number of rows; arguments as for `chain_recipes`. Some come more than once."""
    most_rows = 1 + max(config.STEP_PDL_MAX_ROWS, *(rows for rows, _ in config.STEP_BLOCKS))
    for world in tp_sizes:
        width = chain_share.even_width(config.DRAFT_VOCAB_SIZE, world)
        for cache in config.CACHE_DTYPES or (None,):
            yield from step_recipes(
                config,
                load_step,
                width=width,
                sharded=world > 1,
                max_reqs=most_rows,
                cache_dtype=None if cache is None else host.DTYPES[cache],
            )
