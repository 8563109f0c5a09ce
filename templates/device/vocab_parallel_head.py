"""A Markov head sharded over tensor-parallel ranks like the LM head: this rank's rows, and the bias that they give."""

from __future__ import annotations

from typing import Any

import torch

from . import host

BF16_BYTES = 2
BIAS_ALIGNMENT = host.VECTOR_BYTES // BF16_BYTES  # head rows: so that each row of the bias starts on a vector boundary


def padded_rows(rows: int) -> int:
    """Head rows with the zero rows that fill 16 bytes of bf16 bias."""
    return -(-rows // BIAS_ALIGNMENT) * BIAS_ALIGNMENT


class VocabParallelHead:
    """Rows [rank * W, (rank + 1) * W) of the Markov head, W = vocab_size / world.

    The rows lie on storage that zero rows pad to a multiple of 8, so that a row of the bias is a multiple of 16 bytes:
    cuBLAS chooses its kernel by shape and alignment, and an unaligned shard can get one that sums in another order than
    the replicated head's. The storage is allocated once. ``load`` and writes into ``weight`` reach it, so that captured
    graphs stay valid when weights are loaded again.

    Args:
        weight: bf16 [W, R], this rank's rows, or [>= vocab_size, R], the whole head. Copied.
        vocab_size: rows of the whole head.
        rank: this rank.
        world: number of ranks.

    Raises:
        ValueError: with ``why_not``'s reason.
    """

    def __init__(self, weight: torch.Tensor, *, vocab_size: int, rank: int, world: int) -> None:
        reason = self.why_not(weight, vocab_size=vocab_size, rank=rank, world=world)
        if reason is not None:
            raise ValueError(f"no vocabulary-parallel head: {reason}")
        self.vocab_size, self.rank, self.world = vocab_size, rank, world
        self.width = vocab_size // world
        self.first = rank * self.width
        shape = (padded_rows(self.width), weight.shape[1])
        with torch.inference_mode(False):  # or a reload outside inference mode could not write it
            self.storage = torch.zeros(shape, dtype=torch.bfloat16, device=weight.device)
        self.load(weight)

    @staticmethod
    def why_not(weight: Any, *, vocab_size: int, rank: int, world: int) -> str | None:
        """Why these cannot be one rank's share of a head, or None. Depends on shapes and dtypes only."""
        for name, value, least in (("vocab_size", vocab_size, 1), ("world", world, 1), ("rank", rank, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                return f"{name}: expected an int of at least {least}, got {value!r}"
        if world & (world - 1):
            return f"world: expected a power of two, got {world}"
        if rank >= world:
            return f"rank: expected an int below world, {world}, got {rank}"
        if vocab_size % world:
            return f"vocab_size: expected a multiple of the {world} ranks, got {vocab_size}"
        return _why_not_rows(weight, vocab_size // world, vocab_size)

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows, bf16 [W, R], contiguous: a view of the padded storage."""
        return self.storage[: self.width]

    def load(self, weight: torch.Tensor) -> None:
        """Copy other weights of the same shape into the storage, on the current stream.

        Args:
            weight: as at construction: this rank's rows or the whole head.

        Raises:
            ValueError: the weight does not fit.
        """
        reason = _why_not_rows(weight, self.width, self.vocab_size)
        if reason is None and weight.shape[1] != self.storage.shape[1]:
            reason = f"weight: expected {self.storage.shape[1]} columns, got {host.describe(weight)}"
        if reason is not None:
            raise ValueError(reason)
        rows = weight if weight.shape[0] == self.width else weight[self.first : self.first + self.width]
        self.storage[: self.width].copy_(rows.detach())

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        """Load a module's parameter and let it lie on the padded storage, so that its own loader writes there.

        Args:
            parameter: bf16 [W, R]; afterwards a view of the storage with the same values.

        Raises:
            ValueError: the parameter does not fit.
        """
        if parameter.shape[0] != self.width:
            raise ValueError(f"parameter: expected [{self.width}, R], this rank's rows, got {host.describe(parameter)}")
        self.load(parameter)
        parameter.data = self.weight

    def local_bias(self, embedding: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's columns of the bias, bf16 [rows, W] with a row stride that is a multiple of 16 bytes.

        Args:
            embedding: Markov embeddings of the previous tokens, bf16 [rows, R].
            out: bf16 [rows, padded W], contiguous, for the product; None allocates it.
        """
        product = torch.mm(embedding, self.storage.t(), out=out)
        return product[:, : self.width]


def _why_not_rows(weight: Any, width: int, vocab_size: int) -> str | None:
    """Why a weight is neither ``width`` rows of a rank nor a whole head, or None."""
    if (
        isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.dim() == 2
        and (weight.shape[0] == width or weight.shape[0] >= vocab_size)
    ):
        return None
    return f"weight: expected bf16 [{width}, R], a rank's rows, or [>= {vocab_size}, R], got {host.describe(weight)}"
