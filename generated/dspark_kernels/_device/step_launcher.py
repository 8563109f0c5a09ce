"""The step sampler's mechanics, the same for every model: the loop over draft positions with one kernel behind each GEMM.

A model's launch.py subclasses StepLauncher and names its constants and kernels. All per-call state (seeds, positions,
temperatures, anchors, row mapping) is read from device memory by the kernels, so a captured graph has nothing of one
call baked in but addresses, strides and the row count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Self

import torch

from . import host, kernel_recipes, kernel_store, step_call, step_reasons, step_sizes, vocabulary
from .cubin_launch import CubinKernel
from .kernel_store import Recipe
from .rank_group import Declined, RankGroup
from .step_call import Build, CallViews, Exchange, Variant
from .vocab_parallel_head import VocabParallelHead

log = logging.getLogger("dspark_kernels")

Head = torch.Tensor | VocabParallelHead


class StepLauncher:
    """The engine's loop over the draft positions, each position's tail as one kernel; any number of request rows.

    The bias is the engine's own product, embedding times head, by cuBLAS and over all rows of the head that was given, its
    padding included. So tokens and cache equal the engine's eager loop to the bit on rows without NaN. A call launches one
    kernel that gathers the anchors' embeddings, and per position the product and one kernel.

    With a ``VocabParallelHead`` each rank computes its columns only. Per position the ranks gather one packet a row, from
    which a kernel picks the token; after the last position they gather their shards of the cache. Every rank must then
    make the same calls in the same order, ``warmup`` included, with the same rows; all get the same results.

    One sampler's calls, graph replays included, must follow each other, by one stream or by events between streams: they
    share buffers. Calls from several host threads need a lock.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, on a CUDA device.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], last stride 1, same device; or this rank's
            ``VocabParallelHead``. Both weights are read where they lie, so a reload into the same storage is seen.
        max_reqs: number of request states, and the most rows of a call.
        cache_dtype: dtype of the logits cache; None for a model that drafts greedily, without one.
        d2t: for a reduced draft vocabulary, int64 [DRAFT_VOCAB_SIZE] offsets, target id = draft id + d2t[draft id], read
            here, once. Zeros count as None where draft and target ids are the same.
        group: the ranks' CPU process group, on which they agree before one waits for another; with a sharded head only.
        device_group: the ranks' process group of backend nccl, which gathers packets and shards; likewise.

    Raises:
        Declined: a ValueError with ``why_not``'s reason, when this sampler cannot be built; the same on every rank.
    """

    config: ClassVar[ModuleType]
    load_step: ClassVar[Callable[[], ModuleType]]
    provide: ClassVar[Callable[[Recipe, torch.device], CubinKernel]] = staticmethod(kernel_store.provide)

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: Head,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        d2t: torch.Tensor | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        config = self.config
        self._ranks = RankGroup(group)
        reason = self.why_not(
            embed_weight,
            head_weight,
            max_reqs=max_reqs,
            cache_dtype=cache_dtype,
            d2t=d2t,
            group=group,
            device_group=device_group,
        )
        reason = self._ranks.agree(reason)
        if reason is not None:
            raise Declined(f"{config.MODEL}: no step sampler: {reason}")
        self.device, self.max_reqs, self.cache_dtype = embed_weight.device, max_reqs, cache_dtype
        self._device_group = device_group
        if isinstance(head_weight, VocabParallelHead):
            self.world, self._head = head_weight.world, head_weight.storage
            self.first, self.width = head_weight.first, head_weight.width
        else:
            self.world, self._head = 1, head_weight.detach()
            self.first, self.width = 0, config.DRAFT_VOCAB_SIZE
        self._target_ids = vocabulary.target_ids(config, d2t, self.device)
        self._draft_ids = vocabulary.draft_ids(config, self._target_ids)
        self._fills = cache_dtype is not None and (self.world > 1 or config.D2T)
        self._pitch = step_sizes.shard_pitch(self.width)
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._buffers = step_call.Buffers(
                config,
                self.device,
                max_reqs=max_reqs,
                head_rows=self._head.shape[0],
                world=self.world,
                shard_pitch=self._pitch if self._fills else 0,
                cache_dtype=cache_dtype,
                scratch_words=step_sizes.scratch_words(max_reqs),
            )
        self._expected = step_call.Expectations(
            config, self.device, max_reqs=max_reqs, cache_dtype=cache_dtype, width=self.width
        )
        self._constants = {
            "embed": embed_weight.data_ptr(),
            "scratch": self._buffers.scratch.data_ptr(),
            "target_ids": 0 if self._target_ids is None else self._target_ids[self.first :].data_ptr(),
            "inverse": 0 if self._draft_ids is None else self._draft_ids.data_ptr(),
            "pitch": self._pitch,
            "vocab_start": self.first,
            "width": self.width,
            "world": self.world,
        }
        self._views: dict[int, CallViews] = {}
        self._kernels: dict[Build, CubinKernel] = {}
        self._warming = False

    # --- reasons to decline ---

    @classmethod
    def why_not(
        cls,
        embed_weight: torch.Tensor | None,
        head_weight: Head | None,
        *,
        max_reqs: int,
        cache_dtype: torch.dtype | None,
        logits_cache: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
        fp64_noise: bool | None = None,
        draft_topk: int | None = None,
        watermark: bool = False,
        adaptive_verification: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
    ) -> str | None:
        """Why no step sampler can serve these, or None. Reads the values of ``d2t``, and no other's.

        Args:
            embed_weight, head_weight, max_reqs, cache_dtype, d2t, group, device_group: as at construction.
            logits_cache: the engine's cache, where it exists already: [>= max_reqs, NUM_STEPS, >= VOCAB_SIZE].
            fp64_noise: whether the engine draws its Gumbel noise in fp64; None does not ask.
            draft_topk: the engine's number of draft candidates, where it restricts them.
            watermark: whether the engine watermarks drafts.
            adaptive_verification: whether the engine wants confidences of the drafts, by a head or an estimator.
        """
        config = cls.config
        if embed_weight is None or head_weight is None:
            return f"the Markov {'embedding' if embed_weight is None else 'head'} is missing"
        return (
            step_reasons.why_not_engine(config, fp64_noise, draft_topk, watermark, adaptive_verification)
            or step_reasons.why_not_platform(embed_weight)
            or step_reasons.why_not_weights(config, embed_weight, head_weight)
            or vocabulary.why_not(config, d2t, embed_weight.device)
            or step_reasons.why_not_cache(config, max_reqs, cache_dtype, logits_cache, embed_weight.device)
            or cls.why_not_ranks(head_weight, group, device_group)
            or step_reasons.why_no_kernels(config, cls.load_step, embed_weight, head_weight, max_reqs, cache_dtype)
        )

    @classmethod
    def why_not_ranks(cls, head_weight: Head, group: Any, device_group: Any) -> str | None:
        """Why the ranks cannot share this head, or None."""
        return step_reasons.why_not_groups(head_weight, group, device_group)

    @classmethod
    def create(cls, *weights: Any, **options: Any) -> Self | None:
        """A warmed-up sampler on every rank, or None on every rank. Arguments as for the class; a collective.

        The reason for None is logged once, by rank 0; a caller that wants it builds the class and catches ValueError.
        """
        ranks = RankGroup(options.get("group"))
        try:
            made = ranks.attempt("building the step sampler", lambda: cls(*weights, **options))
            made.warmup()
        except Declined as error:
            if ranks.rank == 0:
                log.warning("%s: no step kernels: %s", cls.config.MODEL, error)
            return None
        return made

    def why_not_call(self, num_reqs: int, base_logits: torch.Tensor | None = None) -> str | None:
        """Why the step kernels do not take a batch, or None. Depends on shapes, dtypes and strides only.

        Args:
            num_reqs: request rows of the (padded) batch.
            base_logits: the batch's base logits; without them the row count alone is judged.
        """
        if not 1 <= num_reqs <= self.max_reqs:
            return f"num_reqs: the step kernels take 1 to {self.max_reqs} request rows, got {num_reqs}"
        if base_logits is None:
            return None
        found = self._expected.base_logits_misfit(num_reqs, base_logits)
        return None if found is None else found.message

    def accepts_shard(self, shard: tuple[int, int] | None) -> bool:
        """Whether base logits can be this rank's columns alone, on every rank. A collective.

        A rank that took its LM head's shard while a peer gathers would leave that peer waiting in the collective.

        Args:
            shard: first column and number of columns of this rank's LM head; None where it has none.
        """
        return self._ranks.agree(None if shard == (self.first, self.width) else f"shard: got {shard}") is None

    # --- one call ---

    def call_views(self, rows: int) -> CallViews:
        """The leading parts of this sampler's buffers that a call of ``rows`` request rows uses."""
        host.check_int("rows", rows, 1, self.max_reqs)
        if rows not in self._views:
            self._views[rows] = self._buffers.views(rows)
        return self._views[rows]

    def variant(self, rows: int, base_logits: torch.Tensor, logits_cache: torch.Tensor | None) -> Variant:
        """The build that a call launches: block size and PDL by its rows, vectors by where its operands really lie."""
        views = self.call_views(rows)
        operands = [self._columns(base_logits), views.bias]
        if logits_cache is not None and not self._fills:
            operands.append(logits_cache)
        return Variant(
            step_call.block_for(self.config, rows),
            rows <= self.config.STEP_PDL_MAX_ROWS,
            step_call.vector_ok(self.width, *operands),
        )

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
            base_logits: [rows, NUM_STEPS, >= DRAFT_VOCAB_SIZE], or with a sharded head this rank's columns,
                [rows, NUM_STEPS, >= W]; one of BASE_DTYPES, last stride 1, other strides free.
            input_ids: int32, contiguous; row r's anchor is ``input_ids[r * query_per_row]``.
            idx_mapping: int64 [>= rows * NUM_STEPS], request-state index per sample, negative for a padding row.
            sample_pos: int64 [>= rows * NUM_STEPS], position of the token being predicted.
            temperature: fp32 [>= max_reqs], by request-state index.
            seeds: int64 [>= max_reqs], by request-state index.
            logits_cache: out, cache_dtype [>= max_reqs, NUM_STEPS, >= VOCAB_SIZE]; last stride 1. None for a model that
                drafts greedily, which reads none of the four before it.
            draft_tokens: out, int64 [>= rows, NUM_STEPS]; last stride 1.
            query_per_row: input ids per request row; the model's QUERY_PER_ROW by default.

        Raises:
            TypeError, ValueError: an argument does not fit; says what was expected and given. Nothing was launched.
            RuntimeError: a build that is not compiled, under graph capture or where ranks would wait for this one.
        """
        for exchange in self.steps(
            base_logits,
            input_ids,
            idx_mapping,
            sample_pos,
            temperature,
            seeds,
            logits_cache,
            draft_tokens,
            query_per_row=query_per_row,
        ):
            torch.distributed.all_gather_into_tensor(exchange.gathered, exchange.own, group=self._device_group)

    def steps(
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
    ) -> Iterator[Exchange]:
        """``sample`` as a generator that stops wherever the ranks must gather: the caller gathers, then goes on.

        Without sharding it yields nothing. Arguments and errors as for ``sample``.
        """
        config = self.config
        rows = base_logits.shape[0] if isinstance(base_logits, torch.Tensor) and base_logits.dim() == 3 else 1
        distance = config.QUERY_PER_ROW if query_per_row is None else query_per_row
        state = (idx_mapping, sample_pos, temperature, seeds)
        if torch.cuda.current_device() != self.device.index:
            raise ValueError(
                f"current CUDA device: expected {self.device.index}, this sampler's, got {torch.cuda.current_device()}"
            )
        self._expected.check(rows, base_logits, input_ids, *state, logits_cache, draft_tokens, distance)
        views, variant = self.call_views(rows), self.variant(rows, base_logits, logits_cache)
        sharded, cache_name = self.world > 1, self._expected.cache_name
        # All builds first: nothing is launched when one is missing.
        anchor = self._build(Build("anchor", variant.pdl))
        choices = (variant.block, host.dtype_name(base_logits.dtype), cache_name, sharded)
        step_kernel = self._build(Build("step", variant.pdl, variant.vector, *choices))
        pick = self._build(Build("pick", variant.pdl)) if sharded else None
        fill = None
        if self._fills and logits_cache is not None:
            fill_vector = step_call.vector_ok(self.width, logits_cache)
            fill = self._build(Build("fill", variant.pdl, fill_vector, cache=cache_name))

        arguments = self._constants | step_call.call_arguments(
            views, self._columns(base_logits), input_ids, *state, logits_cache, draft_tokens, distance, self._pitch
        )
        base, cache, embeddings = arguments["base"], arguments["cache"], views.embeddings
        stream = torch.cuda.current_stream(self.device).cuda_stream
        anchor.launch(arguments | {"embeddings": embeddings.data_ptr()}, stream)
        for step in range(config.NUM_STEPS):
            self.product(embeddings[step], views.bias)
            arguments["step"] = step
            arguments["base"] = base + step * arguments["base_step_bytes"]
            arguments["cache"] = cache + step * arguments["cache_step_bytes"]
            arguments["embeddings"] = embeddings[step + 1].data_ptr()
            step_kernel.launch(arguments, stream)
            if pick is not None and views.packets is not None:
                yield views.packets
                pick.launch(arguments | {"packets": views.packets.gathered.data_ptr()}, stream)
        if fill is not None and logits_cache is not None and views.shards is not None:
            if sharded:
                yield views.shards
            fill.launch(arguments | {"cache": logits_cache.data_ptr()}, stream)

    def product(self, embeddings: torch.Tensor, out: torch.Tensor) -> None:
        """The bias of one position, as the engine's linear layer computes it: the same call of cuBLAS, into a buffer that stays.

        Args:
            embeddings: bf16 [rows, RANK_DIM].
            out: bf16 [rows, rows of the head].
        """
        torch.mm(embeddings, self._head.t(), out=out)

    def _columns(self, base_logits: torch.Tensor) -> torch.Tensor:
        """This rank's columns of base logits, which may be all there are."""
        first = self.first if self._expected.has_all_columns(base_logits) else 0
        return base_logits[:, :, first : first + self.width]

    # --- builds ---

    def _build(self, build: Build) -> CubinKernel:
        """A kernel, found or compiled now if it is the first time.

        Raises RuntimeError where compiling now would end a graph capture, or keep other ranks waiting in a collective.
        """
        if build not in self._kernels:
            if not self._warming and (self.world > 1 or torch.cuda.is_current_stream_capturing()):
                raise RuntimeError(
                    f"{self.config.MODEL}: {build} is not compiled; call warmup() before capturing a graph, and with a "
                    "sharded head on every rank before the first call"
                )
            recipe = kernel_recipes.step_recipe(self.config, self.load_step, build)
            self._kernels[build] = self.provide(recipe, self.device)
        return self._kernels[build]

    def compile(self) -> None:
        """Compile every build that calls of 1 to ``max_reqs`` rows can launch, for this cache dtype. Launches nothing."""
        self._warming = True
        try:
            shared = {"sharded": self.world > 1, "fills": self._fills}
            for build in step_call.all_builds(self.config, self._expected, self.max_reqs, **shared):
                self._build(build)
        finally:
            self._warming = False

    def warmup(self) -> None:
        """Compile every build, then launch each once, so that nothing compiles, loads or allocates later. Synchronises.

        With a sharded head all ranks call this together; they agree that all have compiled before one launches. The launches
        draw padding rows: they write no cache row and no caller's memory.

        Raises:
            Declined: a rank could not compile; the same on every rank.
        """
        self._ranks.attempt("compiling the step kernels", self.compile)
        for rows in range(1, self.max_reqs + 1):
            # cuBLAS loads a kernel at its first use, and chooses it by the row count.
            views = self.call_views(rows)
            self.product(views.embeddings[0], views.bias)
        for rows, variant in step_call.variants(self.config, self.max_reqs, self.width):
            for base_dtype in self._expected.base_dtypes:
                call = step_call.padding_call(self._expected, rows, base_dtype, aligned=variant.vector)
                self.sample(*call, query_per_row=1)
        torch.cuda.current_stream(self.device).synchronize()
