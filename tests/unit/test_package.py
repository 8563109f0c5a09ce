"""The wheel: what it carries, and that the tool works from it alone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def _run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "dsparkgen", *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)


def test_wheel_holds_both_packages_with_specs_and_templates(installed: Path) -> None:
    shipped = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    for folder, below in (("templates", "dsparkgen/_root/templates"), ("specs", "dsparkgen/_root/specs")):
        for path in (ROOT / folder).rglob("*.*"):
            if "__pycache__" not in path.parts:
                assert f"{below}/{path.relative_to(ROOT / folder).as_posix()}" in shipped
    for path in (ROOT / "generated" / "dspark_kernels").rglob("*.py*"):
        if "__pycache__" not in path.parts:
            assert path.relative_to(ROOT / "generated").as_posix() in shipped
    assert "dspark_kernels/py.typed" in shipped
    assert not any("__pycache__" in name or name.startswith(("tests/", "generator/")) for name in shipped)


def test_the_tool_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """In a folder without specs and templates it uses those that it carries."""
    ran = _run(installed, tmp_path, "vendor", "deepseek_v41", "--to", "drafts")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "drafts" / "deepseek_v41" / "chain.py").exists()
    ran = _run(installed, tmp_path, "generate")
    assert ran.returncode == 2 and "need --out" in ran.stderr
    ran = _run(installed, tmp_path, "generate", "--out", "mine")
    assert ran.returncode == 0, ran.stderr
    made = (tmp_path / "mine" / "dspark_kernels" / "deepseek_v41" / "config.py").read_text()
    assert made == (ROOT / "generated" / "dspark_kernels" / "deepseek_v41" / "config.py").read_text()


def test_the_wheel_announces_the_vllm_plugin(installed: Path) -> None:
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    lines = points.read_text().splitlines()
    at = lines.index("[vllm.general_plugins]")
    assert lines[at + 1] == "dspark_kernels = dspark_kernels.engines.vllm:register"
