"""Which CUDA toolkit CuTe DSL assembles with: the newest installed one that the driver knows, and what is said of another."""

import importlib.metadata
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsparkgen import pack
from dsparkgen.compile import compiler_version
from dsparkgen.device_code import load_device_code


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_device_code("toolkit")


def have(monkeypatch: pytest.MonkeyPatch, module: ModuleType, majors: tuple[int, ...], driver: int | None) -> None:
    def version(name: str) -> str:
        if name in [module.LIBRARIES.format(major) for major in majors]:
            return "4.8.1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", version)
    monkeypatch.setattr(module, "driver_major", lambda: driver)


@pytest.mark.parametrize(
    ("majors", "driver", "chosen"),
    [
        ((12, 13), None, 13),
        ((12, 13), 13, 13),
        ((12, 13), 12, 12),
        ((12,), 13, 12),
        ((13,), 12, None),
        ((), None, None),
    ],
)
def test_the_newest_that_the_driver_knows(
    monkeypatch: pytest.MonkeyPatch,
    toolkit: ModuleType,
    majors: tuple[int, ...],
    driver: int | None,
    chosen: int | None,
) -> None:
    have(monkeypatch, toolkit, majors, driver)
    assert toolkit.toolkit() == chosen


def test_figures_and_kernels_of_two_toolkits_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from dsparkgen import compile as compiling

    names = []
    for majors in ((12,), (12, 13)):
        have(monkeypatch, compiling.toolkit, majors, None)
        names.append(compiler_version("nvidia-cutlass-dsl"))
    assert [str(name).rsplit(" ", 1)[1] for name in names] == ["cu12", "cu13"]


def test_no_pack_is_built_with_another_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    from dsparkgen.device import load_devices

    root = Path(__file__).parents[2]
    devices = load_devices(root)
    have(monkeypatch, pack.toolkit, (12,), None)
    options: dict[str, Any] = {"tp": (1,), "pdl": False, "jobs": 1}
    code = pack.run_build(
        root / "generated", ["deepseek_v41"], ["sm_90a"], {"h200": devices["h200"]}, tmp_path, **options
    )
    assert code == 3 and not list(tmp_path.iterdir())
    assert "expected the libraries for CUDA 13" in capsys.readouterr().err


def test_a_kernel_compiled_with_another_toolkit_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    from dspark_kernels._device import kernel_store

    have(monkeypatch, kernel_store.toolkit, (12,), None)

    class Stop(Exception):
        pass

    def stop(arch: str, options: str) -> None:
        raise Stop

    recipe = kernel_store.Recipe("chain", Path(kernel_store.__file__), {}, stop, lambda: None)  # type: ignore[arg-type,return-value]
    with caplog.at_level(logging.WARNING), pytest.raises(Stop):
        kernel_store.compile_image(recipe, "sm_90a")
    assert "assembles with CUDA 12, all recorded runs with CUDA 13" in caplog.text
