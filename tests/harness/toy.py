"""Small models rendered by the generator, for tests that run the kernels in Triton's interpreter or compile them."""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dsparkgen.device import load_devices
from dsparkgen.render import render, render_package
from dsparkgen.spec import ModelSpec

ROOT = Path(__file__).parents[2]
_counter = itertools.count()


def toy_spec(
    vocab_size: int,
    *,
    rank_dim: int = 64,
    num_steps: int = 3,
    vocabulary: dict[str, Any] | None = None,
    noise: dict[str, Any] | None = None,
    logits: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    kernels: tuple[str, ...] = ("noise", "fused"),
) -> ModelSpec:
    """A valid spec for some kernels; the dictionaries add to or replace keys of their tables."""
    return ModelSpec.model_validate(
        {
            "format": 1,
            "model": {"name": "toy", "title": "Toy"},
            "vocabulary": {"target": vocab_size, **(vocabulary or {})},
            "markov": {"rank_dim": rank_dim},
            "draft": {"num_steps": num_steps, **(draft or {})},
            "logits": {"base_dtypes": ("bf16", "fp32"), "cache_dtypes": ("bf16", "fp32"), **(logits or {})},
            "noise": noise or {},
            "parallel": {"tp": (1,)},
            "emit": {"kernels": kernels, "archs": ("sm_90a",)},
            "provenance": {"source": "made up"},
        }
    )


def toy_model(folder: Path, vocab_size: int, **options: Any) -> ModuleType:
    """Render a `toy_spec` and import it: a package whose `noise`, `fused` and `config` are the generated modules.

    Args:
        folder: an empty directory to render into.
        options: as for `toy_spec`.
    """
    spec = toy_spec(vocab_size, **options)
    devices = load_devices(ROOT)
    templates = ROOT / "templates"
    # A name of its own for each rendering, as Python keeps imported packages by name.
    package = f"toy_kernels_{next(_counter)}"
    for path, text in (
        render(spec, devices, templates=templates) | render_package([spec], templates=templates)
    ).items():
        target = folder / path.replace("dspark_kernels", package, 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        model = importlib.import_module(f"{package}.toy")
        for module in ("config", *[name for name in ("noise", "fused") if name in spec.emit.kernels]):
            setattr(model, module, importlib.import_module(f"{package}.toy.{module}"))
    finally:
        sys.path.remove(str(folder))
    return model
