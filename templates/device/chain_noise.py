"""The noise of a chain's next call: drawn ahead on a side stream, or on the current stream right before the launch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from .rank_group import Columns


class NoiseBuffer:
    """fp32 noise for every sample of a call and every column of the launch's ranks, and the draw that fills it.

    Args:
        noise: the model's noise.py; None for greedy drafts, which have no columns to draw for.
        device: where the buffer lies.
        samples: most samples of a call: request rows times positions.
        num_steps: positions of a request row.
        pitch: fp32 values from one sample to the next, a multiple of 4.
        columns: the vocabulary columns of each rank that a launch plays; a rank may own none.
        target_ids: target id of every draft id, int32 [DRAFT_VOCAB_SIZE]; None where they are the same.
    """

    def __init__(
        self,
        noise: ModuleType | None,
        device: torch.device,
        *,
        samples: int,
        num_steps: int,
        pitch: int,
        columns: Sequence[Columns],
        target_ids: torch.Tensor | None,
    ) -> None:
        if noise is not None:
            self._draw, self._stream = noise.draw_noise, noise.NoiseStream(device, target_ids)
        self._num_steps, self._target_ids = num_steps, target_ids
        # [ranks, samples, pitch]; one rank's part is what draw_noise takes.
        self.values = torch.empty((len(columns), samples, pitch), dtype=torch.float32, device=device)
        self._shares = [(part, share) for part, share in zip(self.values, columns, strict=True) if share.width]
        self.rank_stride = samples * pitch  # elements between two ranks
        self._forked_rows: int | None = None
        self._joined = False

    @property
    def pending(self) -> bool:
        """Whether noise was forked that no call has used yet."""
        return self._forked_rows is not None

    def fork(self, rows: int, *state: torch.Tensor) -> None:
        """Draw for ``rows`` request rows on the side stream, after the current stream's work so far."""
        for part, share in self._shares:
            self._stream.fork(part, *state, **self._sizes(rows, share))
        self._forked_rows, self._joined = rows, False

    def join(self) -> None:
        """Make the current stream wait for the forked draw."""
        if self._forked_rows is None:
            raise RuntimeError("join_noise: expected a fork_noise before it, got none since the last sample")
        if not self._joined and self._shares:
            self._stream.join()
        self._joined = True

    def discard(self) -> None:
        """Forget a forked draw that no call will use, once the current stream waits for it."""
        if self._forked_rows is not None:
            self.join()
            self._forked_rows = None

    def provide(self, rows: int, *state: torch.Tensor) -> None:
        """Leave the noise of a call of ``rows`` request rows in the buffer: the forked draw's, or one on the current stream.

        Raises RuntimeError when the forked draw was for another number of rows.
        """
        forked = self._forked_rows
        if forked is None:
            for part, share in self._shares:
                self._draw(part, *state, **self._sizes(rows, share), target_ids=self._target_ids)
            return
        self.join()
        self._forked_rows = None
        if forked != rows:
            raise RuntimeError(f"sample: expected the {forked} request rows that fork_noise drew for, got {rows}")

    def _sizes(self, rows: int, share: Columns) -> dict[str, int]:
        return {"num_samples": rows * self._num_steps, "vocab_start": share.first, "width": share.width}
