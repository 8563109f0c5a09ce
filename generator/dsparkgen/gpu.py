"""This machine's GPU and a generated package on disk, as `verify` and `bench` need them."""

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from dsparkgen.digest import kernel_digest
from dsparkgen.render import PACKAGE
from dsparkgen.tree import MANIFEST

NO_GPU = "needs a CUDA device and torch built for CUDA"


class CannotTell(Exception):
    """This machine lacks what the question needs; the message says what."""


@dataclass(frozen=True)
class Product:
    """One generated model, imported from a folder. Its modules load when they are asked for: chain imports CuTe DSL."""

    package: Path
    alias: str
    model: str

    def module(self, name: str) -> ModuleType:
        """A module of the model: config, noise, chain, fused or launch."""
        return importlib.import_module(f"{self.alias}.{self.model}.{name}")

    def device_module(self, name: str) -> ModuleType:
        """A module of the shared device code."""
        return importlib.import_module(f"{self.alias}._device.{name}")

    @property
    def config(self) -> Any:
        """The model's constants."""
        return self.module("config")

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Source by path below the source root, of everything in the package."""
        return {
            f"{PACKAGE}/{path.relative_to(self.package).as_posix()}": path.read_text(encoding="utf-8")
            for path in sorted(self.package.rglob("*.py"))
        }

    def has(self, kernel: str) -> bool:
        """Whether the model was generated with this kernel."""
        return f"{PACKAGE}/{self.model}/{kernel}.py" in self.files

    def digest(self, kernel: str) -> str:
        """Inputs digest of the code that runs: of the files on disk, whatever the manifest says."""
        return kernel_digest(self.files, self.model, kernel)


def load_product(source_root: Path, model: str) -> Product:
    """Import a generated package from a folder, under a name of its own, so that several can be loaded at once.

    Raises:
        CannotTell: nothing was generated for the model there.
    """
    package = source_root.resolve() / PACKAGE
    if not (package / model / "config.py").exists():
        raise CannotTell(
            f"{model}: expected generated code in {source_root / PACKAGE / model}; run: dsparkgen generate"
        )
    alias = f"{PACKAGE}_{hashlib.sha256(str(package).encode()).hexdigest()[:8]}"
    if alias not in sys.modules:
        found = importlib.util.spec_from_file_location(
            alias, package / "__init__.py", submodule_search_locations=[str(package)]
        )
        if found is None or found.loader is None:
            raise CannotTell(f"{package}: expected a Python package")
        module = importlib.util.module_from_spec(found)
        sys.modules[alias] = module
        found.loader.exec_module(module)
    return Product(package, alias, model)


def generated_models(source_root: Path, models: Sequence[str]) -> tuple[str, ...]:
    """The models asked for, or all that MANIFEST.json lists.

    Raises:
        CannotTell: there is no manifest, or it lacks a model.
    """
    path = source_root / MANIFEST
    if not path.exists():
        raise CannotTell(f"{path}: expected a generated tree; run: dsparkgen generate")
    listed = tuple(json.loads(path.read_text(encoding="utf-8"))["models"])
    for model in models:
        if model not in listed:
            raise CannotTell(f"{model}: expected one of {', '.join(listed) or 'no model at all'} of {path}")
    return tuple(models) or listed


def harness(root: Path, module: str) -> ModuleType:
    """A module of the repository beside the tool: `tests.harness.*` or `benchmarks.*`.

    Raises:
        CannotTell: the repository has none (an installed tool has neither tests nor benchmarks), or torch is missing.
    """
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotTell(f"{module}: expected it and its imports in {root} ({error})") from error


def need_cuda() -> Any:
    """torch, where it can use a GPU. Raises CannotTell elsewhere."""
    try:
        import torch
    except ImportError as error:
        raise CannotTell(f"{NO_GPU}; torch is not installed") from error
    if not torch.cuda.is_available():
        raise CannotTell(f"{NO_GPU}; torch {torch.__version__} finds none")
    return torch


def this_device(product: Product) -> str:
    """The name of the description that fits this machine's GPU. Raises CannotTell, naming the file to add."""
    torch = need_cuda()
    host = product.device_module("host")
    facts = host.read_device(torch.device("cuda", torch.cuda.current_device()))
    name = host.match_device(product.config.DEVICES, facts)
    if name is None:
        raise CannotTell(f"no description fits {facts}; add specs/devices/<name>.toml and regenerate")
    return str(name)
