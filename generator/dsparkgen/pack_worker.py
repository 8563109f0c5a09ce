"""The process that compiles a part of a pack's kernels for one arch; pack.py starts it.

    python -m dsparkgen.pack_worker  < request.json  > one JSON object a kernel

CuTe DSL reads CUTE_DSL_ARCH when it is imported, so an arch needs a process of its own. Compilers may print to standard output:
answers go to a private copy of it, all else to standard error.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def recipes_of(model: str, devices: list[str], tp_sizes: list[int] | None, pdl: bool) -> Iterator[Any]:
    """The kernel_store.Recipe of every build of a generated model's chain and step kernels; some come more than once.

    Args:
        model: the model.
        devices: names of device descriptions.
        tp_sizes: tensor-parallel sizes; None for the model's.
        pdl: also chain builds for programmatic dependent launches.
    """
    config = importlib.import_module(f"dspark_kernels.{model}.config")
    recipes = importlib.import_module("dspark_kernels._device.kernel_recipes")
    folder = Path(str(config.__file__)).parent
    sizes = list(config.TP_SIZES) if tp_sizes is None else tp_sizes

    def load(kernel: str) -> ModuleType:
        return importlib.import_module(f"dspark_kernels.{model}.{kernel}")

    if (folder / "chain.py").is_file():
        for device in devices:
            yield from recipes.chain_recipes(config, lambda: load("chain"), device, sizes, pdl)
    if (folder / "step.py").is_file():
        yield from recipes.all_step_recipes(config, lambda: load("step"), sizes)


def compile_part(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compile every count-th kernel from the first-th on. Yields entries of a pack's index, or {"error", "build"}."""
    store = importlib.import_module("dspark_kernels._device.kernel_store")
    image = importlib.import_module("dspark_kernels._device.kernel_image")
    arch, folder = request["arch"], Path(request["folder"])
    found = {
        recipe.build(arch): recipe
        for model in request["models"]
        for recipe in recipes_of(model, request["devices"], request["tp"], request["pdl"])
    }
    first, count = request["part"]
    for build, recipe in list(found.items())[first::count]:
        try:
            made = store.compile_image(recipe, arch)
        except Exception as error:  # a compiler may raise anything; the other kernels must still be told of
            yield {"error": f"{type(error).__name__}: {error}", "build": str(build)}
            continue
        entry = image.to_json(made)
        path = folder / entry["cubin"]["file"]
        path.write_bytes(made.cubin)
        yield entry


def main() -> None:
    """Answer the request on standard input; compile_part and pack.py say what is in it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.load(sys.stdin)
    sys.path.insert(0, request["source"])
    for answer in compile_part(request):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
