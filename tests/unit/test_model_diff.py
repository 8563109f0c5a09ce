"""Muse Spark's package against DeepSeek-V4.1's: their difference, and nothing else; and the line that sums such a difference up."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from dsparkgen.model_diff import same_code

PACKAGE = Path(__file__).parents[2] / "generated" / "dspark_kernels"
ONE, OTHER = "deepseek_v41", "muse_spark"
# What the specs differ in, and what follows from it.
CONSTANTS = {
    "MODEL", "VOCAB_SIZE", "DRAFT_VOCAB_SIZE", "SAMPLING_LIMIT", "DRAWN_COLUMNS", "NUM_STEPS", "QUERY_PER_ROW", "BASE_DTYPES",
    "CACHE_DTYPES", "TRANSFORM", "MULTIPLIER", "SOFT_CAP", "INVERSE_SOFT_CAP", "ID_BITS", "PLANS",
}  # fmt: skip
# Statements that one model has and the other has not.
CODE = {
    "__init__": [("-", "TITLE = 'DeepSeek-V4.1'"), ("+", "TITLE = 'Muse Spark'")],
    "chain": [("+", "sums = self.transformed_sum(sums)")],
    "fused": [],
    "launch": [],
    "noise": [],
    "step": [],
}


def parsed(model: str, module: str) -> ast.Module:
    return ast.parse((PACKAGE / model / f"{module}.py").read_text())


def code(model: str, module: str) -> list[str]:
    """A module's statements, one a line, without comments and docstrings."""
    tree = parsed(model, module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def test_both_have_the_same_modules() -> None:
    names = [{path.stem for path in (PACKAGE / model).glob("*.py")} for model in (ONE, OTHER)]
    assert names[0] == names[1] == {*CODE, "config"}


@pytest.mark.parametrize("module", CODE)
def test_code_differs_where_the_models_do(module: str) -> None:
    lines = difflib.ndiff(code(ONE, module), code(OTHER, module))
    assert [(line[0], line[2:]) for line in lines if line[0] in "+-"] == CODE[module]


def test_constants_are_the_same_ones_in_the_same_order() -> None:
    def constants(model: str) -> dict[str, str]:
        found = [node for node in parsed(model, "config").body if isinstance(node, ast.Assign)]
        return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in found}

    one, other = constants(ONE), constants(OTHER)
    assert list(one) == list(other)
    assert {name for name in one if one[name] != other[name]} == CONSTANTS


def test_a_line_says_what_is_the_same() -> None:
    one = {
        "__init__.py": "TITLE = 'One'\n",
        "config.py": "A = 1\nB = 2\nPLANS = {(1, 2): 3, (2, 2): 4}\n",
        "chain.py": "x = 1\n",
        "noise.py": '"""One."""\nx = 1  # of one\n',
        "step.py": "x = 1\n",
    }
    other = {
        "__init__.py": "TITLE = 'Other'\n",
        "config.py": "A = 1\nB = 3\nPLANS = {(1, 2): 3, (2, 2): 5, (4, 2): 6}\n",
        "chain.py": "x = 2\n",
        "noise.py": '"""Other."""\nx = 1\n',
    }
    said = "noise: same code; chain: other code; step: in one of the two; config: 1 constant, 2 plan lines"
    assert same_code(one, other) == said
    assert same_code(one, one).endswith("config: 0 constants, 0 plan lines")
