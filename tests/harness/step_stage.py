"""A model of the checked-in specs, or one with other keys, rendered for GPU tests of its step kernels, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsparkgen import bench, gpu
from dsparkgen.device import load_devices
from dsparkgen.spec import ModelSpec, read_specs

from . import oracle
from .cases import Transform, exact_weights, random_case
from .eager import EagerLoop
from .oracle import same_bits

ROOT = Path(__file__).parents[2]
SEED = 31
MAX_REQS = 128
BLOCKS = (1024, 2048, 4096, 8192)
TEMPERATURES = (0.0, 1.0, 0.7, 1.3, 0.05)
SAME = object()


def product_for(folder: Path, model: str, num_steps: int, **changes: Mapping[str, Any]) -> gpu.Product:
    """The checked-in model where it has so many positions; else the model rendered into a folder for them.

    Args:
        folder: an empty directory.
        changes: keys of the spec's tables that replace the model's, by table; with any the model is rendered.
    """
    spec = read_specs(ROOT / "specs")[model]
    if spec.draft.num_steps == num_steps and not changes:
        return gpu.load_product(ROOT / "generated", model)
    pytest.importorskip("cutlass", reason="needs CuTe DSL: compiles kernels that no pack has")
    values = spec.model_dump()
    values["draft"]["num_steps"] = num_steps
    for table, keys in changes.items():
        values[table] = values[table] | dict(keys)
    if changes:
        del values["packet"]  # its default follows the noise
    bench.write_package([ModelSpec.model_validate(values)], load_devices(ROOT), ROOT / "templates", folder)
    return gpu.load_product(folder, model)


class Stage:
    """A model with random weights, and its step sampler."""

    def __init__(self, product: gpu.Product, device: torch.device) -> None:
        self.product = product
        self.config, self.launch = self.product.config, self.product.module("launch")
        self.device = device
        self.vocab, self.rank_dim = self.config.VOCAB_SIZE, self.config.RANK_DIM
        generator = torch.Generator(device).manual_seed(SEED)
        self.drafts = self.config.DRAFT_VOCAB_SIZE
        self.cache = torch.bfloat16 if self.config.CACHE_DTYPES else None
        self.d2t = None
        if self.config.D2T:
            targets = torch.randperm(self.vocab, generator=generator, device=device)[: self.drafts]
            self.d2t = targets - torch.arange(self.drafts, device=device)
        embed, head = (
            torch.randn(rows, self.rank_dim, generator=generator, device=device) for rows in (self.vocab, self.drafts)
        )
        self.weights = (embed * self.rank_dim**-0.5).bfloat16(), (head * 2.0).bfloat16()
        self.sampler = self.make()

    def exact_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights whose dot products are exact, so that no product's order of sums matters."""
        drafts = self.drafts if self.config.D2T else None
        return exact_weights(self.vocab, self.rank_dim, seed=SEED, device=self.device, draft_vocab_size=drafts)

    def make(self, weights: Any = None, *, max_reqs: int = MAX_REQS, cache: Any = SAME, **constants: Any) -> Any:
        """A step sampler, with the stage's cache or another; `constants` replace those of the model's config, as the launcher reads them."""
        kind = self.launch.StepSampler
        if constants:
            given = SimpleNamespace(**(vars(self.config) | constants))
            kind = type("Changed", (kind,), {"config": given})
        cache = self.cache if cache is SAME else cache
        return kind(*(weights or self.weights), max_reqs=max_reqs, cache_dtype=cache, d2t=self.d2t)

    def case(self, rows: int, *, seed: int, weights: Any = None, **options: Any) -> Any:
        """A random case; padding rows have anchors in range, as the eager loop needs them."""
        config = self.config
        options = {"max_reqs": MAX_REQS, "cache_dtype": self.cache, "temperatures": TEMPERATURES} | options
        case = random_case(
            self.vocab,
            self.rank_dim,
            config.NUM_STEPS,
            rows,
            seed=seed,
            device=self.device,
            weights=weights or self.weights,
            draft_vocab_size=self.drafts if config.D2T else None,
            d2t=self.d2t,
            noise_scheme=config.NOISE_SCHEME,
            **options,
        ).replace(transform=Transform.of(config))
        case.input_ids.remainder_(self.vocab)
        return case


def why_unlike_the_engine(case: Any, sampler: Any) -> str | None:
    """Run a case by the sampler and by the eager loop; the first difference in words, or None."""
    got, want = case.with_fresh_outputs(), case.with_fresh_outputs()
    EagerLoop(want)()
    sampler.sample(*got.call_arguments, query_per_row=got.query_per_row)
    return why_unequal(got, want)


def why_unlike_the_oracle(case: Any, sampler: Any) -> str | None:
    """Run a case on exact weights by the sampler; the first difference from the oracle in words, or None."""
    case.poison()
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    return oracle.why_unequal(case, case.draft_tokens, case.logits_cache)


def why_unequal(got: Any, want: Any) -> str | None:
    """The first difference of two cases' outputs in words, or None; NaN equals NaN."""
    wrong = torch.nonzero(got.draft_tokens != want.draft_tokens)
    if len(wrong):
        row, step = wrong[0].tolist()
        pair = f"{int(want.draft_tokens[row, step])}, got {int(got.draft_tokens[row, step])}"
        return f"row {row}, position {step}: expected token {pair}; {len(wrong)} tokens differ"
    if got.logits_cache is None or same_bits(got.logits_cache, want.logits_cache):
        return None
    bits = [
        x.logits_cache.contiguous().view(torch.int16 if x.logits_cache.element_size() == 2 else torch.int32)
        for x in (got, want)
    ]
    state, step, column = torch.nonzero(bits[0] != bits[1])[0].tolist()
    pair = f"{float(want.logits_cache[state, step, column])}, got {float(got.logits_cache[state, step, column])}"
    return f"cache [{state}, {step}, {column}]: expected {pair}"


def nan_cases(stage: Stage, weights: Any) -> Iterator[tuple[str, Any]]:
    """Inputs with NaN or without a finite logit, each named."""
    embed, head = weights
    vocab, nan = stage.drafts, float("nan")
    for name, columns in (
        ("one NaN", [5]),
        ("the last", [vocab - 1]),
        ("in two blocks", [8192 * 3 + 1, 4]),
        ("all", ...),
    ):
        case = stage.case(5, seed=SEED, weights=weights)
        case.base_logits[1, :, columns] = nan
        yield name, case
    case = stage.case(5, seed=SEED, weights=weights)
    case.base_logits[:] = float("-inf")
    yield "all masked", case
    case = stage.case(5, seed=SEED, weights=weights, padding_rows=2)
    case.base_logits[:, :, 7] = nan
    unused = sorted(set(range(MAX_REQS)) - set(case.idx_mapping.tolist()))
    case.temperature[unused] = nan
    yield "in padding rows, and in temperatures that no row has", case
    spoiled = head.clone()
    spoiled[vocab // 2] = nan
    yield "a head row", stage.case(5, seed=SEED, weights=(embed, spoiled))


def why_replays_differ(stage: Stage, rows: int, replays: int) -> str | None:
    """The first difference from the engine's loop when one captured graph serves other requests from replay to replay, or None: rows in use,
    states, seeds, positions, temperatures, anchors and logits change."""
    held = stage.case(rows, seed=SEED)
    stage.sampler.sample(*held.call_arguments, query_per_row=held.query_per_row)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage.sampler.sample(*held.call_arguments, query_per_row=held.query_per_row)
    for replay in range(replays):
        case = stage.case(rows, seed=SEED + replay, padding_rows=replay % rows)
        want = case.with_fresh_outputs()
        EagerLoop(want)()
        for mine, given in zip(held.call_arguments[:6], case.call_arguments[:6], strict=True):
            mine.copy_(given)
        held.poison()
        graph.replay()
        found = why_unequal(held, want)
        if found is not None:
            return f"replay {replay}: {found}"
    return None
