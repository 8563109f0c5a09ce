"""Noise, division and sampling as the engine's GPU kernels do them, in a few lines of Triton each.

The oracle needs the engine's own instructions on a GPU: a logarithm and a division that are not correctly rounded, and the
multiply-adds that the compiler fuses. This file is written apart from the generated kernels, so that a mistake cannot hide
in both.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

BLOCK = 1024  # vocabulary ids a program, as in the engine


FP64_NOISE = "murmur3_64"


@triton.jit
def _mix(state, word):
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _hash(seed, key, ids, DOMAIN: tl.constexpr):
    # seed, key: int64 scalars; ids: int32 vector
    state = _mix((seed * 0).to(tl.uint32) ^ DOMAIN, seed.to(tl.uint32))
    state = _mix(state, (seed >> 32).to(tl.uint32))
    state = _mix(state, key.to(tl.uint32))
    state = _mix(state, ids.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def _gumbel_fp64(seed, key, ids):
    high = _hash(seed, key, ids, 0x9E3779B9).to(tl.uint64)
    bits = ((high << 32) | _hash(seed, key, ids, 0).to(tl.uint64)) >> 11
    u = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(tl.where(u == 1.0, u - 1.1102230246251565e-16, u)))


@triton.jit
def _gumbel_philox(seed, key, ids):
    u = tl.maximum(tl.rand(tl.randint(seed, key), ids), 4.6566127342e-10)
    return -tl.log(-libdevice.log1p(-u))


@triton.jit
def gumbel_of_bits(bits):
    """The engine's noise of 32 random bits."""
    high = (bits >> 16).to(tl.float32)
    low = (bits & 65535).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10

    p = 1 / 7 + u * (1 / 8)
    p = 1 / 6 + u * p
    p = 1 / 5 + u * p
    p = 1 / 4 + u * p
    p = 1 / 3 + u * p
    p = 1 / 2 + u * p
    p = 1.0 + u * p
    complement = tl.maximum(1.0 - u, 5.960464477539063e-08)
    return -tl.log(-tl.where(u < 0.25, -u * p, tl.log(complement)))


@triton.jit
def _gumbel(seed, key, ids):
    return gumbel_of_bits(_hash(seed, key, ids, 0))


@triton.jit
def _gumbel_by(seed, key, ids, SCHEME: tl.constexpr):
    if SCHEME == "murmur3_32":
        noise = _gumbel(seed, key, ids)
    elif SCHEME == "murmur3_64":
        noise = _gumbel_fp64(seed, key, ids)
    else:
        noise = _gumbel_philox(seed, key, ids)
    return noise


@triton.jit
def _noise_kernel(out, seed_pointer, key_pointer, count, SCHEME: tl.constexpr, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, key = tl.load(seed_pointer), tl.load(key_pointer)
    tl.store(out + ids, _gumbel_by(seed, key, ids, SCHEME), mask=ids < count)


@triton.jit
def _divide_kernel(out, score, heat_pointer, count, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    quotient = tl.load(score + ids, mask=ids < count) / tl.load(heat_pointer)
    tl.store(out + ids, quotient, mask=ids < count)


@triton.jit
def _sample_kernel(
    best_score,  # fp32 or fp64 [rows, blocks]
    best_id,  # int64 [rows, blocks]
    logits,  # cache dtype [rows, V], contiguous
    cache,  # [max_reqs, N, >= V]
    cache_req_stride,
    cache_step_stride,
    states,  # int64, of row r at r * N
    positions,  # int64, of row r at r * N
    temperature,
    seeds,
    step,
    num_steps,
    salt,
    first,  # id of the first of `count` columns
    count,
    SCHEME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < count
    stored = tl.load(logits + row * count + ids, mask=inside, other=float("-inf"))
    state = tl.load(states + row * num_steps + step)
    real = state >= 0
    tl.store(cache + state * cache_req_stride + step * cache_step_stride + ids, stored, mask=inside & real)
    heat = tl.load(temperature + state, mask=real, other=0.0)
    score = stored.to(tl.float32).to(best_score.dtype.element_ty)
    if heat != 0.0:
        seed = tl.load(seeds + state) ^ (tl.cast(step, tl.int64) << 32)
        key = tl.load(positions + row * num_steps + step) - 1 + salt
        quotient = stored.to(tl.float32) / heat
        noised = (quotient + _gumbel_by(seed, key, first + ids, SCHEME)).to(best_score.dtype.element_ty)
        score = tl.where(inside, noised, float("-inf"))
    value, place = tl.max(score, axis=0, return_indices=True)
    tl.store(best_score + row * tl.num_programs(1) + block, value)
    tl.store(best_id + row * tl.num_programs(1) + block, first + block * BLOCK + place)


def _words(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it: from pinned memory where it is a GPU."""
    words = torch.tensor(values, dtype=dtype)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words


def noise(seed: int, key: int, count: int, device: torch.device, *, scheme: str = "murmur3_32") -> torch.Tensor:
    """Gumbel noise of ids 0 .. count - 1, [count], fp64 by the scheme murmur3_64, else fp32; seed as signed 64-bit, with the draft
    step mixed in, key salted. The Philox scheme needs a GPU: its logarithm is libdevice's."""
    out = torch.empty(count, dtype=torch.float64 if scheme == FP64_NOISE else torch.float32, device=device)
    words = _words([seed, key], torch.int64, device)
    _noise_kernel[(triton.cdiv(count, BLOCK),)](out, words, words[1:], count, SCHEME=scheme, BLOCK=BLOCK)
    return out


def divide(score: torch.Tensor, heat: float) -> torch.Tensor:
    """score / heat in fp32 by the engine's division; score: contiguous fp32."""
    out = torch.empty_like(score)
    divisor = _words([heat], torch.float32, score.device)
    _divide_kernel[(triton.cdiv(score.numel(), BLOCK),)](out, score, divisor, score.numel(), BLOCK=BLOCK)
    return out


def sample_blocks(
    best_score: torch.Tensor,
    best_id: torch.Tensor,
    logits: torch.Tensor,
    cache: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    *,
    step: int,
    num_steps: int,
    salt: int,
    first: int = 0,
    scheme: str = "murmur3_32",
) -> None:
    """Cache one position's logits and leave the noised maximum of each block of `BLOCK` ids, as the engine's kernel does.

    Args:
        best_score: [rows, blocks], out; fp64 by the scheme murmur3_64, else fp32.
        best_id: int64 [rows, blocks], out.
        logits: [rows, V], contiguous, in the cache's dtype.
        cache: [max_reqs, N, >= V], out; other arguments as in a sampler's `sample`.
        first: token id of column 0, where the logits and the cache are a vocabulary shard's.
        scheme: of the noise.
    """
    rows, count = logits.shape
    _sample_kernel[rows, best_score.shape[1]](
        best_score,
        best_id,
        logits,
        cache,
        cache.stride(0),
        cache.stride(1),
        states,
        positions,
        temperature,
        seeds,
        step,
        num_steps,
        salt,
        first,
        count,
        SCHEME=scheme,
        BLOCK=BLOCK,
    )
