"""The fused loop in Triton's interpreter against the oracle. Skipped where kernels are compiled: tests/kernels covers a GPU."""

from collections.abc import Callable
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import POISON_LOGIT, Case, exact_case, exact_weights  # noqa: E402
from tests.harness.oracle import oracle, same_bits, why_unequal_on_cpu  # noqa: E402
from tests.harness.toy import toy_model  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

NAN, INF = float("nan"), float("inf")
Models = Callable[..., ModuleType]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Rendered toy models by their options; each is rendered once."""
    made: dict[str, ModuleType] = {}

    def get(vocab_size: int, **options: object) -> ModuleType:
        key = repr((vocab_size, sorted(options.items())))
        if key not in made:
            made[key] = toy_model(tmp_path_factory.mktemp("toy"), vocab_size, **options)
        return made[key]

    return get


def draw(model: ModuleType, case: Case, *, block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and cache of one call of a new loop."""
    fresh = case.with_fresh_outputs()
    loop = model.fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs, block=block)
    loop.sample(*fresh.call_arguments, query_per_row=case.query_per_row)
    return fresh.draft_tokens, fresh.logits_cache


def assert_right(model: ModuleType, case: Case, *, block: int | None = None) -> torch.Tensor:
    """Compare a call with the oracle; returns its tokens."""
    tokens, cache = draw(model, case, block=block)
    reason = why_unequal_on_cpu(case, tokens, cache)
    assert reason is None, reason
    return tokens


def with_logits(case: Case, logits: torch.Tensor) -> Case:
    """The case with these base logits [rows, N, V] and no bias."""
    return case.replace(
        base_logits=logits.to(case.base_logits.dtype),
        embed_weight=torch.zeros_like(case.embed_weight),
        head_weight=torch.zeros_like(case.head_weight),
    )


# Vocabularies below, at and above a block and odd; ranks with a tile of 128, 64 and 16; every dtype pair, row tile
# boundary and layout occurs, but not every combination: a case costs up to a second in the interpreter.
GRID = [
    (19, 64, 1, 0, "bf16", "bf16", "plain"),
    (64, 64, 2, 1, "bf16", "fp32", "odd"),
    (97, 80, 3, 0, "fp32", "bf16", "steps_first"),
    (301, 256, 4, 2, "fp32", "fp32", "odd"),
    (333, 64, 16, 3, "bf16", "bf16", "odd"),
    (129, 64, 17, 5, "fp32", "bf16", "steps_first"),
    (65, 144, 35, 4, "bf16", "bf16", "plain"),
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(("vocab", "rank", "rows", "padding", "base", "cache", "layout"), GRID)
def test_equals_the_oracle(
    models: Models, vocab: int, rank: int, rows: int, padding: int, base: str, cache: str, layout: str
) -> None:
    case = exact_case(
        vocab, rank, 3, rows, seed=vocab + rows, padding_rows=padding, layout=layout,
        base_dtype=DTYPES[base], cache_dtype=DTYPES[cache], query_per_row=4,
    )  # fmt: skip
    assert_right(models(vocab, rank_dim=rank), case, block=32)
