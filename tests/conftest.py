"""Test configuration: without a GPU, Triton kernels run in Triton's interpreter on CPU tensors."""

import importlib.util
import os


def _cuda_is_there() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads the variable when a kernel is defined, so it must be set before any test module is imported.
if not _cuda_is_there():
    os.environ.setdefault("TRITON_INTERPRET", "1")
