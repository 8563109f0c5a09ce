"""The noise kernel in Triton's interpreter, the oracle's noise and the GPU oracle's, against known answers and each other.

A CPU has no fused multiply-add and another logarithm, so noise compares within CLOSE; the hashes below it are exact.
"""

import struct
from collections.abc import Callable
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import engine_math, oracle  # noqa: E402
from tests.harness.cases import DRAFT_SALT  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

Models = Callable[..., ModuleType]
CPU = torch.device("cpu")
TORCH_LOG_ULPS = 1.0  # error of torch's fp32 logarithm on a CPU (Sleef's u10 functions)
CLOSE = 4e-6  # two units in the last place of the largest noise, 22.87
POISON = -999.0

# (effective seed, key as hashed, token, hash, u, noise)
KNOWN = [
    (0, 0, 0, 0x8134CDF8, 0.50471199, 0.35294497),
    (0, 0, 1, 0x00990201, 0.0023347144, 6.0586972),
    (42, 7, 123, 0xFD19369B, 0.988666, -1.4996115),
    (42, 7 + DRAFT_SALT, 123, 0xD3619E9A, 0.82570833, -0.55791444),
    (42, 7 + 2**32, 123, 0xFD19369B, 0.988666, -1.4996115),
    (2**32, 5, 9, 0xB44DC5FA, 0.70431173, -0.19757915),
    (42, 49060 + DRAFT_SALT, 95872, 0x00000000, 1.1641532e-10, 22.873857),
    (42, 17056 + DRAFT_SALT, 114765, 0xFFFFFFFF, 1.0, -2.8115408),
]
SECOND_WORD = {  # hash seed 0x9E3779B9, for the first rows
    (0, 0, 0): 0xD28AD962,
    (0, 0, 1): 0x3FAE3FFA,
    (42, 7, 123): 0xB4582A78,
    (42, 7 + DRAFT_SALT, 123): 0x33A63AF7,
    (2**32, 5, 9): 0x25A5021F,
}
ODD_SEEDS = (0, -1, 2**31, 2**32, -(2**63), 2**63 - 1)


def murmur3(data: bytes, hash_seed: int = 0) -> int:
    """MurmurHash3_x86_32 of a multiple of 4 bytes, in Python integers."""
    word_mask = 0xFFFFFFFF
    state = hash_seed
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & word_mask
        word = (word << 15 | word >> 17) & word_mask
        state ^= word * 0x1B873593 & word_mask
        state = (state << 13 | state >> 19) & word_mask
        state = state * 5 + 0xE6546B64 & word_mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & word_mask
    return state ^ state >> 16


def kernel_noise(
    model: ModuleType, seed: int, sample_pos: int, *, vocab_start: int = 0, width: int = 1, heat: float = 1.0
) -> torch.Tensor:
    """One sample of the noise kernel, fp32 [width]; `model` has one draft step, so the seed is not mixed."""
    out = torch.full((1, (width + 3) // 4 * 4), POISON)
    state, position = torch.zeros(1, dtype=torch.int64), torch.tensor([sample_pos])
    temperature, seeds = torch.tensor([heat]), torch.tensor([seed])
    model.noise.draw_noise(
        out, state, position, temperature, seeds, num_samples=1, vocab_start=vocab_start, width=width
    )
    return out[0, :width]


@pytest.fixture(scope="module")
def one_step(toy_models: Models) -> ModuleType:
    return toy_models(129280, num_steps=1)


@pytest.fixture(scope="module")
def three_steps(toy_models: Models) -> ModuleType:
    return toy_models(333)


def test_reference_hash() -> None:
    assert murmur3(b"test") == 0xBA6BD213


@pytest.mark.parametrize(("seed", "key", "token", "bits", "u", "noise"), KNOWN)
def test_known_answers_of_the_oracle(seed: int, key: int, token: int, bits: int, u: float, noise: float) -> None:
    hashed = oracle.hash_bits(seed, key, torch.tensor([token]))
    assert int(hashed) == bits
    assert float(oracle.uniform_of_bits(hashed)) == pytest.approx(u, rel=1e-7)
    assert float(oracle.gumbel_of_bits(hashed)) == pytest.approx(noise, abs=CLOSE)
    second = SECOND_WORD.get((seed, key, token))
    if second is not None:
        assert int(oracle.hash_bits(seed, key, torch.tensor([token]), hash_seed=0x9E3779B9)) == second


@pytest.mark.parametrize(("seed", "key", "token", "bits", "u", "noise"), KNOWN)
def test_known_answers_of_the_kernel(
    one_step: ModuleType, seed: int, key: int, token: int, bits: int, u: float, noise: float
) -> None:
    """Case 1, test a; cases 5 and 6 are the last two rows: 24 random bits would give 17.33, Philox 21.49."""
    sample_pos = key + 1 - DRAFT_SALT
    start = token // 4 * 4
    drawn = kernel_noise(one_step, seed, sample_pos, vocab_start=start, width=4)
    assert float(drawn[token - start]) == pytest.approx(noise, abs=CLOSE)
    assert bool(torch.isfinite(drawn).all())


@pytest.mark.parametrize(("seed", "key", "token", "bits", "u", "noise"), KNOWN)
def test_known_answers_of_the_gpu_oracle(seed: int, key: int, token: int, bits: int, u: float, noise: float) -> None:
    assert float(engine_math.noise(seed, key, token + 1, CPU)[token]) == pytest.approx(noise, abs=CLOSE)


def test_salt_separates_draft_from_target(one_step: ModuleType) -> None:
    """Case 1, test a: at key 7 the target's noise is -1.4996115; a draft there must not draw it."""
    assert float(kernel_noise(one_step, 42, 8, vocab_start=123)) == pytest.approx(-0.55791444, abs=CLOSE)


@pytest.mark.parametrize("seed", ODD_SEEDS)
def test_seed_is_64_bits_of_any_sign(one_step: ModuleType, seed: int) -> None:
    """Case 38: the noise depends on the seed's bits alone, and on the low 32 bits of the position."""
    position, width = 4711, 40
    key = position - 1 + DRAFT_SALT
    words = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF)
    expected = torch.tensor([murmur3(struct.pack("<4I", *words, token)) for token in range(width)])
    assert torch.equal(oracle.hash_bits(seed, key, torch.arange(width)), expected)
    drawn = kernel_noise(one_step, seed, position, width=width)
    assert torch.allclose(drawn, oracle.gumbel_of_bits(expected), rtol=0, atol=CLOSE)
    assert torch.equal(kernel_noise(one_step, seed, position + 2**32, width=width), drawn)


def test_seeds_that_differ_in_the_high_word_differ(one_step: ModuleType) -> None:
    """Case 38."""
    drawn = [kernel_noise(one_step, seed, 5, width=16) for seed in (7, 7 + 2**32, 7 - 2**63)]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert int((drawn[left] == drawn[right]).sum()) == 0


@pytest.mark.parametrize(("start", "width"), [(0, 333), (0, 331), (17, 100), (332, 1)])
def test_kernel_equals_the_oracle(three_steps: ModuleType, start: int, width: int) -> None:
    """All samples of 2 request rows and 3 steps: each step mixes the seed; shards are slices of the whole draw."""
    generator = torch.Generator().manual_seed(start + width)
    states = torch.tensor([2, 2, 2, 0, 0, 0])
    positions = torch.randint(1, 9999, (6,), generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)
    out = torch.full((7, 340), POISON)
    three_steps.noise.draw_noise(
        out, states, positions, torch.tensor([0.7, 1.0, 0.2]), seeds, num_samples=6, vocab_start=start, width=width
    )
    for sample in range(6):
        seed = int(seeds[states[sample]]) ^ (sample % 3 << 32)
        key = int(positions[sample]) - 1 + DRAFT_SALT
        expected = oracle.gumbel(seed, key, start + width, CPU)[start:]
        assert torch.allclose(out[sample, :width], expected, rtol=0, atol=CLOSE), sample
        assert torch.allclose(engine_math.noise(seed, key, start + width, CPU)[start:], expected, rtol=0, atol=CLOSE)
    assert bool((out[6] == POISON).all())
    assert bool((out[:, (width + 3) // 4 * 4 :] == POISON).all())


@pytest.mark.parametrize(("programs", "most"), [(2048, 16), (4, 16), (1, 2), (1, 16)])
def test_noise_does_not_depend_on_how_blocks_are_shared_out(
    toy_models: Models, monkeypatch: pytest.MonkeyPatch, programs: int, most: int
) -> None:
    """1, 3, 2 and 12 of the 6 blocks of a sample a program: also a last program with fewer, and one with more than there are."""
    model = toy_models(333, num_steps=2)
    monkeypatch.setattr(model.noise._launcher, "interpreter_block", 64)
    monkeypatch.setattr(model.noise.noise_launcher, "PROGRAMS", programs)
    monkeypatch.setattr(model.noise.noise_launcher, "MOST_BLOCKS", most)
    arguments = (torch.zeros(2, dtype=torch.int64), torch.tensor([9, 10]), torch.ones(1), torch.tensor([5]))
    out = torch.full((3, 520), POISON)
    model.noise.draw_noise(out, *arguments, num_samples=2, width=331)
    for step in range(2):
        expected = oracle.gumbel(5 ^ (step << 32), 8 + step + DRAFT_SALT, 331, CPU)
        assert torch.allclose(out[step, :331], expected, rtol=0, atol=CLOSE)
    assert bool((out[:, 332:] == POISON).all())
    assert bool((out[2] == POISON).all())


def test_a_reduced_vocabulary_draws_by_target_id(toy_models: Models) -> None:
    """Case 13: column j of a shard holds the noise of the target id that draft id start + j is mapped to."""
    model = toy_models(97, num_steps=1, vocabulary={"draft": 40, "d2t": True})
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(3))[:40].int()
    arguments = (torch.zeros(1, dtype=torch.int64), torch.tensor([9]), torch.ones(1), torch.tensor([5]))
    out = torch.full((1, 24), POISON)
    model.noise.draw_noise(out, *arguments, num_samples=1, vocab_start=17, width=21, target_ids=ids)
    expected = oracle.gumbel(5, 8 + DRAFT_SALT, 97, CPU)[ids[17:38].long()]
    assert torch.allclose(out[0, :21], expected, rtol=0, atol=CLOSE)
    stream = model.noise.NoiseStream("cpu", ids)
    forked = torch.full((1, 24), POISON)
    stream.fork(forked, *arguments, num_samples=1, vocab_start=17, width=21)
    stream.join()
    assert torch.equal(forked[:, :21], out[:, :21])
    for ids_given, width, message in (
        (None, 21, r"target_ids: expected int32 \[40\].* got NoneType None"),
        (ids, 24, "width: expected an int from 1 to 23, got 24"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            model.noise.draw_noise(out, *arguments, num_samples=1, vocab_start=17, width=width, target_ids=ids_given)
    with pytest.raises(ValueError, match="target_ids: expected None for a model without d2t"):
        toy_models(64).noise.draw_noise(torch.empty(1, 64), *arguments, num_samples=1, target_ids=ids)


def test_the_older_scheme(toy_models: Models) -> None:
    """Philox: the noise is close to the oracle's, and its uniform's floor bounds it."""
    model = toy_models(333, num_steps=1, noise={"scheme": "philox_32"})
    for seed in (42, -5, 2**40 + 7, -(2**63)):
        drawn = kernel_noise(model, seed, 4711, width=333)
        expected = oracle.gumbel(seed, 4710 + DRAFT_SALT, 333, CPU, scheme="philox_32")
        assert torch.allclose(drawn, expected, rtol=0, atol=CLOSE)
    words = torch.tensor([0, 2**32 - 1, 1, 2**31])
    assert oracle.gumbel_of_philox(words)[:2].tolist() == pytest.approx([21.4875, 21.4875], abs=1e-3)
    assert not bool(torch.isnan(oracle.gumbel_of_philox(words)).any())


def test_fp64_noise_of_both_oracles() -> None:
    """53 bits of two hashes; the largest midpoint, which rounds to 1, is lowered."""
    for seed, key in ((0, 0), (42, 7 + DRAFT_SALT), (2**32, 5)):
        drawn = engine_math.noise(seed, key, 300, CPU, scheme="murmur3_64")
        expected = oracle.gumbel(seed, key, 300, CPU, scheme="murmur3_64")
        assert drawn.dtype == torch.float64
        assert torch.allclose(drawn, expected, rtol=0, atol=1e-13)
    ones, zeros = torch.tensor([2**32 - 1]), torch.tensor([0])
    assert float(oracle.gumbel_of_bits_64(ones, ones)) == pytest.approx(36.7368, abs=1e-3)
    assert float(oracle.gumbel_of_bits_64(zeros, zeros)) == pytest.approx(-3.6225, abs=1e-3)


def test_rows_without_noise_are_left_alone(three_steps: ModuleType) -> None:
    """Padding rows and T = 0 rows; a padding row reads nothing at index -1, where there is a temperature."""
    states = torch.tensor([0, -1, 0, 1, 1, 1])
    temperature = torch.tensor([0.5, 0.0, 1.0])[1:]
    out = torch.full((6, 336), POISON)
    seeds = torch.tensor([1, 2])
    three_steps.noise.draw_noise(out, states, torch.arange(6), temperature, seeds, num_samples=6, width=333)
    assert bool((out[:3] == POISON).all())
    assert bool((out[3:, :333] != POISON).all())


@pytest.mark.parametrize("mix", [True, False])
def test_step_mix_of_the_spec(toy_models: Models, mix: bool) -> None:
    model = toy_models(64, noise={"step_mix": mix})
    out = torch.empty(3, 64)
    state = torch.zeros(3, dtype=torch.int64)
    model.noise.draw_noise(out, state, torch.full((3,), 9), torch.ones(1), torch.tensor([5]), num_samples=3)
    for step in range(3):
        expected = oracle.gumbel(5 ^ (step << 32 if mix else 0), 8 + DRAFT_SALT, 64, CPU)
        assert torch.allclose(out[step], expected, rtol=0, atol=CLOSE)


def test_noise_is_close_to_fp64() -> None:
    """Both fp32 forms as near to the function that they approximate as derived: at both ends, where the forms meet, between."""
    quarter, near = 1 << 30, 100_000
    ends = [torch.arange(near), torch.arange(quarter - near, quarter + near), torch.arange(2**32 - near, 2**32)]
    bits = torch.cat([*ends, torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(3))])
    error = (oracle.gumbel_of_bits(bits).double() - oracle.gumbel_of_bits_fp64(bits)).abs()
    bound = oracle.gumbel_error(bits, log_ulps=TORCH_LOG_ULPS)
    assert bool((error <= bound).all())
    assert 2e-6 < float(bound.max()) < 2.3e-6  # the derivation has not become a blank cheque


def test_the_noise_bound_notices_a_wrong_function() -> None:
    """A term less in the series, or a slightly larger noise, is found out."""
    bits = torch.arange((1 << 30) - 100_000, 1 << 30)
    u = oracle.uniform_of_bits(bits)
    series = torch.full_like(u, 1.0 / 7.0)
    for term in range(6, 0, -1):
        series = 1.0 / term + u * series
    for wrong in (-torch.log(u * series), oracle.gumbel_of_bits(bits) * (1 + 2e-6)):
        error = (wrong.double() - oracle.gumbel_of_bits_fp64(bits)).abs()
        assert bool((error > oracle.gumbel_error(bits, log_ulps=TORCH_LOG_ULPS)).any())


def test_noise_stream_on_the_cpu(three_steps: ModuleType) -> None:
    arguments = (torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.ones(1), torch.tensor([77]))
    drawn, forked = torch.empty(3, 336), torch.empty(3, 336)
    three_steps.noise.draw_noise(drawn, *arguments, num_samples=3)
    stream = three_steps.noise.NoiseStream("cpu")
    with pytest.raises(RuntimeError, match="expected a fork"):
        stream.join()
    stream.fork(forked, *arguments, num_samples=3)
    stream.join()
    assert torch.equal(drawn[:, :333], forked[:, :333])
    with pytest.raises(RuntimeError, match="expected a fork"):
        stream.join()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_samples": 4}, ValueError, r"out: expected fp32 \[>= 4, >= 336\].*got fp32 \[3, 336\]"),
        ({"num_samples": 0}, ValueError, "num_samples: expected an int at least 1, got 0"),
        ({"vocab_start": -1}, ValueError, "vocab_start: expected an int at least 0, got -1"),
        ({"width": 337}, ValueError, r"out: expected fp32 \[>= 3, >= 340\]"),
        ({"out": torch.empty(3, 338)}, ValueError, "out: expected rows of a multiple of 4 columns, got 338"),
        ({"out": torch.empty(3, 336).double()}, TypeError, "out: expected fp32"),
        ({"out": torch.empty(3 * 336 + 1)[1:].view(3, 336)}, ValueError, "16-byte aligned.*address 4 modulo 16"),
        ({"idx_mapping": torch.zeros(3, dtype=torch.int32)}, TypeError, "idx_mapping: expected int64"),
        ({"sample_pos": torch.zeros(2, dtype=torch.int64)}, ValueError, r"sample_pos: expected int64 \[>= 3\]"),
        ({"temperature": torch.ones(1).double()}, TypeError, "temperature: expected fp32"),
        ({"seeds": torch.ones(1)}, TypeError, "seeds: expected int64"),
    ],
)
def test_arguments_that_do_not_fit(
    three_steps: ModuleType, change: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments = {
        "out": torch.empty(3, 336),
        "idx_mapping": torch.zeros(3, dtype=torch.int64),
        "sample_pos": torch.zeros(3, dtype=torch.int64),
        "temperature": torch.ones(1),
        "seeds": torch.ones(1, dtype=torch.int64),
        "num_samples": 3,
    }
    with pytest.raises(error, match=message):
        three_steps.noise.draw_noise(**(arguments | change))
