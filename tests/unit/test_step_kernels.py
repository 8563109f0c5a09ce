"""What can be said of the step kernels without a GPU: sizes, resources of every kind of build, and the bound that screens columns."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
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

    model = toy_model(folder, VOCAB, **({"kernels": KERNELS} | options))
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


SCHEMES: dict[str, dict[str, Any]] = {
    "murmur3_64": {"noise": {"scheme": "murmur3_64"}, "kernels": ("fused", "step")},
    "philox_32": {"noise": {"scheme": "philox_32"}},
    "greedy": {"logits": {"cache_dtypes": ()}, "kernels": ("fused", "step")},
}


@pytest.mark.parametrize("d2t", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_builds_of_other_schemes_neither_spill_nor_use_local_memory(tmp_path: Path, scheme: str, d2t: bool) -> None:
    vocabulary = {"draft": 500, "d2t": True} if d2t else {"sampling_limit": VOCAB - 2}
    step = step_of(tmp_path, vocabulary=vocabulary, **SCHEMES[scheme])
    cache = "" if scheme == "greedy" else "bf16"
    for base, vector, sharded in (("bf16", True, False), ("fp32", False, True)):
        compiled = step.compile_step(
            8192, base, cache, vector=vector, sharded=sharded, arch="sm_90a", options="--keep-cubin"
        )
        assert resources(compiled) == (0, 0), (base, vector, sharded)
    assert resources(step.compile_pick(arch="sm_90a", options="--keep-cubin")) == (0, 0)


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


def draws_by_scheme(generator: Any, count: int) -> Iterator[tuple[str, Any, Any]]:
    """Of each noise scheme: noise of random words, and the numbers that bound it (step_noise.py), both fp64.

    Words are spread over all sizes towards the end where noise is large, so that noise of every size, and both series and logarithm
    occur.
    """
    from tests.harness.oracle import gumbel_of_bits, gumbel_of_bits_64, gumbel_of_philox

    from dspark_kernels._device import step_noise

    words = torch.randint(0, 1 << 32, (count,), generator=generator) >> torch.randint(
        0, 32, (count,), generator=generator
    )
    bits = words ^ (words >> 16)  # the hash's last operation
    yield "murmur3_32", gumbel_of_bits(bits).double(), words.double() - step_noise.LOWER_HALF
    low = torch.randint(0, 1 << 32, (count,), generator=generator)
    upper = words ^ step_noise.ALL_ONES
    noise = gumbel_of_bits_64(upper ^ (upper >> 16), low)
    yield "murmur3_64", noise, words.double() - step_noise.LOWER_HALF
    halves = words >> 1
    yield "philox_32", gumbel_of_philox(halves).double(), halves.double()
    yield "philox_32", gumbel_of_philox(halves ^ step_noise.ALL_ONES).double(), halves.double()


@pytest.mark.parametrize("heat", [1e-6, 0.05, 0.7, 1.0, 3.0, 1e6])
@pytest.mark.parametrize("spread", [0.0, 3.0, 3e4])
def test_no_column_that_reaches_the_floor_is_left_out(heat: float, spread: float) -> None:
    """bound >= floor(score) for every column: the formulas of step_scan.py in numbers, with the worst error of each operation."""
    from dspark_kernels._device import step_noise, step_scan

    generator = torch.Generator().manual_seed(5)
    for scheme, noise, screen in draws_by_scheme(generator, 1 << 19):
        logits = torch.randn(len(noise), generator=generator).mul(spread).bfloat16().double()
        score = logits / heat + noise
        # division, sum, logarithms at their worst, and fp64 scores as fp32
        score += score.abs() * 2.0**-21 + (logits / heat).abs() * 2.0**-22 + 2.0**-20
        log2 = torch.log2(screen.clamp(min=1) * (1 + 2.0**-23)) + 2.0**-17
        slope = math.log2(math.e) / heat
        bound = logits * slope - log2 - (logits * slope).abs() * 2.0**-21
        scaled = score * step_scan.LOG2_E
        margin = scaled.abs() * step_scan.RELATIVE_MARGIN + step_scan.MARGIN
        floor = scaled - step_noise.SCHEMES[scheme].BITS - margin
        excluded = (screen > 0) & (bound < floor)
        assert not bool(excluded.any()), scheme
        # The bound is worth something: where it says more than nothing it is within a few units of the score.
        near = (bound - floor)[screen > step_noise.LOWER_HALF]
        assert float(near.median()) < 4 + float(scaled.abs().median()) * 2.0**-17, scheme
