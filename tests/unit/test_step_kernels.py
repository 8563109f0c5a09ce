"""What can be said of the step kernels without a GPU: sizes, resources of every kind of build, and the bound that screens columns."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

from dspark_kernels._device import step_sizes  # noqa: E402

KERNELS = ("noise", "chain", "fused", "step")
VOCAB = 1003  # odd: rows end within a vector


def step_of(folder: Path, **options: Any) -> ModuleType:
    """The step module of a small model."""
    from tests.harness.toy import toy_model

    model = toy_model(folder, VOCAB, kernels=KERNELS, **options)
    return importlib.import_module(f"{model.__name__}.step")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return step_of(tmp_path_factory.mktemp("plain"))


def resources(compiled: Any) -> tuple[int, int]:
    """Bytes spilled and bytes of local memory."""
    from dsparkgen.cubin import read_resources

    found = read_resources(compiled.artifacts.CUBIN)
    return found.spill_bytes, found.local_bytes


def test_sizes(plain: ModuleType) -> None:
    """A row's scratch is a 32-byte sector; a position of a flat shard is whole vectors; a block has a thread for each 8 to 32 columns."""
    assert [step_sizes.scratch_words(rows) for rows in (1, 64)] == [4, 256]
    assert [step_sizes.shard_pitch(width) for width in (0, 1, 8, 9, 101024)] == [0, 8, 8, 16, 101024]
    assert [plain.threads_of(block) for block in plain.BLOCK_SIZES] == [128, 128, 128, 256]


def test_an_unknown_block_is_refused(plain: ModuleType) -> None:
    with pytest.raises(ValueError, match="block: expected one of 1024, 2048, 4096, 8192, got 512"):
        plain.compile_step(512, "bf16", "bf16", arch="sm_90a")


def test_every_build_is_named_once_and_takes_its_arguments(plain: ModuleType) -> None:
    builds = plain.compile_builds()
    assert {name.split()[0] for name in builds} == {"anchor_embed", "step", "pick", "cache_fill"}
    dtypes, blocks = 4, len(plain.BLOCK_SIZES)
    assert sum(name.startswith("step ") for name in builds) == dtypes * blocks * 2 * 2  # vector, pdl
    for names in (plain.ANCHOR_ARGUMENTS, plain.STEP_ARGUMENTS, plain.PICK_ARGUMENTS, plain.FILL_ARGUMENTS):
        assert len(set(names)) == len(names)


TRANSFORMS = {
    "sum": {"placement": "sum", "multiplier": 0.25, "soft_cap": 20.0},
    "base": {"placement": "base", "soft_cap": 30.0},
    "both": {"placement": "both", "soft_cap": 30.0},
}


@pytest.mark.parametrize("name", ["none", *TRANSFORMS])
def test_builds_neither_spill_nor_use_local_memory(tmp_path: Path, name: str) -> None:
    logits = {} if name == "none" else {"transform": TRANSFORMS[name]}
    step = step_of(tmp_path, logits=logits, vocabulary={"sampling_limit": VOCAB - 2})
    builds = [("bf16", "bf16", True), ("fp32", "fp32", False)]
    if name == "none":  # the transforms do not differ in how entries are read and written
        builds += [("bf16", "bf16", False), ("fp32", "bf16", True), ("fp32", "bf16", False), ("fp32", "fp32", True)]
    for base, cache, vector in builds:
        compiled = step.compile_step(8192, base, cache, vector=vector, arch="sm_90a", options="--keep-cubin")
        assert resources(compiled) == (0, 0), (base, cache, vector)


def test_a_reduced_vocabulary_compiles(tmp_path: Path) -> None:
    step = step_of(tmp_path, vocabulary={"draft": 500, "d2t": True})
    made = [
        step.compile_step(4096, "bf16", "bf16", sharded=sharded, arch="sm_90a", options="--keep-cubin")
        for sharded in (True, False)
    ]
    made.append(step.compile_cache_fill("bf16", arch="sm_90a", options="--keep-cubin"))
    assert [resources(compiled) for compiled in made] == [(0, 0)] * 3


def test_small_kernels_compile(plain: ModuleType) -> None:
    made = [
        plain.compile_anchor_embed(pdl=True, arch="sm_90a", options="--keep-cubin"),
        plain.compile_pick(arch="sm_90a", options="--keep-cubin"),
        plain.compile_cache_fill("fp32", arch="sm_90a", options="--keep-cubin"),
        plain.compile_cache_fill("bf16", vector=False, arch="sm_90a", options="--keep-cubin"),
    ]
    assert [resources(compiled) for compiled in made] == [(0, 0)] * 4


def test_packets_hold_their_fields_and_zeros(plain: ModuleType) -> None:
    from dspark_kernels._device import step_tail

    values = {"score": ["s"], "nan": ["n"], "token": ["low", "high"]}
    assert step_tail.packed(4, {"score": (0, 1), "nan": (1, 1), "token": (2, 2)}, values) == ["s", "n", "low", "high"]
    packet = step_tail.packed(6, {"token": (4, 1), "score": (1, 1), "spare": (2, 1)}, values)
    assert packet[4] == "low" and packet[1] == "s"
    assert [type(packet[i]).__name__ for i in (0, 2, 3, 5)] == ["Uint32"] * 4


@pytest.mark.parametrize("heat", [1e-6, 0.05, 0.7, 1.0, 3.0, 1e6])
@pytest.mark.parametrize("spread", [0.0, 3.0, 3e4])
def test_no_column_that_reaches_the_floor_is_left_out(plain: ModuleType, heat: float, spread: float) -> None:
    """bound >= floor(score) for every column: the formulas of step_scan.py in numbers, with the worst error of each operation.

    Words are spread over all sizes, so that noise of every size and both series and logarithm occur.
    """
    from tests.harness.oracle import gumbel_of_bits

    from dspark_kernels._device import step_scan

    generator = torch.Generator().manual_seed(5)
    count = 1 << 20
    words = torch.randint(0, 1 << 32, (count,), generator=generator) >> torch.randint(
        0, 32, (count,), generator=generator
    )
    logits = torch.randn(count, generator=generator).mul(spread).bfloat16().double()
    bits = words ^ (words >> 16)
    score = logits / heat + gumbel_of_bits(bits).double()
    score += (
        score.abs() * 2.0**-22 + (logits / heat).abs() * 2.0**-22 + 2.0**-20
    )  # division, sum, logarithms at their worst
    lowered = words.double() - step_scan.LOWER_HALF
    log2 = torch.log2(lowered.clamp(min=1)) + 2.0**-17
    slope = math.log2(math.e) / heat
    bound = logits * slope - log2 - (logits * slope).abs() * 2.0**-21
    scaled = score * step_scan.LOG2_E
    floor = scaled - step_scan.WORD_BITS - (scaled.abs() * step_scan.RELATIVE_MARGIN + step_scan.MARGIN)
    excluded = (lowered > 0) & (bound < floor)
    assert not bool(excluded.any())
    # The bound is worth something: on most columns it is within a few units of the score.
    assert float((bound - floor).median()) < 4 + float(scaled.abs().median()) * 2.0**-17
