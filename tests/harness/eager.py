"""The engine's loop as a baseline: the kernels that it launches per position, captured in a CUDA graph where wanted.

Per position: embedding, linear, add, the output transform in the engine's order of roundings, sampling kernel over blocks of 1024
ids, arg max over blocks, gather, copy. The engine also copies strided index columns, which this loop reads in place, so it is
never slower than the engine's.
"""

import torch
import torch.nn.functional as F
import triton

from . import engine_math
from .cases import Case, Transform


class EagerLoop:
    """Draws a case's draft tokens into the case's own outputs, as the engine's eager loop does.

    The bias is the product with all rows of the case's head, of which those beyond the vocabulary are cut off, as an engine does
    with a padded head. It is rounded to bf16 whatever the base logits' dtype, as the kernels do; an engine with an fp32 head would
    not round it. Where logits and cache differ in dtype the logits are converted before they are sampled, as the engine samples
    what it caches. Winners are those of the engine, which agree with the oracle on rows without NaN.

    A reduced draft vocabulary's logits are copied into rows of the target vocabulary, of which the other columns are -inf. Greedy
    drafts, of a case without a cache, are the arg max in draft space, then mapped.

    The case must have step mixing where it has noise, no sampling limit, and anchors in range also in padding rows. Run once
    before capturing a CUDA graph: the first run compiles.

    Args:
        case: inputs and outputs.
        scatter: also copy the logits through a map of the vocabulary onto itself, as the engine does for a draft whose
            checkpoint has a d2t tensor of zeros. Changes nothing but the time.
    """

    def __init__(self, case: Case, *, scatter: bool = False) -> None:
        if not case.step_mix or case.sampling_limit != case.vocab_size:
            raise ValueError("case: expected step_mix and a sampling_limit of vocab_size, as the engine has")
        anchors = case.input_ids[:: case.query_per_row][: case.rows]
        if bool(((anchors < 0) | (anchors >= case.vocab_size)).any()):
            raise ValueError(f"case: expected every anchor in [0, {case.vocab_size}), got {anchors.tolist()}")
        self.case = case
        blocks = triton.cdiv(case.vocab_size, engine_math.BLOCK)
        score = torch.float64 if case.noise_scheme == engine_math.FP64_NOISE else torch.float32
        self._best_score = torch.empty(case.rows, blocks, dtype=score, device=case.device)
        self._best_id = torch.empty(case.rows, blocks, dtype=torch.int64, device=case.device)
        self._map = case.target_ids if scatter or case.d2t is not None else None
        self._scattered = None
        if self._map is not None and case.logits_cache is not None:
            shape, dtype = (case.rows, case.vocab_size), case.logits_cache.dtype
            self._scattered = torch.full(shape, float("-inf"), dtype=dtype, device=case.device)

    def __call__(self) -> None:
        """Launch the whole loop on the current stream."""
        case = self.case
        prev = case.input_ids[:: case.query_per_row][: case.rows]
        base = base_logits(case)
        for step in range(case.num_steps):
            bias = F.linear(F.embedding(prev, case.embed_weight), case.head_weight)[:, : case.draft_vocab_size]
            prev = self._sample(step, transformed_sum(case.transform, base[:, step], bias))
            case.draft_tokens[: case.rows, step] = prev

    def _sample(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Target ids of one position, int64 [rows], from its draft logits, which are cached."""
        case = self.case
        if case.logits_cache is None:
            drawn = logits.argmax(dim=-1)
            return drawn if case.d2t is None else drawn + case.d2t[drawn]
        logits = logits.to(case.logits_cache.dtype)
        if self._scattered is not None:
            logits = self._scattered.index_copy_(1, self._map, logits)
        engine_math.sample_blocks(
            self._best_score,
            self._best_id,
            logits,
            case.logits_cache,
            case.idx_mapping,
            case.sample_pos,
            case.temperature,
            case.seeds,
            step=step,
            num_steps=case.num_steps,
            salt=case.draft_salt,
            scheme=case.noise_scheme,
        )
        block = self._best_score.argmax(dim=-1, keepdim=True)
        return self._best_id.gather(1, block).view(-1)


def base_logits(case: Case) -> torch.Tensor:
    """The base logits as they come from the engine's LM head: transformed there, where the transform is placed on the base."""
    transform = case.transform
    if transform.placement in ("base", "both") and not transform.base_capped:
        return head_output(transform, case.base_logits)
    return case.base_logits


def transformed_sum(transform: Transform, base: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Base logits, as `base_logits` gives them, plus bias, with the output transform; fp32 where the sum is transformed.

    Args:
        base: [rows, V], bf16 or fp32.
        bias: bf16 [rows, V].
    """
    if transform.placement == "both":
        return base + head_output(transform, bias)
    logits = base + bias
    if transform.placement != "sum":
        return logits
    logits = logits.float() * transform.multiplier
    if transform.soft_cap is not None:
        logits = transform.soft_cap * torch.tanh(logits / transform.soft_cap)
    return logits


def head_output(transform: Transform, logits: torch.Tensor) -> torch.Tensor:
    """Multiplier and cap as a head's logits processor applies them: each operation rounds to the logits' dtype."""
    if transform.multiplier != 1.0:
        logits = logits * transform.multiplier
    if transform.soft_cap is not None:
        logits = torch.tanh(logits / transform.soft_cap) * transform.soft_cap
    return logits
