"""A compiled kernel and all that a host needs to launch it: what a pack and the disk cache hold.

Plain Python: neither CuTe DSL nor torch is imported. A build is looked up by what decides its code: the kernel's name, the
arguments that it was compiled with, the arch, and the digest of the source files that it comes from.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

WIDE_BYTES, NARROW_BYTES = 8, 4  # of a kernel parameter: an address or int64, an int32

# CTAs along one axis: a number, the name of the argument whose value it is, or (name, n): that value divided by n,
# rounded up, and at least 1.
Dimension = int | str | tuple[str, int]


class LaunchShape(NamedTuple):
    """How a kernel is launched."""

    grid: tuple[Dimension, Dimension, Dimension]  # CTAs
    block: int  # threads of a CTA
    shared: int  # dynamic shared memory of a CTA in bytes
    cooperative: bool  # the driver refuses a grid whose CTAs are not all resident
    pdl: bool  # may start while the kernel ahead of it in the stream still runs


class Parameter(NamedTuple):
    """One kernel parameter: an integer by value."""

    name: str
    size: int  # bytes


class Description(NamedTuple):
    """What a host must know of a build beside its machine code."""

    parameters: tuple[Parameter, ...]
    shape: LaunchShape
    facts: Mapping[str, int]  # sizes that the launcher needs, by name


class Build(NamedTuple):
    """What decides a kernel's code."""

    kernel: str  # the module's name, or that and the kernel's name in it
    arguments: str  # what it was compiled with, as canonical JSON
    arch: str  # such as "sm_90a"
    source: str  # digest of the source files

    def __str__(self) -> str:
        return f"{self.kernel} {self.arguments} for {self.arch}, source {self.source}"


class KernelImage(NamedTuple):
    """A compiled build."""

    build: Build
    compiler: str  # name and version
    entry: str  # the kernel's name in the cubin
    description: Description
    cubin: bytes


def parameters(names: Sequence[str], narrow: Collection[str]) -> tuple[Parameter, ...]:
    """Kernel parameters in order; the `narrow` ones are int32, all others int64."""
    return tuple(Parameter(name, NARROW_BYTES if name in narrow else WIDE_BYTES) for name in names)


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Compile-time arguments as canonical JSON: numbers, strings, booleans, and tuples of them."""
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def sha256(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=64)
def source_digest(start: Path) -> str:
    """Digest of a module's file and of every file that it imports relatively, transitively: their names and bytes.

    The package's name and place are not part of it, so that a copied package finds the same builds. Read once a process.
    """
    found: dict[Path, bytes] = {}
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        for node in _relative_imports(found[path]):
            waiting += _imported_files(path.parents[node.level - 1], node)
    named = sorted((path.name, sha256(data)) for path, data in found.items())
    return sha256(json.dumps(named).encode())[:16]


@lru_cache(maxsize=256)
def _relative_imports(source: bytes) -> tuple[ast.ImportFrom, ...]:
    """The relative imports of a module, inside functions too. Kernels share most of their modules, which are parsed once."""
    found: list[ast.ImportFrom] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(node)
        # Statements alone hold imports: leaving out the expressions saves most of the walk.
        for _, inner in ast.iter_fields(node):
            if isinstance(inner, list):
                waiting += [one for one in inner if isinstance(one, (ast.stmt, ast.excepthandler, ast.match_case))]
    return tuple(found)


def _imported_files(folder: Path, node: ast.ImportFrom) -> list[Path]:
    """The files that a relative import loads: a module, or the modules that it names inside a package."""
    base = folder.joinpath(*(node.module or "").split("."))
    if base.with_suffix(".py").is_file():
        return [base.with_suffix(".py")]
    return [path for alias in node.names if (path := base / f"{alias.name}.py").is_file()]


def to_json(image: KernelImage) -> dict[str, Any]:
    """An image without its cubin, which is named by its digest."""
    build, description = image.build, image.description
    digest = sha256(image.cubin)
    return {
        "kernel": build.kernel,
        "arguments": json.loads(build.arguments),
        "arch": build.arch,
        "source": build.source,
        "compiler": image.compiler,
        "entry": image.entry,
        "parameters": [[parameter.name, parameter.size] for parameter in description.parameters],
        **description.shape._asdict(),
        "facts": dict(description.facts),
        "cubin": {"file": f"{digest[:16]}.cubin", "sha256": digest},
    }


def build_of(entry: Mapping[str, Any]) -> Build:
    """The build that an entry written by `to_json` is of."""
    return Build(entry["kernel"], arguments_text(entry["arguments"]), entry["arch"], entry["source"])


def from_json(entry: Mapping[str, Any], cubin: bytes) -> KernelImage:
    """An entry written by `to_json`, with the content of its cubin file.

    Raises:
        ValueError: The cubin is not the one that the entry names.
    """
    found = sha256(cubin)
    if found != entry["cubin"]["sha256"]:
        raise ValueError(f"{entry['cubin']['file']}: expected SHA-256 {entry['cubin']['sha256']}, got {found}")
    across, down, deep = (tuple(size) if isinstance(size, list) else size for size in entry["grid"])
    shape = LaunchShape(
        (across, down, deep),
        entry["block"],
        entry["shared"],
        entry["cooperative"],
        entry["pdl"],
    )
    named = tuple(Parameter(name, size) for name, size in entry["parameters"])
    description = Description(named, shape, entry["facts"])
    return KernelImage(build_of(entry), entry["compiler"], entry["entry"], description, cubin)
