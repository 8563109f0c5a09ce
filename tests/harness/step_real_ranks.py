"""The step kernels over ranks with a GPU each: a process a rank draws what one rank alone draws, also in a captured graph.

`run(world)` starts the processes; each is `python -m tests.harness.step_real_ranks '<task as JSON>'`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULE = "tests.harness.step_real_ranks"
SEED = 37
MAX_REQS = 64
ROWS = (1, 2, 8, 33, MAX_REQS)
SECONDS = 240.0


def run(world: int, model: str, *, generated: Path = ROOT / "generated", replays: int = 30) -> list[dict[str, Any]]:
    """What every rank found, by rank: {"checked": ..., "failure": None or words}. generated: folder of the model's package."""
    from dsparkgen.workers import finish_together, start_ranks

    task = {"model": model, "generated": str(generated), "replays": replays}
    workers = start_ranks(MODULE, task, world, seconds=SECONDS)
    ended = finish_together(workers)
    return [
        one.lines[-1] if one.lines else {"checked": [], "failure": worker.ending(one.code)}
        for worker, one in zip(workers, ended, strict=True)
    ]


class Rank:
    """This process's rank: a sampler over all ranks, and one alone on the same weights."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        import torch
        from benchmarks.ranks import open_ranks

        from dsparkgen.gpu import load_product

        from .cases import Transform, exact_weights

        self.torch, self.replays = torch, task["replays"]
        self.ranks = open_ranks()
        product = load_product(Path(task["generated"]), task["model"])
        self.config, self.launch, self.has_chain = product.config, product.module("launch"), product.has("chain")
        self.transform = Transform.of(self.config)
        vocab, rank_dim = self.config.VOCAB_SIZE, self.config.RANK_DIM
        # Dot products are exact, so that no GEMM's order of sums can differ between a shard and the whole head.
        self.weights = exact_weights(vocab, rank_dim, seed=SEED, device=self.ranks.device)
        self.part = self.launch.VocabParallelHead(
            self.weights[1], vocab_size=vocab, rank=self.ranks.rank, world=self.ranks.world
        )
        self.cache_dtype = torch.bfloat16 if self.config.CACHE_DTYPES else None
        self.options = {"max_reqs": MAX_REQS, "cache_dtype": self.cache_dtype}
        self.groups = {"group": self.ranks.group, "device_group": self.ranks.gpu_group}

    def case(self, rows: int, *, seed: int, padding_rows: int = 0) -> Any:
        """The same random case on every rank."""
        from .cases import exact_case

        shape = (self.config.VOCAB_SIZE, self.config.RANK_DIM, self.config.NUM_STEPS, rows)
        options = {"device": self.ranks.device, "max_reqs": MAX_REQS, "padding_rows": padding_rows}
        options |= {"cache_dtype": self.cache_dtype, "noise_scheme": self.config.NOISE_SCHEME}
        return exact_case(*shape, seed=seed, weights=self.weights, **options).replace(transform=self.transform)

    def check(self) -> list[str]:
        """Run all checks; what was checked. Raises AssertionError on the ranks that find a difference."""
        refused = self.launch.StepSampler.create(self.weights[0], self.wrong_part(), **self.options, **self.groups)
        assert refused is None, "expected no sampler on any rank where one holds another's slice"
        sampler = self.launch.StepSampler.create(self.weights[0], self.part, **self.options, **self.groups)
        assert sampler is not None, "expected a sampler on every rank"
        alone = self.launch.StepSampler(*self.weights, **self.options)
        own = (self.part.first, self.part.width)
        assert sampler.accepts_shard(own) and not sampler.accepts_shard((own[0] + 1, own[1]))
        found = ["set-up"]
        for rows in ROWS:
            for shards in (False, True):
                case = self.case(rows, seed=SEED + rows, padding_rows=rows // 4)
                if rows == 2:
                    case.base_logits[1, :, self.config.VOCAB_SIZE - 2] = float("nan")
                self.compare(case, lambda mine, shards=shards: self.draw(sampler, mine, shards), alone)
                found.append(f"{rows} rows, {'own columns' if shards else 'whole base'}")
        for rows in (8, 40):
            self.check_graph(sampler, alone, rows)
            found.append(f"graph of {rows} rows, {self.replays} replays")
        self.check_draft(alone)
        return [*found, "chain and step kernels as one sampler"]

    def check_draft(self, alone: Any) -> None:
        """The sampler of every batch, on the same sharded head: the chain for few rows, where the model has one, the step kernels
        for more."""
        draft = self.launch.DraftSampler(self.weights[0], self.part, **self.options, **self.groups)
        draft.warmup()
        for rows in (2, MAX_REQS):
            case = self.case(rows, seed=SEED + rows)
            self.compare(case, lambda mine: self.draw(draft, mine, True), alone)
        served = {"chain": 1, "step": 1} if self.has_chain else {"step": 2}
        assert draft.served == served, f"rank {self.ranks.rank}: served {draft.served}"

    def wrong_part(self) -> Any:
        """This rank's head, but on the last rank another one's slice."""
        rank, world = self.ranks.rank, self.ranks.world
        held = 0 if rank == world - 1 else rank
        return self.launch.VocabParallelHead(self.weights[1], vocab_size=self.config.VOCAB_SIZE, rank=held, world=world)

    def draw(self, sampler: Any, case: Any, shards: bool) -> None:
        """Draw a case into its outputs, given the whole base logits or this rank's columns."""
        columns = slice(self.part.first, self.part.first + self.part.width) if shards else slice(None)
        base, *others = case.call_arguments
        sampler.sample(base[:, :, columns], *others, query_per_row=case.query_per_row)

    def compare(self, case: Any, draw: Callable[[Any], None], alone: Any) -> None:
        """Draw over all ranks and alone, into outputs of their own, and compare to the bit."""
        want, got = case.with_fresh_outputs(), case.with_fresh_outputs()
        alone.sample(*want.call_arguments, query_per_row=want.query_per_row)
        draw(got)
        self.same(got, want, f"{case.rows} rows")

    def same(self, got: Any, want: Any, name: str) -> None:
        """Raise AssertionError unless the outputs of two cases are equal to the bit."""
        from .oracle import same_bits

        wrong = int((got.draft_tokens != want.draft_tokens).sum())
        assert not wrong, f"rank {self.ranks.rank}, {name}: {wrong} tokens differ from those of one rank alone"
        same = got.logits_cache is None or same_bits(got.logits_cache, want.logits_cache)
        assert same, f"rank {self.ranks.rank}, {name}: the caches differ"

    def check_graph(self, sampler: Any, alone: Any, rows: int) -> None:
        """One captured graph, collectives included, replayed for other requests each time."""
        held = self.case(rows, seed=SEED)
        self.draw(sampler, held, False)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self.draw(sampler, held, False)
        for replay in range(self.replays):
            case = self.case(rows, seed=SEED + replay, padding_rows=replay % rows)
            want = case.with_fresh_outputs()
            alone.sample(*want.call_arguments, query_per_row=want.query_per_row)
            for mine, given in zip(held.call_arguments[:6], case.call_arguments[:6], strict=True):
                mine.copy_(given)
            held.poison()
            graph.replay()
            self.same(held, want, f"replay {replay} of {rows} rows")


def main(task: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's work; what it found."""
    import torch

    try:
        with torch.inference_mode():
            return {"checked": Rank(task).check(), "failure": None}
    except Exception as error:
        return {"checked": [], "failure": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    found = main(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)
    sys.exit(0 if found["failure"] is None else 1)
