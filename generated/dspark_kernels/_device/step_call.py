"""One call of the step kernels: what its tensors must look like, which builds it launches, and the buffers it uses.

Nothing here launches or synchronises; every refusal says what was expected and given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import host
from .host import Expected

BF16_BYTES = 2
VECTOR_ENTRIES = host.VECTOR_BYTES // BF16_BYTES  # bf16 values of one vector
LARGEST = 2**31 - 1  # int32 arguments: query_per_row, rows
# Arguments of the step kernel that its builds for greedy drafts do not read.
UNUSED_BY_GREEDY_DRAFTS = (
    "cache",
    "cache_row_stride",
    "cache_step_bytes",
    "idx_mapping",
    "sample_pos",
    "temperature",
    "seeds",
)


class Variant(NamedTuple):
    """The compile-time choices of a step kernel. All variants give the same tokens."""

    block: int  # vocabulary columns of a CTA
    pdl: bool  # launched programmatically dependent
    vector: bool  # 16-byte loads and stores, else one entry at a time


class Build(NamedTuple):
    """One compiled kernel: which, and its compile-time choices. Those that a kernel does not have keep their defaults."""

    kernel: str  # "anchor", "step", "pick" or "fill"
    pdl: bool
    vector: bool = False
    block: int = 0
    base: str = ""  # dtype of the base logits, "bf16" or "fp32"
    cache: str = ""  # dtype of the logits cache, likewise; none for greedy drafts
    sharded: bool = False

    def __str__(self) -> str:
        choices = [f"{name} {value}" for name, value in zip(self._fields[1:], self[1:], strict=True) if value]
        return " ".join([f"the {self.kernel} kernel", *choices])


class Exchange(NamedTuple):
    """What the ranks gather at one point of the loop: ``own`` of every rank, by rank, into ``gathered``."""

    gathered: torch.Tensor  # [world, ...]
    own: torch.Tensor


class CallViews(NamedTuple):
    """The leading parts of a sampler's buffers that a call of ``rows`` request rows uses; all contiguous."""

    embeddings: torch.Tensor  # bf16 [N + 1, rows, R]: of the previous token at each position
    bias: torch.Tensor  # bf16 [rows, rows of the head], the product; columns beyond the vocabulary are padding
    packets: Exchange | None  # int32 [rows, PACKET_WORDS], where the head is sharded
    shards: Exchange | None  # cache dtype [rows, N, pitch] flat, where the cache is filled after the loop


class Buffers:
    """A sampler's device memory, flat and sized for ``max_reqs`` rows; calls take views of its leading elements.

    Args:
        config: the model's config.py.
        device: where they lie.
        max_reqs: most request rows of a call.
        head_rows: rows of the head as the product takes it, padding included.
        world: ranks that share the head; 1 without sharding.
        shard_pitch: cache entries between two positions of a row in the flat shard; 0 where calls write the cache itself.
        cache_dtype: dtype of the logits cache; None for greedy drafts, whose calls have none.
        scratch_words: int64 words that the step kernels need zeroed.
    """

    def __init__(
        self,
        config: ModuleType,
        device: torch.device,
        *,
        max_reqs: int,
        head_rows: int,
        world: int,
        shard_pitch: int,
        cache_dtype: torch.dtype | None,
        scratch_words: int,
    ) -> None:
        self._config, self._head_rows, self._world, self._pitch = config, head_rows, world, shard_pitch

        def flat(entries: int, dtype: torch.dtype | None) -> torch.Tensor:
            return torch.empty(entries, dtype=dtype, device=device)

        self.scratch = torch.zeros(scratch_words, dtype=torch.int64, device=device)
        self._embeddings = flat((config.NUM_STEPS + 1) * max_reqs * config.RANK_DIM, torch.bfloat16)
        self._bias = flat(max_reqs * head_rows, torch.bfloat16)
        packet_words = max_reqs * config.PACKET_WORDS if world > 1 else 0
        self._packets, self._all_packets = flat(packet_words, torch.int32), flat(world * packet_words, torch.int32)
        shard = max_reqs * config.NUM_STEPS * shard_pitch
        self._shard = flat(shard, cache_dtype)
        # One rank's flat cache needs no gathering: the kernel that fills the cache reads it where it lies.
        self._all_shards = flat(world * shard, cache_dtype) if world > 1 else self._shard

    def views(self, rows: int) -> CallViews:
        """The views of one call."""
        config, steps = self._config, self._config.NUM_STEPS

        def leading(flat: torch.Tensor, *shape: int) -> torch.Tensor:
            return flat[: math.prod(shape)].view(shape)

        packets = shards = None
        if self._world > 1:
            words = config.PACKET_WORDS
            packets = Exchange(
                leading(self._all_packets, self._world, rows, words), leading(self._packets, rows, words)
            )
        if self._pitch:
            entries = rows * steps * self._pitch
            shards = Exchange(leading(self._all_shards, self._world, entries), leading(self._shard, entries))
        return CallViews(
            leading(self._embeddings, steps + 1, rows, config.RANK_DIM),
            leading(self._bias, rows, self._head_rows),
            packets,
            shards,
        )


def block_for(config: ModuleType, rows: int) -> int:
    """Vocabulary columns of a CTA for a call of ``rows`` request rows: the first line of the table with enough rows."""
    return next((block for most, block in config.STEP_BLOCKS if rows <= most), config.STEP_DEFAULT_BLOCK)


def variants(config: ModuleType, max_reqs: int, width: int) -> Iterator[tuple[int, Variant]]:
    """Every variant that calls of 1 to ``max_reqs`` request rows and ``width`` columns can launch, each with the fewest rows
    that take it."""
    seen = set()
    for rows in range(1, max_reqs + 1):
        for vector in vector_choices(width):
            variant = Variant(block_for(config, rows), rows <= config.STEP_PDL_MAX_ROWS, vector)
            if variant not in seen:
                seen.add(variant)
                yield rows, variant


def vector_choices(width: int) -> tuple[bool, ...]:
    """What ``vector_ok`` can be for rows of ``width`` columns."""
    return (True, False) if width % VECTOR_ENTRIES == 0 else (False,)


def vector_ok(width: int, *operands: torch.Tensor) -> bool:
    """Whether every operand's rows start on 16-byte boundaries and are whole vectors of bf16 wide."""
    return width % VECTOR_ENTRIES == 0 and all(host.vector_ok(operand) for operand in operands)


class Expectations:
    """What the tensors of a call must look like, by row count; made once, so that a call only compares.

    Args:
        config: the model's config.py.
        device: device of every tensor.
        max_reqs: number of request states, and the most rows of a call.
        cache_dtype: dtype of the logits cache; None for greedy drafts, whose calls read nothing of the request states.
        width: columns of this rank; all of the draft vocabulary without sharding.
    """

    def __init__(
        self, config: ModuleType, device: torch.device, *, max_reqs: int, cache_dtype: torch.dtype | None, width: int
    ) -> None:
        self.device, self.max_reqs, self.width = device, max_reqs, width
        self.steps, self.vocab = config.NUM_STEPS, config.DRAFT_VOCAB_SIZE
        self.base_dtypes = tuple(host.DTYPES[name] for name in config.BASE_DTYPES)
        self.temperature = Expected((torch.float32,), (max_reqs,), extendable=(0,), contiguous=True)
        self.seeds = Expected((torch.int64,), (max_reqs,), extendable=(0,), contiguous=True)
        self.cache_dtype, self.cache_columns = cache_dtype, config.VOCAB_SIZE
        self.logits_cache = None
        if cache_dtype is not None:
            shape = (max_reqs, self.steps, config.VOCAB_SIZE)
            self.logits_cache = Expected((cache_dtype,), shape, extendable=(0, 2))

    @property
    def cache_name(self) -> str:
        """Name of the cache's dtype; empty for greedy drafts."""
        return "" if self.cache_dtype is None else host.dtype_name(self.cache_dtype)

    def base_logits_misfit(self, rows: int, base_logits: Any) -> host.Misfit | None:
        """Why base logits do not fit a call of ``rows`` rows, or None. Values are not looked at."""
        expected = Expected(self.base_dtypes, (rows, self.steps, self.width), extendable=(2,))
        return expected.misfit("base_logits", base_logits, self.device)

    def has_all_columns(self, base_logits: torch.Tensor) -> bool:
        """Whether base logits cover the draft vocabulary, and not this rank's columns alone."""
        return base_logits.shape[2] >= self.vocab

    def check(
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
    ) -> None:
        """Check every argument of a call, as documented at the sampler's ``sample``. Raises TypeError or ValueError."""
        host.check_int("rows of base_logits", rows, 1, self.max_reqs)
        found = self.base_logits_misfit(rows, base_logits)
        if found is not None:
            raise found.error(found.message)
        host.check_int("query_per_row", query_per_row, 1, LARGEST)
        samples = Expected((torch.int64,), (rows * self.steps,), extendable=(0,), contiguous=True)
        anchors = Expected((torch.int32,), ((rows - 1) * query_per_row + 1,), extendable=(0,), contiguous=True)
        tokens = Expected((torch.int64,), (rows, self.steps), extendable=(0,))
        anchors.check("input_ids", input_ids, self.device)
        tokens.check("draft_tokens", draft_tokens, self.device)
        if self.logits_cache is None:
            if logits_cache is not None:
                raise ValueError(f"logits_cache: expected None for greedy drafts, got {host.describe(logits_cache)}")
            return
        samples.check("idx_mapping", idx_mapping, self.device)
        samples.check("sample_pos", sample_pos, self.device)
        self.temperature.check("temperature", temperature, self.device)
        self.seeds.check("seeds", seeds, self.device)
        self.logits_cache.check("logits_cache", logits_cache, self.device)


def builds(variant: Variant, expected: Expectations, *, sharded: bool, fills: bool) -> Iterator[Build]:
    """The builds that calls of one variant launch, for every dtype of base logits.

    Args:
        sharded: whether ranks share the vocabulary.
        fills: whether a kernel of its own fills the logits cache.
    """
    cache = expected.cache_name
    yield Build("anchor", variant.pdl)
    for base in expected.base_dtypes:
        yield Build("step", variant.pdl, variant.vector, variant.block, host.dtype_name(base), cache, sharded)
    if sharded:
        yield Build("pick", variant.pdl)
    for vector in vector_choices(expected.width) if fills else ():
        yield Build("fill", variant.pdl, vector, cache=cache)


def all_builds(
    config: ModuleType, expected: Expectations, max_reqs: int, *, sharded: bool, fills: bool
) -> Iterator[Build]:
    """Every build that calls of 1 to ``max_reqs`` request rows launch, once; arguments as for ``builds``."""
    variants_of = (variant for _, variant in variants(config, max_reqs, expected.width))
    found = (build for variant in variants_of for build in builds(variant, expected, sharded=sharded, fills=fills))
    yield from dict.fromkeys(found)


def call_arguments(
    views: CallViews,
    columns: torch.Tensor,
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    sample_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    logits_cache: torch.Tensor | None,
    draft_tokens: torch.Tensor,
    query_per_row: int,
    pitch: int,
) -> dict[str, int]:
    """The kernels' arguments that a call brings, by name: device addresses, strides in elements, sizes.

    ``base_step_bytes`` and ``cache_step_bytes`` are what ``base`` and ``cache`` move on by from position to position.

    Args:
        columns: the base logits of this rank's columns.
        pitch: cache entries between two positions of a row in the flat shard.
    """
    rows, steps = columns.shape[:2]
    arguments = {
        "base": columns.data_ptr(),
        "base_row_stride": columns.stride(0),
        "base_step_bytes": columns.stride(1) * columns.element_size(),
        "bias": views.bias.data_ptr(),
        "bias_row_stride": views.bias.stride(0),
        "input_ids": input_ids.data_ptr(),
        "query_per_row": query_per_row,
        "draft_tokens": draft_tokens.data_ptr(),
        "token_stride": draft_tokens.stride(0),
        "packets": 0 if views.packets is None else views.packets.own.data_ptr(),
        "rows": rows,
    }
    if logits_cache is None:
        return arguments | dict.fromkeys(UNUSED_BY_GREEDY_DRAFTS, 0)
    written, row_stride, step_stride = logits_cache, logits_cache.stride(0), logits_cache.stride(1)
    if views.shards is not None:
        written, row_stride, step_stride = views.shards.own, steps * pitch, pitch
    return arguments | {
        "cache": written.data_ptr(),
        "cache_row_stride": row_stride,
        "cache_step_bytes": step_stride * logits_cache.element_size(),
        "cache_req_stride": logits_cache.stride(0),
        "cache_pos_stride": logits_cache.stride(1),
        "idx_mapping": idx_mapping.data_ptr(),
        "sample_pos": sample_pos.data_ptr(),
        "temperature": temperature.data_ptr(),
        "seeds": seeds.data_ptr(),
        "shards": 0 if views.shards is None else views.shards.gathered.data_ptr(),
        "rank_stride": rows * steps * pitch,
    }


def padding_call(expected: Expectations, rows: int, base_dtype: torch.dtype, *, aligned: bool) -> Sequence[Any]:
    """The arguments of a call of padding rows alone; one row of memory stands for all rows of logits and cache.

    Args:
        aligned: whether logits and cache start on a 16-byte boundary, or beside one.
    """
    device, steps, requests = expected.device, expected.steps, expected.max_reqs

    def one_row(columns: int, dtype: torch.dtype) -> torch.Tensor:
        offset = 0 if aligned else 1
        return torch.zeros(columns + offset, dtype=dtype, device=device)[offset:]

    cache = None
    if expected.cache_dtype is not None:
        columns = expected.cache_columns
        cache = one_row(columns, expected.cache_dtype).expand(requests, steps, columns)
    return (
        one_row(expected.width, base_dtype).expand(rows, steps, expected.width),
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.full((rows * steps,), -1, dtype=torch.int64, device=device),
        torch.zeros(rows * steps, dtype=torch.int64, device=device),
        torch.zeros(requests, dtype=torch.float32, device=device),
        torch.zeros(requests, dtype=torch.int64, device=device),
        cache,
        torch.empty((rows, steps), dtype=torch.int64, device=device),
    )
