"""A Python environment without CuTe DSL, in which `import cutlass` fails, with packs of compiled kernels installed or without.

Everything else that this Python can import is there, so that nothing is downloaded.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPILER_NAMES = ("cutlass", "nvidia_cutlass_dsl")  # packages, folders and files of CuTe DSL start with one of them
SOURCES = (ROOT, ROOT / "generator", ROOT / "generated")
SURVEY = """
import importlib.util, json
try:
    import cutlass
except ModuleNotFoundError as error:
    refused = str(error)
else:
    refused = None
from dspark_kernels._device import cubin_pack, kernel_store
packs = {pack.name: len(pack.entries) for pack in cubin_pack.installed_packs()}
print(json.dumps({"import cutlass": refused, "compiler": kernel_store.compiler_version(), "packs": packs}))
"""


def make_environment(folder: Path, wheels: Sequence[Path] = ()) -> Path:
    """Make a virtual environment that inherits what this process can import, CuTe DSL apart.

    Args:
        folder: where to make it; must not exist.
        wheels: to install into it, by pip, without their requirements.

    Returns:
        Its Python.

    Raises:
        RuntimeError: pip refuses a wheel; says what it said.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inherited = [str(path) for path in _inherited(folder / "without_compiler")]
    (folder / "lib" / version / "site-packages" / "inherited.pth").write_text("\n".join(inherited) + "\n")
    if wheels:
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
        options = ["--disable-pip-version-check", *map(str, wheels)]
        ran = subprocess.run([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode:
            raise RuntimeError(f"pip install {' '.join(map(str, wheels))}: {ran.stdout.strip()}")
    return python


def environment(**variables: str) -> dict[str, str]:
    """The variables for its processes: this process's, the repository's source roots alone on PYTHONPATH, and those given."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCES))} | variables


def survey(python: Path) -> dict[str, Any]:
    """What a process of an environment finds: how `import cutlass` fails (None: it does not), the compiler, packs with their sizes."""
    ran = subprocess.run([python, "-c", SURVEY], env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _inherited(mirrors: Path) -> list[Path]:
    """The folders of installed packages; one that holds CuTe DSL is mirrored by links to everything else in it."""
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    found: list[Path] = []
    for place in map(Path, dict.fromkeys(sys.path)):
        if not place.is_absolute() or not place.is_dir() or place.resolve() in found:
            continue
        if any(place.resolve() == path or place.resolve() == path / "lib-dynload" for path in own):
            continue
        if place.resolve() in SOURCES or any(_is_compiler(part) for part in place.parts):
            continue
        if any(_is_compiler(entry.name) for entry in place.iterdir()):
            place = _mirror(place, mirrors / str(len(found)))
        found.append(place.resolve())
    return found


def _mirror(place: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for entry in place.iterdir():
        if not _is_compiler(entry.name):
            (target / entry.name).symlink_to(entry)
    return target


def _is_compiler(name: str) -> bool:
    return name.startswith(COMPILER_NAMES)
