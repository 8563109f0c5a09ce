"""The step sampler without a GPU: checks, reasons, choice of builds, buffers, and the loop itself, over ranks too.

A simulator stands for the kernels. It works on the memory whose addresses it is given, so that what the sampler draws is compared
with the oracle: pointers, strides, positions, packets and the ranks' exchanges all take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import fake_kernels  # noqa: E402
from tests.harness.cases import Case, exact_case, exact_weights  # noqa: E402
from tests.harness.known_cases import Known, run  # noqa: E402
from tests.harness.oracle import why_unequal_on_cpu  # noqa: E402
from tests.harness.step_ranks import SHARED, EmulatedStepSampler, draw_alike  # noqa: E402
from tests.harness.step_simulator import StepSimulator  # noqa: E402

from dspark_kernels._device import (  # noqa: E402
    draft_launcher,
    host,
    kernel_store,
    step_call,
    step_launcher,
    step_reasons,
    vocab_parallel_head,
)

V, N, R, MAX_REQS = 48, 3, 64, 6
BF16 = torch.bfloat16
CPU = torch.device("cpu")
H200 = host.DeviceFacts("NVIDIA H200", (9, 0), 132, 232448)
CONSTANTS: dict[str, Any] = {
    "__file__": "config.py",
    "MODEL": "toy",
    "VOCAB_SIZE": V,
    "DRAFT_VOCAB_SIZE": V,
    "SAMPLING_LIMIT": V,
    "D2T": False,
    "RANK_DIM": R,
    "NUM_STEPS": N,
    "QUERY_PER_ROW": N,
    "BASE_DTYPES": ("bf16", "fp32"),
    "CACHE_DTYPES": ("bf16", "fp32"),
    "NOISE_SCHEME": "murmur3_32",
    "DRAFT_SALT": 1 << 30,
    "STEP_MIX": True,
    "TRANSFORM": "none",
    "MULTIPLIER": 1.0,
    "SOFT_CAP": None,
    "BASE_CAPPED": False,
    "STEP_BLOCKS": ((1, 1024), (4, 2048)),
    "STEP_DEFAULT_BLOCK": 8192,
    "STEP_PDL_MAX_ROWS": 3,
    "PACKET_WORDS": 4,
    "PACKET_FIELDS": {"score": (0, 1), "nan": (1, 1), "token": (2, 2)},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CPU that passes for a GPU; `capturing` says whether a graph is being captured."""
    state = SimpleNamespace(capturing=False)
    stream = SimpleNamespace(cuda_stream=0x7F00_1234_5678_9ABC, synchronize=lambda: None)
    monkeypatch.setattr(step_reasons, "why_not_platform", lambda weight: None)
    monkeypatch.setattr(kernel_store, "why_none", lambda recipes, device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU.index)
    return state


def toy(**changes: Any) -> Any:
    """A step sampler's class whose kernels are simulated, with other constants."""
    constants = SimpleNamespace(**(CONSTANTS | changes))
    simulator = StepSimulator(constants)

    class Toy(step_launcher.StepLauncher):
        config = constants  # type: ignore[assignment]
        load_step = staticmethod(lambda: simulator)
        provide = staticmethod(fake_kernels.provide)
        kernels = simulator

    return Toy


WEIGHTS = exact_weights(V, R, seed=1)


def case_of(rows: int, *, seed: int = 3, weights: Any = WEIGHTS, **options: Any) -> Case:
    return exact_case(V, R, N, rows, seed=seed, max_reqs=MAX_REQS, weights=weights, **options)


def sample(sampler: Any, case: Case) -> None:
    sampler.sample(*case.call_arguments, query_per_row=case.query_per_row)


# --- what is drawn ---


@pytest.mark.parametrize("layout", ["plain", "odd", "steps_first"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6])
def test_draws_what_the_oracle_draws(gpu: Any, rows: int, layout: Any) -> None:
    case = case_of(rows, layout=layout, padding_rows=rows // 3, query_per_row=N + 1, cache_columns=V + 3)
    sample(toy()(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16), case)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


@pytest.mark.parametrize(("base", "cache"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32")])
def test_other_dtypes_draw_what_the_oracle_draws(gpu: Any, base: str, cache: str) -> None:
    case = case_of(4, base_dtype=host.DTYPES[base], cache_dtype=host.DTYPES[cache], layout="odd")
    sample(toy()(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=host.DTYPES[cache]), case)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


def test_a_padded_head_is_multiplied_as_it_is_and_its_padding_is_no_candidate(gpu: Any) -> None:
    embed, head = WEIGHTS
    padded = torch.cat([head, torch.full((5, R), float("nan"), dtype=BF16)])
    sampler = toy()(embed, padded, max_reqs=MAX_REQS, cache_dtype=BF16)
    case = case_of(3)
    assert sampler.call_views(3).bias.shape == (3, V + 5)
    assert not sampler.variant(3, case.base_logits, case.logits_cache).vector  # rows of 53 bf16
    sample(sampler, case)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


def test_a_reload_into_the_same_storage_is_seen(gpu: Any) -> None:
    weights = tuple(weight.clone() for weight in WEIGHTS)
    sampler = toy()(*weights, max_reqs=MAX_REQS, cache_dtype=BF16)
    sample(sampler, case_of(2, weights=weights))
    for weight, other in zip(weights, exact_weights(V, R, seed=9), strict=True):
        weight.copy_(other)
    case = case_of(2, weights=weights)
    sample(sampler, case)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


def test_one_kernel_behind_each_product(gpu: Any) -> None:
    kind = toy()
    sample(kind(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16), case_of(2))
    assert kind.kernels.launched == ["anchor", *["step"] * N]


# --- ranks ---


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("shards", [False, True], ids=["whole base", "own columns"])
def test_ranks_draw_what_the_oracle_draws(gpu: Any, world: int, shards: bool) -> None:
    ranks = EmulatedStepSampler(launch_of(toy()), WEIGHTS, world=world, max_reqs=MAX_REQS, cache_dtype=BF16)
    for rows in (1, 5):
        case = case_of(rows, padding_rows=rows // 3, layout="odd", cache_columns=V + 3)
        for got in ranks.sample(case, shards=shards):
            assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None


def test_ranks_follow_the_nan_rules(gpu: Any) -> None:
    ranks = EmulatedStepSampler(launch_of(toy()), WEIGHTS, world=4, max_reqs=MAX_REQS, cache_dtype=BF16)
    case = case_of(4, temperatures=(0.0,))
    case.base_logits[0, :, [13, 40]] = float("nan")  # of ranks 1 and 3
    case.base_logits[1] = float("nan")
    case.base_logits[2] = float("-inf")
    for got in ranks.sample(case):
        assert got.draft_tokens[:3].tolist() == [[13] * N, [0] * N, [0] * N]
        assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None


def test_widths_that_are_no_whole_vectors_go_entry_by_entry(gpu: Any) -> None:
    """Shards of 6 columns: rows of the flat shard are padded to 8."""
    ranks = EmulatedStepSampler(launch_of(toy()), WEIGHTS, world=8, max_reqs=MAX_REQS, cache_dtype=BF16)
    case = case_of(3)
    for got in ranks.sample(case, shards=True):
        assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None
    assert {rank.call_views(3).shards.own.numel() for rank in ranks.ranks} == {3 * N * 8}
    assert all(not build[-2] for build in ranks.ranks[0].kernels.compiled if build[0] in ("step", "fill"))


def test_another_packet_layout(gpu: Any) -> None:
    changes = {"PACKET_WORDS": 2, "PACKET_FIELDS": {"token": (0, 1), "score": (1, 1)}}
    ranks = EmulatedStepSampler(launch_of(toy(**changes)), WEIGHTS, world=2, max_reqs=MAX_REQS, cache_dtype=BF16)
    case = case_of(3)
    for got in ranks.sample(case):
        assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None


@pytest.mark.parametrize(("known", "world"), SHARED, ids=str)
def test_known_cases_of_ranks(gpu: Any, known: Known, world: int) -> None:
    vocab = known.model["vocab_size"]
    kind = toy(VOCAB_SIZE=vocab, DRAFT_VOCAB_SIZE=vocab, SAMPLING_LIMIT=vocab)
    run(known, partial(draw_alike, launch_of(kind), world), CPU, kind.config, why_unequal_on_cpu)


def launch_of(kind: Any) -> Any:
    """What `EmulatedStepSampler` takes for a launch.py."""
    return SimpleNamespace(StepSampler=kind, VocabParallelHead=vocab_parallel_head.VocabParallelHead)


# --- other noise, and greedy drafts ---

WIDE_PACKET = {"score64": (0, 2), "token": (2, 2)}
SCHEMES: dict[str, dict[str, Any]] = {
    "murmur3_64": {"NOISE_SCHEME": "murmur3_64", "PACKET_FIELDS": WIDE_PACKET},
    "philox_32": {"NOISE_SCHEME": "philox_32"},
    "greedy": {"CACHE_DTYPES": ()},
}
DRAFTS = 16  # of a reduced vocabulary
LIMIT = 30  # a sampling limit that leaves the last ranks without a candidate


def scheme_case(scheme: str, rows: int, **options: Any) -> Case:
    """A case of a scheme; greedy drafts have no cache."""
    noise = {"cache_dtype": None} if scheme == "greedy" else {"noise_scheme": scheme}
    case = case_of(rows, **(noise | options))
    return case


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_schemes_draw_what_the_oracle_draws(gpu: Any, scheme: str, world: int) -> None:
    cache = None if scheme == "greedy" else BF16
    kind = toy(**SCHEMES[scheme], SAMPLING_LIMIT=LIMIT)
    ranks = EmulatedStepSampler(launch_of(kind), WEIGHTS, world=world, max_reqs=MAX_REQS, cache_dtype=cache)
    for rows, layout in ((1, "plain"), (4, "odd")):
        case = scheme_case(scheme, rows, layout=layout, padding_rows=rows // 3, sampling_limit=LIMIT)
        case.base_logits[0, :, [13, 25]] = float("nan")
        case.base_logits[rows - 1, 1:] = float("-inf")
        for got in ranks.sample(case, shards=True):
            assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["murmur3_32", *SCHEMES])
def test_reduced_vocabularies_draw_what_the_oracle_draws(gpu: Any, scheme: str, world: int) -> None:
    """Token ids out of order: ties go to the lowest token id, of greedy drafts to the lowest draft id, of whatever rank."""
    cache = None if scheme == "greedy" else BF16
    weights = WEIGHTS[0], WEIGHTS[1][:DRAFTS].contiguous()
    case = scheme_case(scheme, 5, weights=weights, draft_vocab_size=DRAFTS, sampling_limit=LIMIT, padding_rows=1)
    weights[1][:] = 0
    case.base_logits[0] = 1.0
    case.base_logits[1] = 0.0
    case.base_logits[1, :, [2, 9]] = 2.0
    case.base_logits[2, :, [5, 6, 11]] = float("nan")
    kind = toy(**SCHEMES.get(scheme, {}), D2T=True, DRAFT_VOCAB_SIZE=DRAFTS, SAMPLING_LIMIT=LIMIT)
    options = {"world": world, "max_reqs": MAX_REQS, "cache_dtype": cache, "d2t": case.d2t}
    for got in EmulatedStepSampler(launch_of(kind), weights, **options).sample(case):
        assert why_unequal_on_cpu(case, got.draft_tokens, got.logits_cache) is None


def test_greedy_drafts_read_no_request_state(gpu: Any) -> None:
    """As in the fused loop, the arguments that only noise and cache need may be anything; a cache is refused."""
    case = scheme_case("greedy", 3)
    sampler = toy(**SCHEMES["greedy"])(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=None)
    base, anchors, *_, tokens = case.call_arguments
    sampler.sample(base, anchors, None, None, None, None, None, tokens, query_per_row=case.query_per_row)
    assert why_unequal_on_cpu(case, tokens, None) is None
    with pytest.raises(ValueError, match=r"logits_cache: expected None for greedy drafts, got bf16 \[6, 3, 48\]"):
        sampler.sample(*case_of(3).call_arguments)


def test_greedy_drafts_launch_no_fill_and_warm_up_all_they_launch(gpu: Any) -> None:
    kind = toy(**SCHEMES["greedy"])
    sampler = kind(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=None)
    sampler.warmup()
    gpu.capturing = True
    del kind.kernels.launched[:]
    sample(sampler, scheme_case("greedy", 2))
    assert kind.kernels.launched == ["anchor", *["step"] * N]


# --- reduced vocabulary ---


def test_a_reduced_vocabulary_is_cached_by_target_id(gpu: Any) -> None:
    drafts = 10
    kind = toy(D2T=True, DRAFT_VOCAB_SIZE=drafts)
    targets = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:drafts]
    embed, head = WEIGHTS[0], WEIGHTS[1][:drafts].contiguous()
    sampler = kind(embed, head, max_reqs=MAX_REQS, cache_dtype=BF16, d2t=targets - torch.arange(drafts))
    case = case_of(3, temperatures=(0.0,))
    base = case.base_logits[:, :, :drafts].contiguous()
    sampler.sample(base, *case.call_arguments[1:], query_per_row=case.query_per_row)
    for row in range(3):
        prev = int(case.input_ids[row * case.query_per_row])
        for step in range(N):
            bias = (head.float() @ embed[prev].float()).bfloat16()
            want = torch.full((V,), float("-inf"), dtype=BF16)
            want[targets] = base[row, step] + bias
            state = int(case.idx_mapping[row * N + step])
            assert torch.equal(case.logits_cache[state, step], want)
            best = want == want.max()
            prev = int(torch.nonzero(best)[0])
            assert int(case.draft_tokens[row, step]) == prev


# --- builds ---


def test_the_table_of_blocks() -> None:
    config = SimpleNamespace(**CONSTANTS)
    assert [step_call.block_for(config, rows) for rows in (1, 2, 4, 5, 500)] == [1024, 2048, 2048, 8192, 8192]


def test_every_reachable_variant_is_listed_once_with_its_fewest_rows() -> None:
    config = SimpleNamespace(**CONSTANTS)
    found = [(rows, *variant) for rows, variant in step_call.variants(config, 6, V)]
    assert found == [
        (rows, block, pdl, vector)
        for rows, block, pdl in ((1, 1024, True), (2, 2048, True), (4, 2048, False), (5, 8192, False))
        for vector in (True, False)
    ]
    assert [variant.vector for _, variant in step_call.variants(config, 1, V + 1)] == [False]


@pytest.mark.parametrize("world", [1, 2])
def test_warmup_compiles_what_any_call_can_take_and_no_call_anything_else(gpu: Any, world: int) -> None:
    kind = toy()
    if world == 1:
        alone = kind(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16)
        alone.warmup()
        draw = partial(sample, alone)
    else:
        options = {"world": world, "max_reqs": MAX_REQS, "cache_dtype": BF16}
        draw = EmulatedStepSampler(launch_of(kind), WEIGHTS, **options).sample
    compiled = list(kind.kernels.compiled)
    assert len(compiled) == world * len(set(compiled))  # each rank compiles each build once
    steps = {build for build in compiled if build[0] == "step"}
    assert len(steps) == 4 * 2 * 2  # rows' choices, vectors, dtypes of the base logits
    gpu.capturing = True
    for rows in range(1, MAX_REQS + 1):
        for layout in ("plain", "odd"):
            for base in (torch.bfloat16, torch.float32):
                draw(case_of(rows, layout=layout, base_dtype=base))
    assert kind.kernels.compiled == compiled


def test_warmup_launches_what_it_compiled(gpu: Any) -> None:
    """A first launch loads a kernel, which must not happen under capture either."""
    sampler = toy()(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16)
    sampler.compile()
    launched: set[Any] = set()
    for build, block in sampler._kernels.items():
        block.launch = partial(note_launch, launched, build, block.launch)
    sampler.warmup()
    assert launched == set(sampler._kernels)


def note_launch(launched: set[Any], build: Any, launch: Any, *arguments: Any) -> None:
    launched.add(build)
    launch(*arguments)


def test_nothing_compiles_under_capture(gpu: Any) -> None:
    kind = toy()
    sampler, case = kind(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16), case_of(2)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"the anchor kernel pdl True is not compiled; call warmup\(\)"):
        sample(sampler, case)
    gpu.capturing = False
    sample(sampler, case)
    gpu.capturing = True
    sample(sampler, case)
    odd = case_of(2, layout="odd")
    with pytest.raises(RuntimeError, match="the step kernel pdl True block 2048 base bf16 cache bf16 is not compiled"):
        sample(sampler, odd)
    assert kind.kernels.launched == ["anchor", *["step"] * N] * 2


@pytest.mark.parametrize("operand", ["base", "cache", "head", "none"])
def test_vectors_need_every_operand_aligned(gpu: Any, operand: str) -> None:
    plain, odd = case_of(3), case_of(3, layout="odd")
    embed, head = WEIGHTS
    if operand == "head":
        head = torch.cat([head, head[:1]])
    sampler = toy()(embed, head, max_reqs=MAX_REQS, cache_dtype=BF16)
    base = (odd if operand == "base" else plain).base_logits
    cache = (odd if operand == "cache" else plain).logits_cache
    assert sampler.variant(3, base, cache) == (2048, True, operand == "none")


# --- one call ---


def test_views_are_the_leading_parts_of_one_buffer(gpu: Any) -> None:
    part = vocab_parallel_head.VocabParallelHead(WEIGHTS[1], vocab_size=V, rank=1, world=2)
    kind = toy()
    kind.why_not_ranks = classmethod(lambda cls, *a: None)
    sampler = kind(WEIGHTS[0], part, max_reqs=MAX_REQS, cache_dtype=BF16)
    small, large = sampler.call_views(2), sampler.call_views(MAX_REQS)
    assert small.embeddings.shape == (N + 1, 2, R) and large.embeddings.shape == (N + 1, MAX_REQS, R)
    assert small.bias.shape == (2, V // 2)
    assert small.packets.own.shape == (2, 4) and small.packets.gathered.shape == (2, 2, 4)
    assert small.shards.own.shape == (2 * N * V // 2,) and small.shards.gathered.shape == (2, 2 * N * V // 2)
    for mine, other in zip(small[:2], large[:2], strict=True):
        assert mine.data_ptr() == other.data_ptr() and mine.is_contiguous()
    assert small.shards.gathered.data_ptr() == large.shards.gathered.data_ptr()
    with pytest.raises(ValueError, match="rows: expected an int from 1 to 6, got 7"):
        sampler.call_views(7)


MISFITS = {
    "base_logits dtype": ("base_logits", torch.zeros((2, N, V), dtype=torch.float16), TypeError, "got fp16"),
    "base_logits steps": ("base_logits", torch.zeros((2, N + 1, V)), ValueError, "got fp32 [2, 4, 48]"),
    "base_logits narrow": ("base_logits", torch.zeros((2, N, V - 1)), ValueError, "[2, 3, >= 48]"),
    "base_logits stride": ("base_logits", torch.zeros((2, N, 2 * V))[:, :, ::2], ValueError, "last stride 1"),
    "base_logits rows": ("base_logits", torch.zeros((7, N, V)), ValueError, "from 1 to 6, got 7"),
    "base_logits rank": ("base_logits", torch.zeros((2, V)), ValueError, "got fp32 [2, 48]"),
    "base_logits type": ("base_logits", [0.0], TypeError, "got list"),
    "input_ids dtype": ("input_ids", torch.zeros(6, dtype=torch.int64), TypeError, "expected int32"),
    "input_ids short": ("input_ids", torch.zeros(2, dtype=torch.int32), ValueError, "[>= 3]"),
    "idx_mapping dtype": ("idx_mapping", torch.zeros(6, dtype=torch.int32), TypeError, "got int32"),
    "sample_pos short": ("sample_pos", torch.zeros(5, dtype=torch.int64), ValueError, "[>= 6]"),
    "temperature dtype": ("temperature", torch.zeros(6, dtype=torch.float64), TypeError, "got fp64"),
    "seeds dtype": ("seeds", torch.zeros(6), TypeError, "expected int64"),
    "cache dtype": ("logits_cache", torch.zeros((6, N, V)), TypeError, "expected bf16"),
    "cache stride": ("logits_cache", torch.zeros((6, N, 2 * V), dtype=BF16)[:, :, ::2], ValueError, "last stride 1"),
    "cache requests": ("logits_cache", torch.zeros((5, N, V), dtype=BF16), ValueError, "[>= 6, 3, >= 48]"),
    "draft_tokens dtype": ("draft_tokens", torch.zeros((2, N), dtype=torch.int32), TypeError, "expected int64"),
    "draft_tokens rows": ("draft_tokens", torch.zeros((1, N), dtype=torch.int64), ValueError, "[>= 2, 3]"),
    "query_per_row": ("query_per_row", 0, ValueError, "at least 1"),
}
NAMES = (
    "base_logits", "input_ids", "idx_mapping", "sample_pos", "temperature", "seeds", "logits_cache", "draft_tokens"
)  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_every_argument_is_checked_before_anything_is_launched(gpu: Any, misfit: str) -> None:
    name, value, error, text = MISFITS[misfit]
    case, kind = case_of(2), toy()
    arguments = dict(zip(NAMES, case.call_arguments, strict=True)) | {"query_per_row": 2}
    sampler = kind(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16)
    with pytest.raises(error) as caught:
        sampler.sample(**(arguments | {name: value}))
    assert name in str(caught.value) and "expected" in str(caught.value)
    if name != "query_per_row":
        assert text in str(caught.value)
    assert kind.kernels.launched == []


def test_another_current_device_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = toy()(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(ValueError, match="current CUDA device: expected None, this sampler's, got 3"):
        sample(sampler, case_of(2))


# --- reasons to decline ---


def group_of(backend: str, size: int, rank: int) -> Any:
    return SimpleNamespace(backend=backend, size=lambda: size, rank=lambda: rank)


def shard(rank: int = 0, world: int = 2, vocab: int = V) -> Any:
    return vocab_parallel_head.VocabParallelHead(
        torch.zeros((vocab, R), dtype=BF16), vocab_size=vocab, rank=rank, world=world
    )


GROUPS = {"group": group_of("gloo", 2, 0), "device_group": group_of("nccl", 2, 0)}


@pytest.mark.parametrize(
    ("changes", "constants", "expected"),
    [
        ({}, {}, None),
        ({"embed_weight": None}, {}, "the Markov embedding is missing"),
        ({"head_weight": None}, {}, "the Markov head is missing"),
        ({"fp64_noise": True}, {}, "noise.scheme, murmur3_32, got fp64"),
        ({"fp64_noise": False}, {"NOISE_SCHEME": "murmur3_64"}, "noise.scheme, murmur3_64, got fp32"),
        ({"fp64_noise": True}, {"NOISE_SCHEME": "murmur3_64"}, None),
        ({"fp64_noise": True, "cache_dtype": None}, {"CACHE_DTYPES": ()}, None),
        ({}, {"CACHE_DTYPES": ()}, "cache_dtype: expected None, got torch.bfloat16"),
        ({"cache_dtype": None}, {}, "cache_dtype: expected bf16 or fp32, got None"),
        (
            {"cache_dtype": None, "logits_cache": torch.zeros((MAX_REQS, N, V))}, {"CACHE_DTYPES": ()},
            "logits_cache: expected None for greedy drafts"
        ),
        ({"draft_topk": 20}, {}, "draft_topk: expected drafts from the whole vocabulary (None), got the 20 best"),
        ({"watermark": True}, {}, "watermark: expected drafts by Gumbel noise alone"),
        ({"adaptive_verification": True}, {}, "adaptive_verification: expected none"),
        ({"head_weight": torch.zeros((V, R))}, {}, "head_weight: expected bf16 [>= 48, 64], last stride 1"),
        ({"head_weight": torch.zeros((V - 1, R), dtype=BF16)}, {}, "head_weight: expected bf16 [>= 48, 64]"),
        ({"embed_weight": torch.zeros((V, 2 * R), dtype=BF16)[:, :R]}, {}, "embed_weight: expected bf16 [>= 48, 64], contiguous"),
        ({"embed_weight": torch.zeros((V, R))}, {}, "embed_weight: expected bf16"),
        ({"embed_weight": torch.zeros((V - 1, R), dtype=BF16)}, {}, "got bf16 [47, 64]"),
        ({"cache_dtype": torch.float16}, {}, "cache_dtype: expected bf16 or fp32, got torch.float16"),
        ({"logits_cache": torch.zeros((MAX_REQS, N, V))}, {}, "logits_cache: expected bf16 [>= 6, 3, >= 48]"),
        (
            {"logits_cache": torch.zeros((MAX_REQS, N, 2 * V), dtype=BF16)[:, :, ::2]}, {}, "logits_cache: expected bf16"
        ),
        ({"max_reqs": 0}, {}, "max_reqs: expected an int of at least 1, got 0"),
        ({"d2t": torch.zeros(V, dtype=torch.int64)}, {}, None),
        ({"d2t": torch.ones(V, dtype=torch.int64)}, {}, "d2t: expected None or zeros"),
        ({}, {"D2T": True}, "d2t: expected int64 [48]"),
        ({"group": GROUPS["group"]}, {}, "group, device_group: expected None without a sharded head"),
        ({"head_weight": shard()}, {}, "group: expected the process group of the 2 ranks that share the head, got None"),
        ({"head_weight": shard(), **GROUPS}, {}, None),
        ({"head_weight": shard(rank=1), **GROUPS}, {}, "expected rank 0 to hold slice 0 of the head, got slice 1"),
        ({"head_weight": shard(world=4), **GROUPS}, {}, "group: expected 4 ranks, as the head has, got 2"),
        ({"head_weight": shard(vocab=V + 2)}, {}, "head_weight: expected a head of 48 rows, got 50"),
        (
            {"head_weight": shard(), **GROUPS, "device_group": group_of("gloo", 2, 0)},
            {},
            "device_group: expected backend nccl, got gloo",
        ),
    ],
)  # fmt: skip
def test_why_not(gpu: Any, monkeypatch: pytest.MonkeyPatch, changes: Any, constants: Any, expected: str | None) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: group.backend)
    given = {"embed_weight": WEIGHTS[0], "head_weight": WEIGHTS[1], "max_reqs": MAX_REQS, "cache_dtype": BF16}
    reason = toy(**constants).why_not(**(given | changes))
    assert reason is expected if expected is None else reason is not None and expected in reason, reason


def test_why_not_on_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step_reasons.why_not_platform(WEIGHTS[0])
    assert found is not None and "expected a tensor on a CUDA device, got bf16 [48, 64]" in found
    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(step_reasons, "isinstance", lambda value, kind: True, raising=False)
    monkeypatch.setattr(host, "read_device", lambda device: H200._replace(capability=(8, 0)))
    assert "expected compute capability 9.0 or later" in (step_reasons.why_not_platform(weight) or "")
    monkeypatch.setattr(host, "read_device", lambda device: H200)
    assert step_reasons.why_not_platform(weight) is None


def test_a_sampler_that_cannot_be_built_raises_the_reason(gpu: Any) -> None:
    with pytest.raises(ValueError, match="toy: no step sampler: the Markov head is missing"):
        toy()(WEIGHTS[0], None, max_reqs=MAX_REQS, cache_dtype=BF16)
    assert toy().create(WEIGHTS[0], None, max_reqs=MAX_REQS, cache_dtype=BF16) is None
    assert toy().create(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16) is not None


def test_batches_are_declined_by_shape_and_dtype_only(gpu: Any) -> None:
    sampler = toy()(*WEIGHTS, max_reqs=MAX_REQS, cache_dtype=BF16)
    assert sampler.why_not_call(6) is None
    assert "1 to 6 request rows, got 7" in (sampler.why_not_call(7) or "")
    assert "bf16 or fp32 [2, 3, >= 48]" in (sampler.why_not_call(2, torch.zeros((2, N, V), dtype=torch.float16)) or "")


# --- the sharded head ---


def test_a_ranks_rows_lie_on_padded_storage() -> None:
    head = torch.randn((20, R)).bfloat16()
    part = vocab_parallel_head.VocabParallelHead(head, vocab_size=20, rank=1, world=2)
    assert (part.first, part.width) == (10, 10)
    assert part.storage.shape == (16, R) and torch.equal(part.weight, head[10:])
    assert not part.storage[10:].any()
    embedding = torch.randn((3, R)).bfloat16()
    bias = part.local_bias(embedding)
    assert bias.shape == (3, 10) and bias.stride() == (16, 1)
    assert torch.equal(bias, torch.nn.functional.linear(embedding, part.storage)[:, :10])
    out = torch.empty((3, 16), dtype=BF16)
    assert part.local_bias(embedding, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :10], bias)


def test_weights_are_loaded_again_into_the_same_storage() -> None:
    part = vocab_parallel_head.VocabParallelHead(torch.zeros((20, R), dtype=BF16), vocab_size=20, rank=0, world=2)
    address = part.storage.data_ptr()
    whole, own = torch.randn((20, R)).bfloat16(), torch.randn((10, R)).bfloat16()
    part.load(whole)
    assert torch.equal(part.weight, whole[:10])
    part.load(own)
    assert torch.equal(part.weight, own)
    parameter = torch.nn.Parameter(torch.randn((10, R)).bfloat16(), requires_grad=False)
    values = parameter.detach().clone()
    part.adopt(parameter)
    assert torch.equal(part.weight, values) and parameter.data_ptr() == address
    parameter.copy_(own)  # what a loader does
    assert torch.equal(part.weight, own) and part.storage.data_ptr() == address
    assert not part.storage[10:].any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"world": 3}, "world: expected a power of two, got 3"),
        ({"rank": 4}, "rank: expected an int below world, 4, got 4"),
        ({"vocab_size": 18}, "vocab_size: expected a multiple of the 4 ranks, got 18"),
        (
            {"weight": torch.zeros((20, R))},
            "weight: expected bf16 [5, R], a rank's rows, or [>= 20, R], got fp32 [20, 64]",
        ),
        ({"weight": torch.zeros((6, R), dtype=BF16)}, "weight: expected bf16 [5, R]"),
        ({"rank": -1}, "rank: expected an int of at least 0, got -1"),
    ],
)
def test_heads_that_cannot_be_shared(changes: Any, expected: str) -> None:
    given = {"weight": torch.zeros((20, R), dtype=BF16), "vocab_size": 20, "rank": 0, "world": 4} | changes
    assert expected in (vocab_parallel_head.VocabParallelHead.why_not(given.pop("weight"), **given) or "")


def test_other_weights_than_the_heads_are_refused() -> None:
    part = vocab_parallel_head.VocabParallelHead(torch.zeros((20, R), dtype=BF16), vocab_size=20, rank=0, world=2)
    with pytest.raises(ValueError, match="weight: expected 64 columns"):
        part.load(torch.zeros((20, R + 2), dtype=BF16))
    with pytest.raises(ValueError, match=r"parameter: expected \[10, R\], this rank's rows"):
        part.adopt(torch.nn.Parameter(torch.zeros((20, R), dtype=BF16)))


# --- chain, step kernels or fused loop ---


class Fake:
    """Stands for a sampler: takes some row counts, and notes its calls."""

    most, declined, world = 100, None, 1
    built: list[dict[str, Any]] = []

    def __init__(self, *weights: Any, **options: Any) -> None:
        if self.declined is not None:
            raise ValueError(self.declined)
        self.weights, self.options, self.calls, self.noise_pending = weights, options, [], False
        type(self).built = [options]

    def why_not_call(self, rows: int, base_logits: Any = None) -> str | None:
        return None if rows <= self.most else f"at most {self.most} rows, got {rows}"

    def sample(self, base_logits: Any, *others: Any, query_per_row: int) -> None:
        self.calls.append(base_logits.shape[0])

    def discard_noise(self) -> None:
        self.noise_pending = False


@pytest.fixture
def kinds() -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(
        chain=type("Chain", (Fake,), {"most": 2}),
        step=type("Step", (Fake,), {"most": 4}),
        fused=type("Fused", (Fake,), {}),
    )


def draft_of(kinds: Any, head: Any = WEIGHTS[1], **options: Any) -> Any:
    class Toy(draft_launcher.DraftLauncher):
        config = SimpleNamespace(**CONSTANTS)  # type: ignore[assignment]
        chain_sampler, step_sampler, fused_loop = kinds.chain, kinds.step, kinds.fused

    return Toy(WEIGHTS[0], head, max_reqs=MAX_REQS, cache_dtype=BF16, **options)


def test_the_first_that_takes_a_batch_draws_it(kinds: Any) -> None:
    draft = draft_of(kinds)
    for rows in (1, 2, 3, 4, 5, 5):
        draft.sample(*case_of(rows).call_arguments)
    assert (draft.chain.calls, draft.step.calls, draft.fused.calls) == ([1, 2], [3, 4], [5, 5])
    assert draft.served == {"chain": 2, "step": 2, "fused": 2}
    assert draft.path(3) == (
        "step",
        "one kernel a position behind the engine's product, for any number of rows; no chain: at most 2 rows, got 3",
    )
    assert [str(choice) for choice in draft.explain(5)] == [
        "chain: not: at most 2 rows, got 5",
        "step: not: at most 4 rows, got 5",
        "fused: takes it: one launch a position, for any number of rows",
    ]


def test_a_kernel_that_cannot_be_built_is_passed_over_with_its_reason(kinds: Any) -> None:
    kinds.chain.declined = "toy: no chain sampler: no plan for this GPU"  # as the sampler itself puts it
    draft = draft_of(kinds)
    assert draft.chain is None and draft.path(1)[0] == "step"
    assert draft.path(1)[1].endswith("; no chain: no plan for this GPU")
    assert draft.declined == {"chain": "no plan for this GPU"}
    kinds.step = None
    draft = draft_of(kinds)
    assert draft.path(1)[0] == "fused" and "no step: the model has no step kernel" in draft.path(1)[1]


def test_engine_bias_keeps_to_the_step_kernels(kinds: Any) -> None:
    draft = draft_of(kinds, engine_bias=True)
    draft.sample(*case_of(1).call_arguments)
    assert draft.step.calls == [1] and draft.chain is draft.fused is None
    with pytest.raises(ValueError, match="expected a batch that a kernel takes: no chain: engine_bias .* got 5"):
        draft.path(5)
    kinds.step.declined = "no CUDA"
    with pytest.raises(ValueError, match="expected the step kernels to take every batch, but .*step: no CUDA"):
        draft_of(kinds, engine_bias=True)


def test_a_sharded_head_leaves_no_fused_loop(kinds: Any) -> None:
    part, groups = shard(rank=1), {"group": object(), "device_group": object()}
    draft = draft_of(kinds, part, **groups)
    assert draft.fused is None and draft.path(3)[0] == "step" and draft.path(2)[0] == "chain"
    assert draft.chain.weights[1].data_ptr() == part.storage.data_ptr() and draft.chain.weights[1].shape == (V // 2, R)
    assert draft.chain.options["group"] is groups["group"] and draft.chain.options["shard_width"] == V // 2
    assert draft.step.weights[1] is part and draft.step.options["device_group"] is groups["device_group"]
    kinds.step.declined = "no CUDA"
    with pytest.raises(ValueError, match="expected the step kernels to take every batch"):
        draft_of(kinds, part, **groups)


def test_own_columns_are_accepted_where_every_batch_can_have_them(gpu: Any, kinds: Any) -> None:
    assert not draft_of(kinds, group=object()).accepts_shard((0, V))
    kinds.step = toy()
    kinds.step.why_not_ranks = classmethod(lambda cls, *a: None)
    draft = draft_of(kinds, shard(rank=1))
    assert draft.accepts_shard((V // 2, V // 2))
    assert not draft.accepts_shard((0, V // 2)) and not draft.accepts_shard(None)


def test_a_whole_head_is_drawn_from_by_every_rank_alone(kinds: Any) -> None:
    draft = draft_of(kinds, group=object())
    assert draft.chain.options["group"] is not None
    assert not {"group", "device_group"} & set(draft.step.options) and draft.fused is not None
