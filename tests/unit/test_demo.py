"""The demo's verdicts: it says yes where the kernels draw what the reference draws, and no where they do not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from dsparkgen import demo  # noqa: E402

ROOT = Path(__file__).parents[2]
DRAW = """\
import pathlib
import sys
from dsparkgen import demo, tree
sys.exit(not demo.show_draw(tree.find_roots(pathlib.Path({root!r})), 'tiny'))
"""


def draw(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs the demo's last step on a repository of its own, in a process that interprets Triton kernels."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "generator")])
    command = [sys.executable, "-c", DRAW.format(root=str(root))]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)


def test_draws_beside_the_reference(sandbox: Any) -> None:
    sandbox.add_spec("tiny", ("target = 129280", "target = 700"), ("rank_dim = 256", "rank_dim = 64"))
    sandbox.generate()
    done = draw(sandbox.root)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"], ["3"])]
    assert len(rows) == len(demo.TEMPERATURES)
    for _, _, _, *tokens in rows:
        assert tokens[:5] == tokens[5:] and all(0 <= int(token) < 700 for token in tokens)

    sandbox.edit("generated/dspark_kernels/tiny/config.py", ("DRAFT_SALT = ", "DRAFT_SALT = 1 + "))
    done = draw(sandbox.root)
    assert done.returncode == 1
    assert "expected token" in done.stdout


def test_one_no_fails_the_demo_and_the_other_steps_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def step(answer: bool) -> Callable[..., bool]:
        return lambda roots, model: ran.append(model) or answer

    monkeypatch.setattr(sys, "argv", ["demo", "m"])
    monkeypatch.setattr(demo, "STEPS", (("first", step(True)), ("second", step(True))))
    assert demo.main() == 0
    monkeypatch.setattr(demo, "STEPS", (("first", step(False)), ("second", step(True))))
    assert demo.main() == 1
    assert ran == ["m"] * 4
