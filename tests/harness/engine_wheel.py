"""The released engine's own sampling loop, for tests: taken from its wheel, which pip fetches into a cache outside this repository.

Only the Python files that the loop needs are kept, in the user's cache folder. DSPARK_ENGINE_FILES names a folder that has them
already (a machine without a network), DSPARK_ENGINE_WHEEL a wheel to take them from.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark_kernels.engines import vllm_contract

RELEASE = vllm_contract.RELEASE
PACKAGE = "vllm"
FILES_VARIABLE, WHEEL_VARIABLE = "DSPARK_ENGINE_FILES", "DSPARK_ENGINE_WHEEL"
MODULES = tuple(sorted({*vllm_contract.LOOP, *vllm_contract.DRAFTS, *(path for path, _ in vllm_contract.ATTRIBUTES)}))
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
# The published wheel runs on every CPython from 3.8 on; the files that are read from it are the same on every platform.
WHEEL_TAGS = (
    "--platform",
    "manylinux_2_28_x86_64",
    "--python-version",
    "3.12",
    "--implementation",
    "cp",
    "--abi",
    "abi3",
)


class CannotFetchError(Exception):
    """The engine's wheel is not here and could not be fetched; the message says why."""


def engine_files() -> Path:
    """The folder that holds the engine's files below vllm/, fetched on first use.

    Raises:
        CannotFetchError: They are not here and could not be fetched.
    """
    named = os.environ.get(FILES_VARIABLE)
    if named:
        return _complete(Path(named))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "dsparkgen" / "engines" / f"{PACKAGE}-{RELEASE}"
    if not (folder / PACKAGE).is_dir():
        _take_files(folder)
    return _complete(folder)


def _complete(folder: Path) -> Path:
    missing = [path for path in MODULES if not (folder / PACKAGE / path).is_file()]
    if missing:
        raise CannotFetchError(f"{folder}: expected {', '.join(missing)} of {PACKAGE} {RELEASE} below {PACKAGE}/")
    return folder


def _take_files(folder: Path) -> None:
    """Fill the folder, which appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        named = os.environ.get(WHEEL_VARIABLE)
        wheel = Path(named) if named else _download(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            for path in MODULES:
                archive.extract(f"{PACKAGE}/{path}", Path(work, "files"))
        # A package of its own, lest the rest come from an installed engine.
        Path(work, "files", PACKAGE, "__init__.py").touch()
        try:
            Path(work, "files").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={RELEASE}", "--no-deps", "--only-binary=:all:"]
    options = ["--dest", str(folder), "--disable-pip-version-check", "--no-cache-dir", "-q", *WHEEL_TAGS]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if ran.returncode or not wheels:
        last = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-1:]
        raise CannotFetchError(f"pip download {PACKAGE}=={RELEASE} ended with {ran.returncode}: {''.join(last)}")
    return wheels[0]


class WithoutEstimator:
    """Stands in for the speculator's base class, as it is without an acceptance estimator."""

    def _maybe_predict_acceptance(self, *arguments: Any) -> None:
        assert self.acceptance_estimator is None


class Engine:
    """The engine's modules, importable while `loaded_engine` is active."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / PACKAGE

    def source(self, path: str) -> str:
        """One file's text, by its path below the package."""
        return (self.package / path).read_text(encoding="utf-8")

    @property
    def gumbel(self) -> Any:
        """The engine's noise and sampling kernels."""
        return importlib.import_module(GUMBEL)

    @property
    def speculator_class(self) -> Any:
        """DSparkSpeculator itself, over a stand-in for its base class."""
        return importlib.import_module(SPECULATOR).DSparkSpeculator


@contextmanager
def loaded_engine(folder: Path, *, batch_invariant: bool = False, group: Any = None) -> Iterator[Engine]:
    """Make the engine's speculator and Gumbel modules importable under their own names, and nothing else of it.

    What they import for other reasons than drawing (configuration, logging, loading models, the base class) is stood in for.

    Args:
        folder: what `engine_files` returned.
        batch_invariant: what vllm.envs says.
        group: the tensor-parallel group; by default one of a single rank.
    """
    import triton

    stand_ins = {
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": batch_invariant},
        "vllm.config": {"VllmConfig": object},
        "vllm.config.compilation": {"CUDAGraphMode": type("CUDAGraphMode", (), {"NONE": 0})},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: group or type("Group", (), {"world_size": 1})},
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator": {"DFlashSpeculator": WithoutEstimator},
        "vllm.v1.worker.gpu.spec_decode.dspark.utils": {"load_dspark_model": None},
    }
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == PACKAGE}
    for name in before:
        del sys.modules[name]
    for name, values in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield Engine(folder)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(before)
