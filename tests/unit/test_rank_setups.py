"""Set-ups over two ranks that agree through a real gloo group: a sampler on every rank, or None on every rank and one reason."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import rank_setups  # noqa: E402
from tests.harness.fake_gpu import R, V  # noqa: E402

WORLD = 2
BUILDS = 4  # two row slots, two dtypes of base logits
BF16_BYTES = 2

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each rank found, by set-up."""
    return rank_setups.run(WORLD)


REFUSED = {
    "one_cannot_compile": ("rank 1: compiling the kernels: RuntimeError: no ptxas", []),
    "one_has_no_head": ("rank 1: the Markov head is missing", []),
    "one_has_a_short_head": ("rank 0: head_weight: expected bf16 [>= 20, 64], contiguous", []),
    "one_cannot_allocate": ("bytes of symmetric memory: OutOfMemoryError: no memory", ["allocate"]),
    "one_cannot_rendezvous": (
        "rank 0: rendezvous of symmetric memory: RuntimeError: no fd",
        ["allocate", "rendezvous"],
    ),
    "one_gets_no_pointer": ("rank 1: no pointer to the memory of rank 0", ["allocate", "rendezvous"]),
    "no_peer_access": ("rank 1: no peer access from GPU", []),
    "one_gpu_for_two": ("rank 0: rank 1 has the same GPU (GPU-0): expected a GPU for each rank", []),
    "two_hosts_without_fabric": ("rank 1 is on another host (host1, this one is host0)", []),
    "no_plan_for_the_world": ("rank 1: no plan for h200 at tensor-parallel size 2", []),
    "other_max_reqs": ("max_reqs: expected the same on every rank, got 6 on rank 0, 7 on rank 1", []),
    "other_shard_width": ("shard_width: expected the same on every rank, got 20 on rank 0, 21 on rank 1", []),
    "other_timeout": ("timeout_ms: expected the same on every rank, got 30000 on rank 0, 0 on rank 1", []),
    "one_breaks_while_it_looks": ("rank 1: checking the arguments: TypeError", []),
}


def test_every_setup_is_judged_here() -> None:
    built = {"every_rank_fits", "two_hosts_with_fabric"}
    assert {setup.__name__ for setup in rank_setups.SETUPS} == built | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_on_one_rank_leaves_none_on_every_rank(found: Found, name: str) -> None:
    reason, steps = REFUSED[name]
    for rank, one in enumerate(ranks[name] for ranks in found):
        assert not one["made"]
        # No rank goes further than the step that one of them failed: it would wait there.
        assert one["steps"] == steps
        assert len(one["logged"]) == (1 if rank == 0 else 0), one["logged"]
    (line,) = found[0][name]["logged"]
    assert line.startswith("toy: no chain sampler: ") and reason in line


def test_compiling_comes_before_anything_that_waits_for_a_peer(found: Found) -> None:
    for name, (_, steps) in REFUSED.items():
        if steps:
            assert [one[name]["compiled"] for one in found] == [BUILDS] * WORLD


@pytest.mark.parametrize("name", ["every_rank_fits", "two_hosts_with_fabric"])
def test_ranks_that_fit_have_a_sampler_each(found: Found, name: str) -> None:
    width = V // WORLD
    for rank, one in enumerate(ranks[name] for ranks in found):
        assert one["made"] and one["logged"] == [] and one["steps"] == ["allocate", "rendezvous"]
        assert one["compiled"] == BUILDS and one["filled"]
        assert one["builds"] == {"world": WORLD, "emulated": False, "check_ranks": False}
        assert one["launch"]["rank"] == rank and one["launch"]["shard_width"] == width and one["launch"]["rows"] == 2
        assert one["head_offset"] == rank * width * R * BF16_BYTES
        assert one["base_offset"] == rank * width * BF16_BYTES
        assert one["noise_starts"] == [rank * width] * 2
    # The same build has the same place in the buffer on every rank.
    assert len({tuple(ranks[name]["launch"][key] for key in ("mailbox", "staging")) for ranks in found}) == 1


def test_a_shard_of_the_base_logits_is_launched_like_the_whole(found: Found) -> None:
    for ranks in found:
        different = {name for name, same in ranks["every_rank_fits"]["same"].items() if not same}
        assert different <= {"base_vector"}  # contiguous in its own strides, here both are views of one tensor
        assert ranks["every_rank_fits"]["supports"] == [True, True, False]


def test_shards_are_accepted_by_all_ranks_or_by_none(found: Found) -> None:
    for ranks in found:
        assert ranks["every_rank_fits"]["accepts"] == [True, False, False]
        assert ranks["every_rank_fits"]["why_not_shard"] == (
            "rank 1: shard: expected columns from 20 on, 20 to 20 of them, got (0, 20)"
        )


def test_a_rank_that_never_comes_ends_the_wait_of_the_others(found: Found) -> None:
    absent = found[0]["absent"]
    assert absent["raised"] is not None
    assert rank_setups.ABSENT_SECONDS <= absent["seconds"] + 0.1 < 4 * rank_setups.ABSENT_SECONDS
