"""Reduced vocabularies: the ids that a chain kernel loads for a tile are those of the tile whose turn it is, whichever way a position goes."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.harness.chain_simulator import device_module

CHAIN = Path(__file__).parents[2] / "generated" / "dspark_kernels" / "gemma4_26b_a4b" / "chain.py"
ORDER = [3, 0, 6, 1, 5, 2, 4]  # a warp's tiles as written down
ORDER_BYTES, TILE_ROWS = 2, 16


@pytest.mark.parametrize("ring", [0, 4])
@pytest.mark.parametrize("step", [0, 1, 2, 5])
def test_target_ids_are_those_of_the_tile(ring: int, step: int) -> None:
    ptx, others = ModuleType("ptx"), {name: ModuleType(name) for name in ("score_ops", "keys")}
    ptx.select = lambda condition, a, b: a if condition else b  # type: ignore[attr-defined]
    ptx.lds_u16 = lambda address: ORDER[address // ORDER_BYTES]  # type: ignore[attr-defined]
    inputs = device_module("chain_inputs_of_targets", "chain_inputs", ptx=ptx)
    scores = device_module("chain_scores_of_targets", "chain_scores", ptx=ptx, **others)
    loads = [node for node in ast.walk(ast.parse(CHAIN.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    (load,) = [node for node in loads if isinstance(node.func, ast.Attribute) and node.func.attr == "load_targets"]
    place = compile(ast.Expression(load.args[1]), str(CHAIN), "eval")

    kernel = SimpleNamespace(ring=ring, rows=1, entries=1, maps_ids=True, draws=True, target_id=lambda c, at: at)
    c = SimpleNamespace(items=len(ORDER), order=0, lane=0)
    names = {"ptx": ptx, "chain_head": inputs.chain_head, "self": kernel, "c": c, "step": step}
    items = range(len(ORDER))
    places = [eval(place, names | {"item": item}) for item in items]
    found = [scores.Scores.load_targets(kernel, c, at)[0] // TILE_ROWS for at in places]
    assert found == [inputs.Inputs.ordered_tile(kernel, c, item, step) for item in items]
    assert sorted(found) == list(items)
