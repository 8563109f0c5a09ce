"""The specification as a program: plain torch, one row and one position after the other.

Noise and division come from engine_math.py on a GPU, where the engine's own instructions decide the last bit, and from this
file on a CPU; so does tanh, which is torch's on a GPU and computed in fp64 on a CPU. Nothing here is shared with the generated
kernels.
"""

from typing import NamedTuple

import torch

from .cases import Case, Transform

WORD = 0xFFFFFFFF
HIGH_HASH_SEED = 0x9E3779B9  # of the upper word of 64 random bits
NEAR_TIE = 1e-5  # scores closer than this may order differently on a CPU, which has no fused multiply-add


class Walk(NamedTuple):
    """What the oracle draws for a case."""

    draft_tokens: torch.Tensor  # int64 [max_reqs, N], poisoned where no row writes
    logits_cache: (
        torch.Tensor | None
    )  # the case's cache dtype and layout, poisoned where nothing is written; None for greedy drafts
    gap: torch.Tensor  # fp32 [rows, N]: best score minus that of the followed token


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft tokens and logits cache of a case, in outputs of their own; the cache is None for greedy drafts."""
    walk = walk_case(case)
    return walk.draft_tokens, walk.logits_cache


def walk_case(case: Case, *, follow: torch.Tensor | None = None) -> Walk:
    """Draw all positions of all rows.

    Args:
        case: the inputs; its outputs are not touched.
        follow: int64 [>= rows, N]; where given, position i + 1 continues from this token instead of the drawn one.

    Raises:
        ValueError: when a followed token is no candidate.
    """
    fresh = case.with_fresh_outputs()
    tokens, cache = fresh.draft_tokens, fresh.logits_cache
    ids = case.target_ids
    head = case.head_weight[: len(ids)].float()
    possible = ids < case.sampling_limit
    # In the order in which ties are broken: by draft id where drafts are greedy, else by target id.
    candidates = ids[possible] if cache is None else ids[possible].sort().values
    # What a row or a request state says is read here once: a GPU would be waited for at every position.
    ids_of_candidates = candidates.cpu()
    anchors, states = case.input_ids.tolist(), case.idx_mapping.tolist()
    positions, heats, seeds = case.sample_pos.tolist(), case.temperature.tolist(), case.seeds.tolist()
    followed = None if follow is None else follow.tolist()
    gap = torch.empty(case.rows, case.num_steps, dtype=torch.float32, device=case.device)
    for row in range(case.rows):
        prev = anchors[row * case.query_per_row]
        if not 0 <= prev < case.vocab_size:
            prev = 0
        for step in range(case.num_steps):
            sample = row * case.num_steps + step
            bias = (head @ case.embed_weight[prev].float()).bfloat16()
            logits = transformed_sum(case.transform, case.base_logits[row, step], bias)
            if cache is None:
                # Greedy drafts: in draft space, before any rounding to a cache.
                score = logits[possible].float()
            else:
                cached = torch.full((case.vocab_size,), float("-inf"), dtype=cache.dtype, device=case.device)
                cached[ids] = logits.to(cache.dtype)
                cached[case.sampling_limit :] = float("-inf")
                state, heat, seed = states[sample], 0.0, 0
                if state >= 0:
                    cache[state, step, : case.vocab_size] = cached
                    heat, seed = heats[state], seeds[state]
                score = cached.float()
                if heat != 0.0:
                    if case.step_mix:
                        seed ^= step << 32
                    key = positions[sample] - 1 + case.draft_salt
                    noise = gumbel(seed, key, case.vocab_size, case.device, scheme=case.noise_scheme)
                    score = divide(score, heat) + noise
                score = score[candidates]
            place = winner(score)
            tokens[row, step] = prev = int(ids_of_candidates[place])
            if followed is not None:
                prev = followed[row][step]
                places = torch.nonzero(ids_of_candidates == prev)
                if not len(places):
                    raise ValueError(f"row {row}, position {step}: expected a token that can be drawn, got {prev}")
                place = int(places[0])
            gap[row, step] = score.max() - score[place]
    return Walk(tokens, cache, gap)


def transformed_sum(transform: Transform, base: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Base logits plus bias with the output transform, in the base's dtype; fp32 where the sum is transformed.

    Args:
        transform: what is multiplied and capped, and where.
        base: bf16 or fp32 [ids].
        bias: bf16 [ids].
    """
    if transform.placement in ("base", "both") and not transform.base_capped:
        base = multiply_and_cap(transform, base)
    if transform.placement == "both":
        bias = multiply_and_cap(transform, bias)
    total = (base.float() + bias.float()).to(base.dtype)
    return multiply_and_cap(transform, total.float()) if transform.placement == "sum" else total


def multiply_and_cap(transform: Transform, x: torch.Tensor) -> torch.Tensor:
    """Multiplier, then cap * tanh(x * (1 / cap)), each operation in fp32 and rounded to the tensor's dtype, bf16 or fp32."""
    if transform.multiplier != 1.0:
        x = (x.float() * _fp32(transform.multiplier)).to(x.dtype)
    if transform.soft_cap is not None:
        cap = _fp32(transform.soft_cap)
        x = (x.float() * (1.0 / cap)).to(x.dtype)
        x = tanh(x.float()).to(x.dtype)
        x = (x.float() * cap).to(x.dtype)
    return x


def _fp32(value: float) -> torch.Tensor:
    """A number rounded to fp32, as a scalar tensor that takes part in fp32 operations on any device."""
    return torch.tensor(value, dtype=torch.float32)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh of fp32: torch's on a GPU, which is the engine's; on a CPU the rounded fp64 value, as fp32 ones differ by build."""
    return torch.tanh(x) if x.is_cuda else torch.tanh(x.double()).float()


def winner(score: torch.Tensor) -> int:
    """The first place whose score is NaN, else the first of the maximum. score: fp32 or fp64 [candidates]."""
    nan = torch.isnan(score)
    best = torch.where(nan.any(), nan, score == score.max())
    return int(torch.where(best, torch.arange(len(score), device=score.device), len(score)).min())


def divide(score: torch.Tensor, heat: float) -> torch.Tensor:
    """score / temperature in fp32, by the division of the device's engine."""
    if score.device.type == "cuda":
        from . import engine_math

        return engine_math.divide(score, heat)
    return score / torch.tensor(heat, dtype=torch.float32)


def gumbel(seed: int, key: int, vocab_size: int, device: torch.device, *, scheme: str = "murmur3_32") -> torch.Tensor:
    """Gumbel noise of ids 0 .. vocab_size - 1: fp64 by the scheme murmur3_64, fp32 by the others. `seed` has the draft step mixed
    in, `key` the draft salt added."""
    if device.type == "cuda":
        from . import engine_math

        return engine_math.noise(seed, key, vocab_size, device, scheme=scheme)
    ids = torch.arange(vocab_size)
    if scheme == "philox_32":
        return gumbel_of_philox(philox_bits(seed, key, ids))
    if scheme == "murmur3_64":
        return gumbel_of_bits_64(hash_bits(seed, key, ids, hash_seed=HIGH_HASH_SEED), hash_bits(seed, key, ids))
    return gumbel_of_bits(hash_bits(seed, key, ids))


def hash_bits(seed: int, key: int, ids: torch.Tensor, *, hash_seed: int = 0) -> torch.Tensor:
    """MurmurHash3_x86_32 of the 16 little-endian bytes (seed low, seed high, key low, id); int64 in [0, 2^32), like `ids`."""
    state = torch.full_like(ids, hash_seed, dtype=torch.int64)
    for word in (seed, seed >> 32, key, ids):
        mixed = (word & WORD) * 0xCC9E2D51 & WORD
        mixed = ((mixed << 15) | (mixed >> 17)) & WORD
        state = state ^ (mixed * 0x1B873593 & WORD)
        state = ((state << 13) | (state >> 19)) & WORD
        state = (state * 5 + 0xE6546B64) & WORD
    state = state ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B & WORD
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & WORD
    return state ^ (state >> 16)


def uniform_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """(bits + 0.5) / 2^32 rounded to fp32; int64 in, fp32 in (0, 1] out."""
    return ((bits.double() + 0.5) * 2.0**-32).float()


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-u)) in fp32: the series below u = 0.25, the logarithm of the complement elsewhere."""
    u = uniform_of_bits(bits)
    series = torch.full_like(u, 1.0 / 8.0)
    for term in range(7, 0, -1):
        series = 1.0 / term + u * series
    direct = torch.log(torch.clamp(1.0 - u, min=2.0**-24))
    return -torch.log(-torch.where(u < 0.25, -u * series, direct))


def gumbel_of_bits_64(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) in fp64, u = (b + 0.5) / 2^53 of the upper 53 bits b of two 32-bit words, below 1. int64 in [0, 2^32) in."""
    bits = (high << 21) | (low >> 11)
    u = (bits.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(torch.where(u == 1.0, u - 2.0**-53, u)))


def philox(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """First word of Philox 4x32-10 with the 64-bit key `seed` and the 64-bit counters, int64; in [0, 2^32)."""
    words = [counter & WORD, (counter >> 32) & WORD, torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(10):
        high_a, low_a = _wide_product(words[0], 0xD2511F53)
        high_b, low_b = _wide_product(words[2], 0xCD9E8D57)
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(keys[0] + 0x9E3779B9) & WORD, (keys[1] + 0xBB67AE85) & WORD]
    return words[0]


def _wide_product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32-bit product, by halves, as int64 holds no 64 unsigned bits."""
    low_half = (word & 0xFFFF) * factor
    high_half = (word >> 16) * factor + (low_half >> 16)
    return high_half >> 16, ((high_half << 16) | (low_half & 0xFFFF)) & WORD


def philox_bits(seed: int, key: int, ids: torch.Tensor) -> torch.Tensor:
    """The random word of each id by the older scheme: a first draw from seed and key, 32 bits, is the key of the draw by id."""
    return philox(int(philox(seed, torch.tensor([key]))), ids)


def gumbel_of_philox(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log1p(-u)) in fp32 of a random word: as a signed number, negative ones mirrored, times 4.6566127342e-10, at least that."""
    signed = bits - ((bits >> 31) << 32)
    magnitude = torch.where(signed < 0, -signed - 1, signed)
    unit = torch.tensor(4.6566127342e-10, dtype=torch.float32)
    u = torch.maximum(magnitude.float() * unit, unit)
    return -torch.log(-torch.log1p(-u))


def gumbel_of_bits_fp64(bits: torch.Tensor) -> torch.Tensor:
    """The same function of the same fp32 uniform in fp64: what the fp32 noise approximates, to `gumbel_error`."""
    return -torch.log(_minus_log1p_fp64(uniform_of_bits(bits).double()))


def _minus_log1p_fp64(u: torch.Tensor) -> torch.Tensor:
    """-log1p(-u), the logarithm's argument clamped as in the noise."""
    return -torch.where(u < 1.0, torch.log1p(-u), torch.log(torch.full_like(u, 2.0**-24)))


def gumbel_error(bits: torch.Tensor, *, log_ulps: float) -> torch.Tensor:
    """How far the fp32 noise of these hashes may lie from `gumbel_of_bits_fp64`, fp64 like `bits`.

    u is the same fp32 number in both, so its rounding is no error. With m = -log1p(-u) and g = -log(m), a relative error d of m
    moves g by -log1p(-d), whatever g is, and the outer logarithm adds its own error. d consists of
    - below u = 1/4: the terms of the series from u^9 / 9 on, up to 1.9e-6 just below 1/4, and the roundings of the Horner steps
      and of the final product (each at most 2^-24 of what is rounded; a fused step makes one less);
    - from 1/4 on: the rounding of 1 - u, at most 2^-24 of it and so 2^-24 of its logarithm, and the error of that logarithm.
    The largest sums are about 2.2e-6 just below u = 1/4 and about 2.1e-6 at the smallest u, where an ulp of g is 1.9e-6.

    Args:
        bits: int64 in [0, 2^32).
        log_ulps: error of the fp32 logarithm in units in the last place of its result: 1 for CUDA's.
    """
    half_ulp = 2.0**-24
    u = uniform_of_bits(bits).double()
    exact = _minus_log1p_fp64(u)
    p, error = torch.full_like(u, 1 / 8), torch.zeros_like(u)
    for term in range(7, 0, -1):
        product = u * p
        p = 1 / term + product
        error = u * error + half_ulp * (product + 1 / term + p)  # of the product, of the constant, of the sum
    series = ((exact - u * p) + u * error + half_ulp * u * p) / exact
    direct = half_ulp / exact + log_ulps * 2 * half_ulp
    moved = -torch.log1p(-torch.where(u < 0.25, series, direct))
    largest = torch.log(exact).abs() + moved
    _, exponent = torch.frexp(largest)
    return moved + log_ulps * torch.ldexp(torch.ones_like(u), exponent - 24)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and floating dtype are equal bit for bit, with any NaN equal to any NaN."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    nan = torch.isnan(left) & torch.isnan(right)
    equal = left.contiguous().view(kind) == right.contiguous().view(kind)
    return bool((equal | nan).all())


def why_unequal(case: Case, tokens: torch.Tensor, cache: torch.Tensor | None) -> str | None:
    """Compare a GPU kernel's outputs with the oracle to the bit. Returns the first difference in words, or None.

    Weights must have exact dot products (`exact_weights`), as a kernel may sum in any order.
    """
    want_tokens, want_cache = oracle(case)
    wrong = torch.nonzero(tokens != want_tokens)
    if len(wrong):
        row, step = wrong[0].tolist()
        got = int(tokens[row, step])
        return f"row {row}, position {step}: expected token {int(want_tokens[row, step])}, got {got}"
    return _why_cache_unequal(cache, want_cache)


def why_unequal_on_cpu(case: Case, tokens: torch.Tensor, cache: torch.Tensor | None) -> str | None:
    """The rule for CPU results: the cache to the bit; another token only if its score is within NEAR_TIE of the best.

    Greedy positions involve no noise and compare exactly. After a near tie the oracle continues from the kernel's token, so
    that later positions are still compared. Returns the first difference in words, or None.
    """
    walk = walk_case(case, follow=tokens)
    for row in range(case.rows):
        for step in range(case.num_steps):
            got, want = int(tokens[row, step]), int(walk.draft_tokens[row, step])
            state = int(case.idx_mapping[row * case.num_steps + step])
            greedy = cache is None or state < 0 or float(case.temperature[state]) == 0.0
            gap = float(walk.gap[row, step])
            if got != want and (greedy or not gap <= NEAR_TIE):
                return f"row {row}, position {step}: expected token {want}, got {got} (its score is {gap:.3g} lower)"
    if bool((tokens[case.rows :] != walk.draft_tokens[case.rows :]).any()):
        return f"rows from {case.rows} on: expected draft_tokens untouched"
    return _why_cache_unequal(cache, walk.logits_cache)


def _why_cache_unequal(got: torch.Tensor | None, want: torch.Tensor | None) -> str | None:
    if got is None or want is None or same_bits(got, want):
        return None
    differs = ~((got == want) | (torch.isnan(got) & torch.isnan(want)))
    if not bool(differs.any()):
        return "logits cache: expected the oracle's zeros, got zeros of another sign"
    state, step, column = torch.nonzero(differs)[0].tolist()
    pair = f"{float(want[state, step, column])}, got {float(got[state, step, column])}"
    return f"logits cache [{state}, {step}, {column}]: expected {pair}; {int(differs.sum())} entries differ"


def prefix_agreement(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    """(agreeing, compared) positions of two token tensors [rows, N], counting those whose prefixes agree."""
    equal = left == right
    before = torch.cat([torch.ones_like(equal[:, :1]), equal[:, :-1].cumprod(1).bool()], dim=1)
    return int((equal & before).sum()), int(before.sum())
