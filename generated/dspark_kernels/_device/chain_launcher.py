"""The chain sampler's mechanics, the same for every model: what is prepared once, and what a call launches.

A model's launch.py subclasses ChainLauncher and names its constants and kernels. All per-call state (seeds, positions,
temperatures, anchors, row mapping) is read from device memory by the kernels, so a captured graph has nothing of one
call baked in but addresses, strides and the row count.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from . import chain_call, host
from .chain_call import ArgumentBlock, Expectations, Variant

NS_PER_MS = 1_000_000

log = logging.getLogger("dspark_kernels")


def device_type(tensor: Any) -> str | None:
    """The kind of device an argument lies on, or None when it is no tensor."""
    return tensor.device.type if isinstance(tensor, torch.Tensor) else None


class ChainLauncher:
    """One chain kernel launch for all draft positions of up to ``max_rows`` request rows, on one GPU.

    One sampler's launches, graph replays included, must follow each other: by one stream, or by events between streams.
    They share the noise buffer and the exchange records; run at once, they would take each other's. Nothing detects
    that, as a replay does not pass through the host. Samplers of their own may run on streams of their own, also on one
    GPU, where the launches follow each other, because each takes every SM. Calls from several host threads need a lock.

    The launch is cooperative: it starts when all SMs can take it, after the kernels that fill them. A kernel that waits
    for something behind the chain, such as a collective that waits for a rank that runs its chain first, must not be
    in flight: each would wait for the other until the timeout.

    With ``pdl`` (programmatic dependent launch) the chain starts while the kernel ahead of it in the stream still runs,
    loads the head, and waits for that kernel's end before it reads anything else. What the caller must then know:

    - The kernel ahead must write neither weight: the head may be read before it ends. A reload of the weights needs an
      event, a copy or any ordinary kernel between itself and the chain.
    - The kernel ahead must end by itself. The chain's CTAs take their SMs while they wait for it, so that a kernel ahead
      that waits for something launched after it, on whatever stream, hangs the GPU: no timeout bounds this wait.
    - The chain waits for the kernel just ahead. Where that one was launched programmatically too, it must itself have
      waited for the one before it, or what the earlier one writes may be read too early.
    - It is launched without the cooperative attribute, with which nothing overlaps. That all CTAs are on the chip at
      once is then checked beforehand (``why_not``, and the driver's occupancy of each build), and holds where all other
      kernels on the GPU end by themselves. Two such samplers on streams that nothing orders may each take a part of the
      SMs and wait for the rest until the timeout: order them by events.
    - Only a launch right behind a kernel overlaps. Behind an event that another stream recorded, such as the join of
      forked noise, it is an ordinary launch: call ``join_noise`` ahead of the last kernel that the base logits need.
      Noise that was not forked is drawn right ahead of the chain, which then overlaps with the noise kernel's end.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, on a CUDA device.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], contiguous, same device. Rows beyond the
            vocabulary are ignored; both weights are read where they lie, so a reload into the same storage is seen.
        max_reqs: number of request states, the first size of temperature, seeds and logits_cache.
        cache_dtype: dtype of the logits cache: torch.bfloat16 or torch.float32.
        device_name: name of the device description whose plan is used; None matches the GPU itself.
        timeout_ms: bound of every wait inside the kernel, in milliseconds. A wait that runs out traps, which loses the
            CUDA context, and raises ChainTimeoutError. 0 leaves the waits unbounded.
        pdl: launch programmatically, as above. The results are the same.

    Raises:
        ValueError: with ``why_not``'s reason, when this sampler cannot be built.
    """

    config: ClassVar[ModuleType]
    noise: ClassVar[ModuleType]
    load_chain: ClassVar[Callable[[], ModuleType]]

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype,
        device_name: str | None = None,
        timeout_ms: int = 30_000,
        pdl: bool = False,
    ) -> None:
        reason = self.why_not(
            embed_weight, head_weight, max_reqs=max_reqs, cache_dtype=cache_dtype, device_name=device_name, pdl=pdl
        )
        if reason is not None:
            raise ValueError(f"{self.config.MODEL}: no chain sampler: {reason}")
        host.check_int("timeout_ms", timeout_ms, 0)
        if timeout_ms == 0:
            log.warning("%s: timeout_ms=0: a wait in the chain kernel that never ends hangs the GPU", self.config.MODEL)
        config = self.config
        self.device = embed_weight.device
        self.embed_weight, self.head_weight = embed_weight, head_weight
        self.max_reqs, self.cache_dtype, self.timeout_ms, self.pdl = max_reqs, cache_dtype, timeout_ms, pdl
        self._lines = host.plan_lines(config.PLANS, config.DEVICES, host.read_device(self.device), 1, device_name)
        self.max_rows = min(config.MAX_ROWS, max_reqs, max(self._lines))
        self._chain = self.load_chain()
        self._variants: dict[tuple[int, torch.dtype], Variant] = {}
        self._report = host.TimeoutReport(pinned=True)
        pitch = chain_call.noise_pitch(config.DRAFT_VOCAB_SIZE)
        samples = self.max_rows * config.NUM_STEPS
        self.noise_buffer = torch.empty((samples, pitch), dtype=torch.float32, device=self.device)
        self._noise_stream = self.noise.NoiseStream(self.device)
        self._forked_rows: int | None = None
        self._joined = False
        self._expected = Expectations(
            config, self.device, max_rows=self.max_rows, max_reqs=max_reqs, cache_dtype=cache_dtype
        )
        self._constant_arguments = {
            "head": head_weight.data_ptr(),
            "embed": embed_weight.data_ptr(),
            "noise": self.noise_buffer.data_ptr(),
            "noise_pitch": pitch,
            "report": self._report.address,
            "timeout_ns": timeout_ms * NS_PER_MS,
            "vocab_start": 0,
            "width": config.DRAFT_VOCAB_SIZE,
        }

    @classmethod
    def why_not(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: torch.Tensor | None,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype,
        device_name: str | None = None,
        pdl: bool = False,
    ) -> str | None:
        """Why no chain sampler can be built from these, or None. Depends on shapes, dtypes and the device only."""
        config = cls.config
        if embed_weight is None or head_weight is None:
            return f"the Markov {'embedding' if embed_weight is None else 'head'} is missing"
        if device_type(embed_weight) != "cuda":
            return f"embed_weight: expected a tensor on a CUDA device, got {host.describe(embed_weight)}"
        reason = chain_call.why_not_fitting(config, embed_weight, head_weight, max_reqs, cache_dtype, pdl)
        if reason is not None:
            return reason
        if importlib.util.find_spec("cutlass") is None:
            return "CuTe DSL is missing: install nvidia-cutlass-dsl"
        return chain_call.why_no_place(config, embed_weight.device, max_reqs, device_name, pdl)

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
        self._noise_stream.fork(
            self.noise_buffer,
            idx_mapping,
            sample_pos,
            temperature,
            seeds,
            num_samples=num_reqs * self.config.NUM_STEPS,
            width=self.config.DRAFT_VOCAB_SIZE,
        )
        self._forked_rows, self._joined = num_reqs, False

    @property
    def noise_pending(self) -> bool:
        """Whether noise was forked that no ``sample`` has used yet."""
        return self._forked_rows is not None

    def join_noise(self) -> None:
        """Make the current stream wait for the forked noise. ``sample`` joins by itself where this was not called."""
        if self._forked_rows is None:
            raise RuntimeError("join_noise: expected a fork_noise before it, got none since the last sample")
        if not self._joined:
            self._noise_stream.join()
            self._joined = True

    def discard_noise(self) -> None:
        """Forget forked noise that no ``sample`` will use, once the current stream waits for it."""
        if self._forked_rows is not None:
            self.join_noise()
            self._forked_rows = None

    def sample(
        self,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor,
        draft_tokens: torch.Tensor,
        *,
        query_per_row: int | None = None,
    ) -> None:
        """Draw every draft token of the batch on the current stream; no synchronisation, and no allocation once warm.

        Args:
            base_logits: bf16 or fp32 [rows, NUM_STEPS, >= DRAFT_VOCAB_SIZE]; last stride 1, other strides free.
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
            ChainTimeoutError: an earlier launch gave up waiting.
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
            self._provide_noise(rows, idx_mapping, sample_pos, temperature, seeds)
            self.launch(variant, arguments)
        except Exception:
            # A trap of an earlier launch surfaces at whichever call comes next; its report says what happened.
            self._report.raise_if_set()
            raise

    def launch(self, variant: Variant, arguments: dict[str, int]) -> None:
        """Launch the chain alone, on the current stream, with what ``prepare`` returned and the noise that is drawn."""
        variant.block.launch(arguments, torch.cuda.current_stream(self.device).cuda_stream)

    def prepare(
        self,
        rows: int,
        base_logits: torch.Tensor,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        logits_cache: torch.Tensor,
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
        arguments = chain_call.call_arguments(
            rows, base_logits, input_ids, idx_mapping, temperature, logits_cache, draft_tokens, query_per_row
        )
        own = {"records": variant.records.data_ptr(), "epoch": variant.epoch.data_ptr(), "ctas": variant.ctas}
        return variant, self._constant_arguments | arguments | own

    def _provide_noise(self, rows: int, *state: torch.Tensor) -> None:
        """Leave this call's noise in the buffer: the forked draw's, or one on the current stream."""
        forked = self._forked_rows
        if forked is None:
            self.noise.draw_noise(
                self.noise_buffer, *state, num_samples=rows * self.config.NUM_STEPS, width=self.config.DRAFT_VOCAB_SIZE
            )
            return
        self.join_noise()
        self._forked_rows = None
        if forked != rows:
            raise RuntimeError(f"sample: expected the {forked} request rows that fork_noise drew for, got {rows}")

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
        line = self._lines[slots]
        base, cache = host.dtype_name(base_dtype), host.dtype_name(self.cache_dtype)
        compiled = self._chain.compile_chain(line, base, cache, pdl=self.pdl)
        shape = chain_call.block_shape(self.config, line, base) if self.pdl else {}
        if self.pdl and chain_call.blocks_per_sm(compiled, **shape) == 0:
            raise RuntimeError(
                f"{self.config.MODEL}: pdl: the chain kernel for {slots} row slots and {base} base logits: expected one "
                f"CTA on an SM, {shape}, but the driver places none; build the sampler without pdl"
            )
        words = self._chain.records_words(line)
        made = Variant(
            ArgumentBlock(compiled, self._chain.ARGUMENTS, self._chain.NARROW),
            line.ctas,
            # torch has few uint64 operations; int64 zeros are the same bits.
            torch.zeros(words, dtype=torch.int64, device=self.device),
            torch.zeros(1, dtype=torch.int32, device=self.device),
        )
        self._variants[slots, base_dtype] = made
        return made

    def warmup(self) -> None:
        """Compile and launch every variant once, so that nothing compiles, loads or allocates later. Synchronises.

        The launches draw one padding row: they write no cache row and no caller's memory.
        """
        config = self.config
        device = self.device
        self.discard_noise()
        anchors = torch.zeros(1, dtype=torch.int32, device=device)
        padding = torch.full((config.NUM_STEPS,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros(config.NUM_STEPS, dtype=torch.int64, device=device)
        temperature = torch.zeros(self.max_reqs, dtype=torch.float32, device=device)
        seeds = torch.zeros(self.max_reqs, dtype=torch.int64, device=device)
        tokens = torch.empty((self.max_rows, config.NUM_STEPS), dtype=torch.int64, device=device)
        # One row of memory stands for all of them: padding rows are never stored.
        cache = torch.zeros(config.VOCAB_SIZE, dtype=self.cache_dtype, device=device)
        cache = cache.expand(self.max_reqs, config.NUM_STEPS, config.VOCAB_SIZE)
        for base_dtype in self._expected.base_dtypes:
            column = torch.zeros(config.DRAFT_VOCAB_SIZE, dtype=base_dtype, device=device)
            for slots in self._lines:
                rows = min(slots, self.max_rows)
                base = column.expand(rows, config.NUM_STEPS, config.DRAFT_VOCAB_SIZE)
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
        self.fork_noise(padding, positions, temperature, seeds, 1)
        self.discard_noise()
        self.synchronize()

    def raise_if_failed(self) -> None:
        """Raise ChainTimeoutError when a launch has given up waiting. Reads host memory only; does not synchronise."""
        self._report.raise_if_set()

    def synchronize(self) -> None:
        """Wait for the current stream. Raises ChainTimeoutError when a launch gave up, else CUDA's own error."""
        try:
            torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError:
            self._report.raise_if_set()
            raise
        self._report.raise_if_set()
