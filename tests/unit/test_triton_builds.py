"""The Triton kernels compile without a GPU, and a launch asks for no binary but the described ones, whatever its arguments."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

CAPABILITIES = ("90", "100")


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("triton_builds_worker.py")
    command = [sys.executable, str(worker), str(tmp_path_factory.mktemp("builds"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_build_is_described(builds: Any) -> None:
    pairs = [f"{base}/{cache}" for base in ("bf16", "fp32") for cache in ("bf16", "fp32")]
    assert sorted(builds["described"]["fused"]) == sorted(pairs)
    assert list(builds["described"]["noise"]) == ["any"]


@pytest.mark.parametrize("module", ["noise", "fused"])
def test_launches_ask_for_described_builds_only(builds: Any, module: str) -> None:
    """Row counts, strides and widths of 1 and of multiples of 16, and unaligned pointers: nothing compiles at a later call."""
    described = {build["90"]["hash"] for build in builds["described"][module].values()}
    assert set(builds["launched"][module]) == described


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("module", ["noise", "fused"])
def test_no_spills_and_no_local_memory(builds: Any, module: str, capability: str) -> None:
    for name, build in builds["described"][module].items():
        found = build[capability]
        assert (found["spill_bytes"], found["local_bytes"]) == (0, 0), name


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_instructions_that_decide_the_last_bit(builds: Any, capability: str) -> None:
    """The division is the engine's approximate one, noise stores are 16 bytes wide, the arrival is acquire and release."""
    noise = builds["described"]["noise"]["any"][capability]["ptx"]
    assert "st.global.v4.b32" in noise and not re.search(r"st\.global\.b32", noise)
    for build in builds["described"]["fused"].values():
        ptx = build[capability]["ptx"]
        assert "div.full.f32" in ptx and not re.search(r"div\.(rn|approx)", ptx)
        assert "atom.global.gpu.acq_rel.add.u32" in ptx
        assert "ld.global.v4.b32" in ptx  # head rows are read 16 bytes at a time


def test_every_feature_compiles_without_spills(builds: Any) -> None:
    features = builds["features"]
    assert {model: sorted(found) for model, found in features.items()} == {
        "reduced vocabulary, fp64 noise, cap on the base": ["fused/fp32/fp32", "fused/mask/fp32"],
        "reduced vocabulary, Philox noise, cap on the sum": ["fused/bf16/bf16", "fused/mask/bf16", "noise/any"],
        "greedy, cap on both, rank 80": ["fused/bf16"],
        "rank 512": ["fused/bf16/bf16"],
    }
    for model, found in features.items():
        for name, build in found.items():
            assert (build["spill_bytes"], build["local_bytes"]) == (0, 0), (model, name)


def test_what_a_transform_multiplies_is_not_fused_into_a_sum(builds: Any) -> None:
    """The engine's multiplication and addition are two operations, each rounded: fp32 base logits would show it."""
    ptx = builds["features"]["reduced vocabulary, fp64 noise, cap on the base"]["fused/fp32/fp32"]["ptx"]
    assert "mul.rn.f32" in ptx and "mul.rn.ftz.f32" not in ptx
