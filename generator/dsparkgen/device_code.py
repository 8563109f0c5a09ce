"""Hand-written device code that the generator uses itself: what both need is written once, in templates/device."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_device_code(name: str) -> ModuleType:
    """The module templates/device/<name>.py, from a checkout or an installed wheel. It must import nothing but the standard library."""
    here = Path(__file__).parent
    roots = (here / "_root" / "templates", here.parents[1] / "templates")
    path = next(root for root in roots if root.is_dir()) / "device" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"dsparkgen._{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
