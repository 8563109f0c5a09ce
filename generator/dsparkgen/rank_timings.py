"""What `bench --tp` times: the chain over several ranks, each a process with a GPU of its own.

Each sample is a flush, a barrier of the ranks on the GPU, then the call, all in one CUDA graph on every rank. A figure is the
slowest rank's median. In the same rounds run, on every rank, the engine's loop with the whole head (``eager_us``), the fused
loop (``fused_us``), the vocabulary-parallel eager loop with NCCL all-gathers (``nccl_us``), and what the chain's parts follow
from:

- ``shard_us``: the chain of a model whose whole vocabulary is one rank's shard, on each GPU alone;
- ``exchange_us``: what the exchange between ranks adds, measured on padding rows, which store no logits: the records, and the last
  position's wait until the peers have said that their logits are there;
- ``tail_us``: the rest, staging the logits for the peers and copying what they staged into the cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsparkgen import floors
from dsparkgen.device import read_devices
from dsparkgen.gpu import CannotTell, harness, load_product, need_cuda
from dsparkgen.timings import INPUT_SETS, SEED, Bench, Model, launches, of_floor, sampling
from dsparkgen.workers import finish_together, start_ranks, wait_all_ready, wait_for_go

PADDING = -1  # request-state index of a padding row


@dataclass(frozen=True)
class RankJob:
    """One model to time over ranks. Every rank gets the same job."""

    root: str  # the repository
    out: str  # source root of the generated code
    model: str
    rows: tuple[int, ...]
    repeats: int
    device: str  # name of the GPUs' description
    shard_out: str  # source root of throw-away code ...
    shard_model: str  # ... of a model whose vocabulary is one rank's shard


def need_gpus(count: int) -> None:
    """Raises CannotTell where this machine has fewer GPUs."""
    found = need_cuda().cuda.device_count()
    if found < count:
        raise CannotTell(
            f"--tp {count}: expected as many GPUs, got {found}; --emulated {count} runs the ranks on one GPU"
        )


def measure(job: RankJob, world: int, seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of one model over `world` GPUs of this machine, and what failed in words."""
    workers = start_ranks("dsparkgen.rank_timings", asdict(job), world, seconds=seconds)
    failure = wait_all_ready(workers)
    if failure is not None:
        return [], failure
    for worker in workers:
        worker.go()
    ended = finish_together(workers)
    for rank, (worker, end) in enumerate(zip(workers, ended, strict=True)):
        if end.code != 0:
            return [], f"rank {rank}: {worker.ending(end.code)}"
    return [slowest(found) for found in zip(*(end.lines for end in ended), strict=True)], None


def slowest(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of what each rank measured of it: of every time the longest, and the parts that follow."""
    us = {name: max(one["times"][name] for one in found) for name in found[0]["times"]}
    row = dict(found[0]["row"])
    floor = row.pop("floor_us")
    exchange = us["inert"] - us["shard_inert"]
    return row | {
        "us": us["chain"],
        "noise_us": us["noise"],
        "call_us": us["call"],
        "eager_us": us["eager"],
        "fused_us": us["fused"],
        "nccl_us": us["nccl"],
        "shard_us": us["shard"],
        "exchange_us": round(exchange, 2),
        "tail_us": round(us["chain"] - us["shard"] - exchange, 2),
        **of_floor(floor, us["chain"]),
    }


class OverRanks:
    """One row count on this rank: every variant captured."""

    def __init__(self, model: Model, shard_model: Model, ranks: Any, meeting: Any, rows: int) -> None:
        timing, loops = (harness(model.root, name) for name in ("benchmarks.timing", "tests.harness.eager_ranks"))
        self._bench, self._world = Bench(model, rows), ranks.world
        bench, shard = self._bench, Bench(shard_model, rows)
        chain, alone = model.sampler("ChainSampler", group=ranks.group), shard_model.sampler("ChainSampler")
        # Every request state is in these batches: that loop gathers the whole cache.
        live = [model.case(rows, seed=SEED + turn, max_reqs=rows) for turn in range(INPUT_SETS)]
        sharded = [loops.ShardedEagerLoop(case, ranks.rank, ranks.world, ranks.gather) for case in live]
        for sampler, cases in ((chain, bench.cases), (alone, shard.cases)):
            for call in sampling(sampler, cases):  # leaves noise for the launches alone
                call()
        self._interleaved = timing.Interleaved(
            {
                "eager": bench.eager(),
                "fused": bench.fused(),
                "nccl": sharded,
                "call": sampling(chain, bench.cases),
                "chain": launches(chain, bench.cases),
                "inert": launches(chain, [inert(case) for case in bench.cases]),
                "noise": bench.noise_alone(chain),
                "shard": launches(alone, shard.cases),
                "shard_inert": launches(alone, [inert(case) for case in shard.cases]),
            },
            device=bench.device,
            meet=meeting,
        )

    def measure(self, job: RankJob) -> dict[str, Any]:
        """This rank's medians, and the row that they belong to with its floor."""
        bench, device = self._bench, read_devices(Path(job.root) / "specs" / "devices")[job.device]
        us = self._interleaved.medians_us(repeats=job.repeats)
        floor = floors.rank_floor_us(device, bench.sizes, self._world)
        row = bench.row("chain", tp=self._world, floor_us=floor)
        return {"times": {name: round(value, 2) for name, value in us.items()}, "row": row}


def inert(case: Any) -> Any:
    """The case with padding rows only: nothing is cached, so nothing is staged and there is no tail."""
    return case.replace(idx_mapping=case.idx_mapping.new_full(case.idx_mapping.shape, PADDING))


def work(job: RankJob) -> Iterator[dict[str, Any]]:
    """One rank: prepare, wait for the word, time; what it measured of each row count."""
    torch = need_cuda()
    harness_ranks = harness(Path(job.root), "benchmarks.ranks")
    ranks = harness_ranks.open_ranks()
    meeting = harness_ranks.Meeting(ranks)
    with torch.inference_mode():
        sources = ((job.out, job.model), (job.shard_out, job.shard_model))
        model, shard = (Model(Path(job.root), load_product(Path(out), name), max(job.rows)) for out, name in sources)
        timed = [OverRanks(model, shard, ranks, meeting, rows) for rows in job.rows]
        torch.cuda.synchronize()
        wait_for_go()
        for one in timed:
            yield one.measure(job)


if __name__ == "__main__":
    for found in work(RankJob(**json.loads(sys.argv[1]))):
        print(json.dumps(found), flush=True)
    # What is left of process groups and peers' memory is given back by the system: tearing it down could wait for a peer.
    os._exit(0)
