"""GPU tests: skipped with a reason where there is no CUDA device, or none that a generated plan describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per checked-in model."""
    if "model" in metafunc.fixturenames:
        from dsparkgen.gpu import generated_models

        metafunc.parametrize("model", generated_models(ROOT / "generated", ()))


@pytest.fixture(scope="session")
def cuda() -> Iterator[object]:
    """The CUDA device that the tests use."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device; torch {torch.__version__} finds none")
    with torch.inference_mode():
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests that compile kernels which no pack has: skips where CuTe DSL is not installed."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL: compiles kernels that no pack has")


@pytest.fixture
def product_of(cuda: object) -> Callable[[str], object]:
    """Loads a checked-in model by its name; skips where its plans do not describe the GPU."""
    from dsparkgen.gpu import CannotTell, load_product, this_device

    def load(model: str) -> object:
        found = load_product(ROOT / "generated", model)
        try:
            this_device(found)
        except CannotTell as error:
            pytest.skip(str(error))
        return found

    return load


@pytest.fixture
def product(model: str, product_of: Callable[[str], object]) -> object:
    """A checked-in model, on a GPU that its plans describe."""
    return product_of(model)
