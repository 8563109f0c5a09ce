"""The kernel ahead of the chain, compiled without a GPU: it lets the chain start, holds on, and leaves room beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from benchmarks import producer  # noqa: E402

from dsparkgen.cubin import read_resources  # noqa: E402

CTAS = 132
SCHEDULER_REGISTERS = 16384  # of each of an SM's four register files
CHAIN_WARPS = 3  # of a chain's CTA on each scheduler
MOST_BESIDE = 160  # registers a thread of a chain that leaves room for the producer; more, up to 168, leave none


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)  # the compiler leaves what it keeps in the working directory
    return producer.compile_producer(CTAS, arch="sm_90a", options="--keep-cubin --keep-ptx")


def test_a_chain_of_fewer_registers_fits_beside_it(compiled: object) -> None:
    """A warp's registers lie in its scheduler's file, in units of 8 a thread."""
    resources = read_resources(compiled.artifacts.CUBIN)  # type: ignore[attr-defined]
    wanted = -(-resources.registers // 8) * 8 * producer.THREADS
    left = {registers: SCHEDULER_REGISTERS - CHAIN_WARPS * 32 * registers for registers in (MOST_BESIDE, 168)}
    assert left[168] < wanted <= left[MOST_BESIDE]


def test_it_lets_the_chain_start_and_writes_only_after_the_wait(compiled: object) -> None:
    text = compiled.artifacts.PTX  # type: ignore[attr-defined]
    early, timer = text.index("griddepcontrol.launch_dependents"), text.index("%globaltimer")
    loop = text.index("%globaltimer", timer + 1)  # read again in the loop, not once
    assert early < timer < loop < text.index("st.global")
    assert ".shared" not in text
