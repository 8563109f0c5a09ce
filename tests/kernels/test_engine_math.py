"""The oracle's GPU arithmetic against the released engine's own kernel, bit for bit, and against fp64.

The engine's file is not part of this repository: name its `vllm/v1/worker/gpu/sample/gumbel.py` in DSPARK_ENGINE_GUMBEL.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness import engine_math, oracle  # noqa: E402
from tests.harness.cases import DRAFT_SALT, random_case  # noqa: E402

VARIABLE = "DSPARK_ENGINE_GUMBEL"
VOCAB = 129280
DTYPES = (torch.bfloat16, torch.float32)
CUDA_LOG_ULPS = 1.0  # error of logf, as CUDA's C++ programming guide states it


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    """The engine's module, with Triton handed to it under the name that it imports."""
    path = os.environ.get(VARIABLE)
    if not path:
        pytest.skip(f"needs the engine's gumbel.py; name the file in {VARIABLE}")
    stand_in: Any = ModuleType("vllm.triton_utils")
    stand_in.triton, stand_in.tl = triton, triton.language
    names = {"vllm": ModuleType("vllm"), "vllm.triton_utils": stand_in}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        spec = importlib.util.spec_from_file_location("engine_gumbel", Path(path))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    yield module


@pytest.mark.parametrize("seed", [42, -1, 2**63 - 1, 987654321])
@pytest.mark.parametrize("sample_pos", [49061, 17057, 5])
def test_noise_is_close_to_fp64(cuda: Any, seed: int, sample_pos: int) -> None:
    """Among the ids are, for seed 42, the one with hash 0 and the one with hash 2^32 - 1."""
    key = sample_pos - 1 + DRAFT_SALT
    bits = oracle.hash_bits(seed, key, torch.arange(VOCAB))
    drawn = engine_math.noise(seed, key, VOCAB, cuda).cpu().double()
    error = (drawn - oracle.gumbel_of_bits_fp64(bits)).abs()
    assert bool((error <= oracle.gumbel_error(bits, log_ulps=CUDA_LOG_ULPS)).all())


@pytest.mark.parametrize("seed", [42, -1, 2**63 - 1, 2**40 + 7])
def test_the_other_schemes_are_close_to_the_cpu_oracle(cuda: Any, seed: int) -> None:
    """The same bits, and logarithms that differ in their last bits: a few of fp64's for the one, a few of fp32's for the other."""
    cpu = torch.device("cpu")
    for scheme, bound in (("murmur3_64", 1e-13), ("philox_32", 8e-6)):
        drawn = engine_math.noise(seed, 4710 + DRAFT_SALT, VOCAB, cuda, scheme=scheme).cpu()
        expected = oracle.gumbel(seed, 4710 + DRAFT_SALT, VOCAB, cpu, scheme=scheme)
        assert drawn.dtype == expected.dtype
        assert float((drawn - expected).abs().max()) <= bound


@pytest.mark.parametrize("scheme", ["murmur3_32", "murmur3_64"])
def test_every_score_equals_the_engines(cuda: Any, engine: ModuleType, scheme: str) -> None:
    """The engine's kernel with blocks of one id leaves every score, logit / T + noise, where blocks leave their maxima."""
    fp64 = scheme == engine_math.FP64_NOISE
    vocab = 65_535  # the kernel's blocks are the grid's y axis, which ends there
    case = random_case(vocab, 64, 3, 4, seed=1, device=cuda, temperatures=(0.7, 1.3, 0.05, 1.0))
    for step in range(3):
        logits = case.base_logits[:, step].float().contiguous()
        states, positions = case.idx_mapping[step::3].contiguous(), case.sample_pos[step::3].contiguous()
        best_id = torch.empty(4, vocab, dtype=torch.int64, device=cuda)
        score = torch.empty(4, vocab, dtype=torch.float64 if fp64 else torch.float32, device=cuda)
        column = torch.tensor(step, device=cuda)
        cache = torch.empty(case.max_reqs, 3, vocab, device=cuda)
        engine._gumbel_sample_kernel[(4, vocab)](
            best_id, vocab, score, vocab, cache, cache.stride(0), cache.stride(1), column, logits, vocab, logits, vocab,
            states, case.seeds, positions - 1, case.temperature, vocab, BLOCK_SIZE=1, IS_DRAFTING=True,
            APPLY_TEMPERATURE=True, USE_FP64=fp64, PER_TOKEN_COL=False,
        )  # fmt: skip
        for row in range(4):
            state = int(states[row])
            seed, key = int(case.seeds[state]) ^ (step << 32), int(positions[row]) - 1 + DRAFT_SALT
            noise = oracle.gumbel(seed, key, vocab, logits.device, scheme=scheme)
            want = oracle.divide(logits[row], float(case.temperature[state])) + noise
            assert oracle.same_bits(score[row], want), f"step {step}, row {row}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_equal_the_engines(cuda: Any, engine: ModuleType, dtype: torch.dtype) -> None:
    """The eager baseline's kernel: cache and tokens of padding rows, greedy rows and sampled rows."""
    case = random_case(VOCAB, 64, 3, 8, seed=2, device=cuda, padding_rows=2, cache_dtype=dtype)
    blocks = triton.cdiv(VOCAB, engine_math.BLOCK)
    score = torch.empty(8, blocks, dtype=torch.float32, device=cuda)
    ids = torch.empty(8, blocks, dtype=torch.int64, device=cuda)
    theirs = case.with_fresh_outputs()
    for step in range(3):
        logits = case.base_logits[:, step].to(dtype).contiguous()
        engine_math.sample_blocks(
            score, ids, logits, case.logits_cache, case.idx_mapping, case.sample_pos, case.temperature, case.seeds,
            step=step, num_steps=3, salt=DRAFT_SALT,
        )  # fmt: skip
        ours = ids.gather(1, score.argmax(dim=-1, keepdim=True)).view(-1)
        tokens = engine.gumbel_sample(
            logits, case.idx_mapping[step::3], case.temperature, case.seeds, case.sample_pos[step::3] - 1,
            apply_temperature=True, is_drafting=True, logits_cache=theirs.logits_cache,
            logits_cache_col=torch.tensor(step, device=cuda),
        )  # fmt: skip
        assert torch.equal(ours, tokens)
    assert oracle.same_bits(case.logits_cache, theirs.logits_cache)
