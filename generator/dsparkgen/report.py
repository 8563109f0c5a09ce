"""What verbs print: text for people, JSON for programs, annotations for CI."""

import sys
from collections.abc import Sequence
from typing import Literal

from dsparkgen.locate import Problem, show_path
from dsparkgen.tree import Change, Roots, Tree

Style = Literal["text", "github"]


def problems(found: Sequence[Problem]) -> None:
    """Errors of files, one a line, on stderr."""
    for problem in found:
        print(problem, file=sys.stderr)


def written(done: Sequence[Change], tree: Tree, roots: Roots) -> None:
    """What `generate` did."""
    words = {"missing": "wrote", "changed": "updated", "edited by hand": "restored", "orphaned": "deleted"}
    for change in done:
        print(f"{words[change.kind]:<9}{show_path(roots.out / change.path)}")
    print(f"{len(done)} of {len(tree.files)} files changed, {len(tree.specs)} models")
