"""What `bench` times on one GPU, in a worker process of its own for each model or throw-away vocabulary.

A worker compiles, warms up and captures everything, waits for the word, times, and prints one bench row a line
(bench.py says what is in one). So all models prepare side by side and have the GPU to themselves while they are timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dsparkgen import floors
from dsparkgen.device import DeviceSpec, read_devices
from dsparkgen.gpu import Product, harness, load_product, need_cuda, this_device
from dsparkgen.plan import BYTES
from dsparkgen.workers import wait_for_go, wait_for_the_end

HOLD_US = 600.0  # how long the kernel ahead runs: several times what the host needs to launch the chain behind it
INPUT_SETS = 3  # rotated from replay to replay
TEMPERATURE = 0.9
SEED = 20261129

Call = Callable[[], None]
Calls = list[Call]  # one per input set


@dataclass(frozen=True)
class Job:
    """One model, or one throw-away vocabulary, to time on one GPU."""

    root: str  # the repository
    out: str  # source root of the generated code
    model: str
    rows: tuple[int, ...]
    repeats: int
    pdl: bool = False
    alone: bool = True  # the kernels of one GPU
    worlds: tuple[int, ...] = ()  # ranks to emulate on this GPU
    parents: Mapping[str, str] = field(default_factory=dict)  # of throw-away code: digests of the checked-in kernels


class Model:
    """A model on this process's GPU: its weights, and samplers that all row counts share, as each compiles its kernels.

    Args:
        max_reqs: number of request states: the most rows of a call.
    """

    def __init__(self, root: Path, product: Product, max_reqs: int) -> None:
        torch = need_cuda()
        self.root, self.product, self.config = root, product, product.config
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._checks = harness(root, "tests.harness.checks")
        self.base, self.cache = self._checks.dtype_pairs(product)[0]
        self.subject = self._checks.random_subject(product, self.base, self.cache, self.device, seed=SEED)
        self.max_reqs, self.options = max_reqs, self.subject.sampler_options(max_reqs)
        self._samplers: dict[tuple[str, frozenset[Any]], Any] = {}

    def sampler(self, name: str, **options: Any) -> Any:
        """A sampler of the model's launch.py on these weights; the same one for the same options."""
        key = (name, frozenset(options.items()))
        if key not in self._samplers:
            kind = getattr(self.product.module("launch"), name)
            self._samplers[key] = kind(*self.subject.weights, **self.options, **options)
        return self._samplers[key]

    def case(self, rows: int, *, seed: int, max_reqs: int | None = None) -> Any:
        """Inputs of one call."""
        states = self.max_reqs if max_reqs is None else max_reqs
        return self._checks.make_case(self.subject, rows, seed=seed, max_reqs=states, temperatures=(TEMPERATURE,))


class Bench:
    """One row count of a model: its inputs, and the calls that are timed on them."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.root, self.product, self.config, self.device = model.root, model.product, model.config, model.device
        self.cases = [model.case(rows, seed=SEED + turn) for turn in range(INPUT_SETS)]

    @property
    def sizes(self) -> floors.Sizes:
        """What the floors follow from."""
        config = self.config
        return floors.Sizes(
            vocab_size=config.DRAFT_VOCAB_SIZE,
            cache_columns=config.VOCAB_SIZE,
            rank_dim=config.RANK_DIM,
            num_steps=config.NUM_STEPS,
            rows=self.rows,
            base_bytes=BYTES[self.model.base],
            cache_bytes=BYTES.get(self.model.cache, 0),
        )

    def row(self, kernel: str, **values: Any) -> dict[str, Any]:
        """A bench row: the shape, the values, the digest of the code that ran."""
        config = self.config
        shape = {
            "kernel": kernel,
            "vocab_size": config.DRAFT_VOCAB_SIZE,
            "num_steps": config.NUM_STEPS,
            "rank_dim": config.RANK_DIM,
            "tp": 1,
            "rows": self.rows,
        }
        return shape | values | {"inputs": self.product.digest(kernel)}

    def eager(self) -> Calls:
        """The engine's loop."""
        return [harness(self.root, "tests.harness.eager").EagerLoop(case) for case in self.cases]

    def plain(self) -> Calls:
        """The engine's loop without the output transform, which draws other tokens: what it would take at the least."""
        none = harness(self.root, "tests.harness.cases").Transform()
        cases = [case.replace(transform=none) for case in self.cases]
        return [harness(self.root, "tests.harness.eager").EagerLoop(case) for case in cases]

    def fused(self) -> Calls:
        """The fused loop."""
        return sampling(self.model.subject.fused_loop(self.model.max_reqs), self.cases)

    def noise_alone(self, sampler: Any) -> Calls:
        """The noise kernel alone, into a chain sampler's buffer."""
        return [
            partial(sampler.draw_noise, case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
            for case in self.cases
        ]

    def bias_products(self) -> Calls:
        """The bias GEMMs of all positions alone: what the engine and the step kernels both run."""
        from torch.nn import functional

        embed, head = self.model.subject.weights

        def products(case: Any) -> None:
            for _ in range(case.num_steps):
                functional.linear(embed[: case.rows], head)

        return [partial(products, case) for case in self.cases]


def sampling(sampler: Any, cases: Sequence[Any]) -> Calls:
    """A sampler's whole call, noise included, one per case."""
    return [partial(sampler.sample, *case.call_arguments, query_per_row=case.query_per_row) for case in cases]


def launches(sampler: Any, cases: Sequence[Any]) -> Calls:
    """The chain's launch alone, on the noise that the last whole call left in the sampler's buffer."""

    def launch(case: Any, variant: Any, arguments: Any) -> None:
        # Arguments are addresses: the call keeps the case whose tensors they point to.
        sampler.launch(variant, arguments)

    return [
        partial(launch, case, *sampler.prepare(case.rows, *case.call_arguments, case.query_per_row)) for case in cases
    ]


class OneGpu:
    """All kernels of a model on one GPU at one row count, every variant in the same rounds."""

    def __init__(self, bench: Bench, *, pdl: bool) -> None:
        timing = harness(bench.root, "benchmarks.timing")
        self._bench, product = bench, bench.product
        variants = {"eager": bench.eager()} | ({"fused": bench.fused()} if product.has("fused") else {})
        if bench.config.TRANSFORM != "none":
            variants["plain"] = bench.plain()
        self._chain = product.has("chain") and bench.rows <= bench.config.MAX_ROWS
        if self._chain:
            chain = bench.model.sampler("ChainSampler")
            variants |= {"call": sampling(chain, bench.cases), "chain": launches(chain, bench.cases)}
            variants["noise"] = bench.noise_alone(chain)
        self._step = product.has("step")
        if self._step:
            variants |= {
                "step": sampling(bench.model.sampler("StepSampler"), bench.cases),
                "gemm": bench.bias_products(),
            }
        self._interleaved = timing.Interleaved(variants, device=bench.device)
        self._behind = self._samplers_behind() if pdl else {}

    def measure(self, device: DeviceSpec, repeats: int) -> Iterator[dict[str, Any]]:
        """The rows: of the chain, or where the batch is beyond it of the fused loop; and of the step kernels."""
        bench = self._bench
        us = {name: round(us, 2) for name, us in self._interleaved.medians_us(repeats=repeats).items()}
        beside = {f"{name}_us": us[name] for name in ("eager", "fused", "plain") if name in us}
        floor = floors.chain_floor_us(device, bench.sizes)
        if self._chain:
            own = {"us": us["chain"], "noise_us": us["noise"], "call_us": us["call"]}
            yield bench.row("chain", **own, **beside, **of_floor(floor, us["chain"]), **self._visible_us(repeats))
        elif not self._step:
            own = {"us": us["fused"], "noise_us": 0.0, "call_us": us["fused"]}
            yield bench.row("fused", **own, **beside, **of_floor(floor, us["fused"]))
        if self._step:
            own = {"us": us["step"], "noise_us": 0.0, "call_us": us["step"]}
            found = of_floor(floors.step_floor_us(device, bench.sizes), us["step"])
            yield bench.row("step", **own, **beside, gemm_us=us["gemm"], **found)

    def _samplers_behind(self) -> dict[str, Calls]:
        """The chain by programmatic and by ordinary launch, each by a sampler of its own whose noise is drawn."""
        bench = self._bench
        declined = "this batch is not the chain's"
        if self._chain:
            launch = bench.product.module("launch").ChainSampler
            declined = launch.why_not(*bench.model.subject.weights, **bench.model.options, pdl=True)
        if declined is not None:
            print(
                f"{bench.product.model}: {bench.rows} rows: nothing to time behind a kernel: {declined}",
                file=sys.stderr,
            )
            return {}
        calls = {}
        for name, pdl in (("pdl_us", True), ("pdl_off_us", False)):
            sampler = bench.model.sampler("ChainSampler", pdl=pdl)
            for call in sampling(sampler, bench.cases):
                call()
            calls[name] = launches(sampler, bench.cases)
        return calls

    def _visible_us(self, repeats: int) -> dict[str, float]:
        """What the chain adds behind a kernel that lets it start early: "pdl_us", "pdl_off_us"; empty without them."""
        if not self._behind:
            return {}
        timing, producer = (harness(self._bench.root, f"benchmarks.{name}") for name in ("timing", "producer"))
        ahead = producer.Producer(self._bench.device)
        hold = partial(ahead.hold, HOLD_US)
        found = timing.time_behind(hold, self._behind, device=self._bench.device, repeats=repeats)
        return {name: round(us, 2) for name, us in found.items()}


class EmulatedRanks:
    """All ranks of a vocabulary-parallel chain in one launch on one GPU, beside the eager loop of the whole head."""

    def __init__(self, bench: Bench, world: int) -> None:
        timing = harness(bench.root, "benchmarks.timing")
        self._bench, self._world = bench, world
        sampler = bench.model.sampler("EmulatedChainSampler", world=world)
        checks = harness(bench.root, "tests.harness.checks")
        stacked = [checks.stacked(case, world) for case in bench.cases]
        variants = {
            "eager": bench.eager(),
            "call": sampling(sampler, stacked),
            "chain": launches(sampler, stacked),
            "noise": bench.noise_alone(sampler),
        }
        self._interleaved = timing.Interleaved(variants, device=bench.device)

    def measure(self, device: DeviceSpec, repeats: int) -> Iterator[dict[str, Any]]:
        """One row. `floor_us` is that of the emulation, which moves every rank's bytes through one GPU; `rank_floor_us` is
        that of a GPU that is one of so many."""
        bench, world = self._bench, self._world
        us = {name: round(us, 2) for name, us in self._interleaved.medians_us(repeats=repeats).items()}
        yield bench.row(
            "chain",
            tp=world,
            emulated=True,
            us=us["chain"],
            noise_us=us["noise"],
            call_us=us["call"],
            eager_us=us["eager"],
            **of_floor(floors.emulated_floor_us(device, bench.sizes, world), us["chain"]),
            rank_floor_us=round(floors.rank_floor_us(device, bench.sizes, world), 2),
        )


def of_floor(floor: float, us: float) -> dict[str, float]:
    """ "floor_us" and "pct_of_floor"."""
    return {"floor_us": round(floor, 2), "pct_of_floor": round(100 * floor / us, 1)}


def work(job: Job) -> None:
    """Prepare, wait for the word, time; print a row a line."""
    torch = need_cuda()
    root = Path(job.root)
    product = load_product(Path(job.out), job.model)
    device = read_devices(root / "specs" / "devices")[this_device(product)]
    with torch.inference_mode():
        timed: list[OneGpu | EmulatedRanks] = []
        model = Model(root, product, max(job.rows))
        for rows in job.rows:
            print(f"{job.model}: preparing {rows} rows", file=sys.stderr, flush=True)
            bench = Bench(model, rows)
            if job.alone:
                timed.append(OneGpu(bench, pdl=job.pdl))
            timed += [EmulatedRanks(bench, world) for world in job.worlds if rows <= product.config.MAX_ROWS]
        torch.cuda.synchronize()
        wait_for_go()
        for one in timed:
            for row in one.measure(device, job.repeats):
                parent = job.parents.get(row["kernel"])
                print(json.dumps(row if parent is None else row | {"parent": parent}), flush=True)
        wait_for_the_end()


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
