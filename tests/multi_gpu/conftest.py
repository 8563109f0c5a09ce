"""`pytest tests/multi_gpu --tp 4`: only what runs over so many GPUs. Without it, everything that this machine has the GPUs for."""

from __future__ import annotations

import pytest

NUMBERS = ("world", "summary")  # parameters that are a number of ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tp", type=int, help="number of GPUs to run over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--tp", default=None)
    if wanted is None:
        return
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        numbers = {parameters[name] for name in NUMBERS if name in parameters}
        (kept if wanted in numbers else others).append(item)
    if not kept:
        raise pytest.UsageError(f"--tp: expected a number of GPUs that a test runs over (got {wanted})")
    config.hook.pytest_deselected(items=others)
    items[:] = kept
