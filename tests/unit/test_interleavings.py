"""The explorer of interleavings: what it finds in small programs, and that its reduction loses no failure."""

import random

import pytest
from tests.harness.interleavings import BLANK, Exploration, Fence, Join, Operation, Program, Put, Set, Take

VALUES = (BLANK, 1, 2)
PROGRAMS = 600


def take(word: str, *right: object, looks: tuple[object, ...] = (), leaves: tuple[object, ...] = ()) -> list[Operation]:
    return [Take(word, frozenset({*right, *looks}), frozenset(right), leaves)]


@pytest.mark.parametrize("reduced", [False, True])
def test_what_stores_fences_and_joins_do(reduced: bool) -> None:
    def outcome(*programs: Program, teams: tuple[int, ...] = ()) -> str:
        failure = Exploration(programs, teams or range(len(programs)), reduced=reduced).explore()
        return "right" if failure is None else "took" if failure.took else "stuck"

    data, flag = [Put(("data",), 1)], [Put(("flag",), 1)]
    reader = [take("flag", 1), take("data", 1, looks=(BLANK,))]
    # Stores to two words are seen in any order, unless a fence is between them that waits for the first.
    assert outcome([data, flag], reader) == "took"
    assert outcome([data, [Fence()], flag], reader) == "took"  # the fence of this model is for what came before a join
    assert outcome([data, [Join()], [Fence()], flag], reader) == "right"
    assert outcome([data, [Join()], flag], reader) == "took"
    assert outcome([data, [Join()]], [[Join()], [Fence()], flag], reader, teams=(0, 0, 1)) == "right"  # a mate's
    assert outcome([data, [Join()]], [[Join()], [Fence()], flag], reader, teams=(0, 1, 2)) == "took"  # not a mate's
    # Those to one word in their order, and by their own agent at once.
    assert outcome([data, take("data", 1), [Put(("data",), 2)], take("data", 2)], [take("data", 2)]) == "right"
    assert outcome([data, [Put(("data",), 2)]], [take("data", 2), take("data", 2, looks=(1,))]) == "right"
    assert outcome([data, [Put(("data",), 2)]], [take("data", 1)]) == "stuck"  # overwritten before it was read
    assert outcome([[Set("data", 1)], flag], reader) == "right"
    assert outcome([data], [take("data", 1, leaves=(BLANK,)), take("data", 1)]) == "stuck"


def some_group(rng: random.Random, words: int) -> list[Operation]:
    some = rng.sample(range(words), rng.randint(1, min(2, words)))
    kind = rng.choice(["put", "put", "set", "fence", "take", "take"])
    if kind == "put":
        return [Put(tuple(some), rng.choice(VALUES[1:]))]
    if kind == "set":
        return [Set(some[0], rng.choice(VALUES[1:]))]
    if kind == "fence":
        return [Fence()]
    group: list[Operation] = []
    for word in some:
        right = frozenset(rng.sample(VALUES, rng.choice([1, 2, 2])))
        looks_right = right | frozenset(rng.sample(VALUES, rng.choice([0, 0, 0, 1])))
        group.append(Take(word, looks_right, right, tuple(rng.sample(VALUES, rng.choice([0, 0, 1])))))
    return group


def test_the_reduction_loses_no_failure() -> None:
    """Programs of two or three agents without any sense: a failure in some interleaving is one in some of those gone through."""
    rng, right, every, some = random.Random(1), 0, 0, 0
    for _ in range(PROGRAMS):
        words, agents = rng.randint(2, 4), rng.choice([2, 3])
        programs = [[some_group(rng, words) for _ in range(rng.randint(2, 4))] for _ in range(agents)]
        for program in programs:
            program.insert(rng.randint(0, len(program)), [Join()])
        teams = [rng.randrange(2) for _ in range(agents)]
        full, reduced = (Exploration(programs, teams, reduced=reduced) for reduced in (False, True))
        failure = reduced.explore()
        assert (full.explore() is None) == (failure is None), (programs, teams)
        if failure is None:
            right, every, some = right + 1, every + full.count, some + reduced.count
    assert PROGRAMS // 10 < right < PROGRAMS // 2  # failures, and not only these
    assert 5 * some < 4 * every
