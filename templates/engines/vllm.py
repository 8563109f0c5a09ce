"""vLLM: draws DSpark drafts with the generated kernels, by installing the package.

vLLM's DSpark speculator asks its draft model for `sample_sequential(speculator, num_reqs, head_hidden)` before it runs
its own loop; False means that nothing was done. `register`, an entry point of vLLM's general plugins, gives the draft
model classes that method once their modules are imported. The first call, in the engine's profiling run and so before
any graph capture, decides once whether a generated model serves the draft, on all tensor-parallel ranks alike, and
builds and warms its sampler.

It stands aside, with the reason in the log, wherever the loop does more than sample or is not that of vllm_contract.py.
DSPARK_KERNELS_DISABLE=1 turns it off.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from . import vllm_contract
from .matching import find_model
from .vllm_draft import PACKAGE, base_dtype_of, facts_of, why_not

if TYPE_CHECKING:
    import torch

DISABLE = "DSPARK_KERNELS_DISABLE"
METHOD = "sample_sequential"

# Below vLLM's logger, whose settings show it.
log = logging.getLogger("vllm.dspark_kernels")


def register() -> None:
    """Entry point of vLLM's general plugins. May be called at any time in every process; imports no engine code."""
    if os.environ.get(DISABLE, "") not in ("", "0"):
        log.info("DSpark drafts keep the engine's loop: %s is set", DISABLE)
        return
    waiting = {}
    for path, classes in vllm_contract.DRAFTS.items():
        name = vllm_contract.module_name(path)
        module = sys.modules.get(name)
        if module is None:
            waiting[name] = tuple(classes)
        else:
            give_method(module, tuple(classes))
    if waiting and not any(isinstance(finder, DraftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DraftFinder(waiting))


class DraftFinder:
    """An import finder that gives draft model classes the method when their modules are imported. Finds nothing itself.

    Importing the modules here instead would import the engine, and CUDA with it, in processes that never draft.
    """

    def __init__(self, waiting: dict[str, tuple[str, ...]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for a draft's module, with the classes' change behind its execution."""
        if name not in self._waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        classes, execute = self._waiting[name], spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            give_method(module, classes)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def give_method(module: ModuleType, classes: Sequence[str]) -> None:
    """Give a module's draft model classes the method, unless they have one: their engine's own stays."""
    for name in classes:
        draft = getattr(module, name, None)
        if draft is not None and not hasattr(draft, METHOD):
            setattr(draft, METHOD, sample_sequential)


def sample_sequential(model: Any, speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> bool:
    """Draw the draft tokens of a step into the speculator's buffers. The method that draft models get.

    Args:
        model: the draft model.
        speculator: vLLM's DSparkSpeculator.
        num_reqs: request rows of the padded batch.
        head_hidden: the draft's hidden states, [tokens, hidden size].

    Returns:
        False, having done nothing, where the engine's loop must run.
    """
    serving = _serving.get(model)
    if serving is None or (isinstance(serving, Serving) and not serving.reads(model)):
        if _capturing():
            log.warning("DSpark drafts keep the engine's loop in this graph: no step ran before with these weights")
            return False
        serving = _serving[model] = serve(model, speculator)
    return not isinstance(serving, Declined) and serving.draw(speculator, num_reqs, head_hidden)


class Declined(str):
    """Why the engine's loop draws."""


_serving: WeakKeyDictionary[Any, Serving | Declined] = WeakKeyDictionary()


def serve(model: Any, speculator: Any) -> Serving | Declined:
    """Decide whether generated kernels draw a draft, on all tensor-parallel ranks alike, and make them ready.

    Logs what was decided. Collective: every rank of the tensor-parallel group calls it. The ranks agree after each part
    that one of them may fail, as building a sampler and warming it up make a rank wait for the others.
    """
    group = tensor_parallel_group()
    found: dict[str, Any] = {}

    def match() -> str | None:
        reason = why_not(model, speculator)
        if reason is not None:
            return reason
        name, reason = find_model(facts_of(model, speculator))
        if name is None:
            return reason
        found.update(name=name, kind=import_module(f"..{name}", __package__).DraftSampler)
        return None

    def build() -> None:
        found["sampler"] = make_sampler(found["kind"], model, speculator, group)

    def warm_up() -> None:
        found["sampler"].warmup()

    for part in (match, build, warm_up):
        reason = agreed(attempted(part), group)
        if reason is not None:
            log.warning("DSpark drafts of %s keep the engine's loop: %s", type(model).__name__, reason)
            return Declined(reason)
    sampler = found["sampler"]
    serving = Serving(model, sampler, base_dtype_of(model, speculator), group)
    paths = describe_paths(sampler, speculator.max_num_reqs)
    log.info("DSpark drafts of %s: %s draws them (%s)", type(model).__name__, found["name"], paths)
    return serving


def attempted(part: Callable[[], str | None]) -> str | None:
    """The reason that a part of the set-up gives, or its failure in words."""
    try:
        return part()
    except Exception as error:  # whatever it raises, the engine has its own loop
        return f"{type(error).__name__}: {error}"


def make_sampler(kind: Any, model: Any, speculator: Any, group: Any) -> Any:
    """A generated model's sampler for a draft; `kind` is its DraftSampler."""
    head = model.model.markov_head
    options: dict[str, Any] = {}
    if kind.config.D2T:
        options["d2t"] = model.draft_id_to_target_id.detach()
    if group is not None:
        options["group"] = group.cpu_group
    return kind(
        head.markov_w1.weight.detach(),
        head.markov_w2.weight.detach(),
        max_reqs=speculator.max_num_reqs,
        cache_dtype=None if speculator.draft_logits is None else speculator.draft_logits.dtype,
        **options,
    )


def weight_addresses(model: Any) -> tuple[int, int]:
    """Where the Markov embedding and head lie."""
    head = model.model.markov_head
    return head.markov_w1.weight.data_ptr(), head.markov_w2.weight.data_ptr()


class Serving:
    """A draft that generated kernels draw.

    Args:
        model: the draft model.
        sampler: a warm DraftSampler.
        base_dtype: dtype that the draft's LM head gives.
        group: the tensor-parallel group, or None on one rank.
    """

    def __init__(self, model: Any, sampler: Any, base_dtype: torch.dtype, group: Any) -> None:
        self.sampler, self.base_dtype = sampler, base_dtype
        self._weights = weight_addresses(model)
        self._shard = group is not None and accepts_shard(model, sampler, group)
        self._told: set[str] = set()

    def reads(self, model: Any) -> bool:
        """Whether the weights lie where they lay. A reload into the same storage is seen."""
        return self._weights == weight_addresses(model)

    def draw(self, speculator: Any, num_reqs: int, head_hidden: torch.Tensor) -> bool:
        """Draw one step. False, having changed nothing, where the LM head gives another dtype than was expected."""
        model, steps = speculator.model, speculator.num_speculative_steps
        samples = num_reqs * steps
        idx_mapping, sample_pos = speculator.sample_idx_mapping[:samples], speculator.sample_pos[:samples]
        state = (idx_mapping, sample_pos, speculator.temperature, speculator.seeds)
        # Noise depends on seeds and positions only: it is drawn beside the LM head.
        self.sampler.fork_noise(*state, num_reqs)
        hidden = head_hidden[speculator.sample_indices[:samples]]
        if self._shard and self.sampler.path(num_reqs)[0] == "chain":
            base = shard_logits(model, hidden)
        else:
            base = model.compute_draft_logits(hidden)
        base = base.view(num_reqs, steps, base.shape[-1])
        if base.dtype != self.base_dtype:
            self.sampler.join_noise()
            self._tell(f"expected {self.base_dtype} base logits, got {base.dtype}")
            return False
        self.sampler.sample(
            base,
            speculator.input_buffers.input_ids,
            *state,
            speculator.draft_logits,
            speculator.draft_tokens,
            query_per_row=speculator.num_query_per_req,
        )
        return True

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("DSpark drafts keep the engine's loop: %s", reason)


def shard_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """This rank's columns of the base logits: what `compute_draft_logits` computes, without its all-gather."""
    lm_head = model.lm_head
    if type(model).__name__ == "DSparkDeepseekV4ForCausalLM":
        hidden = model.model.norm(hidden)
    elif type(model).__name__ == "MuseSparkDSparkForCausalLM":
        hidden = hidden.to(lm_head.weight.dtype)
    return model.logits_processor(lm_head, hidden, skip_gather=True)


def accepts_shard(model: Any, sampler: Any, group: Any) -> bool:
    """Whether a chain over the ranks takes every rank's LM head shard. Collective."""
    if sampler.chain is None:  # on no rank, then
        return False
    indices = model.lm_head.shard_indices
    first, end = indices.padded_org_vocab_start_index, indices.padded_org_vocab_end_index
    plain = model.lm_head.tp_size == group.world_size and indices.num_added_elements_padded == 0
    return sampler.chain.accepts_shard((first, end - first) if plain else None)


def tensor_parallel_group() -> Any:
    """vLLM's tensor-parallel group, or None on one rank."""
    group = import_module(f"{PACKAGE}.distributed.parallel_state").get_tp_group()
    return group if group.world_size > 1 else None


def agreed(reason: str | None, group: Any) -> str | None:
    """The first rank's reason to decline, the same on every rank, or None where no rank has one. Collective."""
    if group is None:
        return reason
    import torch.distributed

    reasons: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(reasons, reason, group=group.cpu_group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None), None)


def describe_paths(sampler: Any, max_reqs: int) -> str:
    """Which kernels draw which batches, and why."""
    paths = groupby(range(1, max_reqs + 1), key=lambda rows: sampler.path(rows))
    texts = []
    for (name, reason), group in paths:
        rows = list(group)
        texts.append(f"{rows[0]} to {rows[-1]} requests: {name}, {reason}")
    return "; ".join(texts)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
