"""Failures that are public from other samplers, and shapes that public drafts have, as small inputs with their right outcome.

Each is a generator: it yields a `Case`, is sent that call's (draft tokens, logits cache), and asserts what must hold. `run` draws the
cases by any kernel and compares every call with the oracle besides. The models are toys, of rank 64 where nothing else is said; `model` of a `Known` are the
options of `toy_spec`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .cases import POISON_LOGIT, POISON_TOKEN, Case, Transform, exact_case

NAN, INF = float("nan"), float("inf")
RANK = 64
LARGE = 129280  # the vocabulary in which the extreme hashes of seed 42 were found
LARGEST_NOISE = (49061, 95872)  # sample position and token whose hash is 0: noise 22.87
SMALLEST_NOISE = (17057, 114765)  # whose hash is 2^32 - 1, so that u rounds to 1: noise -2.81
ODD_SEEDS = (0, -1, 2**31, 2**32, -(2**63), 2**63 - 1)
MUSE = Transform("sum", 0.19611613513818404, 20.0)

Outputs = tuple[torch.Tensor, torch.Tensor | None]
Trial = Generator[Case, Outputs, None]
Draw = Callable[[Case], Outputs]
Compare = Callable[[Case, torch.Tensor, torch.Tensor | None], str | None]


@dataclass(frozen=True)
class Known:
    """One failure: the toy model that it needs and the trial itself."""

    name: str
    model: dict[str, Any]  # vocab_size and other options of `toy_spec`
    trial: Callable[[torch.device, ModuleType], Trial]

    def __str__(self) -> str:
        return self.name


KNOWN: list[Known] = []


def known(vocab_size: int, **model: Any) -> Callable[[Callable[..., Trial]], Callable[..., Trial]]:
    """Register a trial, by its function's name, for a toy model of that vocabulary. It may also take the model's config."""

    def add(function: Callable[..., Trial]) -> Callable[..., Trial]:
        takes_config = len(inspect.signature(function).parameters) > 1
        trial = function if takes_config else without_config(function)
        KNOWN.append(Known(function.__name__, {"vocab_size": vocab_size, **model}, trial))
        return function

    return add


def without_config(function: Callable[[torch.device], Trial]) -> Callable[[torch.device, ModuleType], Trial]:
    """A trial that does not look at the model's constants."""
    return lambda device, config: function(device)


def run(known: Known, draw: Draw, device: torch.device, config: ModuleType, compare: Compare) -> None:
    """Run a trial; AssertionError where a call differs from the oracle or its outcome is not the right one.

    Args:
        known: the trial.
        draw: draws a case into outputs of its own.
        device: of the tensors.
        config: the toy model's constants.
        compare: the oracle's comparison for this device: the first difference in words, or None.
    """
    trial = known.trial(device, config)
    case = next(trial)
    while True:
        tokens, cache = draw(case)
        reason = compare(case, tokens, cache)
        assert reason is None, reason
        try:
            case = trial.send((tokens, cache))
        except StopIteration:
            return


def with_logits(case: Case, logits: torch.Tensor) -> Case:
    """The case with these base logits, [V] for all or [rows, N, V], and no bias."""
    return case.replace(
        base_logits=logits.expand(case.base_logits.shape).to(case.device, case.base_logits.dtype).contiguous(),
        embed_weight=torch.zeros_like(case.embed_weight),
        head_weight=torch.zeros_like(case.head_weight),
    )


def greedy(vocab: int, device: torch.device, rows: int = 1, **options: Any) -> Case:
    """A case of T = 0 rows, in which ties are exact."""
    return exact_case(vocab, RANK, 3, rows, seed=vocab, temperatures=(0.0,), device=device, **options)


# --- indices and padding ---


@known(97)
def case_03_padding_rows_of_a_graph_are_inert(device: torch.device) -> Trial:
    """Four rows captured, two of them real: only their slots change, and they equal the unpadded call."""
    case = exact_case(97, RANK, 3, 4, seed=31, padding_rows=2, device=device)
    case.idx_mapping[:6] = torch.tensor([5, 5, 5, 2, 2, 2])
    # Where a read at index -1 would land: the kernel must not use what is there.
    heat = torch.cat([torch.tensor([NAN], device=device), case.temperature])
    case = case.replace(temperature=heat[1:])
    tokens, cache = yield case
    assert bool(((tokens[:4] >= 0) & (tokens[:4] < 97)).all()) and bool((tokens[4:] == POISON_TOKEN).all())
    assert [slot for slot in range(case.max_reqs) if bool((cache[slot] != POISON_LOGIT).any())] == [2, 5]
    alone, alone_cache = yield case.replace(base_logits=case.base_logits[:2])
    assert torch.equal(alone[:2], tokens[:2]) and torch.equal(alone_cache, cache)


@known(97)
def case_03_padding_by_position(device: torch.device) -> Trial:
    """A row may be padding at some positions and live at others."""
    case = exact_case(97, RANK, 3, 2, seed=32, device=device)
    case.idx_mapping[1], case.idx_mapping[3] = -1, 4
    yield case


def _masked_rows(vocab: int) -> Callable[[torch.device], Trial]:
    def trial(device: torch.device) -> Trial:
        for heat in (0.0, 0.8):
            case = exact_case(vocab, RANK, 3, 3, seed=vocab, temperatures=(heat,), device=device)
            logits = torch.full((3, 3, vocab), -INF, device=device)
            logits[1] = NAN
            logits[2, :, 3] = -1e38
            tokens, _ = yield with_logits(case, logits)
            assert tokens[:3].tolist() == [[0, 0, 0], [0, 0, 0], [3, 3, 3]]

    return trial


for _vocab in (17, 31, 33):  # one, two and three tiles of 16, of which the last holds 1, 15 and 1 id
    KNOWN.append(
        Known(
            f"case_07_a_masked_row_gives_an_id_below_{_vocab}",
            {"vocab_size": _vocab},
            without_config(_masked_rows(_vocab)),
        )
    )


@known(20, vocabulary={"sampling_limit": 18})
def case_11_a_padded_head_is_never_drawn(device: torch.device) -> Trial:
    """The largest base logit and the largest bias lie beyond the sampling limit; the cached distribution excludes both."""
    for heat in (0.0, 1.0):
        case = exact_case(20, RANK, 3, 2, seed=28, sampling_limit=18, temperatures=(heat,), device=device)
        case.base_logits[:, :, 19] = 100.0
        case.head_weight[18] = case.embed_weight[int(case.input_ids[0])].sign()
        tokens, cache = yield case
        assert int(tokens[:2].max()) < 18
        assert bool((cache[case.idx_mapping[0], :, 18:] == -INF).all())


@known(99)
def case_21_anchors_are_read_by_their_stride(device: torch.device) -> Trial:
    """Anchors are a column of a table 6 wide; base logits and cache have rows wider than the vocabulary."""
    case = exact_case(99, RANK, 3, 4, seed=27, query_per_row=6, layout="odd", device=device)
    tokens, _ = yield case
    # Were row 1's anchor read at another place, its drafts would be those of that place.
    moved = case.input_ids.clone()
    moved[1:6] = (moved[1:6] + 50) % 99
    again, _ = yield case.replace(input_ids=moved)
    assert torch.equal(again[:4], tokens[:4])


@known(99, num_steps=4, draft={"sample_from_anchor": True})
def case_23_drafts_from_the_anchor_row_on(device: torch.device, config: ModuleType) -> Trial:
    """A block of 4: 4 tokens from hidden rows 0 to 3, and the chain starts at the anchor."""
    yield from _block_of_4(device, config, first=0, steps=4)


@known(99, num_steps=3, draft={"sample_from_anchor": False})
def case_23_drafts_from_the_row_after_the_anchor(device: torch.device, config: ModuleType) -> Trial:
    """A block of 4: 3 tokens from hidden rows 1 to 3, and the chain still starts at the anchor."""
    yield from _block_of_4(device, config, first=1, steps=3)


def _block_of_4(device: torch.device, config: ModuleType, *, first: int, steps: int) -> Trial:
    assert (config.FIRST_QUERY, config.NUM_STEPS, config.QUERY_PER_ROW) == (first, steps, 4)
    case = exact_case(99, RANK, 4, 2, seed=23, temperatures=(0.0,), query_per_row=4, device=device)
    block = with_logits(case, torch.zeros(2, 4, 99)).base_logits  # of all 4 hidden rows of both requests
    for row in range(2):
        for place in range(4):
            block[row, place, 10 * row + place] = 50.0
    drafted = case.replace(
        base_logits=block[:, first:],
        idx_mapping=case.idx_mapping.view(2, 4)[:, :steps].reshape(-1),
        sample_pos=case.sample_pos.view(2, 4)[:, :steps].reshape(-1),
        logits_cache=case.logits_cache[:, :steps].contiguous(),
        draft_tokens=case.draft_tokens[:, :steps].contiguous(),
    )
    tokens, _ = yield drafted
    assert tokens[:2].tolist() == [[10 * row + place for place in range(first, 4)] for row in range(2)]
    # With flat logits the bias decides, and the first one comes from the anchor.
    yield drafted.replace(base_logits=torch.zeros_like(drafted.base_logits))


# --- noise ---


def _one_position(device: torch.device, sample_pos: int, logits: torch.Tensor, **options: Any) -> Case:
    """One row, one position of the large vocabulary with seed 42 at T = 1."""
    case = exact_case(LARGE, RANK, 1, 1, seed=1, temperatures=(1.0,), device=device, **options)
    case = with_logits(case, logits)
    return case.replace(sample_pos=torch.full_like(case.sample_pos, sample_pos), seeds=torch.full_like(case.seeds, 42))


@known(LARGE, num_steps=1)
def case_04_a_masked_token_with_u_of_one_is_no_nan(device: torch.device) -> Trial:
    """-inf + noise must not be NaN, which would win."""
    position, token = SMALLEST_NOISE
    logits = torch.full((LARGE,), -INF)
    logits[7] = 0.0
    tokens, cache = yield _one_position(device, position, logits)
    assert tokens[0, 0] == 7 and token != 7
    assert not bool(torch.isnan(cache).any())


@known(LARGE, num_steps=1)
def case_05_u_of_one_does_not_win(device: torch.device) -> Trial:
    """A token of small probability whose u rounds to 1 loses against one of ordinary noise."""
    position, token = SMALLEST_NOISE
    logits = torch.full((LARGE,), -INF)
    logits[token], logits[7] = -5.0, 0.0
    tokens, _ = yield _one_position(device, position, logits)
    assert tokens[0, 0] == 7


@known(LARGE, num_steps=1)
def case_06_the_noise_has_32_bits(device: torch.device) -> Trial:
    """Hash 0 has noise 22.87 and beats 22.0 for the others' largest; 24-bit noise (17.33) and Philox (21.49) would not reach it."""
    position, token = LARGEST_NOISE
    logits = torch.full((LARGE,), -INF)
    logits[token], logits[7] = 0.0, 16.0
    tokens, _ = yield _one_position(device, position, logits)
    assert tokens[0, 0] == token


@known(64, num_steps=1)
def case_38_seeds_are_64_bits_of_any_sign(device: torch.device) -> Trial:
    """Every seed draws by its bits; positions that differ by 2^32 draw alike; seeds that differ in the high word do not."""
    rows = len(ODD_SEEDS)
    case = exact_case(64, RANK, 1, rows, seed=38, temperatures=(1.0,), max_reqs=rows, device=device)
    case = with_logits(case, torch.zeros(64)).replace(
        seeds=torch.tensor(ODD_SEEDS, device=device), idx_mapping=torch.arange(rows, device=device)
    )
    tokens, _ = yield case
    again, _ = yield case.replace(sample_pos=case.sample_pos + 2**32)
    assert torch.equal(again, tokens)
    high = case.replace(seeds=torch.arange(rows, device=device) << 32, sample_pos=torch.full_like(case.sample_pos, 5))
    differing, _ = yield high
    assert len(set(differing[:, 0].tolist())) > 1


# --- reduced vocabulary ---

SMALL_MAP = (2, 3, 3, 5)  # of 4 draft ids into 10 target ids: 2, 4, 5, 8
SMALL = {"vocabulary": {"draft": 4, "d2t": True}}


def _small(device: torch.device, **options: Any) -> Case:
    d2t = torch.tensor(SMALL_MAP, device=device)
    return exact_case(10, RANK, 3, 2, seed=12, draft_vocab_size=4, d2t=d2t, device=device, **options)


@known(10, **SMALL)
def case_12_the_embedding_is_indexed_by_target_ids(device: torch.device) -> Trial:
    """Anchor 9 is beyond the draft ids; draft id 3 is token 8, and position 1 continues from embedding row 8, not 3."""
    case = with_logits(_small(device, temperatures=(0.0,)), torch.zeros(4))
    case.base_logits[:, 0, 3] = 50.0
    case.input_ids.fill_(9)
    case.embed_weight[8, 0], case.embed_weight[3, 1] = 1.0, 1.0
    case.head_weight[2, 0], case.head_weight[1, 1] = 1.0, 1.0
    tokens, _ = yield case
    assert tokens[:2, :2].tolist() == [[8, 5]] * 2  # embedding row 3 would give 4
    case.embed_weight.zero_()
    case.embed_weight[9, 0] = 1.0
    case.base_logits.zero_()
    tokens, _ = yield case
    assert tokens[:2, 0].tolist() == [5, 5]


@known(10, **SMALL)
def case_13_cache_and_noise_are_in_target_space(device: torch.device) -> Trial:
    """The cached row is 10 wide and -inf except at the mapped ids, at every call; its softmax is that of the draft logits."""
    case = _small(device, temperatures=(1.0,), cache_columns=12)
    for turn in range(2):  # the second call finds what the first one cached
        _, cache = yield case.replace(seeds=case.seeds + turn)
        row = cache[case.idx_mapping[0], 0]
        assert torch.nonzero(row[:10] > -INF).flatten().tolist() == [2, 4, 5, 8]
        assert bool((row[10:] == POISON_LOGIT).all())
        draft = row[[2, 4, 5, 8]].float().softmax(0)
        assert torch.equal(row[:10].float().softmax(0)[[2, 4, 5, 8]], draft)


@known(40, vocabulary={"draft": 20, "d2t": True})
def case_13_ties_go_to_the_lowest_target_id(device: torch.device) -> Trial:
    """The map is not monotonic: equal scores of draft ids 0, 7 and 19 give the lowest of their target ids."""
    d2t = torch.arange(39, -1, -2)[:20] - torch.arange(20)  # 39, 37, ... 1
    case = greedy(40, device, draft_vocab_size=20, d2t=d2t.to(device))
    logits = torch.zeros(20, device=device)
    logits[[0, 7, 19]] = 3.0
    tokens, _ = yield with_logits(case, logits)
    assert tokens[0].tolist() == [1] * 3
    tokens, _ = yield with_logits(case, torch.full((20,), -INF))
    assert tokens[0].tolist() == [1] * 3  # a mapped id, not 0


@known(40, vocabulary={"draft": 20, "d2t": True, "sampling_limit": 30})
def case_11_the_limit_of_a_reduced_vocabulary_is_of_target_ids(device: torch.device) -> Trial:
    """Draft ids mapped at or above the limit are cached as -inf and never drawn."""
    d2t = (torch.arange(20, device=device) * 2 + 1) - torch.arange(20, device=device)  # 1, 3, ... 39
    case = greedy(40, device, draft_vocab_size=20, d2t=d2t, sampling_limit=30)
    case.base_logits[:, :, 15:] = 100.0  # target ids from 31 on
    tokens, cache = yield case
    assert int(tokens[0].max()) < 30
    assert bool((cache[case.idx_mapping[0], :, 30:] == -INF).all())


# --- ties and NaN ---

TIES: dict[str, tuple[dict[int, float], float, int]] = {
    "constant": ({}, 0.5, 0),
    "zero": ({}, 0.0, 0),
    "last of a tile, first of the next": ({15: 2.0, 16: 2.0}, 0.0, 15),
    "last of a block, first of the next": ({63: 2.0, 64: 2.0}, 0.0, 63),
    "two later blocks": ({70: 2.0, 64: 2.0, 96: 2.0}, 0.0, 64),
    "zeros of both signs": ({3: -0.0, 40: 0.0}, -1.0, 3),
    "zeros of both signs, other order": ({3: 0.0, 40: -0.0}, -1.0, 3),
    "negative only": ({5: -2.0, 77: -1.5}, -3.0, 77),
    "negative, small and large": ({0: -1e30, 1: -1e-30, 98: -1e-20}, -1e38, 1),
    "infinity": ({60: INF, 98: INF}, 1.0, 60),
    "one finite": ({50: -3e38}, -INF, 50),
    "all masked": ({}, -INF, 0),
}
NANS: dict[str, tuple[dict[int, float], float, int]] = {
    "NaN beats infinity": ({9: INF, 80: NAN}, 0.0, 80),
    "NaN at 5": ({5: NAN}, 0.0, 5),
    "in the second tile alone": ({20: NAN}, 0.0, 20),
    "first NaN": ({33: NAN, 98: NAN}, 0.0, 33),
    "all NaN": ({}, NAN, 0),
}


def _rows_of(table: dict[str, tuple[dict[int, float], float, int]], device: torch.device) -> Trial:
    """One row of a batch for each entry of a table, at all positions, in two batches."""
    entries = list(table.values())
    for start in range(0, len(entries), 6):
        part = entries[start : start + 6]
        logits = torch.empty(len(part), 3, 99)
        for row, (marks, rest, _) in enumerate(part):
            logits[row] = rest
            for column, value in marks.items():
                logits[row, :, column] = value
        for dtype in (torch.bfloat16, torch.float32):
            case = greedy(99, device, len(part), base_dtype=dtype, cache_dtype=dtype)
            tokens, _ = yield with_logits(case, logits)
            assert tokens[: len(part)].tolist() == [[want] * 3 for _, _, want in part]


@known(99)
def case_18_ties_give_the_lowest_id(device: torch.device) -> Trial:
    """Across tiles, blocks and signs of zero; negative values order as numbers."""
    yield from _rows_of(TIES, device)


@known(99)
def case_08_nan_gives_the_first_nan(device: torch.device) -> Trial:
    """The policy of torch.argmax, in range, at every tile size."""
    yield from _rows_of(NANS, device)


@known(99)
def case_08_nan_leaves_other_rows_alone(device: torch.device) -> Trial:
    """NaN in one row's logits, then in a row of the head."""
    case = exact_case(99, RANK, 3, 3, seed=81, device=device)
    clean, _ = yield case
    base = case.base_logits.clone()
    base[1, 1, 55] = NAN
    case = case.replace(base_logits=base)
    tokens, _ = yield case
    assert tokens[1, 1] == 55 and torch.equal(tokens[[0, 2]], clean[[0, 2]])
    head = case.head_weight.clone()
    head[70] = NAN
    tokens, _ = yield case.replace(head_weight=head)
    assert tokens[:3].tolist() == [[70, 70, 70], [70, 55, 70], [70, 70, 70]]


# --- temperature and cache ---


@known(99)
def case_24_greedy_and_sampled_rows_in_one_batch(device: torch.device) -> Trial:
    """T = 0 rows do not depend on seed and position; every row equals its single-row call."""
    case = exact_case(99, RANK, 3, 4, seed=24, max_reqs=4, temperatures=(0.0, 1.0, 0.0, 0.7), device=device)
    case = case.replace(idx_mapping=torch.arange(4, device=device).repeat_interleave(3))
    tokens, _ = yield case
    moved, _ = yield case.replace(seeds=case.seeds + 1, sample_pos=case.sample_pos + 5)
    assert torch.equal(moved[[0, 2]], tokens[[0, 2]]) and not torch.equal(moved[[1, 3]], tokens[[1, 3]])
    for row in range(4):
        single, _ = yield case.replace(
            base_logits=case.base_logits[row : row + 1],
            input_ids=case.input_ids[row * 3 :],
            idx_mapping=case.idx_mapping[row * 3 :],
            sample_pos=case.sample_pos[row * 3 :],
        )
        assert torch.equal(single[0], tokens[row])


@known(99)
def case_24_a_tiny_temperature_gives_no_nan(device: torch.device) -> Trial:
    """Logits of 3e4 at T = 1e-6 stay finite enough for the largest to win."""
    logits = torch.full((99,), 29_000.0)
    logits[40] = 30_000.0
    case = exact_case(99, RANK, 3, 1, seed=25, temperatures=(1e-6,), device=device)
    tokens, _ = yield with_logits(case, logits)
    assert tokens[0].tolist() == [40] * 3


@known(99)
def case_25_the_cache_is_written_before_temperature(device: torch.device) -> Trial:
    """Bitwise the bf16 sum, for sampled rows and for T = 0 rows; columns beyond the vocabulary stay."""
    for heat in (0.7, 0.0):
        case = exact_case(99, RANK, 3, 1, seed=26, cache_columns=104, temperatures=(heat,), device=device)
        _, cache = yield case
        embedding = case.embed_weight[int(case.input_ids[0])].float()
        want = case.base_logits[0, 0] + (case.head_weight.float() @ embedding).bfloat16()
        assert torch.equal(cache[case.idx_mapping[0], 0, :99], want)
        assert bool((cache[:, :, 99:] == POISON_LOGIT).all())


# --- rounding and transforms ---


@known(17)
def case_19_rounding_makes_ties(device: torch.device) -> Trial:
    """The bias is rounded to bf16, then the sum; the dot products are sums of three bf16 numbers, exact in fp32."""
    for bias, want in (((0.01, 0.02), 0), ((0.0, 0.03126), 0), ((0.03, 0.04), 1)):
        logits = torch.full((17,), -INF)
        logits[:2] = 8.0
        case = with_logits(greedy(17, device), logits)
        case.embed_weight[:, :3] = 1.0
        for token, value in enumerate(bias):
            rest = torch.tensor(value)
            for column in range(3):
                case.head_weight[token, column] = rest.bfloat16()
                rest = rest - rest.bfloat16().float()
        tokens, _ = yield case
        assert tokens[0, 0] == want


def _biased(device: torch.device, base: tuple[float, float], bias: tuple[float, float], transform: Transform) -> Case:
    """Two tokens with these base logits and biases, fp32 base and cache, among masked ones."""
    logits = torch.full((17,), -INF)
    logits[:2] = torch.tensor(base)
    case = greedy(17, device, base_dtype=torch.float32, cache_dtype=torch.float32, transform=transform)
    case = with_logits(case, logits)
    case.embed_weight[:, 0] = 1.0
    case.head_weight[:2, 0] = torch.tensor(bias)
    return case


CAP = {"soft_cap": 30.0}
# Placement: cached logits of base [40, 39] and bias [0, 20], then the winner of base [29, 0] and bias [0, 24].
CAPPED = {"base": ((26.102, 45.852), 1), "both": ((26.102, 43.335), 0), "sum": ((26.102, 28.848), 0)}


def _capped(placement: Any) -> Callable[[torch.device], Trial]:
    def trial(device: torch.device) -> Trial:
        transform = Transform(placement, soft_cap=30.0)
        cached, winner = CAPPED[placement]
        case = _biased(device, (40.0, 39.0), (0.0, 20.0), transform)
        _, cache = yield case
        # The bias of `both` is capped in bf16, the head's dtype: 2^-8 of its value.
        found = cache[case.idx_mapping[0], 0, :2].cpu()
        assert torch.allclose(found, torch.tensor(cached), rtol=0, atol=0.1 if placement == "both" else 1e-3)
        tokens, _ = yield _biased(device, (29.0, 0.0), (0.0, 24.0), transform)
        assert tokens[0, 0] == winner

    return trial


for _placement in CAPPED:
    KNOWN.append(
        Known(
            f"case_26_soft_cap_on_{_placement}",
            {"vocab_size": 17, "logits": {"transform": {"placement": _placement, **CAP}}},
            without_config(_capped(_placement)),
        )
    )


@known(17, logits={"transform": {"placement": "sum", "multiplier": MUSE.multiplier, "soft_cap": MUSE.soft_cap}})
def case_27_multiplier_before_the_cap_on_the_sum(device: torch.device) -> Trial:
    """[10, 9] + [0, 0.5] give [1.9549, 1.8577]; 200 gives 19.2236, as the multiplier comes first."""
    case = _biased(device, (10.0, 9.0), (0.0, 0.5), MUSE)
    tokens, cache = yield case
    found = cache[case.idx_mapping[0], 0, :2].cpu()
    assert torch.allclose(found, torch.tensor([1.9549, 1.8577]), rtol=0, atol=1e-4) and tokens[0, 0] == 0
    case = _biased(device, (200.0, 0.0), (0.0, 0.0), MUSE)
    _, cache = yield case
    assert abs(float(cache[case.idx_mapping[0], 0, 0]) - 19.2236) < 1e-3


@known(17, logits={"transform": {"placement": "base", "multiplier": MUSE.multiplier, "soft_cap": MUSE.soft_cap}})
def case_27_multiplier_before_the_cap_on_the_base(device: torch.device) -> Trial:
    """The same numbers: the raw bias lifts token 1 to 2.2605."""
    case = _biased(device, (10.0, 9.0), (0.0, 0.5), Transform("base", MUSE.multiplier, MUSE.soft_cap))
    tokens, cache = yield case
    found = cache[case.idx_mapping[0], 0, :2].cpu()
    assert torch.allclose(found, torch.tensor([1.9549, 2.2605]), rtol=0, atol=1e-4) and tokens[0, 0] == 1


# --- greedy drafts, other noise ---


@known(99, logits={"cache_dtypes": ()})
def case_25_greedy_drafts_are_drawn_before_any_cache_rounding(device: torch.device) -> Trial:
    """fp32 sums that a bf16 cache would make equal: the larger wins, at any temperature of the request."""
    case = exact_case(99, RANK, 3, 2, seed=4, base_dtype=torch.float32, cache_dtype=None, device=device)
    logits = torch.zeros(99, device=device)
    logits[[20, 60]] = torch.tensor([8.0, 8.001], device=device)
    tokens, cache = yield with_logits(case, logits)
    assert tokens[:2].tolist() == [[60] * 3] * 2 and cache is None
    yield case


@known(40, vocabulary={"draft": 20, "d2t": True, "sampling_limit": 30}, logits={"cache_dtypes": ()})
def case_13_greedy_drafts_are_mapped_after_the_draw(device: torch.device) -> Trial:
    """Ties go to the lowest draft id, whose target id need not be the lowest; the limit is one of target ids."""
    d2t = torch.arange(39, -1, -2)[:20] - torch.arange(20)  # 39, 37, ... 1
    case = greedy(40, device, draft_vocab_size=20, d2t=d2t.to(device), cache_dtype=None, sampling_limit=30)
    logits = torch.zeros(20, device=device)
    logits[[2, 7, 19]] = 3.0  # target ids 35, 25 and 1
    tokens, _ = yield with_logits(case, logits)
    assert tokens[0].tolist() == [25] * 3
    yield case


@known(97, noise={"scheme": "murmur3_64"})
def case_02_fp64_noise(device: torch.device) -> Trial:
    """Scores are compared in fp64."""
    yield exact_case(97, RANK, 3, 4, seed=64, noise_scheme="murmur3_64", padding_rows=1, device=device)


@known(97, noise={"scheme": "philox_32"})
def case_02_philox_noise(device: torch.device) -> Trial:
    """The draw of engines before the hash; the whole position counts, not its low 32 bits alone."""
    case = exact_case(97, RANK, 3, 4, seed=65, noise_scheme="philox_32", padding_rows=1, device=device)
    yield case
    flat = with_logits(case, torch.zeros(97, device=device))
    tokens, _ = yield flat
    moved, _ = yield flat.replace(sample_pos=flat.sample_pos + 2**32)
    assert not torch.equal(moved, tokens)


@known(101, noise={"step_mix": False, "draft_salt": 7})
def case_01_salt_and_step_mix_of_the_spec(device: torch.device) -> Trial:
    """Neither is fixed in a kernel."""
    yield exact_case(101, RANK, 3, 3, seed=66, device=device).replace(step_mix=False, draft_salt=7)


# --- shapes of the public drafts ---


@known(97, rank_dim=80)
def rank_80(device: torch.device) -> Trial:
    """A rank that is no multiple of 32."""
    yield exact_case(97, 80, 3, 3, seed=80, device=device)


@known(97, rank_dim=512)
def rank_512(device: torch.device) -> Trial:
    """The largest rank; sums of 512 products."""
    yield exact_case(97, 512, 3, 3, seed=512, device=device)


@known(203, num_steps=15)
def fifteen_positions(device: torch.device) -> Trial:
    """The longest draft; a vocabulary that ends within a tile."""
    yield exact_case(203, RANK, 15, 2, seed=15, device=device)


@known(97, num_steps=2)
def every_pair_of_dtypes(device: torch.device) -> Trial:
    """Base logits and cache, each bf16 and fp32; case 2 asks for the same tokens where bf16 holds all values."""
    case = exact_case(97, RANK, 2, 3, seed=22, temperatures=(0.9, 0.0, 1.7), device=device)
    case = case.replace(
        base_logits=case.base_logits.round(),
        head_weight=case.head_weight.round(),
        embed_weight=case.embed_weight.round(),
    )
    drawn = []
    for base in (torch.bfloat16, torch.float32):
        for cache in (torch.bfloat16, torch.float32):
            variant = case.replace(base_logits=case.base_logits.to(base), logits_cache=case.logits_cache.to(cache))
            tokens, _ = yield variant
            drawn.append(tokens[:3])
    assert all(torch.equal(other, drawn[0]) for other in drawn[1:])
