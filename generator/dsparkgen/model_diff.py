"""What two models' generated code has in common, in a line."""

import ast
from collections.abc import Mapping

from dsparkgen.digest import code_digest

KINDS = ("same code", "other code", "in one of the two")
NOUNS = ("constant", "plan line")


def same_code(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Which modules have the same code, and in how many constants and plan lines config.py differs.

    Args:
        one: Source by file name, config.py among them. Comments, docstrings and the registry's title count for nothing.
        other: The other model's.

    Returns:
        Such as "chain, fused, launch, noise, step: same code; config: 3 constants, 180 plan lines".
    """
    modules: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted({*one, *other} - {"config.py", "__init__.py"}):
        digests = [code_digest({name: side[name]}) for side in (one, other) if name in side]
        kind = KINDS[2] if len(digests) == 1 else KINDS[digests[0] != digests[1]]
        modules[kind].append(name.removesuffix(".py"))
    parts = [f"{', '.join(names)}: {kind}" for kind, names in modules.items() if names]
    before, now = (_constants(side["config.py"]) for side in (one, other))
    lines = [_plan_lines(constants.pop("PLANS")) for constants in (before, now)]
    counts = (_differing(before, now), _differing(*lines))
    words = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in zip(counts, NOUNS, strict=True)]
    return "; ".join([*parts, f"config: {', '.join(words)}"])


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    return sum(one.get(name) != other.get(name) for name in {*one, *other})


def _constants(text: str) -> dict[str, str]:
    """The values that a module assigns, as text by name."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in found}


def _plan_lines(table: str) -> dict[str, str]:
    """The lines of a plan table, by key."""
    node = ast.parse(table, mode="eval").body
    if not isinstance(node, ast.Dict):
        raise ValueError(f"expected PLANS to be a dictionary, got {table[:40]}")
    return {ast.unparse(key): ast.unparse(value) for key, value in zip(node.keys, node.values, strict=True) if key}
