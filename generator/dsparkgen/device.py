"""GPU descriptions: the numbers that plans are made from, each with its mark."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dsparkgen.locate import InvalidFile, Location, Problem, Table, read_document, show, validate
from dsparkgen.spec import Arch

Mark = Literal["measured", "published", "estimated"]
NUMBERS = (
    "sms",
    "smem_per_block_bytes",
    "smem_per_sm_bytes",
    "registers_per_sm",
    "l2_bytes",
    "hbm_bytes_per_s",
    "l2_bytes_per_s",
    "grid_barrier_us",
    "rank_hop_us",
    "launch_us",
    "clock_hz",
)


def _marks(device: Any) -> Iterator[tuple[Location, str]]:
    marks = device.provenance
    for name in NUMBERS:
        if name not in marks:
            yield ("provenance",), f"must mark every number; {name} is missing"
    for name in marks:
        if name not in NUMBERS:
            yield ("provenance", name), f"must be one of the numbers: {', '.join(NUMBERS)}"


def _arch(device: Any) -> Iterator[tuple[Location, str]]:
    major, minor = device.compute_capability
    expected = f"sm_{major}{minor}a"
    if device.arch != expected:
        yield ("arch",), f"must be {show(expected)} for compute capability {major}.{minor} (got {show(device.arch)})"


def _shared_memory(device: Any) -> Iterator[tuple[Location, str]]:
    block, sm = device.smem_per_block_bytes, device.smem_per_sm_bytes
    if block > sm:
        yield ("smem_per_block_bytes",), f"must be at most smem_per_sm_bytes, {sm} (got {block})"


class DeviceSpec(Table):
    """One GPU."""

    RULES = (_marks, _arch, _shared_memory)
    HINTS = {
        "l2_bytes": "in bytes",
        "hbm_bytes_per_s": "in bytes per second",
        "l2_bytes_per_s": "in bytes per second",
        "grid_barrier_us": "in microseconds",
        "rank_hop_us": "in microseconds",
        "launch_us": "in microseconds",
        "clock_hz": "in hertz",
    }

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=32)] = Field(
        description="Short name; equal to the file name without .toml."
    )
    title: Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f\x7f]+$')] = Field(description="Name for people.")
    arch: Arch = Field(description="Compilation target.")
    compute_capability: tuple[int, int] = Field(description="Major and minor compute capability.")
    sms: Annotated[int, Field(ge=1, le=1024)] = Field(description="Streaming multiprocessors that are enabled.")
    smem_per_block_bytes: Annotated[int, Field(ge=49152, multiple_of=1024)] = Field(
        description="Largest dynamic shared memory of a block (opt-in maximum), in bytes."
    )
    smem_per_sm_bytes: Annotated[int, Field(ge=49152, multiple_of=1024)] = Field(
        description="Shared memory of an SM, in bytes; each resident block takes 1024 bytes more than it asks for."
    )
    registers_per_sm: Annotated[int, Field(ge=1024)] = Field(description="32-bit registers of an SM.")
    l2_bytes: Annotated[int, Field(ge=1 << 20)] = Field(description="L2 cache, in bytes.")
    hbm_bytes_per_s: Annotated[float, Field(ge=1e11)] = Field(
        description="Device memory bandwidth, in bytes per second."
    )
    l2_bytes_per_s: Annotated[float, Field(ge=1e11)] = Field(
        description="Bandwidth from L2 into shared memory by bulk copies, whole device, in bytes per second."
    )
    grid_barrier_us: Annotated[float, Field(ge=0.05, le=100)] = Field(
        description="One barrier over a block on every SM, in microseconds."
    )
    rank_hop_us: Annotated[float, Field(ge=0.05, le=100)] = Field(
        description="An 8-byte store into another GPU's memory until that GPU sees it, one way, in microseconds."
    )
    launch_us: Annotated[float, Field(ge=0.1, le=1000)] = Field(
        description="From launch to the first instruction, and end to event, in microseconds."
    )
    clock_hz: Annotated[float, Field(ge=1e8)] = Field(description="SM clock under load, in hertz.")
    provenance: dict[str, Mark] = Field(description="For every number: measured, published or estimated.")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_rules()
        return self


def read_device(path: Path) -> DeviceSpec:
    """Read one device file.

    Raises:
        InvalidFile: With every problem, each with file, line and column.
    """
    document = read_document(path)
    device = validate(document, DeviceSpec)
    if device.name != path.stem:
        message = f"must equal the file's name, {show(path.stem)} (got {show(device.name)})"
        raise InvalidFile([document.problem(("name",), message)])
    return device


def load_devices(root: Path) -> dict[str, DeviceSpec]:
    """Every device of `root`/specs/devices, by name in alphabetical order.

    Raises:
        InvalidFile: With the problems of all files.
    """
    return read_devices(root / "specs" / "devices")


def read_devices(folder: Path) -> dict[str, DeviceSpec]:
    """Every device of a folder, by name in alphabetical order.

    Raises:
        InvalidFile: With the problems of all files.
    """
    devices: dict[str, DeviceSpec] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.toml")):
        try:
            devices[path.stem] = read_device(path)
        except InvalidFile as error:
            problems += error.problems
    if problems:
        raise InvalidFile(problems)
    return devices
