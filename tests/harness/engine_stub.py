"""A draft model and a speculator around real tensors, as far as the engine's sampling loop and the hook look at them."""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.harness.cases import POISON_LOGIT, POISON_TOKEN, Case

# Draft model classes of the engine that the stub can pass for: name -> module.
CLASSES = {
    "Qwen3DSparkForCausalLM": "vllm.model_executor.models.qwen3_dspark",
    "Gemma4DSparkForCausalLM": "vllm.model_executor.models.gemma4_dspark",
    "MuseSparkDSparkForCausalLM": "vllm.models.muse_spark.common.dspark",
    "DSparkDeepseekV4ForCausalLM": "vllm.models.deepseek_v41.nvidia.dspark",
    "K3DSparkForCausalLM": "vllm.models.kimi_k3.nvidia.dspark_mla",
}


class LogitsProcessor:
    """Products with an unsharded head, capped and scaled as the engine's class of this name does it."""

    def __init__(self, vocabulary: int, *, scale: float = 1.0, soft_cap: float | None = None) -> None:
        self.org_vocab_size, self.scale, self.soft_cap = vocabulary, scale, soft_cap
        self.head_dtype: torch.dtype | None = None
        self.logits_as_input = False

    def __call__(self, head: Any, hidden: torch.Tensor, *, skip_gather: bool = False) -> torch.Tensor:
        if skip_gather:  # of the LM head, whose logits are given as they arrive
            return head.shard_of(hidden)
        logits = F.linear(hidden, head.weight)[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits * self.scale if self.scale != 1.0 else logits


class UnquantizedEmbeddingMethod:
    """The engine's name for a plain weight."""


class LmHead:
    """An LM head as one rank of several has it: an even share of the columns."""

    def __init__(self, draft: "StubDraft", rank: int, world: int) -> None:
        columns = draft.logits.shape[-1]
        width = -(-columns // world)
        self._draft, self.tp_size = draft, world
        self._columns = slice(rank * width, min((rank + 1) * width, columns))
        self.shard_indices = SimpleNamespace(
            num_added_elements_padded=0,
            padded_org_vocab_start_index=rank * width,
            padded_org_vocab_end_index=(rank + 1) * width,
        )

    def shard_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's columns, without a gather."""
        self._draft.shard_calls += 1
        return self._draft.logits[hidden.view(-1)][:, self._columns].contiguous()


class StubDraft:
    """A draft model whose base logits are given: its hidden states index them.

    Args:
        embed_weight: Markov embedding, bf16 [V, R].
        head_weight: Markov head, bf16 [>= V_draft, R].
        logits: base logits by token row, [tokens, V_draft]; the hidden state of token t is t.
        processor: caps and scales the bias (base logits are given as they arrive).
        d2t: offsets of a reduced vocabulary.
    """

    def __init__(
        self,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        logits: torch.Tensor,
        processor: LogitsProcessor,
        d2t: torch.Tensor | None = None,
    ) -> None:
        method = UnquantizedEmbeddingMethod()
        head = SimpleNamespace(
            markov_w1=SimpleNamespace(weight=embed_weight),
            markov_w2=SimpleNamespace(weight=head_weight, quant_method=method),
        )
        self.model = SimpleNamespace(markov_head=head, norm=lambda hidden: hidden)
        self.logits_processor, self.logits, self.draft_id_to_target_id = processor, logits, d2t
        self.lm_head_calls = self.shard_calls = 0
        self.lm_head = LmHead(self, 0, 1)

    def compute_draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.lm_head_calls += 1
        return self.logits[hidden.view(-1)]

    def markov_embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.model.markov_head.markov_w1.weight)

    def markov_bias(self, embed: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.model.markov_head.markov_w2, embed)

    def map_draft_to_target(self, draft: torch.Tensor) -> torch.Tensor:
        return draft if self.draft_id_to_target_id is None else draft + self.draft_id_to_target_id[draft]


class TransformedDraft(StubDraft):
    """A draft that transforms the sum of base logits and bias, as Muse Spark's does."""

    output_multiplier = 1.0
    output_soft_cap_temp: float | None = None

    def apply_output_logit_transform(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float() * self.output_multiplier
        cap = self.output_soft_cap_temp
        return logits if cap is None else cap * torch.tanh(logits / cap)


def draft_class(name: str, base: type[StubDraft] = StubDraft) -> type[StubDraft]:
    """The stub under the name and module of one of the engine's classes, with nothing of another test in it."""
    return type(name, (base,), {"__module__": CLASSES[name]})


def fill_speculator(speculator: Any, draft: StubDraft, case: Case, *, max_rows: int, query_per_row: int) -> None:
    """Give a speculator object the state of a case: what the engine's constructor and input preparation would have left.

    Rows beyond the case's, up to `max_rows`, are padding. Hidden state t is the number t, so that sample s reads base logits row s.
    """
    steps, device = case.num_steps, case.base_logits.device
    samples = max_rows * steps
    speculator.model = draft
    speculator.device = device
    speculator.dtype = case.base_logits.dtype
    speculator.num_speculative_steps = steps
    speculator.max_num_reqs = case.max_reqs
    speculator.num_query_per_req = query_per_row
    speculator.use_fp64_gumbel = speculator.use_confidence_head = speculator.use_acceptance_estimator = False
    speculator.acceptance_estimator = speculator.draft_watermarker = None
    speculator._draft_topk = speculator._d2t_scatter_index = speculator._draft_scatter_buf = None
    speculator._step_cols = torch.arange(steps, dtype=torch.int32, device=device)
    speculator._anchor_idx = torch.arange(case.max_reqs, device=device) * query_per_row
    speculator.temperature, speculator.seeds = case.temperature, case.seeds
    speculator.sample_indices = torch.arange(samples, device=device)
    speculator.sample_idx_mapping = torch.full((samples,), -1, dtype=torch.int64, device=device)
    speculator.sample_idx_mapping[: case.idx_mapping.numel()] = case.idx_mapping
    speculator.sample_pos = torch.zeros(samples, dtype=torch.int64, device=device)
    speculator.sample_pos[: case.sample_pos.numel()] = case.sample_pos
    input_ids = torch.zeros(case.max_reqs * query_per_row, dtype=torch.int32, device=device)
    anchors = case.input_ids[:: case.query_per_row][: case.rows]
    # The engine's buffers hold token ids, in padding rows too.
    anchors = torch.where((anchors >= 0) & (anchors < case.vocab_size), anchors, 0)
    input_ids[: case.rows * query_per_row : query_per_row] = anchors
    speculator.input_buffers = SimpleNamespace(input_ids=input_ids)
    speculator.draft_logits = torch.full_like(case.logits_cache, POISON_LOGIT)
    speculator.draft_tokens = torch.full((case.max_reqs, steps), POISON_TOKEN, dtype=torch.int64, device=device)


class Draft:
    """A case inside the engine: its speculator, with a stub draft model of one of the engine's classes.

    Args:
        engine: tests.harness.engine_wheel.Engine.
        case: inputs; outputs are new tensors.
        name: class that the draft model passes for.
        base: the stub behind it.
        d2t: offsets of a reduced vocabulary, int64 [V_draft].
        query_per_row: input ids per request row.
        max_rows: rows of the padded batch; default: the case's.
    """

    def __init__(
        self,
        engine: Any,
        case: Case,
        *,
        name: str = "Qwen3DSparkForCausalLM",
        soft_cap: float | None = None,
        scale: float = 1.0,
        base: type[StubDraft] = StubDraft,
        d2t: torch.Tensor | None = None,
        query_per_row: int | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.case = case
        self.rows = case.rows if max_rows is None else max_rows
        device, columns = case.base_logits.device, case.base_logits.shape[-1]
        logits = torch.zeros(self.rows * case.num_steps, columns, dtype=case.base_logits.dtype, device=device)
        logits[: case.rows * case.num_steps] = case.base_logits.reshape(-1, columns)
        processor = LogitsProcessor(columns, scale=scale, soft_cap=soft_cap)
        self.model: Any = draft_class(name, base)(case.embed_weight, case.head_weight, logits, processor, d2t)
        self.speculator = object.__new__(engine.speculator_class)
        distance = case.num_steps if query_per_row is None else query_per_row
        fill_speculator(self.speculator, self.model, case, max_rows=self.rows, query_per_row=distance)
        self.hidden = torch.arange(self.rows * case.num_steps, device=device).view(-1, 1)
        if d2t is not None:
            self.speculator._d2t_scatter_index = torch.arange(d2t.numel(), device=device) + d2t
            cache = self.speculator.draft_logits
            shape = (case.max_reqs, cache.shape[-1])
            self.speculator._draft_scatter_buf = torch.full(shape, -torch.inf, dtype=cache.dtype, device=device)

    def give_hook(self, hook: ModuleType) -> None:
        """Give the draft model's class the method, as registering does."""
        name = type(self.model).__name__
        hook.give_method(SimpleNamespace(**{name: type(self.model)}), (name,))

    def take_inputs(self, other: "Draft") -> None:
        """Copy what another draft of the same shapes has in the buffers that a step reads, and its poisoned outputs."""
        mine, given = self.speculator, other.speculator
        for name in ("temperature", "seeds", "sample_idx_mapping", "sample_pos", "draft_tokens", "draft_logits"):
            getattr(mine, name).copy_(getattr(given, name))
        mine.input_buffers.input_ids.copy_(given.input_buffers.input_ids)
        self.model.logits.copy_(other.model.logits)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the engine's own `_sample_sequential`; draft tokens and logits cache."""
        self.speculator._sample_sequential(self.rows, self.hidden)
        return self.speculator.draft_tokens, self.speculator.draft_logits

    def asked(self) -> bool:
        """What the hook answers."""
        return self.model.sample_sequential(self.speculator, self.rows, self.hidden)
