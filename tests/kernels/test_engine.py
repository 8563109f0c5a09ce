"""The vLLM hook on a GPU: the released engine's own loop with and without it, bit for bit, eager and in captured graphs.

Weights are exact (tests/harness/cases.py), so that the chain's sums agree with the engine's product to the bit.
"""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.harness import engine_wheel  # noqa: E402
from tests.harness.cases import Case, exact_case, exact_weights  # noqa: E402
from tests.harness.engine_stub import Draft, StubDraft, TransformedDraft  # noqa: E402
from tests.harness.oracle import same_bits  # noqa: E402

ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 64)
MAX_REQS = 67
REPLAYS = 20
MODELS = ("deepseek_v41", "gemma4_12b", "muse_spark")  # one of each kind of transform


@pytest.fixture(scope="module")
def files() -> Path:
    """The engine's files."""
    try:
        return engine_wheel.engine_files()
    except engine_wheel.CannotFetchError as error:
        pytest.skip(f"needs files of the vLLM {engine_wheel.RELEASE} wheel, which could not be fetched: {error}")


@pytest.fixture(scope="module")
def engine(files: Path) -> Iterator[engine_wheel.Engine]:
    """The engine's speculator and Gumbel kernel."""
    with engine_wheel.loaded_engine(files) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The hook of the checked-in package."""
    return importlib.import_module("dspark_kernels.engines.vllm")


class Kind:
    """A checked-in model as the engine has it: weights, and which draft class computes its logits."""

    def __init__(self, name: str, device: Any) -> None:
        self.config = importlib.import_module(f"dspark_kernels.{name}.config")
        self.device = device
        self.weights = exact_weights(self.config.VOCAB_SIZE, self.config.RANK_DIM, seed=3, device=device)
        self.options: dict[str, Any] = {}
        if self.config.TRANSFORM == "both":
            self.options = {"name": "Gemma4DSparkForCausalLM", "soft_cap": self.config.SOFT_CAP}
        elif self.config.TRANSFORM == "sum":
            base: type[StubDraft] = type(
                "Transformed",
                (TransformedDraft,),
                {"output_multiplier": self.config.MULTIPLIER, "output_soft_cap_temp": self.config.SOFT_CAP},
            )
            d2t = torch.zeros(self.config.VOCAB_SIZE, dtype=torch.int64, device=device)
            self.options = {"name": "MuseSparkDSparkForCausalLM", "base": base, "d2t": d2t}

    def case(self, rows: int, seed: int) -> Case:
        config = self.config
        return exact_case(
            config.VOCAB_SIZE, config.RANK_DIM, config.NUM_STEPS, rows, seed=seed, device=self.device,
            weights=self.weights, max_reqs=MAX_REQS, padding_rows=rows // 3,
        )  # fmt: skip

    def draft(self, engine: engine_wheel.Engine, case: Case) -> Draft:
        return Draft(engine, case, **self.options)


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest, cuda: Any, hook: ModuleType) -> Kind:
    """A model with a sampler."""
    package = importlib.import_module("dspark_kernels")
    if "DraftSampler" not in package.load(request.param).EXPORTS:
        pytest.skip(f"{request.param} is generated without samplers")
    return Kind(request.param, cuda)


@pytest.fixture(scope="module")
def served(kind: Kind, hook: ModuleType, engine: engine_wheel.Engine) -> Any:
    """The sampler that serves the model, built once."""
    draft = kind.draft(engine, kind.case(1, 0))
    serving = hook.serve(draft.model, draft.speculator)
    assert isinstance(serving, hook.Serving), serving
    return serving


def hooked(draft: Draft, hook: ModuleType, served: Any) -> Draft:
    """The draft with the hook, served by the sampler that is there already."""
    draft.give_hook(hook)
    hook._serving[draft.model] = served
    return draft


@pytest.mark.parametrize("rows", ROWS)
def test_draws_what_the_loop_draws(
    kind: Kind, hook: ModuleType, served: Any, engine: engine_wheel.Engine, rows: int
) -> None:
    case = kind.case(rows, rows)
    want = kind.draft(engine, case).run()
    before = Counter(served.sampler.served)
    got = hooked(kind.draft(engine, case), hook, served).run()
    assert served.sampler.served - before == {"chain" if rows <= kind.config.MAX_ROWS else "step": 1}
    assert torch.equal(got[0], want[0])
    assert same_bits(got[1], want[1])


@pytest.mark.parametrize("rows", [3, 8, 64])
def test_draws_in_a_captured_graph(
    kind: Kind, hook: ModuleType, served: Any, engine: engine_wheel.Engine, rows: int
) -> None:
    """Replays read this step's seeds, positions, temperatures, anchors, rows and logits, not the captured ones."""
    draft = hooked(kind.draft(engine, kind.case(rows, 100)), hook, served)
    draft.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft.run()
    for step in range(REPLAYS):
        loop = kind.draft(engine, kind.case(rows, 101 + step))
        draft.take_inputs(loop)
        graph.replay()
        want = loop.run()
        assert torch.equal(draft.speculator.draft_tokens, want[0]), f"replay {step}"
        assert same_bits(draft.speculator.draft_logits, want[1]), f"replay {step}"


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_fused_loop_draws_where_neither_compiler_nor_pack_is(
    kind: Kind, hook: ModuleType, engine: engine_wheel.Engine, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    from dspark_kernels._device import kernel_store

    monkeypatch.setattr(kernel_store, "why_none", lambda recipes, device: "no kernels here")
    case = kind.case(rows, rows)
    want = kind.draft(engine, case).run()
    draft = kind.draft(engine, case)
    draft.give_hook(hook)
    got = draft.run()
    sampler = hook._serving[draft.model].sampler
    assert sampler.served == {"fused": 1}
    assert "no kernels here" in sampler.declined["chain"] and "no kernels here" in sampler.declined["step"]
    assert torch.equal(got[0], want[0])
    assert same_bits(got[1], want[1])


def test_builds_before_capture_only(
    kind: Kind, hook: ModuleType, engine: engine_wheel.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft whose first step is captured keeps the engine's loop in that graph."""
    draft = kind.draft(engine, kind.case(1, 5))
    draft.run()
    draft.give_hook(hook)
    answers = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers.append(draft.asked())
        torch.zeros(1, device=kind.device)
    assert answers == [False]
    assert draft.model not in hook._serving


def test_row_mapping_is_declined(kind: Kind, hook: ModuleType, engine: engine_wheel.Engine) -> None:
    draft = kind.draft(engine, kind.case(1, 6))
    draft.speculator.draft_logits = SimpleNamespace(values=draft.speculator.draft_logits)
    draft.give_hook(hook)
    assert draft.asked() is False
