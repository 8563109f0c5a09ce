"""Every interleaving of a few agents that share words by relaxed stores and loads, explored exhaustively.

An agent runs its groups one after the other, the operations of a group in any order. A store is made at one time and seen at any time after
it, whatever the order of stores to other words; to one word an agent's stores keep their order, and the agent itself sees them at once. A
fence waits until what its team stored before its last join is seen. The agents of a team pass a join together: a kernel's end, for one.

Steps that nothing else can see are taken at once (`Exploration.is_private`). Left are the orders in which stores are seen and words are taken.
`reduced=False` walks through all of them. Those of three ranks are too many, and for the most part tell nothing: two steps of different agents
that have no word in common lead to the same state in either order. So, reduced, a state is left by one step alone where that step can
meddle with nothing that may happen before it (`Exploration.meddles_not`). This loses no failure, for such a step is a persistent set (P.
Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, LNCS 1032): whatever the others do first, it can still be taken,
and leads to where it would have led. So every run to a state that has no next step can be rearranged into one that begins with it. No step is
put off for ever, as there are no cycles: each step advances an agent or uses up a store. An agent that takes what is wrong goes no further,
so that every failure is, or leads to, a state without a next step for that agent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

BLANK = None  # in each word at first


class Put(NamedTuple):
    """Stores a value into words."""

    words: tuple[Any, ...]
    value: Any


class Set(NamedTuple):
    """Stores a value into a word, seen at once."""

    word: Any
    value: Any


class Take(NamedTuple):
    """Waits until a word holds one of the values that look right. Of these, only the right ones are."""

    word: Any
    looks_right: frozenset[Any]
    right: frozenset[Any]
    leaves: tuple[Any, ...] = ()  # what it then stores there, if anything


@dataclass(frozen=True)
class Fence:
    """Waits until the stores that the team made before its last join are seen."""


@dataclass(frozen=True)
class Join:
    """Waits until all agents of the team are here. A group of its own."""


Operation = Put | Set | Take | Fence | Join
Program = list[list[Operation]]


class Store(NamedTuple):
    """A store that has been made and not been seen."""

    agent: int
    word: int
    value: Any
    joins: int  # that the agent had passed


class Place(NamedTuple):
    """Where an agent is: its group, a bit for each of its operations that is done, and the joins behind it."""

    group: int
    done: int
    joins: int


class State(NamedTuple):
    """What lies in each word, where each agent is, and the stores that are not seen, by agent and word, each word's in their order."""

    memory: tuple[Any, ...]
    places: tuple[Place, ...]
    unseen: tuple[Store, ...]


class Step(NamedTuple):
    """A store is seen, or an operation is done."""

    store: int  # its place among those that are not seen; -1: none
    agent: int = -1
    operation: int = -1  # its place in the agent's group


class Wait(NamedTuple):
    """A word that an agent waits for or takes: what it finds there, and what would be right."""

    agent: int
    word: Any
    found: Any
    right: frozenset[Any]


class Failure(NamedTuple):
    """How an interleaving ends that is not as it should be."""

    took: Wait | None  # what somebody took for right
    stuck: tuple[Wait, ...]  # else everything that is waited for for ever
    steps: int  # of the interleaving


def touched(op: Operation) -> tuple[Any, ...]:
    """The words of an operation."""
    return op.words if isinstance(op, Put) else (op.word,) if isinstance(op, Set | Take) else ()


def stored(op: Operation) -> tuple[Any, ...]:
    """The values that an operation stores into its words."""
    return (op.value,) if isinstance(op, Put | Set) else op.leaves if isinstance(op, Take) else ()


class Exploration:
    """All states that agents can reach."""

    def __init__(self, programs: Sequence[Program], teams: Sequence[int], *, reduced: bool) -> None:
        """`teams`: of each agent, its team."""
        self.reduced = reduced
        self.mates = [[other for other, its in enumerate(teams) if its == team] for team in teams]
        users: dict[Any, set[int]] = {}
        for me, program in enumerate(programs):
            for word in (word for group in program for op in group for word in touched(op)):
                users.setdefault(word, set()).add(me)
        self.words = sorted(users, key=str)
        self.private = {n for n, word in enumerate(self.words) if len(users[word]) == 1}
        number = {word: n for n, word in enumerate(self.words)}
        self.programs = [[[_numbered(op, number) for op in group] for group in program] for program in programs]
        self.joins = [[n for n, group in enumerate(program) if Join() in group] for program in programs]
        self.came_from: dict[State, State | None] = {}

    @property
    def count(self) -> int:
        """States that were reached."""
        return len(self.came_from)

    def explore(self) -> Failure | None:
        """What goes wrong in some interleaving, or None when every one ends with every agent through its program."""
        start = State((BLANK,) * len(self.words), (Place(0, 0, 0),) * len(self.programs), ())
        self.came_from = {start: None}
        waiting = [start]
        while waiting:
            state = waiting.pop()
            steps = list(self.steps(state))
            for step in steps:
                op = self.operation(state, step)
                if isinstance(op, Take) and self.found(state, step.agent, op.word) not in op.right:
                    return Failure(self.wait(state, step.agent, op), (), self.length(state) + 1)
            if not steps and any(place.group < len(self.programs[me]) for me, place in enumerate(state.places)):
                return Failure(None, tuple(self.waits(state)), self.length(state))
            for step in self.chosen(state, steps):
                after = self.after(state, step)
                if after not in self.came_from:
                    self.came_from[after] = state
                    waiting.append(after)
        return None

    # ---- what a state says

    def group(self, me: int, place: Place) -> list[Operation]:
        """The operations at an agent's place, none behind its program's end."""
        return self.programs[me][place.group] if place.group < len(self.programs[me]) else []

    def found(self, state: State, me: int, word: int) -> Any:
        """What an agent finds in a word: its own last store, or what has been seen."""
        own = [store.value for store in state.unseen if store[:2] == (me, word)]
        return own[-1] if own else state.memory[word]

    def can(self, state: State, me: int, op: Operation) -> bool:
        """Whether an operation can be done now."""
        joins = state.places[me].joins
        if isinstance(op, Take):
            return self.found(state, me, op.word) in op.looks_right
        if isinstance(op, Fence):
            return not any(store.agent in self.mates[me] and store.joins < joins for store in state.unseen)
        return not isinstance(op, Join) or self.are_at_join(state.places, me)

    def are_at_join(self, places: Sequence[Place], me: int) -> bool:
        """Whether all of an agent's team have come to its next join, or are behind it."""
        return all(places[mate].group >= self.joins[mate][places[me].joins] for mate in self.mates[me])

    def wait(self, state: State, me: int, take: Take) -> Wait:
        return Wait(me, self.words[take.word], self.found(state, me, take.word), take.right)

    def waits(self, state: State) -> Iterator[Wait]:
        """All words that somebody waits for."""
        for me, place in enumerate(state.places):
            for n, op in enumerate(self.group(me, place)):
                if isinstance(op, Take) and not place.done >> n & 1:
                    yield self.wait(state, me, op)

    def length(self, state: State | None) -> int:
        """Steps of the run that led to a state."""
        steps = -1
        while state is not None:
            state, steps = self.came_from[state], steps + 1
        return steps

    # ---- what can happen next

    def steps(self, state: State) -> Iterator[Step]:
        """All steps from a state. Stores of one agent to one word are seen in their order."""
        for n, store in enumerate(state.unseen):
            if n == 0 or store[:2] != state.unseen[n - 1][:2]:
                yield Step(n)
        for me, place in enumerate(state.places):
            for n, op in enumerate(self.group(me, place)):
                if not place.done >> n & 1 and self.can(state, me, op):
                    yield Step(-1, me, n)

    def operation(self, state: State, step: Step) -> Operation | None:
        """The operation of a step, None where a store is seen."""
        return None if step.agent < 0 else self.group(step.agent, state.places[step.agent])[step.operation]

    def after(self, state: State, step: Step) -> State:
        memory, places, unseen = state
        op = self.operation(state, step)
        if op is None:
            _, word, value, _ = unseen[step.store]
            memory = (*memory[:word], value, *memory[word + 1 :])
            return State(memory, places, unseen[: step.store] + unseen[step.store + 1 :])
        me, (group, done, joins) = step.agent, places[step.agent]
        if isinstance(op, Set):
            memory = (*memory[: op.word], op.value, *memory[op.word + 1 :])
        else:
            made = [Store(me, word, value, joins) for word in touched(op) for value in stored(op)]
            unseen = tuple(sorted((*unseen, *made), key=lambda store: store[:2])) if made else unseen  # a stable sort
        done |= 1 << step.operation
        if done == (1 << len(self.programs[me][group])) - 1:
            group, done = group + 1, 0
        place = Place(group, done, joins + isinstance(op, Join))
        return State(memory, (*places[:me], place, *places[me + 1 :]), unseen)

    # ---- which of it has to be gone through

    def chosen(self, state: State, steps: list[Step]) -> list[Step]:
        """Those of a state's next steps that are enough."""
        alone = (step for step in steps if self.is_private(state, step))
        if self.reduced:
            alone = (step for step in steps if self.is_private(state, step) or self.meddles_not(state, step))
        first = next(alone, None)
        return steps if first is None else [first]

    def is_private(self, state: State, step: Step) -> bool:
        """Whether a step concerns its agent alone: making a store; what only this agent uses; a fence or a join that can be passed, as
        then it always can: what it waits for is of the past."""
        op = self.operation(state, step)
        if isinstance(op, Set | Take):
            return op.word in self.private
        return op is not None or state.unseen[step.store].word in self.private

    def meddles_not(self, state: State, step: Step) -> bool:
        """Whether a step changes nothing for what may happen before it, nor that anything for the step."""
        op = self.operation(state, step)
        seen, taken = self.possible(state, step)
        if isinstance(op, Take):  # it finds what is right, and whatever else it may find later is right too
            return seen.get(op.word, set()) <= op.right
        store = state.unseen[step.store] if op is None else op
        # Who may take the word before may take it behind, and either is right. The agent of the store has seen it all the time.
        others = [take for agent, take in taken if take.word == store.word and (op or agent != store.agent)]
        return not seen.get(store.word) and all(
            {state.memory[store.word], store.value} <= take.right for take in others
        )

    def possible(self, state: State, step: Step) -> tuple[dict[int, set[Any]], set[tuple[int, Take]]]:
        """What may happen before a step is taken, and somewhat more: the values that may be seen in words, and what agents may take.

        An agent gets on while it finds all that it waits for: in memory as it is, or among these values. It does not get behind
        the group of the step, nor its team behind a fence that waits until the store of the step is seen.
        """
        memory, places, unseen = state
        held = unseen[step.store] if step.agent < 0 else None
        seen: dict[int, set[Any]] = {}
        taken: set[tuple[int, Take]] = set()
        at = list(places)

        def may_be_seen(agent: int, word: int, values: Sequence[Any], at_once: bool = False) -> None:
            if values and (at_once or held is None or held[:2] != (agent, word)):  # else only behind the step
                seen.setdefault(word, set()).update(values)

        def may(me: int, op: Operation) -> bool:
            if isinstance(op, Take):
                own = {store.value for store in unseen if store[:2] == (me, op.word)}
                return not op.looks_right.isdisjoint({memory[op.word], *own, *seen.get(op.word, ())})
            if isinstance(op, Fence):
                return held is None or held.agent not in self.mates[me] or held.joins >= at[me].joins
            return not isinstance(op, Join) or self.are_at_join(at, me)

        def advance(me: int) -> bool:
            """Does what may be done of an agent's group; whether it gets on."""
            group, done, joins = at[me]
            left = [n for n in range(len(self.group(me, at[me]))) if not done >> n & 1]
            here = group == places[me].group
            can = [n for n in left if not (here and step[1:] == (me, n)) and may(me, self.programs[me][group][n])]
            for op in (self.programs[me][group][n] for n in can):
                for word in touched(op):
                    may_be_seen(me, word, stored(op), isinstance(op, Set))
                if isinstance(op, Take):
                    taken.add((me, op))
            if left and len(can) == len(left):
                at[me] = Place(group + 1, 0, joins + (group in self.joins[me]))
            return at[me].group > group

        for store in unseen:
            may_be_seen(store.agent, store.word, (store.value,))
        known = -1
        while known != (known := sum(map(len, seen.values())) + len(taken) + sum(place.group for place in at)):
            for me in range(len(self.programs)):
                while advance(me):
                    pass
        return seen, taken


def _numbered(op: Operation, number: dict[Any, int]) -> Operation:
    """An operation on numbered words, which make for small states."""
    if isinstance(op, Put):
        return op._replace(words=tuple(number[word] for word in op.words))
    return op._replace(word=number[op.word]) if isinstance(op, Set | Take) else op
