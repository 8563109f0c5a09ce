"""Host side of a launch: the checks made before a kernel runs, and the report a kernel leaves when it gives up waiting.

Every check names what it expected and what it was given; every decline is a sentence. Nothing here synchronises.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

VECTOR_BYTES = 16  # the widest load or store of one thread
RESERVED_SHARED_BYTES = 1024  # of an SM's shared memory, kept by CUDA for every CTA (CUDA C++ Programming Guide)
REGISTERS_PLANNED = 65536  # of an SM: what the compiler divides among the threads of a CTA that has an SM to itself
MOST_REGISTERS, REGISTER_UNIT = 256, 8  # of a thread, as they are allocated
PEER_WAIT, RANKS_DIFFER, FILL_WAIT, LOGITS_WAIT = 2, 3, 4, 5  # codes of a report, its word 0
REPORT_WORDS = 16  # int32 words of pinned memory that a kernel may write before it traps
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "int32",
    torch.int64: "int64",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that specs and messages use for a torch dtype."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def describe(tensor: Any) -> str:
    """One line on an argument: dtype, shape, strides, device and the address modulo 16 bytes."""
    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} {tensor!r}"
    text = f"{dtype_name(tensor.dtype)} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"
    offset = tensor.data_ptr() % VECTOR_BYTES
    return f"{text}, address {offset} modulo {VECTOR_BYTES}" if offset else text


class Misfit(NamedTuple):
    """Why an argument does not fit: the exception that a call raises for it, and its message."""

    error: type[Exception]
    message: str


class Expected(NamedTuple):
    """What one tensor argument must look like.

    ``shape`` gives the sizes; ``extendable`` the dimensions that may be larger (what lies beyond is never touched).
    The last stride is always 1; the other strides are free unless ``contiguous``. ``alignment`` is in bytes.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    extendable: tuple[int, ...] = ()
    contiguous: bool = False
    alignment: int = 1

    def __str__(self) -> str:
        sizes = ", ".join(f">= {n}" if d in self.extendable else str(n) for d, n in enumerate(self.shape))
        layout = "contiguous" if self.contiguous else "last stride 1"
        text = f"{' or '.join(dtype_name(d) for d in self.dtypes)} [{sizes}], {layout}"
        return f"{text}, {self.alignment}-byte aligned" if self.alignment > 1 else text

    def misfit(self, name: str, tensor: Any, device: torch.device) -> Misfit | None:
        """Compare an argument with this expectation; None means that it fits. Costs no device work."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in self.dtypes:
            return self._because(TypeError, name, tensor, device)
        sizes, strides = tensor.shape, tensor.stride()
        fits = len(sizes) == len(self.shape) and tensor.device == device
        for dim, least in enumerate(self.shape):
            fits = fits and (sizes[dim] == least or (dim in self.extendable and sizes[dim] > least))
        # A size of 0 or 1 leaves its stride meaningless: torch may report any number there.
        fits = fits and (strides[-1] == 1 or sizes[-1] <= 1)
        fits = fits and (not self.contiguous or tensor.is_contiguous())
        if fits and tensor.data_ptr() % self.alignment == 0:
            return None
        return self._because(ValueError, name, tensor, device)

    def _because(self, error: type[Exception], name: str, tensor: Any, device: torch.device) -> Misfit:
        return Misfit(error, f"{name}: expected {self} on {device}, got {describe(tensor)}")

    def check(self, name: str, tensor: Any, device: torch.device) -> None:
        """Raise TypeError (not a tensor, dtype) or ValueError (shape, strides, device, alignment) when it does not fit."""
        found = self.misfit(name, tensor, device)
        if found is not None:
            raise found.error(found.message)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise TypeError unless ``value`` is an int, ValueError unless it lies in [least, most]."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if value < least or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: expected an int {span}, got {value}")


def vector_ok(tensor: torch.Tensor, first: int = 0) -> int:
    """1 when column ``first`` of every row starts on a 16-byte boundary, so that vector accesses are allowed, else 0."""
    size = tensor.element_size()
    starts = [tensor.data_ptr() + first * size]
    starts += [stride * size for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return int(all(start % VECTOR_BYTES == 0 for start in starts))


def vector_step(columns: int, tensor: torch.Tensor) -> int:
    """1 when so many columns of ``tensor`` are whole 16-byte vectors, else 0."""
    return int(columns * tensor.element_size() % VECTOR_BYTES == 0)


class DeviceFacts(NamedTuple):
    """What a plan depends on, as CUDA reports it."""

    name: str
    capability: tuple[int, int]
    sms: int
    smem_per_block: int  # bytes, with the opt-in

    def __str__(self) -> str:
        major, minor = self.capability
        return (
            f"{self.name}: compute capability {major}.{minor}, {self.sms} SMs, "
            f"{self.smem_per_block} bytes of shared memory per block"
        )


def read_device(device: torch.device) -> DeviceFacts:
    """Ask CUDA for the facts of one device."""
    found = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        found.name, (found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin
    )


class SmFacts(NamedTuple):
    """What one SM holds, as CUDA reports it."""

    shared: int  # bytes of shared memory
    registers: int  # of 32 bits
    threads: int


def read_sm(device: torch.device) -> SmFacts:
    """Ask CUDA what one SM of a device holds."""
    found = torch.cuda.get_device_properties(device)
    return SmFacts(
        found.shared_memory_per_multiprocessor, found.regs_per_multiprocessor, found.max_threads_per_multi_processor
    )


def why_not_resident(facts: DeviceFacts, sm: SmFacts, *, ctas: int, threads: int, shared: int) -> str | None:
    """Why the CTAs of a grid cannot all be on the chip at once, one per SM, or None.

    Args:
        facts: the device; with a MIG slice, the slice.
        sm: one SM of it.
        ctas: CTAs of the grid.
        threads: threads of a CTA.
        shared: shared memory that a CTA asks for, in bytes.
    """
    if ctas > facts.sms:
        return f"expected at least {ctas} SMs, one per CTA, got {facts}"
    if shared > facts.smem_per_block or shared + RESERVED_SHARED_BYTES > sm.shared:
        return (
            f"expected a CTA's {shared} bytes of shared memory, and {RESERVED_SHARED_BYTES} that CUDA keeps, on an SM, "
            f"got {sm.shared} bytes, {facts.smem_per_block} per block"
        )
    # What the compiler may give a thread so that a CTA fits, in units of 8.
    registers = min(MOST_REGISTERS, REGISTERS_PLANNED // threads // REGISTER_UNIT * REGISTER_UNIT)
    if threads > sm.threads or threads * registers > sm.registers:
        return (
            f"expected a CTA's {threads} threads of {registers} registers on an SM, got {sm.threads} threads and "
            f"{sm.registers} registers"
        )
    return None


def match_device(devices: Mapping[str, tuple[tuple[int, int], int, int]], facts: DeviceFacts) -> str | None:
    """The described device that this one is: same compute capability and SM count, at least its shared memory.

    Parts that share all three (H100 and H200) compute the same with either description; the one whose name CUDA
    reports is taken, for its speed, else the first described.
    """
    fitting = [
        name
        for name, (capability, sms, smem) in devices.items()
        if tuple(capability) == facts.capability and sms == facts.sms and smem <= facts.smem_per_block
    ]
    reported = re.sub(r"[^a-z0-9]+", "_", facts.name.lower())
    return next((name for name in fitting if name in reported), fitting[0] if fitting else None)


def why_no_plan(
    plans: Mapping[tuple[str, int, int], Any],
    devices: Mapping[str, tuple[tuple[int, int], int, int]],
    facts: DeviceFacts,
    tp: int,
    device_name: str | None = None,
) -> str | None:
    """Why no PLANS line serves this device at this tensor-parallel size, and which file would change that; or None."""
    if device_name is not None and device_name not in devices:
        return f"device_name: expected one of {', '.join(sorted(devices))}, got {device_name!r}"
    name = match_device(devices, facts) if device_name is None else device_name
    if name is None:
        return f"no plan for {facts}; describe this GPU in specs/devices/<name>.toml and regenerate"
    capability, sms, smem = devices[name]
    if tuple(capability) != facts.capability or sms > facts.sms or smem > facts.smem_per_block:
        needs = DeviceFacts(name, (capability[0], capability[1]), sms, smem)
        return f"the plan for {needs} does not fit {facts}"
    if not any(key[0] == name and key[1] == tp for key in plans):
        return f"no plan for {name} at tensor-parallel size {tp}; add {tp} to parallel.tp of the model's spec and regenerate"
    return None


def plan_lines(
    plans: Mapping[tuple[str, int, int], Any],
    devices: Mapping[str, tuple[tuple[int, int], int, int]],
    facts: DeviceFacts,
    tp: int,
    device_name: str | None = None,
) -> dict[int, Any]:
    """The PLANS lines of this device and tensor-parallel size by row slots, ascending. Ask ``why_no_plan`` first."""
    name = match_device(devices, facts) if device_name is None else device_name
    return {key[2]: plans[key] for key in sorted(plans, key=lambda key: key[2]) if key[:2] == (name, tp)}


def row_slots_for(lines: Sequence[int] | Mapping[int, Any], rows: int) -> int | None:
    """The smallest row slots that hold ``rows`` request rows, or None."""
    return min((slots for slots in lines if slots >= rows), default=None)


CONTEXT_LOST = "The kernel trapped, so this process's CUDA context is lost: no CUDA call can succeed any more; restart the process."


class ChainError(RuntimeError):
    """The chain kernel gave up and trapped. The CUDA context is lost."""


class ChainTimeoutError(ChainError):
    """A bounded wait inside the chain kernel ran out.

    Attributes: ``rank``, ``row``, ``position`` of the wait; ``what`` was waited for ("grid barrier", "peer rank", "filled
    cache rows" or "logits"); ``peer``, the CTA or rank that did not arrive, of filled rows how many CTAs did not; ``cta``, the
    CTA that waited; ``timeout_ms``; ``epoch``, the launch.
    """

    # By report word 0: at what a CTA waited, and for whom.
    WAITS = {1: "grid barrier", PEER_WAIT: "peer rank", FILL_WAIT: "filled cache rows", LOGITS_WAIT: "logits"}

    def __init__(self, words: Sequence[int]) -> None:
        code, self.rank, self.row, self.position, self.peer, self.cta, self.timeout_ms, self.epoch = words[:8]
        self.what = self.WAITS.get(code, f"unknown wait {code}")
        rank = f"rank {self.peer}"
        missing = {PEER_WAIT: rank, LOGITS_WAIT: rank, FILL_WAIT: f"{self.peer} CTAs"}.get(code, f"CTA {self.peer}")
        super().__init__(
            f"the chain kernel gave up after {self.timeout_ms} ms: rank {self.rank}, row {self.row}, position "
            f"{self.position}: CTA {self.cta} waited at the {self.what} for {missing} (launch {self.epoch}). {CONTEXT_LOST}"
        )


class RanksDifferError(ChainError):
    """A debugging build found that two ranks do not make the same launch.

    Attributes: ``rank``, which found it; ``peer``, the other one; ``what`` differs ("launch count", "rows" or "batch
    shape"); ``expected``, this rank's value; ``given``, the peer's; ``epoch``, the launch.
    """

    WHAT = ("launch count", "rows", "batch shape")  # report word 2

    def __init__(self, words: Sequence[int]) -> None:
        _, self.rank, what, _, self.peer, _, _, self.epoch, self.expected, self.given = words[:10]
        self.what = self.WHAT[what] if 0 <= what < len(self.WHAT) else f"unknown word {what}"
        super().__init__(
            f"the ranks of a chain launch differ: {self.what}: expected {self.expected}, as on rank {self.rank}, got "
            f"{self.given} on rank {self.peer} (launch {self.epoch}). Every rank must make the same launches. {CONTEXT_LOST}"
        )


class TimeoutReport:
    """Sixteen int32 words that a kernel writes before it traps; readable after the CUDA context is gone.

    The words live in pinned host memory, whose device address is its host address, and are read without a CUDA call.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._words = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._undying: tuple[object, ...] = ()
        self.address = self._words.data_ptr()
        self._view = (ctypes.c_int32 * REPORT_WORDS).from_address(self.address)

    def keep_after_trap(self, *objects: object) -> None:
        """Objects whose destructors need the CUDA context: once a kernel has trapped, they are never destroyed.

        Torch's symmetric memory ends the process when it is freed without a context, and with it the error that says why.
        """
        self._undying += objects

    def raise_if_set(self) -> None:
        """Raise ChainTimeoutError or RanksDifferError when a kernel has reported why it gave up."""
        if self._view[0]:
            for kept in self._undying:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # beyond the interpreter's own teardown, too
            self._undying = ()
            raise (RanksDifferError if self._view[0] == RANKS_DIFFER else ChainTimeoutError)(list(self._view))
