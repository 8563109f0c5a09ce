"""What `dsparkgen verify` and tests/kernels check of generated kernels on a GPU.

Every check takes a generated model (its `config`, and `module(name)` for noise, chain, fused, launch), draws fresh random
inputs, poisons outputs first, and raises CheckFailed with the first difference in words, or returns what it covered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch

from .cases import POISON_LOGIT, Case, Layout, Transform, exact_weights, random_case
from .eager import EagerLoop
from .oracle import gumbel, oracle, prefix_agreement, same_bits, why_unequal

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "none": None}  # none: greedy drafts, without a cache
MAX_REQS = 11  # request states: more than rows, so that some stay unused
FUSED_ROWS = (9, 17, 33)  # beyond the chain: the fused loop's second and third tile of 16 rows, and one row over
EAGER_ROWS = (
    1,
    2,
    3,
    7,
    8,
    16,
    33,
    64,
    128,
)  # step kernels against the eager loop: every block size, and both sides of each
LAYOUTS: tuple[Layout, ...] = ("plain", "odd", "steps_first")
SEEDS = (0, -1, 1, 42, 2**31, 2**32, -(2**63), 2**63 - 1)
# Sample positions whose noise is extreme for request seed 42: hash 0 at token 95872, hash 2^32 - 1 (u rounds to 1) at 114765.
POSITIONS = (1, 49061, 17057, 2**31, 2**32 + 7)
TIE_LOGIT = 30_000.0  # a bf16 step is 128 there, so that every bias rounds away
AGREEMENT = 0.999  # of positions whose prefix agreed, with weights whose biases may differ in their last bit
ORACLE_EVERY = 200  # graph replays between two comparisons with the oracle; the others compare chain with fused
MAPPINGS = 509  # row mappings that graph replays cycle through; prime, so that they meet the oracle's replays in turn


class CheckFailed(AssertionError):
    """Results differ from the contract; the message names each kernel's first difference and its inputs.

    ``failures`` holds the messages by kernel, ``covered`` what was covered for the kernels that are not among them.
    """

    def __init__(self, failures: Mapping[str, str], covered: Any = None) -> None:
        super().__init__("; ".join(f"{kernel}: {message}" for kernel, message in failures.items()))
        self.failures, self.covered = dict(failures), covered


class Product(Protocol):
    """A generated model."""

    @property
    def config(self) -> Any: ...

    def module(self, name: str) -> Any: ...

    def has(self, kernel: str) -> bool: ...


Sample = Callable[[Case], None]


@dataclass
class Subject:
    """The samplers of one model for one pair of dtypes, on one set of weights."""

    product: Product
    base: str
    cache: str
    device: torch.device
    weights: tuple[torch.Tensor, torch.Tensor]
    d2t: torch.Tensor | None = None  # of a reduced draft vocabulary
    forks: int = field(default=0, init=False)
    _steps: dict[int, Any] = field(default_factory=dict, init=False)
    failures: dict[str, str] = field(default_factory=dict, init=False)  # first failure of each kernel in this check

    @cached_property
    def chain(self) -> Any:
        """The chain's sampler, or None where the model has no chain kernel."""
        if not self.product.has("chain"):
            return None
        return self.chain_sampler()

    @property
    def options(self) -> dict[str, Any]:
        """What every sampler of these weights takes: the map of a reduced draft vocabulary."""
        return {} if self.d2t is None else {"d2t": self.d2t}

    def sampler_options(self, max_reqs: int = MAX_REQS) -> dict[str, Any]:
        """What a chain or step sampler takes beside the weights."""
        return self.options | {"max_reqs": max_reqs, "cache_dtype": DTYPES[self.cache]}

    def chain_sampler(self) -> Any:
        """A new sampler of the chain for `MAX_REQS` request states."""
        return self.product.module("launch").ChainSampler(*self.weights, **self.sampler_options())

    @cached_property
    def fused(self) -> Any:
        """The fused loop for `MAX_REQS` request states, or None where the model has none."""
        return self.fused_loop(MAX_REQS)

    def fused_loop(self, max_reqs: int) -> Any:
        """A fused loop for a number of request states, or None where the model has none."""
        if not self.product.has("fused"):
            return None
        return self.product.module("fused").FusedLoop(*self.weights, max_reqs=max_reqs, **self.options)

    def step_sampler(self, max_reqs: int) -> Any:
        """The step kernels' sampler for a number of request states, or None where the model or these dtypes have none."""
        if not self.product.has("step"):
            return None
        if max_reqs not in self._steps:
            sampler = self.product.module("launch").StepSampler
            options = self.sampler_options(max_reqs)
            declined = sampler.why_not(*self.weights, **options)
            self._steps[max_reqs] = None if declined else sampler(*self.weights, **options)
        return self._steps[max_reqs]

    def samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        """The kernels that take this case and have not failed yet, by name."""
        if self.chain is not None and self.chain.supports(case.rows, case.base_logits):
            if "chain" not in self.failures:
                yield "chain", self._sample_chain
        if self.fused is not None and "fused" not in self.failures:
            yield "fused", self._sample_fused
        step = self.step_sampler(case.max_reqs)
        if step is not None and step.why_not_call(case.rows, case.base_logits) is None and "step" not in self.failures:
            yield "step", lambda mine: step.sample(*mine.call_arguments, query_per_row=mine.query_per_row)

    def graph_samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        """What is captured and compared with each other; the first draws, or copies what an earlier one drew."""
        return self.samplers(case)

    def conclude(self, covered: Any) -> Any:
        """End a check: raise CheckFailed with what failed, or return what was covered."""
        failures, self.failures = self.failures, {}
        if failures:
            raise CheckFailed(failures, covered)
        return covered

    def _sample_chain(self, case: Case) -> None:
        # Every other call draws its noise ahead on the side stream.
        self.forks += 1
        if self.forks % 2:
            self.chain.fork_noise(case.idx_mapping, case.sample_pos, case.temperature, case.seeds, case.rows)
        self.chain.sample(*case.call_arguments, query_per_row=case.query_per_row)

    def _sample_fused(self, case: Case) -> None:
        loop = self.fused if case.max_reqs == MAX_REQS else self.fused_loop(case.max_reqs)
        loop.sample(*case.call_arguments, query_per_row=case.query_per_row)


class EmulatedSubject(Subject):
    """The chain over several ranks that one GPU runs in one launch; every rank's outputs are compared."""

    world: int = 1
    shard_width: int | None = None
    _drawn: Case | None = None

    @classmethod
    def of(cls, subject: Subject, world: int, shard_width: int | None = None) -> EmulatedSubject:
        """The ranks of another subject's model, on its weights; `shard_width` where shards are padded."""
        made = cls(subject.product, subject.base, subject.cache, subject.device, subject.weights, subject.d2t)
        made.world, made.shard_width = world, shard_width
        return made

    def chain_sampler(self) -> Any:
        launch = self.product.module("launch")
        options = self.sampler_options() | {"world": self.world, "shard_width": self.shard_width}
        return launch.EmulatedChainSampler(*self.weights, **options)

    def samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        if self.chain.supports(case.rows, case.base_logits) and "chain" not in self.failures:
            for rank in range(self.world):
                yield "chain", partial(self._rank_outputs, rank)

    def graph_samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        yield from self.samplers(case)
        if self.fused is not None:
            yield "fused", self._sample_fused

    def _rank_outputs(self, rank: int, case: Case) -> None:
        """Give a case the outputs of one rank. Rank 0 comes first, and draws for all."""
        if rank == 0:
            self._drawn = stacked(case, self.world)
            self._sample_chain(self._drawn)
        assert self._drawn is not None
        if case.logits_cache is not None:
            case.logits_cache.copy_(self._drawn.logits_cache[rank])
        case.draft_tokens.copy_(self._drawn.draft_tokens[rank])


class RankSubject(Subject):
    """The chain over several ranks, of which this process is one; all of them run the same checks.

    A rank that has found a difference goes on launching, since its peers wait for it.
    """

    group: Any = None

    @classmethod
    def of(cls, subject: Subject, group: Any) -> RankSubject:
        """This rank of another subject's model, on its weights. group: the ranks' CPU group. A collective."""
        made = cls(subject.product, subject.base, subject.cache, subject.device, subject.weights, subject.d2t)
        made.group = group
        return made

    def chain_sampler(self) -> Any:
        return self.product.module("launch").ChainSampler(*self.weights, **self.sampler_options(), group=self.group)

    def samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        if self.chain.supports(case.rows, case.base_logits):
            yield "chain", self._sample_chain

    def graph_samplers(self, case: Case) -> Iterator[tuple[str, Sample]]:
        yield from self.samplers(case)
        if self.fused is not None:
            yield "fused", self._sample_fused


def stacked(case: Case, world: int) -> Case:
    """The case with outputs of every emulated rank, poisoned: each lies in memory as the case's own does."""

    def every_rank(tensor: torch.Tensor) -> torch.Tensor:
        entries = len(tensor.untyped_storage()) // tensor.element_size()
        storage = torch.empty(world * entries, dtype=tensor.dtype, device=tensor.device)
        return storage.as_strided((world, *tensor.shape), (entries, *tensor.stride()), tensor.storage_offset())

    cache = None if case.logits_cache is None else every_rank(case.logits_cache)
    made = case.replace(logits_cache=cache, draft_tokens=every_rank(case.draft_tokens))
    made.poison()
    return made


# --- noise ---


def check_noise(product: Product, device: torch.device, *, batches: int, seed: int) -> dict[str, Any]:
    """Noise of random samples and vocabulary shards, to the bit; what must stay untouched stays so."""
    config, draw = product.config, product.module("noise").draw_noise
    rng = random.Random(seed)
    steps, vocab = config.NUM_STEPS, config.DRAFT_VOCAB_SIZE
    d2t = draft_map(product, device, seed=seed)
    ids = torch.arange(vocab, device=device) + (0 if d2t is None else d2t)
    mapped = {} if d2t is None else {"target_ids": ids.int()}
    compared = 0
    for batch in range(batches):
        rows = 1 + batch % config.MAX_ROWS
        tp = config.TP_SIZES[batch % len(config.TP_SIZES)]
        width = -(-vocab // tp)
        start = width * rng.randrange(tp)
        width = max(1, min(width, vocab - start))
        samples = rows * steps
        states = [rng.choice([-1, *range(MAX_REQS)]) for _ in range(samples)]
        positions = [rng.choice([*POSITIONS, rng.randrange(1, 1 << 20)]) for _ in range(samples)]
        heats = [rng.choice([0.0, 0.5, 1.0]) for _ in range(MAX_REQS)]
        seeds = [rng.choice([*SEEDS, rng.randrange(-(2**63), 2**63)]) for _ in range(MAX_REQS)]
        pitch = -(-width // 4) * 4 + 4 * rng.randrange(3)
        out = torch.full((samples + 1, pitch), POISON_LOGIT, device=device)
        draw(
            out,
            torch.tensor(states, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(heats, device=device),
            torch.tensor(seeds, device=device),
            num_samples=samples,
            vocab_start=start,
            width=width,
            **mapped,
        )
        for sample, state in enumerate(states):
            where = f"batch {batch}, sample {sample}, draft ids {start} to {start + width - 1}"
            if state < 0 or heats[state] == 0.0:
                if not bool((out[sample] == POISON_LOGIT).all()):
                    raise CheckFailed({"noise": f"{where}: expected an unused row untouched"})
                continue
            mixed = seeds[state] ^ ((sample % steps) << 32) if config.STEP_MIX else seeds[state]
            key = positions[sample] - 1 + config.DRAFT_SALT
            every = gumbel(mixed, key, config.VOCAB_SIZE, device, scheme=config.NOISE_SCHEME)
            want = every[ids[start : start + width]]
            if not same_bits(out[sample, :width], want):
                column = int(torch.nonzero(out[sample, :width] != want)[0])
                got = f"{float(out[sample, column])!r}, expected {float(want[column])!r}"
                raise CheckFailed({"noise": f"{where}: seed {mixed}, key {key}, id {start + column}: got {got}"})
            compared += width
            if not bool((out[sample, -(-width // 4) * 4 :] == POISON_LOGIT).all()):
                raise CheckFailed({"noise": f"{where}: expected the columns beyond the padding untouched"})
        if not bool((out[samples] == POISON_LOGIT).all()):
            raise CheckFailed({"noise": f"batch {batch}: expected the row after the last sample untouched"})
    return {"batches": batches, "values": compared}


# --- chain and fused, to the bit ---


def check_bitwise(subject: Subject, *, batches: int, seed: int, rows: Sequence[int] | None = None) -> dict[str, Any]:
    """Tokens and whole caches of random batches equal the oracle's to the bit; ``subject`` has exact weights.

    Row counts go round, from 1 to the model's maximum where none are given. Batches mix padding rows, temperatures, ties, NaN, infinities,
    strided and misaligned base logits and caches, wider caches, states that differ by position, and extreme seeds.
    """
    rng = random.Random(seed)
    counts = range(1, subject.product.config.MAX_ROWS + 1) if rows is None else rows
    for batch in range(batches):
        compare(subject, vary(subject, rng, counts[batch % len(counts)], seed=rng.randrange(2**31)), f"batch {batch}")
    named = f"1..{len(counts)}" if rows is None else ",".join(map(str, rows))
    return subject.conclude({"batches": batches, "rows": named, "base": subject.base, "cache": subject.cache})


def check_step_loop(subject: Subject, *, rows: Sequence[int], seed: int) -> dict[str, Any]:
    """The step kernels' tokens and whole caches equal the eager loop's to the bit, with random weights: the same products.

    Base logits and cache lie aligned, and so that only scalar accesses fit. No row has a NaN.
    """
    most = max(rows)
    step = subject.step_sampler(most)
    for count in rows:
        for layout in ("plain", "odd"):
            case = make_case(subject, count, seed=seed + count, max_reqs=most, layout=layout)
            eager, mine = case.with_fresh_outputs(), case.with_fresh_outputs()
            EagerLoop(eager)()
            step.sample(*mine.call_arguments, query_per_row=mine.query_per_row)
            tokens = int((mine.draft_tokens[:count] != eager.draft_tokens[:count]).sum())
            equal = same_cache(mine.logits_cache, eager.logits_cache)
            if tokens or not equal:
                subject.failures["step"] = (
                    f"base {subject.base}, cache {subject.cache}, {count} rows, layout {layout}: {tokens} of "
                    f"{count * case.num_steps} tokens differ from the eager loop's; caches "
                    f"{'equal' if equal else 'differ'}"
                )
    return subject.conclude({"rows": list(rows), "layouts": ["plain", "odd"]})


def check_directed(subject: Subject, *, seed: int, beyond: bool = True) -> dict[str, Any]:
    """Inputs of known trouble, each named; ``subject`` has exact weights. ``beyond``: also row counts beyond the chain's."""
    covered = []
    for name, case in directed_cases(subject, seed):
        compare(subject, case, name)
        covered.append(name)
    for rows in FUSED_ROWS if beyond and type(subject) is Subject else ():
        case = make_case(subject, rows, seed=seed + rows, max_reqs=max(FUSED_ROWS), padding_rows=rows // 4)
        compare(subject, case, f"{rows} rows")
    return subject.conclude({"cases": covered, "base": subject.base, "cache": subject.cache})


def compare(subject: Subject, case: Case, name: str) -> None:
    """Run every kernel that takes the case, compare both outputs with the oracle to the bit, and note what differs."""
    want_tokens, want_cache = oracle(case)
    for kernel, sample in subject.samplers(case):
        got = case.with_fresh_outputs()
        sample(got)
        if torch.equal(got.draft_tokens, want_tokens) and same_cache(got.logits_cache, want_cache):
            continue
        reason = why_unequal(case, got.draft_tokens, got.logits_cache)
        subject.failures[kernel] = (
            f"base {subject.base}, cache {subject.cache}, {case.rows} rows, {name}: "
            f"{reason or 'a second comparison finds no difference: the oracle is not stable'}"
        )


def same_cache(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether two logits caches are equal to the bit; None stands for greedy drafts, which have none."""
    return left is right if left is None or right is None else same_bits(left, right)


def make_case(subject: Subject, rows: int, *, seed: int, **options: Any) -> Case:
    """`random_case` with the subject's shape, dtypes, weights and device."""
    config = subject.product.config
    options.setdefault("max_reqs", MAX_REQS)
    return random_case(
        config.VOCAB_SIZE,
        config.RANK_DIM,
        config.NUM_STEPS,
        rows,
        seed=seed,
        base_dtype=DTYPES[subject.base],
        cache_dtype=DTYPES[subject.cache],
        device=subject.device,
        weights=subject.weights,
        draft_vocab_size=None if subject.d2t is None else config.DRAFT_VOCAB_SIZE,
        d2t=subject.d2t,
        sampling_limit=config.SAMPLING_LIMIT,
        transform=Transform.of(config),
        noise_scheme=config.NOISE_SCHEME,
        **options,
    ).replace(draft_salt=config.DRAFT_SALT, step_mix=config.STEP_MIX)


def vary(subject: Subject, rng: random.Random, rows: int, *, seed: int) -> Case:
    """A random case with a random selection of features."""
    config = subject.product.config
    steps, vocab = config.NUM_STEPS, config.VOCAB_SIZE
    layout = rng.choice(LAYOUTS)
    case = make_case(
        subject,
        rows,
        seed=seed,
        layout=layout,
        padding_rows=rng.choice([0, 0, rng.randrange(rows + 1)]),
        query_per_row=rng.choice([steps, 1, steps + 2]),
        cache_columns=vocab + rng.choice([0, 5, 8]),
        temperatures=rng.choice([(0.0,), (1.0,), (0.0, 0.9), (0.0, 1.0, 0.7, 1.3, 0.05)]),
    )
    for index in range(rng.randrange(4)):
        case.seeds[rng.randrange(MAX_REQS)] = rng.choice(SEEDS)
        case.sample_pos[rng.randrange(rows * steps)] = POSITIONS[index]
    if rng.random() < 0.3:
        _states_by_position(case, rng)
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        rng.choice(SPOILERS)(case.base_logits[rng.randrange(rows), rng.randrange(steps)], rng)
    return case


def _states_by_position(case: Case, rng: random.Random) -> None:
    """Give the live rows another permutation of request states at each position."""
    states = case.idx_mapping.view(case.rows, case.num_steps)
    live = int((states[:, 0] >= 0).sum())
    for step in range(case.num_steps):
        drawn = rng.sample(range(case.max_reqs), live)
        states[:live, step] = torch.tensor(drawn, dtype=torch.int64, device=case.device)


def _some(column: torch.Tensor, rng: random.Random) -> list[int]:
    """A few ids, some of them on the borders of 16-row tiles."""
    vocab = len(column)
    drawn = [rng.randrange(vocab) for _ in range(rng.randrange(2, 8))]
    border = 16 * rng.randrange(1, max(2, vocab // 16))
    return [*drawn, min(border - 1, vocab - 1), min(border, vocab - 1)]


def _ties(column: torch.Tensor, rng: random.Random) -> None:
    column[_some(column, rng)] = TIE_LOGIT


def _flat(column: torch.Tensor, rng: random.Random) -> None:
    column.fill_(rng.choice([0.0, -0.0, TIE_LOGIT, -TIE_LOGIT]))


def _negative(column: torch.Tensor, rng: random.Random) -> None:
    column.copy_(-column.abs() - 100.0)


def _nan(column: torch.Tensor, rng: random.Random) -> None:
    column[_some(column, rng)] = float("nan")


def _all_nan(column: torch.Tensor, rng: random.Random) -> None:
    column.fill_(float("nan"))


def _masked(column: torch.Tensor, rng: random.Random) -> None:
    column.fill_(float("-inf"))


def _almost_masked(column: torch.Tensor, rng: random.Random) -> None:
    keep = _some(column, rng)
    kept = column[keep].clone()
    column.fill_(float("-inf"))
    column[keep] = kept


def _infinite(column: torch.Tensor, rng: random.Random) -> None:
    column[_some(column, rng)] = float("inf")


SPOILERS = (_ties, _flat, _negative, _nan, _all_nan, _masked, _almost_masked, _infinite)


def directed_cases(subject: Subject, seed: int) -> Iterator[tuple[str, Case]]:
    """Named cases of trouble that is known from other samplers."""
    rows = subject.product.config.MAX_ROWS
    vocab = subject.product.config.DRAWN_COLUMNS
    rng = random.Random(seed)
    every = slice(None)

    def greedy(**options: Any) -> Case:
        return make_case(subject, rows, seed=seed, temperatures=(0.0,), **options)

    case = greedy()
    case.base_logits[every] = TIE_LOGIT
    yield "all logits equal: token 0", case
    for left, right in ((15, 16), (vocab // 2 - 1, vocab // 2), (vocab - 2, vocab - 1), (0, vocab - 1)):
        case = greedy()
        case.base_logits[:, :, [left, right]] = TIE_LOGIT
        yield f"equal maxima at {left} and {right}", case
    case = greedy()
    case.base_logits[:, :, vocab - 1] = TIE_LOGIT
    yield "the last id wins", case
    case = make_case(subject, rows, seed=seed)
    case.base_logits[every] = float("-inf")
    yield "all masked", case
    case = make_case(subject, rows, seed=seed)
    case.base_logits[every] = float("nan")
    yield "all NaN", case
    for column in (0, 5, 17, vocab - 1):
        case = make_case(subject, rows, seed=seed)
        case.base_logits[0, :, column] = float("nan")
        yield f"one NaN at {column} in one row", case
    case = make_case(subject, rows, seed=seed, padding_rows=rows)
    yield "padding rows only", case
    case = make_case(subject, rows, seed=seed, padding_rows=rows // 2)
    case.idx_mapping[case.idx_mapping < 0] = -(2**40) + 1  # negative in 64 bits, 1 in the lowest 32
    yield "padding rows whose low 32 bits look like a state", case
    case = make_case(subject, rows, seed=seed, padding_rows=rows // 2)
    unused = sorted(set(range(MAX_REQS)) - set(case.idx_mapping.tolist()))
    case.temperature[unused] = float("nan")
    yield "NaN temperatures of states that no row has", case
    case = make_case(subject, rows, seed=seed, temperatures=(1.0,))
    case.seeds.fill_(42)
    case.sample_pos.view(rows, -1)[:, 0] = torch.tensor(
        [rng.choice(POSITIONS[1:3]) for _ in range(rows)], device=subject.device
    )
    yield "extreme noise", case
    case = make_case(subject, rows, seed=seed, temperatures=(1.0,))
    case.sample_pos.add_(2**32)
    yield "positions beyond 32 bits", case


def check_seed_dependence(subject: Subject, *, seed: int) -> dict[str, Any]:
    """Tokens depend on seed, position and token alone: not on the batch's other rows, its order, or torch's generator."""
    rows = subject.product.config.MAX_ROWS
    steps = subject.product.config.NUM_STEPS
    case = make_case(subject, rows, seed=seed, temperatures=(0.9,))
    for kernel, sample in subject.samplers(case):
        whole = case.with_fresh_outputs()
        sample(whole)
        for row in range(rows):
            part = slice(row * steps, (row + 1) * steps)
            torch.rand(7, device=subject.device)
            alone = case.replace(
                base_logits=case.base_logits[row : row + 1],
                input_ids=case.input_ids[row * case.query_per_row :],
                idx_mapping=case.idx_mapping[part],
                sample_pos=case.sample_pos[part],
            ).with_fresh_outputs()
            sample(alone)
            got, want = alone.draft_tokens[0].tolist(), whole.draft_tokens[row].tolist()
            if got != want:
                subject.failures[kernel] = f"row {row} alone draws {got}, in a batch of {rows} rows {want}"
    return subject.conclude({"rows": rows})


# --- agreement with the engine's loop ---


def check_agreement(subject: Subject, *, batches: int, seed: int) -> dict[str, Any]:
    """With random weights, tokens agree with the eager loop in more than 99.9 % of positions whose prefix agreed."""
    rows = subject.product.config.MAX_ROWS
    counts: dict[str, list[int]] = {}
    for batch in range(batches):
        case = make_case(subject, rows, seed=seed + batch)
        eager = case.with_fresh_outputs()
        EagerLoop(eager)()
        for kernel, sample in subject.samplers(case):
            got = case.with_fresh_outputs()
            sample(got)
            agreeing, compared = prefix_agreement(got.draft_tokens[:rows], eager.draft_tokens[:rows])
            count = counts.setdefault(kernel, [0, 0])
            count[0] += agreeing
            count[1] += compared
    for kernel, (agreeing, compared) in counts.items():
        if agreeing <= AGREEMENT * compared:
            subject.failures[kernel] = (
                f"base {subject.base}, cache {subject.cache}: {agreeing} of {compared} positions agree with the eager "
                f"loop, expected more than {AGREEMENT:.1%}"
            )
    return subject.conclude({kernel: {"agreeing": pair[0], "positions": pair[1]} for kernel, pair in counts.items()})


# --- CUDA graphs ---


def check_graph(
    subject: Subject,
    *,
    replays: int,
    seed: int,
    oracle_every: int = ORACLE_EVERY,
    rows: int | None = None,
    warm: bool = True,
    before_replay: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """One captured graph, replayed with other seeds, positions, temperatures, anchors, base logits and padding.

    Each replay compares the kernels with each other to the bit, on the device; every ``oracle_every``-th, and the first
    three, with the oracle. ``subject`` has exact weights. ``warm``: compile every variant first, as a server would, not only
    the one that is captured. ``before_replay`` may queue work, such as a delay of one rank.
    """
    rows = subject.product.config.MAX_ROWS if rows is None else rows
    case = make_case(subject, rows, seed=seed)
    graphs: list[Captured] = []
    if subject.chain is not None and warm:
        subject.chain.warmup()
    if subject.fused is not None and warm:
        subject.fused.warmup(DTYPES[subject.cache])
    for kernel, sample in subject.graph_samplers(case):
        mine = case.with_fresh_outputs()
        sample(mine)  # what this shape needs is compiled
        subject.forks = 0  # the next chain call forks its noise: the side stream is captured too
        torch.cuda.synchronize(subject.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sample(mine)
        graphs.append(Captured(kernel, graph, mine))
    generator = torch.Generator(subject.device).manual_seed(seed)
    mappings = _mappings(case, random.Random(seed), min(replays, MAPPINGS))
    different = torch.zeros((), dtype=torch.int64, device=subject.device)
    for replay in range(replays):
        _refill(case, generator, mappings[replay % len(mappings)])
        for captured in graphs:
            captured.case.poison()
            if before_replay is not None:
                before_replay(replay)
            captured.graph.replay()
        if replay < 3 or replay % oracle_every == 0:
            _compare_replay(subject, case, graphs, replay)
        elif len(graphs) > 1:
            first, *others = (captured.case for captured in graphs)
            for other in others:
                different += (first.draft_tokens != other.draft_tokens).sum()
                if first.logits_cache is not None and other.logits_cache is not None:
                    # Bits, so that NaN equals NaN.
                    kind = torch.int16 if first.logits_cache.element_size() == 2 else torch.int32
                    different += (first.logits_cache.view(kind) != other.logits_cache.view(kind)).sum()
    kernels = sorted({captured.kernel for captured in graphs})
    if int(different) and not subject.failures:
        text = f"{int(different)} values differ between {' and '.join(kernels)} over {replays} replays"
        subject.failures |= {kernel: f"base {subject.base}, cache {subject.cache}: {text}" for kernel in kernels}
    return subject.conclude({"replays": replays, "rows": rows, "kernels": kernels})


class Captured(NamedTuple):
    """One sampler's graph and the outputs that it writes."""

    kernel: str
    graph: torch.cuda.CUDAGraph
    case: Case


def _mappings(case: Case, rng: random.Random, count: int) -> torch.Tensor:
    """int64 [count, rows * N] on the case's device: request states of the rows, and how many of the last rows are padding."""
    drawn = []
    for _ in range(count):
        states = rng.sample(range(case.max_reqs), case.rows)
        live = rng.choice([case.rows, rng.randrange(case.rows + 1)])
        drawn.append(states[:live] + [-1] * (case.rows - live))
    return torch.tensor(drawn, dtype=torch.int64, device=case.device).repeat_interleave(case.num_steps, dim=1)


def _refill(case: Case, generator: torch.Generator, mapping: torch.Tensor) -> None:
    """New inputs in the captured tensors. Runs on the device without waiting for it. mapping: int64 [rows * N]."""
    rows, steps, _ = case.base_logits.shape
    vocab = case.vocab_size
    case.base_logits.normal_(0.0, 3.0, generator=generator)
    case.input_ids.random_(0, vocab, generator=generator)
    case.sample_pos.random_(1, 100_000, generator=generator)
    case.seeds.random_(-(2**63), 2**63 - 1, generator=generator)
    case.temperature.uniform_(-0.5, 1.5, generator=generator).clamp_(min=0.0)
    case.idx_mapping.copy_(mapping)
    # Anchors of padding rows are out of range.
    padding = mapping.view(rows, steps)[:, :1] < 0
    case.input_ids.view(rows, case.query_per_row).add_(padding * vocab)


def _compare_replay(subject: Subject, case: Case, graphs: Sequence[Captured], replay: int) -> None:
    want_tokens, want_cache = oracle(case)
    for kernel, _, mine in graphs:
        if not (torch.equal(mine.draft_tokens, want_tokens) and same_cache(mine.logits_cache, want_cache)):
            reason = why_unequal(case, mine.draft_tokens, mine.logits_cache)
            subject.failures.setdefault(kernel, f"graph replay {replay}: {reason}")


# --- bounded waits ---


def provoke_timeout(product: Product, device: torch.device, *, timeout_ms: int) -> dict[str, Any]:
    """Let the chain wait for a CTA that does not exist. Loses this process's CUDA context: run it in one of its own."""
    launch = product.module("launch")
    subject = exact_subject(product, *dtype_pairs(product)[0], device, seed=1)
    sampler = launch.ChainSampler(*subject.weights, **subject.sampler_options(), timeout_ms=timeout_ms)
    case = make_case(subject, 1, seed=2)
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)
    sampler.synchronize()
    variant, arguments = sampler.prepare(1, *case.call_arguments, case.query_per_row)
    sampler.launch(variant, arguments | {"ctas": variant.ctas + 1})
    try:
        sampler.synchronize()
    except launch.ChainTimeoutError as error:
        found = {
            "what": error.what,
            "rank": error.rank,
            "row": error.row,
            "position": error.position,
            "peer": error.peer,
            "timeout_ms": error.timeout_ms,
        }
        want = {
            "what": "grid barrier",
            "rank": 0,
            "row": 0,
            "position": 0,
            "peer": variant.ctas,
            "timeout_ms": timeout_ms,
        }
        if found != want:
            raise CheckFailed({"chain": f"timeout: expected the report {want}, got {found}"}) from error
        return {"timeout_ms": timeout_ms, "message": str(error)}
    raise CheckFailed({"chain": f"expected ChainTimeoutError when it waits for CTA {variant.ctas}, got none"})


def exact_subject(product: Product, base: str, cache: str, device: torch.device, *, seed: int) -> Subject:
    """A subject whose dot products are exact in fp32, so that results do not depend on the order of sums."""
    config, d2t = product.config, draft_map(product, device, seed=seed)
    drafts = config.DRAFT_VOCAB_SIZE
    weights = exact_weights(config.VOCAB_SIZE, config.RANK_DIM, seed=seed, device=device, draft_vocab_size=drafts)
    return Subject(product, base, cache, device, weights, d2t)


def random_subject(product: Product, base: str, cache: str, device: torch.device, *, seed: int) -> Subject:
    """A subject with normally distributed weights."""
    config, d2t = product.config, draft_map(product, device, seed=seed)
    drafts = None if d2t is None else config.DRAFT_VOCAB_SIZE
    shape = (config.VOCAB_SIZE, config.RANK_DIM, 1, 1)
    drawn = random_case(*shape, seed=seed, device=device, draft_vocab_size=drafts, d2t=d2t)
    return Subject(product, base, cache, device, (drawn.embed_weight, drawn.head_weight), d2t)


def draft_map(product: Product, device: torch.device, *, seed: int) -> torch.Tensor | None:
    """A d2t map out of order, int64 [DRAFT_VOCAB_SIZE]; None for a model without one."""
    config = product.config
    if not config.D2T:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    chosen = torch.randperm(config.VOCAB_SIZE, generator=generator, device=device)[: config.DRAFT_VOCAB_SIZE]
    return chosen - torch.arange(config.DRAFT_VOCAB_SIZE, device=device)


def dtype_pairs(product: Product) -> Sequence[tuple[str, str]]:
    """Every (base dtype, cache dtype) that the model's kernels take; the cache's is "none" for greedy drafts."""
    config = product.config
    return [(base, cache) for base in config.BASE_DTYPES for cache in config.CACHE_DTYPES or ("none",)]
