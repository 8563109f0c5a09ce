"""The block of arguments against CuTe DSL itself: a compiled function finds in it what it would make of plain ints."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cuda.bindings.driver import CUstream  # noqa: E402
from cutlass import Int32, Int64  # noqa: E402
from cutlass.cute.runtime import make_fake_stream  # noqa: E402

from dspark_kernels._device.chain_call import ArgumentBlock  # noqa: E402
from dspark_kernels.deepseek_v41 import chain, config  # noqa: E402

STREAM = 0x7F00_1234_5678_9ABC


@cute.jit
def show(a: Int64, b: Int32, c: Int64, d: Int32, stream: Any) -> None:
    cute.printf("%ld %d %ld %d", a, b, c, d)


def test_a_compiled_function_reads_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    """Called on the host: no GPU is needed to see the values arrive."""
    compiled = cute.compile(show, Int64(16), Int32(1), Int64(16), Int32(1), make_fake_stream())
    block = ArgumentBlock(compiled, ("a", "b", "c", "d"), ("b", "d"))
    calls = ((2**40 + 3, -7, 5, 2**31 - 1), (-(2**63), -(2**31), 2**63 - 1, 0), (1, 2, 3, 4))
    for values in calls:
        block.launch(dict(zip("abcd", values, strict=True)), STREAM)
    ctypes.CDLL(None).fflush(None)
    assert [tuple(map(int, line.split())) for line in capfd.readouterr().out.splitlines() if line] == list(calls)


def test_the_chain_finds_the_same_values_in_a_block() -> None:
    """Every argument of the real kernel, as CuTe DSL hands it on: from plain ints, and from the block."""
    line = next(line for line in config.PLANS.values() if line.device == "h200")
    compiled = chain.compile_chain(line, "bf16", "bf16", arch="sm_90a")
    values = [1000 + place if name in chain.NARROW else 2**40 + place for place, name in enumerate(chain.ARGUMENTS)]
    widths = [4 if name in chain.NARROW else 8 for name in chain.ARGUMENTS] + [8]

    def read(arguments: tuple[Any, ...]) -> list[bytes]:
        # The adapted arguments own the memory that the pointers lead to.
        pointers, adapted = compiled.execution_args.generate_execution_args(arguments, {})
        addresses = [pointer.value if isinstance(pointer, ctypes.c_void_p) else pointer for pointer in pointers]
        found = [ctypes.string_at(address, width) for address, width in zip(addresses, widths, strict=True)]
        assert adapted is not None
        return found

    seen: list[list[bytes]] = []
    block = ArgumentBlock(lambda *slots: seen.append(read(slots)), chain.ARGUMENTS, chain.NARROW)
    block.launch(dict(zip(chain.ARGUMENTS, values, strict=True)), STREAM)
    assert seen == [read((*values, CUstream(STREAM)))]


@pytest.mark.parametrize(("name", "value"), [("rows", 2**31), ("rows", -(2**31) - 1), ("base", 2**63)])
def test_a_value_that_does_not_fit_is_refused_and_nothing_launched(name: str, value: int) -> None:
    """ctypes and CuTe DSL would cut it off."""
    launched: list[Any] = []
    block = ArgumentBlock(lambda *slots: launched.append(slots), ("base", "rows"), ("rows",))
    with pytest.raises(struct.error):
        block.launch({"base": 1, "rows": 1} | {name: value}, STREAM)
    assert launched == []
