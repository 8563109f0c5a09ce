"""Reduced vocabularies: the ids that a chain kernel loads for a tile are those of the tile whose turn it is, whichever way a position goes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHAIN = ROOT / "generated" / "dspark_kernels" / "gemma4_26b_a4b" / "chain.py"
INPUTS = ROOT / "templates" / "device" / "chain_inputs.py"
SCORES = ROOT / "templates" / "device" / "chain_scores.py"
HEAD = ROOT / "templates" / "device" / "chain_head.py"
ORDER_BYTES, TILE_ROWS, ITEMS = 2, 16, 7


def function(path: Path, name: str, **names: Any) -> Callable[..., Any]:
    """One function of a module, without its decorators and annotations, on numbers in place of DSL values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list, found.returns = [], None
    for argument in found.args.args:
        argument.annotation = None
    module = ast.fix_missing_locations(ast.Module([found], []))
    space: dict[str, Any] = {"Int32": int, **names}
    exec(compile(module, str(path), "exec"), space)
    return space[name]


@pytest.mark.parametrize("ring", [0, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_target_ids_are_those_of_the_tile(ring: int, step: int) -> None:
    order = [3, 0, 6, 1, 5, 2, 4]
    ptx = SimpleNamespace(
        select=lambda condition, a, b: a if condition else b, lds_u16=lambda address: order[address // ORDER_BYTES]
    )
    head = SimpleNamespace(goes_up=function(HEAD, "goes_up"))
    line = SimpleNamespace(ORDER_BYTES=ORDER_BYTES, TILE_ROWS=TILE_ROWS)
    tiles = SimpleNamespace(bias_entry=lambda rows, lane: 0)
    ordered_tile = function(INPUTS, "ordered_tile", ptx=ptx, chain_head=head, plan_line=line)
    loads = [node for node in ast.walk(ast.parse(CHAIN.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    (load,) = [node for node in loads if isinstance(node.func, ast.Attribute) and node.func.attr == "load_targets"]
    place = compile(ast.Expression(load.args[1]), str(CHAIN), "eval")
    load_targets = function(SCORES, "load_targets", ptx=ptx, plan_line=line, head_tiles=tiles)
    kernel = SimpleNamespace(ring=ring, rows=1, entries=1, maps_ids=True, draws=True, target_id=lambda c, at: at)
    c = SimpleNamespace(items=ITEMS, order=0, lane=0)
    names = {"ptx": ptx, "chain_head": head, "self": kernel, "c": c, "step": step}
    places = [eval(place, names | {"item": item}) for item in range(ITEMS)]
    found = [load_targets(kernel, c, at)[0] // TILE_ROWS for at in places]
    assert found == [ordered_tile(kernel, c, item, step) for item in range(ITEMS)]
    assert sorted(found) == list(range(ITEMS))
