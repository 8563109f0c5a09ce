"""The calls of a chain sampler, the same for every model: what a call checks and launches.

All per-call state (seeds, positions, temperatures, anchors, row mapping) is read from device memory by the kernels, so a
captured graph has nothing of one call baked in but addresses, strides and the row count.
"""

from __future__ import annotations

import torch

from . import host
from .chain_call import Variant
from .chain_setup import ChainSetup


class ChainCalls(ChainSetup):
    """What a chain sampler does once it is set up; its own class says for whom."""

    def why_not_call(self, num_reqs: int, base_logits: torch.Tensor | None = None) -> str | None:
        """Why the chain does not take a batch, or None. Depends on shapes, dtypes and strides only.

        Args:
            num_reqs: request rows of the (padded) batch.
            base_logits: the batch's base logits; without them the row count alone is judged.
        """
        if not 1 <= num_reqs <= self.max_rows:
            return f"num_reqs: the chain takes 1 to {self.max_rows} request rows, got {num_reqs}"
        if base_logits is None:
            return None
        found = self._expected.base_logits_misfit(num_reqs, base_logits)
        return None if found is None else found.message

    def supports_batch(self, num_reqs: int) -> bool:
        """Whether the chain takes a batch of this many request rows."""
        return self.why_not_call(num_reqs) is None

    def supports(self, num_reqs: int, base_logits: torch.Tensor) -> bool:
        """Whether the chain takes this batch with these base logits. Their values are not looked at."""
        return self.why_not_call(num_reqs, base_logits) is None

    def fork_noise(
        self,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Draw the noise of the next ``sample`` on a side stream, after the current stream's work so far.

        The noise depends on these arguments only, so it can be drawn while the base logits are computed. They must
        hold the same values until that ``sample``. Raises as ``sample`` does.
        """
        host.check_int("num_reqs", num_reqs, 1, self.max_rows)
        self._expected.check_state(num_reqs, idx_mapping, sample_pos, temperature, seeds)
        self._noise.fork(num_reqs, idx_mapping, sample_pos, temperature, seeds)

    def draw_noise(
        self,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Draw noise into the buffer on the current stream, as ``sample`` does where none was forked. Raises as it does."""
        host.check_int("num_reqs", num_reqs, 1, self.max_rows)
        self._expected.check_state(num_reqs, idx_mapping, sample_pos, temperature, seeds)
        self.discard_noise()
        self._noise.provide(num_reqs, idx_mapping, sample_pos, temperature, seeds)

    @property
    def noise_buffer(self) -> torch.Tensor:
        """The noise of a call, fp32 [samples, pitch]; of emulated ranks [world, samples, pitch]."""
        return self._noise.values if self.share.emulated else self._noise.values[0]

    @property
    def noise_pending(self) -> bool:
        """Whether noise was forked that no ``sample`` has used yet."""
        return self._noise.pending

    def join_noise(self) -> None:
        """Make the current stream wait for the forked noise. ``sample`` joins by itself where this was not called."""
        self._noise.join()

    def discard_noise(self) -> None:
        """Forget forked noise that no ``sample`` will use, once the current stream waits for it."""
        self._noise.discard()

    def sample(
        self,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor | None,
        draft_tokens: torch.Tensor,
        *,
        query_per_row: int | None = None,
    ) -> None:
        """Draw every draft token of the batch on the current stream; no synchronisation, and no allocation once warm.

        Args:
            base_logits: bf16 or fp32 [rows, NUM_STEPS, >= DRAFT_VOCAB_SIZE]; last stride 1, other strides free. With several
                ranks also this rank's columns alone, [rows, NUM_STEPS, up to shard_width].
            input_ids: int32, contiguous; row r's anchor is ``input_ids[r * query_per_row]``.
            idx_mapping: int64 [>= rows * NUM_STEPS], request-state index per sample, negative for a padding row.
            sample_pos: int64 [>= rows * NUM_STEPS], position of the token being predicted.
            temperature: fp32 [>= max_reqs], by request-state index.
            seeds: int64 [>= max_reqs], by request-state index.
            logits_cache: out, cache_dtype [>= max_reqs, NUM_STEPS, >= VOCAB_SIZE]; last stride 1.
            draft_tokens: out, int64 [>= rows, NUM_STEPS]; last stride 1.
            query_per_row: input ids per request row; the model's QUERY_PER_ROW by default.

        Raises:
            TypeError, ValueError: an argument does not fit; says what was expected and given. Nothing was launched.
            RuntimeError: forked noise of another batch, a variant that would have to compile under graph capture, or one
                that ``pdl`` cannot launch here.
            ChainTimeoutError, RanksDifferError: an earlier launch gave up.
        """
        self._report.raise_if_set()
        rows = base_logits.shape[0] if isinstance(base_logits, torch.Tensor) and base_logits.dim() == 3 else 1
        try:
            tensors = (base_logits, input_ids, idx_mapping, sample_pos, temperature, seeds, logits_cache, draft_tokens)
            distance = self.config.QUERY_PER_ROW if query_per_row is None else query_per_row
            variant, arguments = self.prepare(rows, *tensors, distance)
        except Exception:
            self.discard_noise()
            raise
        try:
            self._noise.provide(rows, idx_mapping, sample_pos, temperature, seeds)
            self.launch(variant, arguments)
        except Exception:
            # A trap of an earlier launch surfaces at whichever call comes next; its report says what happened.
            self._report.raise_if_set()
            raise

    def launch(self, variant: Variant, arguments: dict[str, int]) -> None:
        """Launch the chain alone, on the current stream, with what ``prepare`` returned and the noise that is drawn."""
        variant.kernel.launch(arguments, torch.cuda.current_stream(self.device).cuda_stream)

    def prepare(
        self,
        rows: int,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor | None,
        draft_tokens: torch.Tensor,
        query_per_row: int,
    ) -> tuple[Variant, dict[str, int]]:
        """Check one call; return its kernel and the kernel's arguments by name. Pointers are device addresses."""
        if torch.cuda.current_device() != self.device.index:
            raise ValueError(
                f"current CUDA device: expected {self.device.index}, this sampler's, got {torch.cuda.current_device()}"
            )
        state = (idx_mapping, sample_pos, temperature, seeds)
        self._expected.check(rows, base_logits, input_ids, *state, logits_cache, draft_tokens, query_per_row)
        variant = self._variant(rows, base_logits.dtype)
        arguments = self._expected.call_arguments(
            rows, base_logits, input_ids, idx_mapping, temperature, logits_cache, draft_tokens, query_per_row
        )
        own = {"records": variant.records.data_ptr(), "epoch": variant.epoch.data_ptr(), "ctas": variant.ctas}
        own["batch_shape"] = self._expected.batch_shape(rows, base_logits, query_per_row)
        if self._peers is not None:
            own |= self._peers.arguments(variant.number)
        return variant, self._constant_arguments | arguments | own

    def _variant(self, rows: int, base_dtype: torch.dtype) -> Variant:
        slots = host.row_slots_for(self._lines, rows)
        assert slots is not None  # rows <= max_rows <= the largest row slots
        found = self._variants.get((slots, base_dtype))
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.config.MODEL}: the chain kernel for {slots} row slots and {host.dtype_name(base_dtype)} base "
                "logits is not compiled; call warmup() before capturing a graph"
            )
        return self._build(slots, base_dtype)

    def warmup(self) -> None:
        """Compile and launch every variant once, so that nothing compiles, loads or allocates later. Synchronises.

        The launches draw one padding row: they write no cache row and no caller's memory. With several ranks a collective.
        """
        config, share, device = self.config, self.share, self.device
        self.discard_noise()
        self.compile()
        anchors = torch.zeros(1, dtype=torch.int32, device=device)
        padding = torch.full((config.NUM_STEPS,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros(config.NUM_STEPS, dtype=torch.int64, device=device)
        temperature = torch.zeros(self.max_reqs, dtype=torch.float32, device=device)
        seeds = torch.zeros(self.max_reqs, dtype=torch.int64, device=device)
        played = (share.world,) if share.emulated else ()
        tokens = torch.empty((*played, self.max_rows, config.NUM_STEPS), dtype=torch.int64, device=device)
        # One row of memory stands for all of them: padding rows are never stored.
        cache: torch.Tensor | None = None
        if self.cache_dtype is not None:
            cache = torch.zeros(config.VOCAB_SIZE, dtype=self.cache_dtype, device=device)
            cache = cache.expand(*played, self.max_reqs, config.NUM_STEPS, config.VOCAB_SIZE)
        self.fork_noise(padding, positions, temperature, seeds, 1)
        self.discard_noise()
        for slots, base_dtype in self._builds:
            rows = min(slots, self.max_rows)
            column = torch.zeros(config.DRAFT_VOCAB_SIZE, dtype=base_dtype, device=device)
            base = column.expand(rows, config.NUM_STEPS, config.DRAFT_VOCAB_SIZE)
            self.synchronize()
            self.ranks.gather(None)  # a rank that is late by a compilation must not run into a peer's timeout
            self.sample(
                base,
                anchors.expand(rows).contiguous(),
                padding.repeat(rows),
                positions.repeat(rows),
                temperature,
                seeds,
                cache,
                tokens,
                query_per_row=1,
            )
        self.synchronize()

    def raise_if_failed(self) -> None:
        """Raise ChainTimeoutError or RanksDifferError when a launch has given up. Reads host memory only; does not wait."""
        self._report.raise_if_set()

    def synchronize(self) -> None:
        """Wait for the current stream. Raises as ``raise_if_failed`` when a launch gave up, else CUDA's own error."""
        try:
            torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError:
            self._report.raise_if_set()
            raise
        self._report.raise_if_set()
