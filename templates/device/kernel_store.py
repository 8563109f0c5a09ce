"""Where compiled kernels come from: an installed pack, else the disk cache, else CuTe DSL, whose result is cached.

The same machine code runs whichever it is: a build is looked up by the digest of its source, its compile-time arguments and
its arch, and all are launched the same way (cubin_launch.py).
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import cubin_pack, kernel_image, toolkit
from .cubin_launch import CubinKernel
from .kernel_image import Build, Description, KernelImage

COMPILER = "nvidia-cutlass-dsl"
CACHE_VARIABLE = "DSPARK_KERNELS_CACHE"  # a folder; which kernel runs does not depend on it

log = logging.getLogger("dspark_kernels")


class Recipe(NamedTuple):
    """One build, and how to make it. The two functions import CuTe DSL: they are called only where nothing is found."""

    kernel: str  # the module's name, or that and the kernel's name in it
    source: Path  # the module's file
    arguments: Mapping[str, Any]  # what decides the code beside source and arch: numbers, strings, tuples of them
    compile: Callable[[str, str], Any]  # (arch, options of the DSL) -> what the DSL compiled
    describe: Callable[[], Description]

    def build(self, arch: str) -> Build:
        """What the build is looked up by."""
        text = kernel_image.arguments_text(self.arguments)
        return Build(self.kernel, text, arch, kernel_image.source_digest(self.source))


class KernelMissingError(RuntimeError):
    """A kernel is in no installed pack and there is no compiler to make it."""


def arch_of(capability: tuple[int, int]) -> str:
    """The arch that kernels are compiled for on a GPU of a compute capability."""
    return f"sm_{capability[0]}{capability[1]}a"


def compiler_version() -> str | None:
    """Name and version of the installed CuTe DSL and the CUDA version that it assembles for, or None. Does not import it."""
    if importlib.util.find_spec("cutlass") is None:
        return None
    try:
        return f"{COMPILER} {metadata.version(COMPILER)} cu{toolkit.toolkit()}"
    except metadata.PackageNotFoundError:
        return None


def why_missing(recipe: Recipe, arch: str) -> str | None:
    """Why a kernel can neither be found nor compiled here, or None. Compiles nothing."""
    build = recipe.build(arch)
    if compiler_version() is not None or cubin_pack.holds(build):
        return None
    packs = ", ".join(pack.name for pack in cubin_pack.installed_packs()) or "none"
    return (
        f"{build}: in no installed pack (installed: {packs}), and CuTe DSL is missing: install {COMPILER}, or a pack that "
        f"`dsparkgen build --arch {arch}` writes from these sources"
    )


def why_none(recipes: Iterable[Recipe], device: torch.device) -> str | None:
    """Why some of these builds can neither be found nor compiled for a CUDA device, or None. Compiles nothing."""
    if compiler_version() is not None:
        return None
    arch = arch_of(torch.cuda.get_device_capability(device))
    return next(filter(None, (why_missing(recipe, arch) for recipe in recipes)), None)


def compile_image(recipe: Recipe, arch: str) -> KernelImage:
    """Compile a build; needs no GPU. Raises whatever the compiler raises."""
    found = toolkit.toolkit()
    if found != toolkit.RECORDED:
        log.warning(
            "%s: CuTe DSL assembles with CUDA %s, all recorded runs with CUDA %s: pip install '%s[cu%s]'",
            recipe.kernel,
            found,
            toolkit.RECORDED,
            COMPILER,
            toolkit.RECORDED,
        )
    with tempfile.TemporaryDirectory(prefix="dspark-kernels-") as folder:
        compiled = recipe.compile(arch, f"--keep-cubin --dump-dir={shlex.quote(folder)}")
        names, cubin = list(compiled.kernel_info), compiled.artifacts.CUBIN
    if len(names) != 1:
        raise RuntimeError(f"{recipe.kernel}: expected one kernel in the cubin, got {len(names)}")
    return KernelImage(recipe.build(arch), compiler_version() or COMPILER, names[0], recipe.describe(), cubin)


def find_or_compile(recipe: Recipe, arch: str) -> tuple[KernelImage, str]:
    """A build and where it came from: "pack NAME", "cache" or "compiled".

    Raises:
        KernelMissingError: No pack has it and there is no compiler.
    """
    build = recipe.build(arch)
    packed = cubin_pack.find(build)
    if packed is not None:
        return packed[0], f"pack {packed[1]}"
    compiler = compiler_version()
    if compiler is None:
        raise KernelMissingError(why_missing(recipe, arch) or f"{build}: the pack that lists it cannot be read")
    cache = KernelCache(cache_folder())
    found = cache.read(build, compiler)
    if found is not None:
        return found, "cache"
    with cache.lock(build, compiler):
        # Another process may have compiled it while this one waited.
        found = cache.read(build, compiler)
        if found is not None:
            return found, "cache"
        made = compile_image(recipe, arch)
        cache.write(made)
    return made, "compiled"


def provide(recipe: Recipe, device: torch.device) -> CubinKernel:
    """A build, loaded on a CUDA device. Logs where it came from.

    Raises:
        KernelMissingError: No pack has it and there is no compiler.
        RuntimeError: The driver refuses it.
    """
    image, origin = find_or_compile(recipe, arch_of(torch.cuda.get_device_capability(device)))
    log.debug("%s: %s", origin, image.build)
    with torch.cuda.device(device):
        return CubinKernel(image, origin)


def cache_folder() -> Path:
    """The disk cache: DSPARK_KERNELS_CACHE, else dspark_kernels below the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark_kernels"


class KernelCache:
    """Compiled kernels on disk, one JSON file a build beside cubins named by their digest.

    A file appears whole or not at all (rename), the JSON file last. Entries are never changed; deleting the folder is safe.
    A folder that cannot be written is named in a warning, and kernels are compiled anew in each process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, build: Build, compiler: str) -> Path:
        return self.folder / f"{build.kernel}-{kernel_image.sha256(f'{compiler} {build}'.encode())[:24]}.json"

    def read(self, build: Build, compiler: str) -> KernelImage | None:
        """A build that this compiler made, or None where there is none or its files are damaged."""
        try:
            entry = json.loads(self._place(build, compiler).read_text(encoding="utf-8"))
            image = kernel_image.from_json(entry, (self.folder / entry["cubin"]["file"]).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("kernel cache %s: %s is not used: %s", self.folder, build, error)
            return None
        return image if (image.build, image.compiler) == (build, compiler) else None

    def write(self, image: KernelImage) -> None:
        """Store a build."""
        entry = kernel_image.to_json(image)
        try:
            self._replace(self.folder / entry["cubin"]["file"], image.cubin)
            text = json.dumps(entry, indent=1)
            self._replace(self._place(image.build, image.compiler), text.encode())
        except OSError as error:
            log.warning("kernel cache %s: expected a folder to write to: %s", self.folder, error)

    def _replace(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".part-", delete=False) as part:
            try:
                part.write(data)
                part.flush()
                os.replace(part.name, path)
            except BaseException:
                os.unlink(part.name)
                raise

    @contextmanager
    def lock(self, build: Build, compiler: str) -> Iterator[None]:
        """Hold a build's lock, so that one of several processes compiles and the others wait for it.

        The lock ends with the process that holds it.
        """
        path = self._place(build, compiler).with_suffix(".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except OSError as error:
            log.warning("kernel cache %s: expected a folder to write to: %s", self.folder, error)
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
