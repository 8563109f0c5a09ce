"""The engine's loop as a baseline: the kernels that it launches per position, captured in a CUDA graph where wanted.

Per position: embedding, linear, add, sampling kernel over blocks of 1024 ids, arg max over blocks, gather, copy. The engine also
copies strided index columns, which this loop reads in place, so it is never slower than the engine's.
"""

import torch
import torch.nn.functional as F
import triton

from . import engine_math
from .cases import Case


class EagerLoop:
    """Draws a case's draft tokens into the case's own outputs, as the engine's eager loop does.

    The bias is rounded to bf16 whatever the base logits' dtype, as the kernels do; an engine with an fp32 head would not
    round it. Where logits and cache differ in dtype the logits are converted first, as the engine samples what it caches.
    Winners are those of the engine, which agree with the oracle on rows without NaN.

    The case must have step mixing, no sampling limit, and anchors in range also in padding rows. Run once before capturing a
    CUDA graph: the first run compiles.
    """

    def __init__(self, case: Case) -> None:
        if not case.step_mix or case.sampling_limit != case.vocab_size:
            raise ValueError("case: expected step_mix and a sampling_limit of vocab_size, as the engine has")
        anchors = case.input_ids[:: case.query_per_row][: case.rows]
        if bool(((anchors < 0) | (anchors >= case.vocab_size)).any()):
            raise ValueError(f"case: expected every anchor in [0, {case.vocab_size}), got {anchors.tolist()}")
        self.case = case
        blocks = triton.cdiv(case.vocab_size, engine_math.BLOCK)
        self._best_score = torch.empty(case.rows, blocks, dtype=torch.float32, device=case.device)
        self._best_id = torch.empty(case.rows, blocks, dtype=torch.int64, device=case.device)

    def __call__(self) -> None:
        """Launch the whole loop on the current stream."""
        case = self.case
        prev = case.input_ids[:: case.query_per_row][: case.rows]
        for step in range(case.num_steps):
            bias = F.linear(F.embedding(prev, case.embed_weight), case.head_weight)
            logits = (case.base_logits[:, step] + bias).to(case.logits_cache.dtype)
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
            )
            block = self._best_score.argmax(dim=-1, keepdim=True)
            prev = self._best_id.gather(1, block).view(-1)
            case.draft_tokens[: case.rows, step] = prev
