"""Launches compiled kernels by the CUDA driver, without the compiler that made them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

from .kernel_image import WIDE_BYTES, Dimension, KernelImage

FIELDS = {8: "q", 4: "i4x"}  # by a parameter's bytes; every field of the argument block takes 8


def ask(answer: tuple[Any, ...], what: str) -> Any:
    """The result of a driver call. Raises RuntimeError with the driver's words when it refused."""
    from cuda.bindings import driver

    status = answer[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        raise RuntimeError(f"{what}: expected CUDA_SUCCESS, got {status.name}: {(text or b'').decode()}")
    return answer[1] if len(answer) > 1 else None


def size_of(dimension: Dimension, arguments: Mapping[str, int]) -> int:
    """CTAs along one axis of the grid, at least one, for one launch's arguments."""
    if isinstance(dimension, int):
        return dimension
    if isinstance(dimension, str):
        return arguments[dimension]
    name, share = dimension
    return max(-(-arguments[name] // share), 1)


class CubinKernel:
    """One compiled kernel, loaded into the current CUDA context. Keeps its arguments in one piece of memory.

    Calls from several host threads need a lock: they share that memory.

    Args:
        image: the kernel. The current device must be of its arch.
        origin: where it came from, in words; for whoever asks.

    Raises:
        RuntimeError: with the driver's words, when it refuses the cubin.
    """

    def __init__(self, image: KernelImage, origin: str = "") -> None:
        from cuda.bindings import driver

        self.image, self.origin = image, origin
        parameters, shape, _ = image.description
        name = f"kernel {image.build.kernel} for {image.build.arch}"
        self._library = ask(driver.cuLibraryLoadData(image.cubin, [], [], 0, [], [], 0), name)
        kernel = ask(driver.cuLibraryGetKernel(self._library, image.entry.encode()), name)
        self._function = ask(driver.cuKernelGetFunction(kernel), name)
        self._check_parameters(kernel, name)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask(driver.cuFuncSetAttribute(self._function, limit, shape.shared), f"{name}: {shape.shared} bytes shared")

        # Little-endian without alignment of its own: every field is 8 bytes, an int32 in the first four.
        self._layout = struct.Struct("<" + "".join(FIELDS[parameter.size] for parameter in parameters))
        self._names = tuple(parameter.name for parameter in parameters)
        self._memory = ctypes.create_string_buffer(max(self._layout.size, 1))
        start = ctypes.addressof(self._memory)
        self._places = (ctypes.c_void_p * len(parameters))(*[start + WIDE_BYTES * i for i in range(len(parameters))])
        self._arguments = ctypes.addressof(self._places)

        self._launch = driver.cuLaunchKernelEx
        self._config = driver.CUlaunchConfig()
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = shape.block, 1, 1
        self._config.sharedMemBytes = shape.shared
        attributes = []
        if shape.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if shape.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        self._config.attrs, self._config.numAttrs = attributes, len(attributes)
        self._fixed_grid = all(isinstance(size, int) for size in shape.grid)
        if self._fixed_grid:
            self._set_grid({})

    def _check_parameters(self, kernel: Any, name: str) -> None:
        """Raise RuntimeError unless the kernel takes what its description says."""
        from cuda.bindings import driver

        wanted = [parameter.size for parameter in self.image.description.parameters]
        found: list[int] = []
        while len(found) <= len(wanted):
            status, _, size = driver.cuKernelGetParamInfo(kernel, len(found))
            if status != driver.CUresult.CUDA_SUCCESS:  # no such parameter
                break
            found.append(size)
        if found != wanted:
            raise RuntimeError(f"{name}: expected parameters of {wanted} bytes, got {found}")

    def _set_grid(self, arguments: Mapping[str, int]) -> None:
        sizes = [size_of(size, arguments) for size in self.image.description.shape.grid]
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = sizes

    def launch(self, arguments: Mapping[str, int], stream: int) -> None:
        """Launch on a stream (its CUstream handle). The driver has copied the arguments when this returns.

        Raises RuntimeError with the driver's words when it refuses the launch, KeyError for a missing argument.
        """
        self._layout.pack_into(self._memory, 0, *[arguments[name] for name in self._names])
        if not self._fixed_grid:
            self._set_grid(arguments)
        self._config.hStream = stream
        (status,) = self._launch(self._config, self._function, self._arguments, 0)
        if status:
            ask((status,), f"launch of kernel {self.image.build.kernel}")

    def blocks_per_sm(self) -> int:
        """CTAs that the driver places on one SM of the current device at once."""
        from cuda.bindings import driver

        shape = self.image.description.shape
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, shape.block, shape.shared)
        return int(ask(answer, f"occupancy of kernel {self.image.build.kernel}"))
