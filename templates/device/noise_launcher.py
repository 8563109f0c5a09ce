"""Host side of the noise kernel: checks, the launch, and a side stream to draw on."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
import triton

from . import host

VECTOR = 4  # fp32 values of one 16-byte store
VECTOR_BYTES = 16
BLOCK = 1024  # vocabulary ids that a program takes at a time: two vector stores a thread
NUM_WARPS = 4
INTERPRETER_BLOCK = 8192  # the interpreter's cost is per program more than per element
# A program takes up to MOST_BLOCKS blocks of one sample, so that what it computes once counts little, as long as PROGRAMS are left.
PROGRAMS, MOST_BLOCKS = 2048, 16
ARGUMENT_TYPES = {
    "out": "*fp32",
    "pitch_vectors": "i64",
    "target_ids": "*i32",
    "idx_mapping": "*i64",
    "sample_pos": "*i64",
    "temperature": "*fp32",
    "seeds": "*i64",
    "vocab_start": "i32",
    "width": "i32",
    "share": "i32",
}
RUNTIME_ARGUMENTS = tuple(ARGUMENT_TYPES)  # all but the compile-time constant


def blocks_of_program(blocks: int) -> int:
    """How many blocks a program takes when a call has `blocks`."""
    return max(1, min(MOST_BLOCKS, blocks // PROGRAMS))


class NoiseLauncher:
    """Launches one model's noise kernel."""

    def __init__(self, kernel: Any, config: ModuleType) -> None:
        self.kernel, self.config = kernel, config
        self.interpreter_block = INTERPRETER_BLOCK
        self.names = [name for name in kernel.arg_names if name in RUNTIME_ARGUMENTS]

    def draw(
        self,
        out: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *,
        num_samples: int,
        vocab_start: int = 0,
        width: int | None = None,
        target_ids: torch.Tensor | None = None,
    ) -> None:
        """Draw the noise of `num_samples` samples on the current stream. Allocates nothing and does not synchronise.

        Args:
            out: fp32 [>= num_samples, >= width rounded up to a multiple of 4], contiguous, 16-byte aligned rows. Columns
                beyond that are left alone, and so is the whole row of a padding sample (negative state) or one with
                temperature 0.
            idx_mapping: int64 [>= num_samples], request-state index of each sample; negative for padding rows.
            sample_pos: int64 [>= num_samples], position of the token being predicted.
            temperature: fp32 [max_reqs], by request-state index.
            seeds: int64 [max_reqs], by request-state index.
            vocab_start: draft id of column 0, the first id of a vocabulary shard.
            width: ids to draw for; None draws for the whole draft vocabulary.
            target_ids: int32 [DRAFT_VOCAB_SIZE], target id of each draft id, for a model with d2t; else None.

        Raises:
            TypeError: for an argument of another dtype.
            ValueError: for an argument of another shape, alignment or device, or a size out of range.
        """
        width = self.config.DRAFT_VOCAB_SIZE if width is None else width
        host.check_int("num_samples", num_samples, 1)
        host.check_int("vocab_start", vocab_start, 0)
        host.check_int("width", width, 1)
        columns = triton.cdiv(width, VECTOR) * VECTOR
        wanted = host.Expected(
            (torch.float32,), (num_samples, columns), (0, 1), contiguous=True, alignment=VECTOR_BYTES
        )
        wanted.check("out", out, out.device)
        if out.stride(0) % VECTOR:
            raise ValueError(f"out: expected rows of a multiple of {VECTOR} columns, got {out.stride(0)}")
        samples = host.Expected((torch.int64,), (num_samples,), (0,), contiguous=True)
        samples.check("idx_mapping", idx_mapping, out.device)
        samples.check("sample_pos", sample_pos, out.device)
        host.Expected((torch.float32,), (1,), (0,), contiguous=True).check("temperature", temperature, out.device)
        host.Expected((torch.int64,), (1,), (0,), contiguous=True).check("seeds", seeds, out.device)
        if self.config.D2T:
            table = host.Expected((torch.int32,), (self.config.DRAFT_VOCAB_SIZE,), contiguous=True)
            table.check("target_ids", target_ids, out.device)
            host.check_int("width", width, 1, self.config.DRAFT_VOCAB_SIZE - vocab_start)
        elif target_ids is not None:
            raise ValueError(f"target_ids: expected None for a model without d2t, got {host.describe(target_ids)}")
        block = BLOCK if out.is_cuda else self.interpreter_block
        blocks = triton.cdiv(columns, block)
        share = blocks_of_program(num_samples * blocks)
        values = {
            "out": out,
            "pitch_vectors": out.stride(0) // VECTOR,
            "target_ids": target_ids,
            "idx_mapping": idx_mapping,
            "sample_pos": sample_pos,
            "temperature": temperature,
            "seeds": seeds,
            "vocab_start": vocab_start,
            "width": width,
            "share": share,
        }
        with torch.cuda.device_of(out):
            self.kernel[triton.cdiv(blocks, share), num_samples](
                *(values[name] for name in self.names), BLOCK=block, num_warps=NUM_WARPS
            )

    def builds(self) -> dict[str, tuple[Any, dict[str, str], dict[str, int], dict[str, int]]]:
        """Every binary that is launched: name -> (jit function, argument types, constants, compiler options)."""
        signature = {name: ARGUMENT_TYPES.get(name, "constexpr") for name in self.kernel.arg_names}
        return {"any": (self.kernel, signature, {"BLOCK": BLOCK}, {"num_warps": NUM_WARPS})}


class NoiseStream:
    """Draws noise on a side stream, so that it overlaps the current stream's work. Both calls may be captured in a graph.

    On the CPU the draw runs at once.

    Args:
        device: where the noise is drawn.
        target_ids: as for `NoiseLauncher.draw`.
    """

    launcher: ClassVar[NoiseLauncher]

    def __init__(self, device: torch.device | str, target_ids: torch.Tensor | None = None) -> None:
        self.device = torch.device(device)
        self._target_ids = target_ids
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pending = False

    def fork(
        self,
        out: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *,
        num_samples: int,
        vocab_start: int = 0,
        width: int | None = None,
    ) -> None:
        """Draw after the current stream's work so far. Arguments and errors as for `NoiseLauncher.draw`.

        All tensors must stay as they are until `join`.
        """
        arguments = (out, idx_mapping, sample_pos, temperature, seeds)
        shape: dict[str, Any] = {"num_samples": num_samples, "vocab_start": vocab_start, "width": width}
        if self._stream is None:
            self.launcher.draw(*arguments, **shape, target_ids=self._target_ids)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self.launcher.draw(*arguments, **shape, target_ids=self._target_ids)
        self._pending = True

    def join(self) -> None:
        """Make the current stream wait for the draw.

        Raises RuntimeError when no draw was forked since the last join.
        """
        if not self._pending:
            raise RuntimeError("join: expected a fork before it, got none since the last join")
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        self._pending = False
