"""The CI workflow, the hooks, and the patch that a stale tree leaves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from dsparkgen.cli import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERBS = frozenset(get_command(app).commands)  # type: ignore[attr-defined]
HOOK = "scripts/hooks/pre-commit"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def _git(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, **options)


def _steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


# The workflow


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_bash_and_every_verb_exists(path: Path, tmp_path: Path) -> None:
    scripts = [re.sub(r"\$\{\{.*?\}\}", "value", step["run"]) for step in _steps(path) if "run" in step]
    assert scripts
    for script in scripts:
        ran = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    used = {verb for script in scripts for verb in re.findall(r"bin/dsparkgen (\S+)", script)}
    assert used and used <= VERBS
    targets = {target for script in scripts for target in re.findall(r"^make (\S+)", script, re.MULTILINE)}
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    modules = {module for script in scripts for module in re.findall(r"python -m dsparkgen\.(\w+)", script)}
    assert all((ROOT / "generator" / "dsparkgen" / f"{module}.py").is_file() for module in modules)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_it_reads_only_and_names_steps_that_exist(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] == {"contents": "read"}
    text = path.read_text()
    ids = {step["id"] for step in _steps(path) if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.", text)) <= ids
    for step in _steps(path):
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"[\w./-]+@v\d+", step.get("uses", "a/b@v1")), step


# The patch


def test_the_diff_of_a_stale_tree_is_a_patch_that_makes_it_current(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, new and deleted files at once, applied as the summary says."""
    monkeypatch.chdir(sandbox.root)
    sandbox.add_spec("leaving")
    sandbox.generate()
    _git(sandbox.root, "init", "-q", check=True)
    _git(sandbox.root, "add", "-A", check=True)
    (sandbox.root / "specs" / "leaving.toml").unlink()
    sandbox.add_spec("arriving", ("num_steps = 5", "num_steps = 7"))
    sandbox.edit("specs/deepseek_v41.toml", ("draft_salt = 0x4000_0000", "draft_salt = 7"))
    found = CliRunner().invoke(app, ["diff"])
    assert found.exit_code == 1
    (sandbox.root / "generated.patch").write_text(found.stdout)
    assert sandbox.check()
    ran = _git(sandbox.root, "apply", "--directory=generated", "generated.patch")
    assert ran.returncode == 0, ran.stderr
    assert sandbox.check() == {}


# The hooks


@pytest.fixture
def repository(sandbox: Any) -> Any:
    """A repository whose hook and tool are this checkout's."""
    sandbox.generate()
    tool = sandbox.root / ".venv" / "bin" / "dsparkgen"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT / "generator"}" exec "{sys.executable}" -m dsparkgen "$@"\n')
    tool.chmod(0o755)
    hook = sandbox.root / HOOK
    hook.parent.mkdir(parents=True)
    shutil.copy(ROOT / HOOK, hook)
    (sandbox.root / ".gitignore").write_text(".venv/\n")
    _git(sandbox.root, "init", "-q", check=True)
    _git(sandbox.root, "add", "-A", check=True)
    _git(sandbox.root, "commit", "-q", "-m", "start", check=True)
    _git(sandbox.root, "config", "core.hooksPath", "scripts/hooks", check=True)
    return sandbox


def test_the_hook_refuses_a_spec_without_its_kernels(repository: Any) -> None:
    repository.edit("specs/deepseek_v41.toml", ("draft_salt = 0x4000_0000", "draft_salt = 7"))
    ran = _git(repository.root, "commit", "-q", "-a", "-m", "stale")
    assert ran.returncode == 1
    assert "noise.draft_salt was 1073741824, is 7" in ran.stdout + ran.stderr
    repository.generate()
    _git(repository.root, "commit", "-q", "-a", "-m", "current", check=True)


def test_the_hook_lets_other_files_pass_unchecked(repository: Any) -> None:
    repository.edit("specs/deepseek_v41.toml", ("draft_salt = 0x4000_0000", "draft_salt = 7"))
    (repository.root / "README.md").write_text("text\n")
    _git(repository.root, "add", "README.md", check=True)
    _git(repository.root, "commit", "-q", "-m", "text", check=True)


def test_the_hook_says_which_tool_it_misses(repository: Any, tmp_path: Path) -> None:
    shutil.rmtree(repository.root / ".venv")
    repository.edit("specs/deepseek_v41.toml", ("draft_salt = 0x4000_0000", "draft_salt = 7"))
    folders = [str(Path(found).parent) for found in map(shutil.which, ("git", "bash", "env")) if found]
    ran = _git(repository.root, "commit", "-q", "-a", "-m", "x", env=os.environ | {"PATH": os.pathsep.join(folders)})
    assert ran.returncode == 1
    assert "expected .venv/bin/dsparkgen (make venv) or dsparkgen on the path" in ran.stderr


def test_the_hooks_of_both_configurations_exist() -> None:
    (own,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = own["hooks"]
    assert hook["entry"] == HOOK and os.access(ROOT / HOOK, os.X_OK)
    (offered,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert offered["entry"].split() == ["dsparkgen", "check"] and "check" in VERBS
