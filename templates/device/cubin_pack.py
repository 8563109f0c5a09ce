"""Packs: installed data packages of compiled kernels, so that a machine without the compiler serves.

A pack is a Python package with pack.json and cubins/, announced by an entry point of the group below whose value is the
package. `dsparkgen build` writes one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata, resources
from typing import Any, NamedTuple, Protocol

from . import kernel_image
from .kernel_image import Build, KernelImage

GROUP = "dspark_kernels.packs"
FORMAT = 1  # of pack.json
INDEX, CUBINS = "pack.json", "cubins"

log = logging.getLogger("dspark_kernels")


class Folder(Protocol):
    """What a pack is read from: a directory, or a package inside a wheel."""

    def joinpath(self, *names: str) -> Any:
        """The file or folder of that name below this one."""
        ...


class Pack(NamedTuple):
    """One pack: entries as `kernel_image.to_json` writes them, by build."""

    name: str
    folder: Folder
    entries: Mapping[Build, Mapping[str, Any]]

    def image(self, build: Build) -> KernelImage | None:
        """The compiled build, or None where the pack has none.

        Raises:
            ValueError: The cubin file is not the one that the pack's index names.
            OSError: It cannot be read.
        """
        entry = self.entries.get(build)
        if entry is None:
            return None
        return kernel_image.from_json(entry, self.folder.joinpath(CUBINS, entry["cubin"]["file"]).read_bytes())


def read_pack(name: str, folder: Folder) -> Pack:
    """Read a pack's index.

    Raises:
        ValueError: It has another format.
        OSError: It cannot be read.
    """
    index = json.loads(folder.joinpath(INDEX).read_text(encoding="utf-8"))
    if index.get("format") != FORMAT:
        raise ValueError(f"{INDEX}: expected format {FORMAT}, got {index.get('format')!r}")
    return Pack(name, folder, {kernel_image.build_of(entry): entry for entry in index["entries"]})


@lru_cache(maxsize=1)
def installed_packs() -> tuple[Pack, ...]:
    """The packs of this environment, by name. One that cannot be read is named in a warning and left out."""
    packs = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            packs.append(read_pack(point.name, resources.files(point.load())))
        except Exception as error:  # whatever an installed package does wrong, the others still serve
            log.warning("pack %s (%s) is left out: %s: %s", point.name, point.value, type(error).__name__, error)
    return tuple(packs)


def find(build: Build) -> tuple[KernelImage, str] | None:
    """A build and the name of the first pack that has it, or None."""
    for pack in installed_packs():
        try:
            image = pack.image(build)
        except (OSError, ValueError) as error:
            log.warning("pack %s: %s is left out: %s", pack.name, build, error)
            continue
        if image is not None:
            return image, pack.name
    return None


def holds(build: Build) -> bool:
    """Whether an installed pack lists a build. Reads no cubin."""
    return any(build in pack.entries for pack in installed_packs())
