"""The fused loop in Triton's interpreter against the oracle. Skipped where kernels are compiled: tests/kernels covers a GPU.
Failures that are known by name are in test_known_cases.py.
"""

from collections.abc import Callable
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import POISON_TOKEN, Case, exact_case, random_case  # noqa: E402
from tests.harness.known_cases import with_logits  # noqa: E402
from tests.harness.oracle import same_bits, walk_case, why_unequal_on_cpu  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

NAN, INF = float("nan"), float("inf")
Models = Callable[..., ModuleType]


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


def greedy_case(vocab: int, rows: int = 1, **options: object) -> Case:
    return exact_case(vocab, 64, 3, rows, seed=vocab, temperatures=(0.0,), **options)


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
    toy_models: Models, vocab: int, rank: int, rows: int, padding: int, base: str, cache: str, layout: str
) -> None:
    case = exact_case(
        vocab, rank, 3, rows, seed=vocab + rows, padding_rows=padding, layout=layout,
        base_dtype=DTYPES[base], cache_dtype=DTYPES[cache], query_per_row=4,
    )  # fmt: skip
    assert_right(toy_models(vocab, rank_dim=rank), case, block=32)


def test_bias_of_random_weights(toy_models: Models) -> None:
    """Dot products that are not exact: summed in another order, a bias may round to the neighbouring bf16, and no further."""
    case = random_case(257, 128, 3, 4, seed=9, base_dtype=torch.float32, cache_dtype=torch.float32)
    tokens, cache = draw(toy_models(257, rank_dim=128), case)
    want = walk_case(case, follow=tokens).logits_cache
    for row in range(case.rows):
        state = case.idx_mapping[row * 3]
        bias = want[state] - case.base_logits[row]
        assert bool(((cache[state] - want[state]).abs() <= bias.abs() * 2.0**-7 + 1e-6).all())
        assert int((cache[state] != want[state]).sum()) <= 4


@pytest.mark.parametrize("block", [16, 32, 64, 512])
def test_every_block_size_draws_the_same(toy_models: Models, block: int) -> None:
    """Case 2 for the variants that one launch can have."""
    case = exact_case(210, 64, 3, 3, seed=21)
    want = draw(toy_models(210), case)
    got = draw(toy_models(210), case, block=block)
    assert torch.equal(got[0], want[0]) and same_bits(got[1], want[1])


def test_noise_kernel_and_fused_kernel_share_the_draw(toy_models: Models) -> None:
    """Case 2: with flat logits the winner is the id of the largest noise that the noise kernel writes."""
    model, rows = toy_models(210), 4
    case = with_logits(exact_case(210, 64, 3, rows, seed=23, temperatures=(1.0,)), torch.zeros(210))
    noise = torch.empty(rows * 3, 212)
    state = (case.idx_mapping, case.sample_pos, case.temperature, case.seeds)
    model.noise.draw_noise(noise, *state, num_samples=rows * 3)
    tokens, _ = draw(model, case)
    assert torch.equal(tokens[:rows].flatten(), noise[:, :210].argmax(dim=1))


@pytest.mark.parametrize("cache", ["bf16", "fp32"])
def test_u_of_one_does_not_win(toy_models: Models, cache: str) -> None:
    """Cases 4 and 5: token 114765 has hash 0xFFFFFFFF; masked or merely unlikely, it must lose, without a NaN on the way."""
    model = toy_models(129280, num_steps=1)
    case = exact_case(
        129280, 64, 1, 2, seed=1, cache_dtype=DTYPES[cache], temperatures=(1.0,), base_dtype=torch.float32
    )
    logits = torch.full((2, 1, 129280), -INF)
    logits[:, 0, 7] = 0.0
    logits[1, 0, 114765] = -5.0
    case = with_logits(case, logits).replace(sample_pos=torch.full((2,), 17057), seeds=torch.full((5,), 42))
    loop = model.fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs)
    loop.sample(*case.call_arguments)
    assert case.draft_tokens[:2, 0].tolist() == [7, 7]
    written = loop._orders.flatten()[: 2 * loop._programs]  # of two rows, which the interpreter packs
    assert int(written.max()) < 0x7F800000


def test_negative_zero_ties_with_zero(toy_models: Models) -> None:
    """Case 18: a sum of -1e-45 is cached as the bf16 -0.0; it ties with the +0.0 at a higher id."""
    logits = torch.full((99,), -1.0)
    logits[3], logits[40] = -1e-45, 0.0
    case = with_logits(greedy_case(99, base_dtype=torch.float32), logits)
    assert assert_right(toy_models(99), case, block=32)[0].tolist() == [3] * 3


def test_every_nan_ranks_alike(toy_models: Models) -> None:
    """Case 8: sign and payload of a NaN do not matter, nor does the block that it is in."""
    logits = torch.zeros(99)
    logits[[20, 50, 80]] = torch.tensor([-4194303, 2139095041, 2147483647], dtype=torch.int32).view(torch.float32)
    logits[30] = INF
    case = with_logits(greedy_case(99, base_dtype=torch.float32, cache_dtype=torch.float32), logits)
    assert assert_right(toy_models(99), case, block=32)[0].tolist() == [20] * 3


def test_infinite_temperature_stays_in_range(toy_models: Models) -> None:
    """Padding columns hold -inf, and -inf / inf is NaN: they must not win for it."""
    case = exact_case(17, 64, 3, 2, seed=17, temperatures=(INF,))
    tokens = assert_right(toy_models(17), case, block=16)
    assert int(tokens[:2].max()) < 17


def test_strided_tokens_and_anchors(toy_models: Models) -> None:
    """Case 21: draft_tokens as columns of a wider table, anchors every 6 ids."""
    case = exact_case(99, 64, 3, 4, seed=27, query_per_row=6)
    table = torch.full((case.max_reqs, 8), POISON_TOKEN)
    loop = toy_models(99).fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs)
    loop.sample(*case.replace(draft_tokens=table[:, 2:5]).call_arguments, query_per_row=6)
    assert why_unequal_on_cpu(case, table[:, 2:5], case.logits_cache) is None
    assert bool((table[:, :2] == POISON_TOKEN).all()) and bool((table[:, 5:] == POISON_TOKEN).all())


def test_nothing_of_one_call_is_kept(toy_models: Models) -> None:
    """Case 35 on the CPU: one loop, the same tensors with other contents, other row counts; each call equals the oracle."""
    case = exact_case(99, 64, 3, 18, seed=35)
    loop = toy_models(99).fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs, block=32)
    for turn, rows in enumerate((18, 2, 17, 1)):
        other = exact_case(
            99, 64, 3, 18, seed=100 + turn, padding_rows=turn, weights=(case.embed_weight, case.head_weight)
        )
        for name in ("base_logits", "input_ids", "idx_mapping", "sample_pos", "temperature", "seeds"):
            getattr(case, name).copy_(getattr(other, name))
        case.poison()
        call = case.replace(base_logits=case.base_logits[:rows])
        loop.sample(*call.call_arguments)
        reason = why_unequal_on_cpu(call, call.draft_tokens, call.logits_cache)
        assert reason is None, f"call {turn}: {reason}"
        assert not loop._arrivals.any()


def test_warmup_draws_for_padding_only(toy_models: Models) -> None:
    """A warm-up before the first call changes no later result."""
    case = exact_case(99, 64, 3, 2, seed=36)
    loop = toy_models(99).fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs)
    loop.warmup()
    loop.warmup(cache_dtype=torch.bfloat16)
    loop.sample(*case.call_arguments)
    assert why_unequal_on_cpu(case, case.draft_tokens, case.logits_cache) is None


def test_weights_that_do_not_fit(toy_models: Models) -> None:
    case, loop_type = exact_case(99, 64, 3, 1, seed=37), toy_models(99).fused.FusedLoop
    embed, head = case.embed_weight, case.head_weight
    assert loop_type.why_not(embed, head, max_reqs=1) is None
    longer = torch.cat([embed, embed])
    assert loop_type.why_not(longer, head, max_reqs=1) is None
    for arguments, message in (
        ((None, head), "embed_weight: expected a tensor, got NoneType None"),
        (
            (embed.float(), head),
            r"embed_weight: expected bf16 \[>= 99, 64\], contiguous, 16-byte aligned on cpu, got fp32",
        ),
        ((embed, head[:98]), r"head_weight: expected bf16 \[>= 99, 64\].*got bf16 \[98, 64\]"),
        ((embed, head.t().contiguous().t()), "head_weight: .*contiguous"),
        ((embed, torch.cat([head.flatten(), head[0]])[1:].view(-1)[: 99 * 64].view(99, 64)), "address 2 modulo 16"),
    ):
        with pytest.raises(ValueError, match=message):
            loop_type(*arguments, max_reqs=1)
    for options, message in (
        ({"max_reqs": 0}, "max_reqs: expected an int of at least 1, got 0"),
        ({"max_reqs": 1, "block": 48}, "block: expected a power of two, got 48"),
        ({"max_reqs": 1, "block": 8}, "block: expected an int at least 16, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            loop_type(embed, head, **options)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("base_logits", lambda t: t.half(), TypeError, "base_logits: expected bf16 or fp32"),
        (
            "base_logits",
            lambda t: t[:, :2],
            ValueError,
            r"base_logits: expected .*\[2, 3, >= 99\].*got bf16 \[2, 2, 99\]",
        ),
        (
            "base_logits",
            lambda t: t.repeat(3, 1, 1),
            ValueError,
            "rows of base_logits: expected an int from 1 to 5, got 6",
        ),
        ("base_logits", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "last stride 1"),
        ("input_ids", lambda t: t.long(), TypeError, "input_ids: expected int32"),
        ("input_ids", lambda t: t[:3], ValueError, r"input_ids: expected int32 \[>= 4\]"),
        ("idx_mapping", lambda t: t.int(), TypeError, "idx_mapping: expected int64"),
        ("sample_pos", lambda t: t[:5], ValueError, r"sample_pos: expected int64 \[>= 6\]"),
        ("temperature", lambda t: t[:4], ValueError, r"temperature: expected fp32 \[>= 5\]"),
        ("seeds", lambda t: t.float(), TypeError, "seeds: expected int64"),
        ("logits_cache", lambda t: t[:, :, :98], ValueError, r"logits_cache: expected .*\[>= 5, 3, >= 99\]"),
        ("logits_cache", lambda t: t.double(), TypeError, "logits_cache: expected bf16 or fp32"),
        ("draft_tokens", lambda t: t.int(), TypeError, "draft_tokens: expected int64"),
        ("draft_tokens", lambda t: t[:1], ValueError, r"draft_tokens: expected int64 \[>= 2, 3\]"),
    ],
)
def test_arguments_that_do_not_fit(
    toy_models: Models,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    error: type[Exception],
    message: str,
) -> None:
    case = exact_case(99, 64, 3, 2, seed=38)
    loop = toy_models(99).fused.FusedLoop(case.embed_weight, case.head_weight, max_reqs=case.max_reqs)
    with pytest.raises(error, match=message):
        loop.sample(*case.replace(**{name: change(getattr(case, name))}).call_arguments)
    assert bool((case.draft_tokens == POISON_TOKEN).all())
