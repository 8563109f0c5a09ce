"""Stands for a GPU, so that launchers run on CPU tensors: which kernel would be launched, with which arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dspark_kernels._device import chain_launcher, chain_setup, host, kernel_store, plan_line

from . import fake_kernels
from .fake_kernels import FakeKernel

V, N, R, MAX_REQS = 40, 3, 64, 6
STREAM = 0x7F00_1234_5678_9ABC  # a handle is an address: 64 bits
CPU = torch.device("cpu")
H200 = host.DeviceFacts("NVIDIA H200", (9, 0), 132, 232448)
DTYPE_BYTES = (("bf16", 2), ("fp32", 4))
DEVICES = {"h100": ((9, 0), 132, 232448), "h200": ((9, 0), 132, 232448), "b200": ((10, 0), 148, 232448)}
CHAIN = Path(__file__).parents[2] / "templates" / "model" / "chain.tpl.py"


def chain_constant(name: str) -> tuple[str, ...]:
    """A constant of the chain kernel, read without importing its compiler."""
    for node in ast.parse(CHAIN.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{CHAIN}: expected {name} at the top level")


ARGUMENTS, NARROW = chain_constant("ARGUMENTS"), chain_constant("NARROW")


def real_lines(*row_slots: int, tp: int = 1) -> dict[tuple[str, int, int], plan_line.PlanLine]:
    """Plan lines whose fp32 builds stage more, and so take more shared memory than their bf16 builds."""
    kept = plan_line.Residency(register_tiles=0, register_chunks=0, resident=40, ring=0, ahead=4, keep=0)
    line = plan_line.PlanLine("h200", tp, 1, 132, 12, 40, kept, kept, 0, False)
    return {("h200", tp, slots): line._replace(row_slots=slots) for slots in row_slots}


class Recorder:
    """Stands for the GPU: keeps the order of what was launched, and can fail like a lost context."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[int, str, str]] = []
        self.pdl: list[bool] = []  # of each build
        self.ranks: list[dict[str, Any]] = []  # of each build: world, emulated, check_ranks
        self.failure: Exception | None = None
        self.compile_failure: Exception | None = None
        self.starts: list[int] = []  # first column of each draw
        self.tables: list[Any] = []  # target ids given to the side stream, then to each draw
        self.kernels: list[FakeKernel] = []

    # The chain module.
    def compile_chain(
        self,
        line: Any,
        base_dtype: str,
        cache_dtype: str,
        *,
        pdl: bool = False,
        arch: str = "",
        options: str = "",
        **ranks: Any,
    ) -> FakeKernel:
        if self.compile_failure is not None:
            raise self.compile_failure
        self.compiled.append((line.row_slots, base_dtype, cache_dtype))
        self.ranks.append(ranks)
        self.pdl.append(pdl)

        def run(arguments: dict[str, int], stream: int) -> None:
            if self.failure is not None:
                raise self.failure
            self.events.append(("chain", line.row_slots, arguments | {"stream": stream}))

        self.kernels.append(FakeKernel(run, ARGUMENTS, NARROW, {"records_words": 8 * line.row_slots * ranks["world"]}))
        return self.kernels[-1]

    # The noise module.
    def draw_noise(
        self, out: Any, *state: Any, num_samples: int, vocab_start: int, width: int, target_ids: Any
    ) -> None:
        self.starts.append(vocab_start)
        self.tables.append(target_ids)
        self.events.append(("draw", num_samples, width))

    def NoiseStream(self, device: Any, target_ids: Any) -> Any:  # noqa: N802
        self.tables.append(target_ids)

        def fork(out: Any, *state: Any, num_samples: int, vocab_start: int, width: int) -> None:
            self.starts.append(vocab_start)
            self.events.append(("fork", num_samples, width))

        return SimpleNamespace(fork=fork, join=lambda: self.events.append(("join",)))


def install(recorder: Recorder, replace: Callable[[Any, str, Any], None]) -> None:
    """Put a recorder in CUDA's place. `replace` sets an attribute of an object."""
    cuda = chain_setup.torch.cuda
    replace(host, "read_device", lambda device: H200)
    report = host.TimeoutReport
    replace(host, "TimeoutReport", lambda *, pinned: report(pinned=False))
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    replace(cuda, "current_stream", lambda device=None: stream)
    replace(cuda, "is_current_stream_capturing", lambda: False)
    replace(kernel_store, "why_none", lambda recipes, device: None)
    replace(cuda, "current_device", lambda: CPU.index)


def make_config(**changes: Any) -> SimpleNamespace:
    constants = {
        "__file__": str(CHAIN),
        "MODEL": "toy",
        "VOCAB_SIZE": V,
        "DRAFT_VOCAB_SIZE": V,
        "DRAWN_COLUMNS": V,
        "SAMPLING_LIMIT": V,
        "D2T": False,
        "RANK_DIM": R,
        "NUM_STEPS": N,
        "QUERY_PER_ROW": N,
        "MAX_ROWS": 8,
        "BASE_DTYPES": ("bf16", "fp32"),
        "CACHE_DTYPES": ("bf16", "fp32"),
        "DTYPE_BYTES": dict(DTYPE_BYTES),
        "PLANS": real_lines(8, 4, 1),
        "DEVICES": DEVICES,
    }
    return SimpleNamespace(**(constants | changes))


def make_chain(gpu: Recorder, **changes: Any) -> type[chain_launcher.ChainLauncher]:
    class Toy(chain_launcher.ChainLauncher):
        config = make_config(**changes)
        noise = gpu
        load_chain = staticmethod(lambda: gpu)
        provide = staticmethod(fake_kernels.provide)

    return Toy


def weights() -> dict[str, Any]:
    return {
        "embed_weight": torch.zeros((V + 2, R), dtype=torch.bfloat16),
        "head_weight": torch.zeros((V, R), dtype=torch.bfloat16),
        "max_reqs": MAX_REQS,
        "cache_dtype": torch.bfloat16,
    }


def batch(rows: int = 2, base_dtype: Any = torch.bfloat16) -> dict[str, Any]:
    return {
        "base_logits": torch.zeros((rows, N, V), dtype=base_dtype),
        "input_ids": torch.zeros(rows * N, dtype=torch.int32),
        "idx_mapping": torch.zeros(rows * N, dtype=torch.int64),
        "sample_pos": torch.zeros(rows * N, dtype=torch.int64),
        "temperature": torch.ones(MAX_REQS),
        "seeds": torch.zeros(MAX_REQS, dtype=torch.int64),
        "logits_cache": torch.zeros((MAX_REQS, N, V + 8), dtype=torch.bfloat16),
        "draft_tokens": torch.zeros((MAX_REQS, N), dtype=torch.int64),
    }
