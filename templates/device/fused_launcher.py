"""Host side of the fused loop: checks, scratch buffers, the launches of all positions, and the list of its binaries."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import torch
import triton

from . import host, vocabulary
from .fused_math import mask_rows

BLOCK = 64  # head rows of a program on a GPU: 32 KiB of head at rank 256, several programs a SM keep loads in flight
INTERPRETER_BLOCK = 8192  # the interpreter's cost is per program more than per element
MASK_BLOCK = 4096  # cache entries that a program of the mask fills
NUM_WARPS = 4
ROW_TILE = 16  # request rows of a program: columns of a tensor-core tile
VECTOR_BYTES = 16  # alignment of weight rows, and of the mask's stores
WIDEST_RANK_TILE = 128
LARGEST_STRIDE = 2**31 - 1  # query_per_row and token_stride are 32-bit in the kernel
ARGUMENT_TYPES = {
    "head": "*bf16",
    "embed": "*bf16",
    "target_ids": "*i32",
    "base_row_stride": "i64",
    "base_step_stride": "i64",
    "cache_req_stride": "i64",
    "cache_step_stride": "i64",
    "input_ids": "*i32",
    "query_per_row": "i32",
    "idx_mapping": "*i64",
    "sample_pos": "*i64",
    "temperature": "*fp32",
    "seeds": "*i64",
    "draft_tokens": "*i64",
    "token_stride": "i32",
    "winners": "*i32",
    "arrivals": "*i32",
    "rows": "i32",
    "step": "i32",
}
RUNTIME_ARGUMENTS = (*ARGUMENT_TYPES, "base", "cache", "orders")  # all but the compile-time constants
FP64_SCHEMES = ("murmur3_64",)  # whose scores are fp64

Build = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]


def rank_tile(rank_dim: int) -> int:
    """Markov rank columns that are multiplied at a time: the largest power of two that divides the rank, as tl.arange needs one."""
    return min(rank_dim & -rank_dim, WIDEST_RANK_TILE)


class FusedLauncher:
    """Draws all draft tokens of a batch of 1 to `max_reqs` request rows, one launch a position.

    A model with a reduced draft vocabulary takes one launch more, which masks the cache's rows. Two calls of one loop must be
    ordered by one stream (or by events): they share the scratch buffers.

    Args:
        embed_weight: Markov embedding, bf16 [>= VOCAB_SIZE, RANK_DIM], contiguous, 16-byte aligned.
        head_weight: Markov head, bf16 [>= DRAFT_VOCAB_SIZE, RANK_DIM], likewise, on the same device. Rows beyond the
            vocabulary are ignored; both are read where they lie, so a reload into the same storage is seen.
        max_reqs: number of request states, and the most rows of a call.
        d2t: int64 [DRAFT_VOCAB_SIZE], target id = draft id + d2t[draft id], for a reduced draft vocabulary; read here, once.
        block: head rows of a program, a power of two; None takes the device's constant. Results do not depend on it.

    Raises:
        ValueError: with `why_not`'s reason, when the loop cannot be built from these.
    """

    config: ClassVar[ModuleType]
    kernel: ClassVar[Any]

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        *,
        max_reqs: int,
        d2t: torch.Tensor | None = None,
        block: int | None = None,
    ) -> None:
        config = self.config
        reason = self.why_not(embed_weight, head_weight, max_reqs=max_reqs, d2t=d2t)
        if reason is not None:
            raise ValueError(f"{config.MODEL}: no fused loop: {reason}")
        self.device = embed_weight.device
        self.embed_weight, self.head_weight = embed_weight, head_weight
        self.target_ids = vocabulary.target_ids(config, d2t, self.device)
        self.max_reqs = max_reqs
        self._on_gpu = self.device.type == "cuda"
        if block is None:
            block = BLOCK if self._on_gpu else INTERPRETER_BLOCK
        host.check_int("block", block, ROW_TILE)
        if block & (block - 1):
            raise ValueError(f"block: expected a power of two, got {block}")
        self._block = block
        self._programs = triton.cdiv(config.DRAFT_VOCAB_SIZE, block)
        tiles = triton.cdiv(max_reqs, ROW_TILE)
        scratch = (tiles, self._programs, ROW_TILE)
        order = torch.int64 if config.NOISE_SCHEME in FP64_SCHEMES else torch.int32
        self._orders = torch.empty(scratch, dtype=order, device=self.device)
        self._winners = torch.empty(scratch, dtype=torch.int32, device=self.device)
        self._arrivals = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        self._names = [name for name in self.kernel.arg_names if name in RUNTIME_ARGUMENTS]
        self._base_dtypes = tuple(host.DTYPES[name] for name in config.BASE_DTYPES)
        self._cache_dtypes = tuple(host.DTYPES[name] for name in config.CACHE_DTYPES)
        self._temperature = host.Expected((torch.float32,), (max_reqs,), (0,), contiguous=True)
        self._seeds = host.Expected((torch.int64,), (max_reqs,), (0,), contiguous=True)
        self._cache = host.Expected(self._cache_dtypes, (max_reqs, config.NUM_STEPS, config.VOCAB_SIZE), (0, 2))

    @classmethod
    def why_not(
        cls,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        *,
        max_reqs: int,
        d2t: torch.Tensor | None = None,
    ) -> str | None:
        """Why no loop can be built from these, or None. Looks at the values of `d2t` and, of the others, at shapes, dtypes,
        addresses and the device only."""
        config = cls.config
        if not isinstance(embed_weight, torch.Tensor):
            return f"embed_weight: expected a tensor, got {host.describe(embed_weight)}"
        device = embed_weight.device
        if device.type != "cuda" and isinstance(cls.kernel, triton.JITFunction):
            return f"weights on {device} need Triton's interpreter; set TRITON_INTERPRET=1 before Triton is imported"
        for name, weight, tokens in (
            ("embed_weight", embed_weight, config.VOCAB_SIZE),
            ("head_weight", head_weight, config.DRAFT_VOCAB_SIZE),
        ):
            shape = (tokens, config.RANK_DIM)
            wanted = host.Expected((torch.bfloat16,), shape, (0,), contiguous=True, alignment=VECTOR_BYTES)
            found = wanted.misfit(name, weight, device)
            if found is not None:
                return found.message
        if not isinstance(max_reqs, int) or max_reqs < 1:
            return f"max_reqs: expected an int of at least 1, got {max_reqs!r}"
        return vocabulary.why_not(config, d2t, device)

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
        """Draw the draft tokens of every row on the current stream. Allocates nothing and does not synchronise.

        Args:
            base_logits: bf16 or fp32 [rows, NUM_STEPS, >= DRAFT_VOCAB_SIZE], last stride 1, other strides free.
            input_ids: int32; the anchor of row r is input_ids[r * query_per_row].
            idx_mapping: int64 [>= rows * NUM_STEPS], request-state index; negative for padding rows.
            sample_pos: int64 [>= rows * NUM_STEPS], position of the token being predicted.
            temperature: fp32 [max_reqs], by request-state index; 0 is greedy.
            seeds: int64 [max_reqs], by request-state index.
            logits_cache: bf16 or fp32 [max_reqs, NUM_STEPS, >= VOCAB_SIZE], last stride 1; columns below VOCAB_SIZE of the
                states in use are written. None for a model of greedy drafts, which reads none of the four before it.
            draft_tokens: int64 [>= rows, NUM_STEPS], written by row.
            query_per_row: distance of two rows' anchors in input_ids; default QUERY_PER_ROW.

        Raises:
            TypeError: for an argument of another dtype.
            ValueError: for an argument of another shape, layout or device, or more rows than max_reqs.
        """
        config = self.config
        rows, steps = base_logits.shape[0], config.NUM_STEPS
        query_per_row = config.QUERY_PER_ROW if query_per_row is None else query_per_row
        host.check_int("rows of base_logits", rows, 1, self.max_reqs)
        host.check_int("query_per_row", query_per_row, 1, LARGEST_STRIDE)
        anchors = host.Expected((torch.int32,), ((rows - 1) * query_per_row + 1,), (0,), contiguous=True)
        tokens = host.Expected((torch.int64,), (rows, steps), (0,))
        logits = host.Expected(self._base_dtypes, (rows, steps, config.DRAFT_VOCAB_SIZE), (2,))
        logits.check("base_logits", base_logits, self.device)
        anchors.check("input_ids", input_ids, self.device)
        tokens.check("draft_tokens", draft_tokens, self.device)
        host.check_int("first stride of draft_tokens", draft_tokens.stride(0), 0, LARGEST_STRIDE)
        values: dict[str, Any] = {
            "head": self.head_weight,
            "embed": self.embed_weight,
            "target_ids": self.target_ids,
            "base": base_logits,
            "base_row_stride": base_logits.stride(0),
            "base_step_stride": base_logits.stride(1),
            "input_ids": input_ids,
            "query_per_row": query_per_row,
            "draft_tokens": draft_tokens,
            "token_stride": draft_tokens.stride(0),
            "orders": self._orders,
            "winners": self._winners,
            "arrivals": self._arrivals,
            "rows": rows,
        }
        if self._cache_dtypes:
            samples = host.Expected((torch.int64,), (rows * steps,), (0,), contiguous=True)
            samples.check("idx_mapping", idx_mapping, self.device)
            samples.check("sample_pos", sample_pos, self.device)
            self._temperature.check("temperature", temperature, self.device)
            self._seeds.check("seeds", seeds, self.device)
            self._cache.check("logits_cache", logits_cache, self.device)
            values |= {
                "cache": logits_cache,
                "cache_req_stride": logits_cache.stride(0),
                "cache_step_stride": logits_cache.stride(1),
                "idx_mapping": idx_mapping,
                "sample_pos": sample_pos,
                "temperature": temperature,
                "seeds": seeds,
            }
        elif logits_cache is not None:
            raise ValueError(f"logits_cache: expected None for greedy drafts, got {host.describe(logits_cache)}")
        # The interpreter computes every lane of a tile, also those without a row.
        row_tile = ROW_TILE if self._on_gpu else min(ROW_TILE, triton.next_power_of_2(rows))
        with torch.cuda.device_of(base_logits):
            if config.D2T and logits_cache is not None:
                self._mask(logits_cache, idx_mapping, rows * steps)
            for step in range(steps):
                values["step"] = step
                self.kernel[self._programs, triton.cdiv(rows, row_tile)](
                    *(values[name] for name in self._names),
                    BLOCK=self._block,
                    ROW_TILE=row_tile,
                    TENSOR_CORES=self._on_gpu,
                    num_warps=NUM_WARPS,
                )

    def _mask(self, logits_cache: torch.Tensor, idx_mapping: torch.Tensor, samples: int) -> None:
        """Fill the rows that a call writes with -inf, what ids without a draft id keep."""
        # Entries by which a row can begin behind the start of its first vector.
        shifted = VECTOR_BYTES // logits_cache.element_size() - 1
        mask_rows[triton.cdiv(self.config.VOCAB_SIZE + shifted, MASK_BLOCK), samples](
            logits_cache,
            logits_cache.stride(0),
            logits_cache.stride(1),
            idx_mapping,
            NUM_STEPS=self.config.NUM_STEPS,
            VOCAB_SIZE=self.config.VOCAB_SIZE,
            BLOCK=MASK_BLOCK,
            num_warps=NUM_WARPS,
        )

    def warmup(self, cache_dtype: torch.dtype | None = None) -> None:
        """Compile and load every binary that a call can launch, so that none compiles under graph capture.

        Each is launched with one padding row, which writes no cache. Any row count, stride or alignment launches the same
        binaries: there is one for each pair of dtypes.

        Args:
            cache_dtype: the cache dtype that will be used; None warms up all that the spec lists.
        """
        config, device = self.config, self.device
        steps = config.NUM_STEPS
        anchor = torch.zeros(1, dtype=torch.int32, device=device)
        padding = torch.full((steps,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros(steps, dtype=torch.int64, device=device)
        temperature = torch.zeros(self.max_reqs, dtype=torch.float32, device=device)
        seeds = torch.zeros(self.max_reqs, dtype=torch.int64, device=device)
        tokens = torch.empty((1, steps), dtype=torch.int64, device=device)
        caches: list[torch.Tensor | None] = [None]
        if self._cache_dtypes:
            row = [
                torch.empty(config.VOCAB_SIZE, dtype=dtype, device=device)
                for dtype in (self._cache_dtypes if cache_dtype is None else (cache_dtype,))
            ]
            caches = [x.expand(self.max_reqs, steps, config.VOCAB_SIZE) for x in row]
        for logits_cache in caches:
            for dtype in self._base_dtypes:
                base = torch.zeros(config.DRAFT_VOCAB_SIZE, dtype=dtype, device=device).expand(1, steps, -1)
                self.sample(base, anchor, padding, positions, temperature, seeds, logits_cache, tokens, query_per_row=1)

    @classmethod
    def builds(cls) -> dict[str, Build]:
        """Every binary that is launched on a GPU: "base dtype/cache dtype" -> (jit function, argument types, constants,
        compiler options); "base dtype" alone for greedy drafts, "mask/cache dtype" for the mask of a reduced vocabulary."""
        config = cls.config
        builds: dict[str, Build] = {}
        constants = {"BLOCK": BLOCK, "ROW_TILE": ROW_TILE, "TENSOR_CORES": True}
        orders = "*i64" if config.NOISE_SCHEME in FP64_SCHEMES else "*i32"
        for base in config.BASE_DTYPES:
            for cache in config.CACHE_DTYPES or (None,):
                types = ARGUMENT_TYPES | {"base": f"*{base}", "cache": f"*{cache}", "orders": orders}
                signature = {name: types.get(name, "constexpr") for name in cls.kernel.arg_names}
                builds[f"{base}/{cache}" if cache else base] = (
                    cls.kernel,
                    signature,
                    constants,
                    {"num_warps": NUM_WARPS},
                )
        for cache in config.CACHE_DTYPES if config.D2T else ():
            shape = {"NUM_STEPS": config.NUM_STEPS, "VOCAB_SIZE": config.VOCAB_SIZE, "BLOCK": MASK_BLOCK}
            signature = {
                "cache": f"*{cache}",
                "cache_req_stride": "i64",
                "cache_step_stride": "i64",
                "idx_mapping": "*i64",
            }
            signature |= dict.fromkeys(shape, "constexpr")
            builds[f"mask/{cache}"] = (mask_rows, signature, shape, {"num_warps": NUM_WARPS})
        return builds
