"""The specification as a program: plain torch, one row and one position after the other.

Noise and division come from engine_math.py on a GPU, where the engine's own instructions decide the last bit, and from this
file on a CPU. Nothing here is shared with the generated kernels.
"""

from typing import NamedTuple

import torch

from .cases import Case

WORD = 0xFFFFFFFF
NEAR_TIE = 1e-5  # scores closer than this may order differently on a CPU, which has no fused multiply-add


class Walk(NamedTuple):
    """What the oracle draws for a case."""

    draft_tokens: torch.Tensor  # int64 [max_reqs, N], poisoned where no row writes
    logits_cache: torch.Tensor  # the case's cache dtype and layout, poisoned where nothing is written
    gap: torch.Tensor  # fp32 [rows, N]: best score minus that of the followed token


def oracle(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens and logits cache of a case, in outputs of their own."""
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
    head = case.head_weight.float()
    gap = torch.empty(case.rows, case.num_steps, dtype=torch.float32, device=case.device)
    for row in range(case.rows):
        prev = int(case.input_ids[row * case.query_per_row])
        if not 0 <= prev < case.vocab_size:
            prev = 0
        for step in range(case.num_steps):
            state = int(case.idx_mapping[row * case.num_steps + step])
            embedding = case.embed_weight[prev]
            bias = (head @ embedding.float()).bfloat16()
            base = case.base_logits[row, step]
            logits = base + bias if base.dtype == torch.bfloat16 else base + bias.float()
            logits = logits.to(cache.dtype)
            logits[case.sampling_limit :] = float("-inf")
            heat, seed = 0.0, 0
            if state >= 0:
                cache[state, step, : case.vocab_size] = logits
                heat, seed = float(case.temperature[state]), int(case.seeds[state])
            score = logits.float()
            if heat != 0.0:
                if case.step_mix:
                    seed ^= step << 32
                key = int(case.sample_pos[row * case.num_steps + step]) - 1 + case.draft_salt
                score = divide(score, heat) + gumbel(seed, key, case.vocab_size, case.device)
            score = score[: case.sampling_limit]
            tokens[row, step] = prev = winner(score)
            if follow is not None:
                prev = int(follow[row, step])
                if not 0 <= prev < len(score):
                    raise ValueError(f"row {row}, position {step}: expected a token below {len(score)}, got {prev}")
            gap[row, step] = score.max() - score[prev]
    return Walk(tokens, cache, gap)


def winner(score: torch.Tensor) -> int:
    """The lowest id whose score is NaN, else the lowest id of the maximum. score: fp32 [ids]."""
    nan = torch.isnan(score)
    best = nan if bool(nan.any()) else score == score.max()
    return int(torch.nonzero(best)[0])


def divide(score: torch.Tensor, heat: float) -> torch.Tensor:
    """score / temperature in fp32, by the division of the device's engine."""
    if score.device.type == "cuda":
        from . import engine_math

        return engine_math.divide(score, heat)
    return score / torch.tensor(heat, dtype=torch.float32)


def gumbel(seed: int, key: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise of ids 0 .. vocab_size - 1, fp32. `seed` has the draft step mixed in, `key` the draft salt added."""
    if device.type == "cuda":
        from . import engine_math

        return engine_math.noise(seed, key, vocab_size, device)
    return gumbel_of_bits(hash_bits(seed, key, torch.arange(vocab_size)))


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
    kind = torch.int16 if left.element_size() == 2 else torch.int32
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    nan = torch.isnan(left) & torch.isnan(right)
    equal = left.contiguous().view(kind) == right.contiguous().view(kind)
    return bool((equal | nan).all())


def why_unequal(case: Case, tokens: torch.Tensor, cache: torch.Tensor) -> str | None:
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


def why_unequal_on_cpu(case: Case, tokens: torch.Tensor, cache: torch.Tensor) -> str | None:
    """The rule for CPU results: the cache to the bit; another token only if its score is within NEAR_TIE of the best.

    Greedy positions involve no noise and compare exactly. After a near tie the oracle continues from the kernel's token, so
    that later positions are still compared. Returns the first difference in words, or None.
    """
    walk = walk_case(case, follow=tokens)
    for row in range(case.rows):
        for step in range(case.num_steps):
            got, want = int(tokens[row, step]), int(walk.draft_tokens[row, step])
            state = int(case.idx_mapping[row * case.num_steps + step])
            greedy = state < 0 or float(case.temperature[state]) == 0.0
            gap = float(walk.gap[row, step])
            if got != want and (greedy or not gap <= NEAR_TIE):
                return f"row {row}, position {step}: expected token {want}, got {got} (its score is {gap:.3g} lower)"
    if bool((tokens[case.rows :] != walk.draft_tokens[case.rows :]).any()):
        return f"rows from {case.rows} on: expected draft_tokens untouched"
    return _why_cache_unequal(cache, walk.logits_cache)


def _why_cache_unequal(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if same_bits(got, want):
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
