"""Which CUDA toolkit CuTe DSL assembles with: it brings one a CUDA major version, and their machine code differs."""

import ctypes
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = "nvidia-cutlass-dsl-libs-cu{}"
KNOWN = range(12, 20)  # CUDA major versions
RECORDED = 13  # the one that all recorded runs on a GPU were compiled with


def installed_toolkits() -> list[int]:
    """CUDA major versions whose libraries of CuTe DSL are installed, ascending."""
    found = []
    for major in KNOWN:
        try:
            version(LIBRARIES.format(major))
        except PackageNotFoundError:
            continue
        found.append(major)
    return found


def driver_major() -> int | None:
    """CUDA major version of the driver, or None without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        return number.value // 1000 if library.cuDriverGetVersion(ctypes.byref(number)) == 0 else None
    except (OSError, AttributeError):
        return None


def toolkit() -> int | None:
    """The CUDA major version that CuTe DSL chooses here: the newest installed one that the driver knows; None without any."""
    driver = driver_major()
    return max((major for major in installed_toolkits() if driver is None or major <= driver), default=None)
