"""What a rank times, without a GPU: which calls there are, on which inputs, and that graphs keep what they point to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import exact_case  # noqa: E402

from dsparkgen import gpu, rank_timings, timings  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

ROOT = Path(__file__).parents[2]
ROWS, MOST = 2, 3


class FakeSampler:
    """A chain's sampler that notes what reaches it; like the real one, a prepared call keeps no tensor."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.drawn: list[int] = []
        self.sampled = 0

    def sample(self, *arguments: Any, query_per_row: int) -> None:
        self.sampled += 1

    def prepare(self, rows: int, *arguments: Any) -> tuple[str, dict[str, Any]]:
        idx_mapping = arguments[2]
        return "variant", {"rows": rows, "idx_mapping": weakref.ref(idx_mapping), "states": idx_mapping.tolist()}

    def launch(self, variant: str, arguments: dict[str, Any]) -> None:
        assert arguments["idx_mapping"]() is not None, "expected the tensor that a launch points to, got freed memory"
        self.launched.append(arguments)

    def draw_noise(self, *arguments: Any) -> None:
        self.drawn.append(arguments[-1])


class FakeModel:
    """timings.Model on the CPU."""

    def __init__(self, vocab: int) -> None:
        self.root, self.device, self.max_reqs, self.vocab = ROOT, torch.device("cpu"), MOST, vocab
        self.base = self.cache = "bf16"
        self.config = SimpleNamespace(DRAFT_VOCAB_SIZE=vocab, VOCAB_SIZE=vocab, RANK_DIM=64, NUM_STEPS=3)
        self.product = SimpleNamespace(config=self.config, digest=lambda kernel: "a" * 12)
        self.subject = SimpleNamespace(fused_loop=lambda most: FakeSampler())
        self.made: dict[str, FakeSampler] = {}

    def sampler(self, name: str, **options: Any) -> FakeSampler:
        return self.made.setdefault(name, FakeSampler())

    def case(self, rows: int, *, seed: int, max_reqs: int | None = None) -> Any:
        return exact_case(self.vocab, 64, 3, rows, seed=seed, max_reqs=self.max_reqs if max_reqs is None else max_reqs)


class FakeInterleaved:
    """Runs each variant's calls once where the real one times them."""

    def __init__(self, variants: dict[str, Sequence[Callable[[], None]]], *, device: Any, meet: Any) -> None:
        self.variants, self.meet = variants, meet

    def medians_us(self, *, repeats: int) -> dict[str, float]:
        for name, calls in self.variants.items():
            assert len(calls) == timings.INPUT_SETS
            for call in calls if name != "nccl" else ():  # which gathers from a rank that is not here
                call()
        return dict.fromkeys(self.variants, 10.0)


@pytest.fixture
def over_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeModel, FakeModel], rank_timings.OverRanks]:
    def harness(root: Path, module: str) -> Any:
        return (
            SimpleNamespace(Interleaved=FakeInterleaved) if module == "benchmarks.timing" else gpu.harness(root, module)
        )

    monkeypatch.setattr(rank_timings, "harness", harness)
    ranks = SimpleNamespace(rank=1, world=2, group="group", gather=lambda out, local: None)
    return lambda model, shard: rank_timings.OverRanks(model, shard, ranks, "meeting", ROWS)  # type: ignore[arg-type]


def test_a_rank_times_every_variant_on_memory_that_is_still_there(over_ranks: Any) -> None:
    model, shard = FakeModel(64), FakeModel(32)
    timed = over_ranks(model, shard)
    gc.collect()
    job = rank_timings.RankJob(str(ROOT), "", "toy", (ROWS,), 30, "h200", "", "")
    found = timed.measure(job)
    chain, alone = model.made["ChainSampler"], shard.made["ChainSampler"]
    # Three input sets as they are, and three of padding rows alone; on the whole head and on one rank's shard.
    for sampler in (chain, alone):
        inert = [all(state == -1 for state in one["states"]) for one in sampler.launched]
        assert sorted(inert) == [False] * 3 + [True] * 3
    assert chain.drawn == [ROWS] * 3 and chain.sampled == 6 and alone.sampled == 3
    row = rank_timings.slowest([found, found])
    assert (row["tp"], row["rows"], row["us"], row["nccl_us"]) == (2, ROWS, 10.0, 10.0)
    assert (row["exchange_us"], row["tail_us"]) == (0.0, 0.0) and row["inputs"] == "a" * 12


def test_a_launch_alone_keeps_its_inputs() -> None:
    sampler = FakeSampler()
    (call,) = timings.launches(sampler, [exact_case(64, 64, 3, 2, seed=1)])
    gc.collect()
    call()
    assert sampler.launched[0]["rows"] == 2
