"""Draft and verification together: the output must follow the target distribution (case 1, test b).

A draft token is drawn with the kernels' noise functions and verified as an engine does: accepted with probability
min(1, p / q), else replaced by a draw from max(p - q, 0) with the target's own noise, which has no draft salt. Column 0,
where the step mix leaves the seed alone, so that the salt is all that keeps the two streams apart.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from tests.harness import oracle  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")

SEEDS = 200_000
SAMPLE_POS = 1234
BLOCK = 8192
TARGET = np.array([0.30, 0.22, 0.15, 0.11, 0.09, 0.07, 0.04, 0.02])
DRAFT = np.array([0.05, 0.10, 0.30, 0.05, 0.20, 0.05, 0.05, 0.20])
# Chi-square with 7 degrees of freedom exceeds this once in a million; without the salt it is in the thousands.
LIMIT = 40.5


@triton.jit
def _noise_of_many_seeds(out, key_pointer, count, GUMBEL: tl.constexpr, SCHEME: tl.constexpr, BLOCK: tl.constexpr):
    seed = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.arange(0, 8)
    drawn = GUMBEL(seed[:, None], tl.load(key_pointer), ids[None, :], SCHEME)
    tl.store(out + seed[:, None] * 8 + ids[None, :], drawn, mask=seed[:, None] < count)


@pytest.fixture(scope="module")
def draw_many(toy_models: Callable[..., ModuleType]) -> Callable[[int], np.ndarray]:
    """Noise of the 8 ids for every seed at one key, fp32 [SEEDS, 8], by the kernels' device functions."""
    noise = toy_models(8, num_steps=1).noise

    def draw(key: int) -> np.ndarray:
        out = torch.empty(SEEDS, 8)
        draw = {"GUMBEL": noise.gumbel_noise, "SCHEME": "murmur3_32"}
        _noise_of_many_seeds[(triton.cdiv(SEEDS, BLOCK),)](out, torch.tensor([key]), SEEDS, BLOCK=BLOCK, **draw)
        return out.numpy()

    return draw


def verify(draft: np.ndarray, target_noise: np.ndarray) -> np.ndarray:
    """Counts of output tokens: reference rejection sampling of draft tokens [SEEDS] with residual noise [SEEDS, 8]."""
    uniform = np.random.default_rng(11).random(len(draft))
    accepted = uniform < (TARGET / DRAFT)[draft]
    with np.errstate(divide="ignore"):
        residual = np.log(np.maximum(TARGET - DRAFT, 0.0))
    recovered = (residual + target_noise).argmax(axis=1)
    return np.bincount(np.where(accepted, draft, recovered), minlength=8)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_output_follows_the_target_only_with_the_salt(
    draw_many: Callable[[int], np.ndarray], toy_models: Callable[..., ModuleType]
) -> None:
    salt = toy_models(8, num_steps=1).config.DRAFT_SALT
    key = SAMPLE_POS - 1
    target_noise, draft_noise = draw_many(key), draw_many(key + salt)
    salted = (np.log(DRAFT) + draft_noise).argmax(axis=1)
    unsalted = (np.log(DRAFT) + target_noise).argmax(axis=1)
    assert chi_square(np.bincount(salted, minlength=8), DRAFT) < LIMIT
    assert chi_square(np.bincount(unsalted, minlength=8), DRAFT) < LIMIT
    assert chi_square(verify(salted, target_noise), TARGET) < LIMIT
    assert chi_square(verify(unsalted, target_noise), TARGET) > 10 * LIMIT


def test_the_fused_kernel_draws_these_drafts(
    draw_many: Callable[[int], np.ndarray], toy_models: Callable[..., ModuleType]
) -> None:
    """The statistics above are of the draft tokens that the kernel itself draws: the first 64 seeds, one request each."""
    model = toy_models(8, num_steps=1)
    rows = 64
    zeros = torch.zeros(8, 64, dtype=torch.bfloat16)
    loop = model.fused.FusedLoop(zeros, zeros, max_reqs=rows)
    tokens = torch.empty(rows, 1, dtype=torch.int64)
    logits = torch.log(torch.tensor(DRAFT, dtype=torch.float32))
    loop.sample(
        logits.expand(rows, 1, 8),
        torch.zeros(rows, dtype=torch.int32),
        torch.arange(rows),
        torch.full((rows,), SAMPLE_POS),
        torch.ones(rows),
        torch.arange(rows),
        torch.empty(rows, 1, 8),
        tokens,
    )
    noise = draw_many(SAMPLE_POS - 1 + model.config.DRAFT_SALT)[:rows]
    assert tokens[:, 0].tolist() == (logits.numpy() + noise).argmax(axis=1).tolist()
    expected = oracle.gumbel(5, SAMPLE_POS - 1 + model.config.DRAFT_SALT, 8, torch.device("cpu"))
    assert np.abs(noise[5] - expected.numpy()).max() < 4e-6
