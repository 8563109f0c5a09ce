"""scripts/bench_tp.sh: what it runs over a number of GPUs, with a Python that only tells."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TELLS = '#!/bin/sh\necho "ran $*"\ncase "$*" in *"$FAILS"*) exit 7;; esac\n'


def run(tmp_path: Path, *arguments: str, fails: str = "nothing") -> tuple[int, list[str]]:
    python = tmp_path / "python"
    python.write_text(TELLS)
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts" / "bench_tp.sh"), *arguments],
        env=os.environ | {"PYTHON": str(python), "FAILS": fails},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    return ran.returncode, [line.removeprefix("ran ") for line in ran.stdout.splitlines() if line.startswith("ran ")]


def test_tests_verification_and_timings_of_the_models_that_have_a_spec(tmp_path: Path) -> None:
    code, ran = run(tmp_path, "4")
    models = [name for name in ("deepseek_v41", "qwen3_8b", "kimi_k3") if (ROOT / "specs" / f"{name}.toml").exists()]
    assert code == 0 and models
    tests, phases, verify, bench = ran
    assert tests.endswith("tests/multi_gpu --tp 4") and "--world 4 --phases bitwise,graph" in phases
    assert verify == f"-m dsparkgen verify {' '.join(models)} --tp 4 --record"
    assert bench == f"-m dsparkgen bench {' '.join(models)} --tp 4 --emulated 4 --rows 1,8 --record"


@pytest.mark.parametrize("part", ["tests/multi_gpu", "dsparkgen verify"])
def test_a_part_that_fails_does_not_keep_the_others(tmp_path: Path, part: str) -> None:
    code, ran = run(tmp_path, "2", "deepseek_v41", fails=part)
    assert code == 7 and len(ran) == 4 and "bench deepseek_v41 --tp 2" in ran[-1]


def test_the_number_of_gpus_is_needed(tmp_path: Path) -> None:
    assert run(tmp_path)[0] != 0
