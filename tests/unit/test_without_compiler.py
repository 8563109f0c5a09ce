"""The environment in which packs are tried: no CuTe DSL, and the packs that were installed."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.harness import without_compiler

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A pack without kernels."""
    from dsparkgen.pack import write_wheel

    return write_wheel([], tmp_path, tmp_path / "out", "some_pack")


def test_the_compiler_is_gone_and_the_pack_is_there(tmp_path: Path, wheel: Path) -> None:
    python = without_compiler.make_environment(tmp_path / "environment", [wheel])
    found = without_compiler.survey(python)
    assert found["import cutlass"] == "No module named 'cutlass'" and found["compiler"] is None
    assert found["packs"] == {"some_pack": 0}


def test_everything_else_is_there_for_processes_that_it_starts_too(tmp_path: Path) -> None:
    python = without_compiler.make_environment(tmp_path / "environment")
    code = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import torch, triton, pytest, dsparkgen']))"
    assert subprocess.run([python, "-c", code], env=without_compiler.environment()).returncode == 0
    assert without_compiler.survey(python)["packs"] == {}


def test_a_wheel_that_pip_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no_such-1-py3-none-any\.whl"):
        without_compiler.make_environment(tmp_path / "environment", [tmp_path / "no_such-1-py3-none-any.whl"])
