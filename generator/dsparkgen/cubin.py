"""Reads what a compiled kernel costs out of its cubin: registers, stack frame, local memory, spills, static shared memory.

Registers, frame and local bytes are the assembler's own figures (`cuobjdump --dump-resource-usage`). Spills are counted in the
machine code (`nvdisasm`): every STL and LDL instruction moves a register to or from local memory. Both tools come with Triton.
"""

import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_FUNCTION = re.compile(r"Function (?P<name>\S+):\s+(?P<figures>[^\n]+)")
_FIGURE = re.compile(r"\b(?P<key>REG|STACK|SHARED|LOCAL):(?P<value>\d+)")
_LOCAL_ACCESS = re.compile(r"\b(?:STL|LDL)(?P<suffix>(?:\.\w+)*)\s")
_WIDTHS = {".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2, ".64": 8, ".128": 16}  # bytes; an access without a suffix moves 4
_UNKNOWN_ARCH = "Cannot decode architecture"


class Resources(NamedTuple):
    """What one cubin's kernels use; the maximum over its functions where there are several.

    registers: 32-bit registers a thread. local_bytes: local memory a thread, stack frame included.
    spill_bytes: bytes that a thread's STL and LDL instructions move, each instruction counted once.
    shared_bytes: static shared memory a block. spill_source: "nvdisasm", or "frame" where nvdisasm does not know the arch: spilled
    registers live in the stack frame, so a frame of 0 bytes proves that there are none and another frame is reported as spills.
    """

    registers: int
    local_bytes: int
    spill_bytes: int
    shared_bytes: int
    spill_source: str


def find_tool(name: str) -> Path | None:
    """The CUDA binary tool `name`, from Triton's package or else from PATH; None where neither has it."""
    triton = find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        path = Path(triton.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return path
    found = shutil.which(name)
    return Path(found) if found else None


def parse_usage(text: str) -> Resources:
    """The figures of `cuobjdump --dump-resource-usage`; spills are left 0. Raises ValueError where no function is listed."""
    functions = [
        {key: int(value) for key, value in _FIGURE.findall(match["figures"])} for match in _FUNCTION.finditer(text)
    ]
    if not functions:
        raise ValueError(f"expected at least one 'Function' line from cuobjdump, got {text.strip()!r}")
    return Resources(
        registers=max(usage["REG"] for usage in functions),
        local_bytes=max(usage["STACK"] + usage["LOCAL"] for usage in functions),
        spill_bytes=0,
        shared_bytes=max(usage["SHARED"] for usage in functions),
        spill_source="frame",
    )


def count_spills(disassembly: str) -> int:
    """Bytes a thread moves to or from local memory in nvdisasm's text, each instruction counted once."""
    total = 0
    for match in _LOCAL_ACCESS.finditer(disassembly):
        widths = [_WIDTHS["." + part] for part in match["suffix"].split(".") if "." + part in _WIDTHS]
        total += widths[0] if widths else 4
    return total


def read_resources(cubin: bytes) -> Resources:
    """Reads a cubin's figures. Raises FileNotFoundError without the tools, ValueError where a tool refuses the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = parse_usage(_output(["cuobjdump", "--dump-resource-usage", file.name]))
        try:
            disassembly = _output(["nvdisasm", "--print-code", file.name])
        except ValueError as error:
            if _UNKNOWN_ARCH not in str(error):
                raise
            return usage._replace(spill_bytes=usage.local_bytes)
    return usage._replace(spill_bytes=count_spills(disassembly), spill_source="nvdisasm")


def _output(command: list[str]) -> str:
    tool = find_tool(command[0])
    if tool is None:
        raise FileNotFoundError(f"expected {command[0]} in Triton's package or on PATH, found neither")
    done = subprocess.run([str(tool), *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{command[0]} exited with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
