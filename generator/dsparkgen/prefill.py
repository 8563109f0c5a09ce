"""Compiles ahead, one process a core, the chain's builds that a run over ranks would compile one after another.

They land in the disk cache of compiled kernels, where the samplers find them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsparkgen.gpu import Product, load_product
from dsparkgen.workers import Worker


@dataclass(frozen=True)
class Slice:
    """What one process compiles: every build whose number is `part` modulo `parts`."""

    out: str  # source root of the generated code
    models: tuple[str, ...]
    device: str  # name of the GPUs' description
    arch: str
    worlds: tuple[int, ...]  # ranks, each on a GPU
    emulated: tuple[int, ...]  # ranks on one GPU
    part: int = 0
    parts: int = 1


def fill(
    out: Path,
    models: Sequence[str],
    device: str,
    arch: str,
    *,
    worlds: Sequence[int] = (),
    emulated: Sequence[int] = (),
    jobs: int,
    seconds: float,
) -> None:
    """Compile the builds of these models over ranks. A process that fails leaves its builds to the samplers, which then tell.

    Args:
        out: source root of the generated code.
        models: their names; one without a chain has no builds.
        device: name of the GPUs' description.
        arch: what to compile for.
        worlds: numbers of ranks with a GPU each.
        emulated: numbers of ranks on one GPU.
        jobs: processes.
        seconds: bound of each process.
    """
    slices = [
        Slice(str(out), tuple(models), device, arch, tuple(worlds), tuple(emulated), part, jobs) for part in range(jobs)
    ]
    workers = [Worker("dsparkgen.prefill", asdict(one), seconds=seconds) for one in slices]
    for worker in workers:
        worker.finish()


def recipes(product: Product, device: str, worlds: Sequence[int], emulated: Sequence[int]) -> Iterator[Any]:
    """The chain's builds of one model for even shards over ranks, as the shared device code's recipes."""
    if not product.has("chain"):
        return
    found, shares, host = (product.device_module(name) for name in ("kernel_recipes", "chain_share", "host"))
    config = product.config

    def load_chain() -> Any:
        return product.module("chain")

    yield from found.chain_recipes(config, load_chain, device, worlds, False)
    capability, sms, shared = config.DEVICES[device]
    facts = host.DeviceFacts(device, tuple(capability), sms, shared)
    options = shares.Options(config.MAX_ROWS, None, device_name=device)
    for world in emulated:
        for line in shares.lines_of(config, facts, shares.emulated_share(config, world), options).values():
            for base in config.BASE_DTYPES:
                for cache in config.CACHE_DTYPES or (None,):
                    yield found.chain_recipe(config, load_chain, line, base, cache, world=world, emulated=True)


def work(own: Slice) -> int:
    """Compile one process's builds into the cache; returns their number."""
    done = number = 0
    for model in own.models:
        product = load_product(Path(own.out), model)
        for recipe in recipes(product, own.device, own.worlds, own.emulated):
            if number % own.parts == own.part:
                product.device_module("kernel_store").find_or_compile(recipe, own.arch)
                done += 1
            number += 1
    return done


if __name__ == "__main__":
    print(json.dumps({"builds": work(Slice(**json.loads(sys.argv[1])))}))
