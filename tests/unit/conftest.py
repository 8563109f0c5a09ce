"""A copy of specs and templates that a test may change."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsparkgen import tree

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sandbox:
    """A repository of its own: specs/, templates/ and what is generated."""

    root: Path

    @property
    def roots(self) -> tree.Roots:
        """Its folders."""
        return tree.find_roots(self.root)

    @property
    def package(self) -> Path:
        """The generated package."""
        return self.root / "generated" / "dspark_kernels"

    def generate(self) -> dict[str, str]:
        """Generate; what was done by path."""
        return {change.path: change.kind for change in tree.write(tree.build_tree(self.roots), self.roots)}

    def check(self) -> dict[str, str]:
        """What `check` finds, by path."""
        return {change.path: change.kind for change in tree.compare(tree.build_tree(self.roots), self.roots)}

    def edit(self, name: str, *changes: tuple[str, str]) -> None:
        """Replace text in a file; every text must be there."""
        path = self.root / name
        text = path.read_text()
        for before, after in changes:
            assert before in text, (name, before)
            text = text.replace(before, after, 1)
        path.write_text(text)

    def add_spec(self, name: str, *changes: tuple[str, str]) -> None:
        """A second model, like deepseek_v41 but for the changes."""
        shutil.copy(self.root / "specs" / "deepseek_v41.toml", self.root / "specs" / f"{name}.toml")
        self.edit(f"specs/{name}.toml", ('"deepseek_v41"', f'"{name}"'), *changes)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """deepseek_v41 alone, not generated yet."""
    (tmp_path / "specs").mkdir()
    shutil.copy(ROOT / "specs" / "deepseek_v41.toml", tmp_path / "specs")
    shutil.copytree(ROOT / "specs" / "devices", tmp_path / "specs" / "devices")
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns("__pycache__"))
    return Sandbox(tmp_path)


@pytest.fixture
def generated(sandbox: Sandbox) -> Sandbox:
    """deepseek_v41 alone, generated."""
    sandbox.generate()
    return sandbox


Lines = Callable[[str, str], list[str]]


@pytest.fixture
def changed_lines() -> Lines:
    """The added and removed lines between two texts, without the header's digest."""
    import difflib

    def lines(before: str, after: str) -> list[str]:
        found = difflib.ndiff(before.splitlines(), after.splitlines())
        return [line for line in found if line[0] in "+-" and "# Codegen" not in line]

    return lines
