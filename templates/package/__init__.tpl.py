"""GPU kernels that sample DSpark draft tokens, one subpackage a model.

Importing this package imports no CUDA library, nor does importing a model: torch comes with the first sampler.

    from dspark_kernels import load
    sampler = load("MODEL").DraftSampler(embed_weight, head_weight, max_reqs=64, cache_dtype=torch.bfloat16)
"""

from importlib import import_module
from types import ModuleType

MODELS: tuple[str, ...] = (
    # % for model in models
    "{{ model }}",
    # % endfor
)

__all__ = ["MODELS", "load"]


def load(model: str) -> ModuleType:
    """The subpackage of a model.

    Raises:
        ValueError: No model of that name is generated here.
    """
    if model not in MODELS:
        raise ValueError(f"expected one of the models {', '.join(MODELS)} (got {model!r})")
    return import_module(f".{model}", __name__)


def __getattr__(name: str) -> ModuleType:
    if name in MODELS:
        return load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *MODELS])
