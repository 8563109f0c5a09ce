"""Test configuration: without a GPU, Triton kernels run in Triton's interpreter on CPU tensors."""

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import pytest


def _cuda_is_there() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads the variable when a kernel is defined, so it must be set before any test module is imported.
if not _cuda_is_there():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def toy_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """Rendered small models by vocabulary size and the options of `toy_spec`; each is rendered once a session."""
    from tests.harness.toy import toy_model

    made: dict[str, ModuleType] = {}

    def get(vocab_size: int, **options: object) -> ModuleType:
        key = repr((vocab_size, sorted(options.items())))
        if key not in made:
            made[key] = toy_model(tmp_path_factory.mktemp("toy"), vocab_size, **options)
        return made[key]

    return get
