"""The vocabulary-parallel eager loop against the eager loop of the whole head, both in Triton's interpreter."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.harness.cases import Case, exact_case  # noqa: E402
from tests.harness.eager import EagerLoop  # noqa: E402
from tests.harness.eager_ranks import ShardedEagerLoop  # noqa: E402
from tests.harness.oracle import same_bits  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here, not interpreted")


def in_step(case: Case, world: int) -> list[Case]:
    """Every rank's outputs, the ranks run one after another up to each of their collectives."""
    own = [case.with_fresh_outputs() for _ in range(world)]
    loops = [ShardedEagerLoop(mine, rank, world, lambda out, local: None) for rank, mine in enumerate(own)]
    tokens = [case.input_ids[:: case.query_per_row][: case.rows]] * world
    for step in range(case.num_steps):
        packets = torch.stack([loop.propose(step, prev) for loop, prev in zip(loops, tokens, strict=True)])
        tokens = [loop.pick(step, packets) for loop in loops]
    shards = torch.stack([loop._shard for loop in loops])
    for loop in loops:
        loop.fill(shards)
    return own


@pytest.mark.parametrize(("vocab", "world"), [(64, 2), (1101, 3)])
def test_every_rank_draws_what_the_whole_head_draws(vocab: int, world: int) -> None:
    case = exact_case(vocab, 64, 3, 2, seed=vocab, max_reqs=2, temperatures=(0.0, 0.9))
    whole = case.with_fresh_outputs()
    EagerLoop(whole)()
    for mine in in_step(case, world):
        assert torch.equal(mine.draft_tokens, whole.draft_tokens)
        assert same_bits(mine.logits_cache, whole.logits_cache)


def test_one_rank_alone_runs_the_whole_loop() -> None:
    case = exact_case(97, 64, 3, 2, seed=5, max_reqs=2, temperatures=(0.9,))
    whole, alone = case.with_fresh_outputs(), case.with_fresh_outputs()
    EagerLoop(whole)()
    ShardedEagerLoop(alone, 0, 1, lambda out, local: out.copy_(local[None]))()
    assert torch.equal(alone.draft_tokens, whole.draft_tokens) and same_bits(alone.logits_cache, whole.logits_cache)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="expected all of 5 request states"):
        ShardedEagerLoop(exact_case(64, 64, 3, 2, seed=1), 0, 2, lambda out, local: None)
    case = exact_case(3, 64, 3, 2, seed=1, max_reqs=2)
    with pytest.raises(ValueError, match="rank 3: expected a share of 3 ids"):
        ShardedEagerLoop(case, 3, 4, lambda out, local: None)
