"""Draft-token sampling for one model; its name and constants are in config.py.

Names below are imported on first use, so that importing this package needs neither torch nor a GPU.
"""

from importlib import import_module
from typing import Any

TITLE = "{{ spec.model.title }}"

# Public name -> the module that defines it.
EXPORTS: dict[str, str] = {
    # % if "noise" in spec.emit.kernels
    "NoiseStream": "noise",
    "draw_noise": "noise",
    # % endif
    # % if "fused" in spec.emit.kernels
    "FusedLoop": "fused",
    "DraftSampler": "launch",
    "SamplerOps": "._device.torch_ops",
    # % endif
    # % if "chain" in spec.emit.kernels
    "ChainSampler": "launch",
    "EmulatedChainSampler": "launch",
    # % endif
    # % if "step" in spec.emit.kernels
    "StepSampler": "launch",
    "VocabParallelHead": "launch",
    # % endif
}

__all__ = ["TITLE", *EXPORTS]


def __getattr__(name: str) -> Any:
    if name in EXPORTS:
        return getattr(import_module(f".{EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
