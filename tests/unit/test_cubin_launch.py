"""The launcher of compiled kernels against a driver that keeps what it is given."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
bindings = pytest.importorskip("cuda.bindings")

from dspark_kernels._device import cubin_launch, kernel_image  # noqa: E402
from dspark_kernels._device.kernel_image import Build, Description, KernelImage, LaunchShape  # noqa: E402

STREAM = 0x7F00_1234_5678_9ABC
NAMES, NARROW = ("a", "b", "c", "rows"), ("b", "rows")
WIDTHS = {8: ctypes.c_int64, 4: ctypes.c_int32}


class FakeDriver:
    """Stands for the CUDA driver: one kernel with the parameters that `sizes` says, in bytes."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl"
    )
    REFUSED = SimpleNamespace(name="CUDA_ERROR_REFUSED")

    def __init__(self, sizes: tuple[int, ...] = (8, 4, 8, 4)) -> None:
        self.sizes, self.shared = sizes, 0
        self.launched: list[dict[str, Any]] = []
        self.refuses: str | None = None
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (self.REFUSED if self.refuses == name else 0, *values)

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"refused"

    def cuLibraryLoadData(self, cubin: bytes, *rest: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("load", ("library", cubin))

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("kernel", (*library, name))

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("function", kernel)

    def cuKernelGetParamInfo(self, kernel: Any, place: int) -> tuple[Any, ...]:  # noqa: N802
        if place >= len(self.sizes):
            return (SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"), 0, 0)
        return 0, 8 * place, self.sizes[place]

    def cuFuncSetAttribute(self, function: Any, attribute: str, value: int) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == "dynamic"
        self.shared = value
        return self._answer("attribute")

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, function: Any, threads: int, shared: int
    ) -> tuple[Any, ...]:
        return self._answer("occupancy", int(threads <= 384 and shared <= self.shared))

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: int, extra: int) -> tuple[Any, ...]:  # noqa: N802
        places = (ctypes.c_void_p * len(self.sizes)).from_address(arguments)
        values = [WIDTHS[size].from_address(place).value for size, place in zip(self.sizes, places, strict=True)]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        attributes = [attribute.id for attribute in config.attrs[: config.numAttrs]]
        self.launched.append(
            {"function": function, "values": values, "grid": grid, "block": block, "attributes": attributes}
            | {"shared": config.sharedMemBytes, "stream": config.hStream}
        )
        return self._answer("launch")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver that kernels meet."""
    fake = FakeDriver()
    monkeypatch.setattr(bindings, "driver", fake, raising=False)
    return fake


def image(grid: Any = (132, 1, 1), *, cooperative: bool = False, pdl: bool = False) -> KernelImage:
    shape = LaunchShape(grid, 384, 200_000, cooperative, pdl)
    described = Description(kernel_image.parameters(NAMES, NARROW), shape, {})
    return KernelImage(Build("toy", "{}", "sm_90a", "0" * 16), "compiler 1", "kernel_0", described, b"cubin")


def test_a_launch_gives_the_driver_every_value(driver: FakeDriver) -> None:
    kernel = cubin_launch.CubinKernel(image())
    calls = ((2**40 + 3, -7, 5, 2**31 - 1), (-(2**63), -(2**31), 2**63 - 1, 0), (1, 2, 3, 4))
    for values in calls:
        kernel.launch(dict(zip(NAMES, values, strict=True)) | {"other": 9}, STREAM)
    assert [launch["values"] for launch in driver.launched] == [list(values) for values in calls]
    assert driver.launched[0] | {"values": []} == {
        "function": ("library", b"cubin", b"kernel_0"), "values": [], "grid": (132, 1, 1), "block": (384, 1, 1),
        "attributes": [], "shared": 200_000, "stream": STREAM,
    }  # fmt: skip
    assert driver.shared == 200_000


@pytest.mark.parametrize(
    "flags, attributes",
    [({}, []), ({"cooperative": True}, ["cooperative"]), ({"pdl": True}, ["pdl"])],
)
def test_launch_attributes(driver: FakeDriver, flags: dict[str, bool], attributes: list[str]) -> None:
    cubin_launch.CubinKernel(image(**flags)).launch(dict.fromkeys(NAMES, 1), STREAM)
    assert driver.launched[0]["attributes"] == attributes


@pytest.mark.parametrize(
    "a, rows, grid", [(1, 3, (1, 3, 7)), (1024, 1, (1, 1, 7)), (1025, 2, (2, 2, 7)), (0, 1, (1, 1, 7))]
)
def test_a_grid_follows_the_arguments(driver: FakeDriver, a: int, rows: int, grid: tuple[int, int, int]) -> None:
    """An argument's value, or its share, of which there is at least one."""
    kernel = cubin_launch.CubinKernel(image((("a", 1024), "rows", 7)))
    kernel.launch({"a": a, "b": 0, "c": 0, "rows": rows}, STREAM)
    assert driver.launched[0]["grid"] == grid


@pytest.mark.parametrize(("name", "value"), [("rows", 2**31), ("b", -(2**31) - 1), ("a", 2**63)])
def test_a_value_that_does_not_fit_is_refused_and_nothing_launched(driver: FakeDriver, name: str, value: int) -> None:
    """The driver would take the low bits."""
    kernel = cubin_launch.CubinKernel(image())
    with pytest.raises(struct.error):
        kernel.launch(dict.fromkeys(NAMES, 1) | {name: value}, STREAM)
    assert driver.launched == []


@pytest.mark.parametrize("sizes", [(8, 4, 8), (8, 4, 8, 4, 8), (8, 8, 8, 4)])
def test_other_parameters_than_described_are_refused(driver: FakeDriver, sizes: tuple[int, ...]) -> None:
    driver.sizes = sizes
    with pytest.raises(RuntimeError, match=r"expected parameters of \[8, 4, 8, 4\] bytes, got"):
        cubin_launch.CubinKernel(image())


@pytest.mark.parametrize("call", ["load", "kernel", "function", "attribute", "launch", "occupancy"])
def test_the_drivers_refusal_is_passed_on(driver: FakeDriver, call: str) -> None:
    driver.refuses = call
    with pytest.raises(RuntimeError, match="expected CUDA_SUCCESS, got CUDA_ERROR_REFUSED: refused"):
        kernel = cubin_launch.CubinKernel(image())
        kernel.launch(dict.fromkeys(NAMES, 1), STREAM)
        kernel.blocks_per_sm()


def test_occupancy_is_asked_with_the_kernels_shared_memory(driver: FakeDriver) -> None:
    assert cubin_launch.CubinKernel(image()).blocks_per_sm() == 1
