"""The exchange between ranks, explored exhaustively (harness/rank_protocol.py, interleavings.py), and the mistakes that have been made with it.

Each mistake is explored over two and three ranks, and must end as it did: with the wait, or the wrong take, that it is known for.
"""

from typing import Any

import pytest
from tests.harness.interleavings import BLANK, Failure, Wait
from tests.harness.rank_protocol import Logits, Protocol, Word

RANKS = pytest.mark.parametrize("ranks", [2, 3])
FORMS = pytest.mark.parametrize("direct", [False, True])
# What is wrong in few launches: two for what has two parities, three where the place of the launch before last is used again.
MISTAKES: list[dict[str, Any]] = [
    {"builds": (0, 0), "counts_launches": False},
    {"builds": (0, 0), "mailbox_parities": 1},
    {"builds": (0,), "sentinel": True},
    {"builds": (0, 1), "shares_mailbox": True},
    {"builds": (0, 0), "staging_parities": 1},
    {"builds": (0, 1), "own_parity": True},
    {"blanks": False},
    {"greets": False},
    {"fences": False},
    {"builds": (0,), "stages_blank": True},
    {"builds": (0,), "trusts_records": True},
    {"builds": (0, 0, 1), "stages_past_end": True},
]


def explore(**flags: Any) -> Failure | None:
    return Protocol(**flags).exploration().explore()


def fail(**flags: Any) -> Failure:
    """How a mistaken protocol fails."""
    failure = explore(**flags)
    assert failure is not None and failure.steps > 20  # a run, not a start that is wrong
    return failure


def take(**flags: Any) -> tuple[Word, Any, Any]:
    """The word that a mistaken protocol takes for right, what it holds, and what it should."""
    took = fail(**flags).took
    assert took is not None
    return took.word, took.found, *took.right  # type: ignore[return-value]


def wait(kind: str, **flags: Any) -> list[Wait]:
    """The words of a kind that a mistaken protocol waits for for ever."""
    failure = fail(**flags)
    assert failure.took is None
    return [one for one in failure.stuck if one.word.kind == kind]


# --- the protocol ---


@pytest.mark.parametrize(
    ("ranks", "ctas", "steps", "builds"),
    [
        *[(ranks, 1, 2, builds) for ranks in (2, 3) for builds in ((0, 0, 0, 0, 0), (0, 1, 0, 0, 1, 1))],
        *[(ranks, 1, steps, (0, 0, 0, 0)) for ranks in (2, 3) for steps in (1, 3)],
        *[(ranks, 2, 2, (0, 0, 0)) for ranks in (2, 3)],
        (4, 1, 2, (0, 0, 0)),
    ],
)
@FORMS
@pytest.mark.parametrize("draws", [False, True])
def test_every_interleaving_ends_with_the_right_tokens_and_logits(
    ranks: int, ctas: int, steps: int, builds: tuple[int, ...], direct: bool, draws: bool
) -> None:
    assert explore(ranks=ranks, ctas=ctas, steps=steps, builds=builds, direct=direct, draws=draws) is None


@pytest.mark.parametrize(
    "flags",
    [
        *[{"builds": builds, "direct": direct} for builds in ((0,), (0, 0, 0)) for direct in (False, True)],
        {"builds": (0, 0, 0, 0), "steps": 1},
        {"builds": (0,), "steps": 1, "ctas": 2},
        *[{"builds": (0, 0, 0), "draws": False, "ranks": 3, "direct": direct} for direct in (False, True)],
        *MISTAKES,
    ],
    ids=str,
)
def test_what_the_reduction_leaves_out_tells_nothing(flags: dict[str, Any]) -> None:
    """Every interleaving, one by one, as far as there are not too many: they fail where the reduced ones fail, and only there."""
    every, some = Protocol(**flags).exploration(reduced=False), Protocol(**flags).exploration()
    assert (every.explore() is None) == (some.explore() is None) == (flags not in MISTAKES)
    assert flags in MISTAKES or every.count > 5 * some.count > 0


# --- mistakes that have been made ---


@FORMS
@RANKS
def test_without_a_launch_count_a_stale_record_is_taken(ranks: int, direct: bool) -> None:
    word, found, right = take(ranks=ranks, builds=(0, 0), counts_launches=False, direct=direct)
    assert word.kind == "mailbox" and found.tag == right.tag
    assert (found.launch, right.launch) == (0, 1)


@FORMS
@RANKS
def test_with_one_mailbox_parity_a_fast_rank_overwrites_what_a_slow_one_waits_for(ranks: int, direct: bool) -> None:
    waits = wait("mailbox", ranks=ranks, builds=(0, 0), mailbox_parities=1, direct=direct)
    overwritten = [one for one in waits for right in one.right if one.found.tag == right.tag + 1]
    assert overwritten and len(waits) == ranks  # and everybody else waits for the slow one


@RANKS
def test_a_sentinel_that_a_record_can_take_waits_for_ever(ranks: int) -> None:
    assert explore(ranks=ranks, builds=(0,), sentinel=True, says_zero=False) is None
    (waiter,) = wait("local", ranks=ranks, builds=(0,), sentinel=True)
    assert waiter.found.payload == 0 and {waiter.found} == waiter.right  # it is there, and is not seen


@RANKS
def test_with_one_staging_parity_the_next_launch_overwrites_what_a_slow_rank_still_copies(ranks: int) -> None:
    """It blanks the new logits for the old ones."""
    waits = wait("staging", ranks=ranks, builds=(0, 0), staging_parities=1)
    assert {(one.found, *one.right) for one in waits} == {(BLANK, Logits(1, 0))}


@RANKS
def test_builds_with_one_mailbox_take_each_others_records(ranks: int) -> None:
    """Each build counts its own launches, so their tags and parities meet."""
    word, found, right = take(ranks=ranks, builds=(0, 1), shares_mailbox=True)
    assert word.kind == "mailbox" and (found.launch, right.launch) == (0, 1)


@RANKS
def test_a_staging_parity_by_the_builds_own_count_is_one_parity(ranks: int) -> None:
    """Two launches of two builds in a row would have the same one."""
    waits = wait("staging", ranks=ranks, builds=(0, 1), own_parity=True)
    assert {(one.found, *one.right) for one in waits} == {(BLANK, Logits(1, 0))}


@RANKS
def test_a_count_that_is_read_late_may_be_the_next_launchs(ranks: int) -> None:
    """The first CTA may have ended and counted the launch when another one copies the last position."""
    word, found, right = take(ranks=ranks, ctas=2, builds=(0, 0), counts_late=True)
    assert word.kind == "count" and (found, right) in [(1, BLANK), (2, 1)]


@pytest.mark.parametrize("ctas", [1, 2])
@RANKS
def test_staging_that_nobody_blanks_is_copied_again(ranks: int, ctas: int) -> None:
    assert explore(ranks=ranks, ctas=ctas, builds=(0, 0), blanks=False) is None  # the other parity
    word, found, right = take(ranks=ranks, ctas=ctas, blanks=False)
    assert word.kind == "staging" and found == right._replace(launch=0) and right.launch == 2


@pytest.mark.parametrize("flag", ["greets", "fences"])
@RANKS
def test_without_a_greeting_behind_a_fence_blanking_may_come_after_the_next_logits(ranks: int, flag: str) -> None:
    assert explore(ranks=ranks, builds=(0, 0), **{flag: False}) is None  # the other parity
    waits = wait("staging", ranks=ranks, **{flag: False})
    assert waits and {one.found for one in waits} == {BLANK}
    assert {right.launch for one in waits for right in one.right} == {2}


@RANKS
def test_logits_that_look_blank_are_waited_for_for_ever(ranks: int) -> None:
    waits = wait("staging", ranks=ranks, builds=(0,), stages_blank=True)
    assert len(waits) == ranks * (ranks - 1)  # all that there are of the position


@RANKS
def test_logits_that_do_not_tell_themselves_may_come_after_their_record(ranks: int) -> None:
    """Why a word of staging has a value that means that nothing is there: no store waits for another one."""
    word, found, right = take(ranks=ranks, builds=(0,), trusts_records=True)
    assert word.kind == "staging" and (found, right) == (BLANK, Logits(0, 0))


@RANKS
def test_logits_that_nobody_reads_are_taken_by_another_build(ranks: int) -> None:
    """Why words past a shard's end are not staged: where builds have their logits differs, and what is not read is not blanked."""
    assert explore(ranks=ranks, builds=(0, 0, 1)) is None
    _, found, right = take(ranks=ranks, builds=(0, 0, 1), stages_past_end=True)
    assert (found, right) == (Logits(0, 1), Logits(2, 1))
