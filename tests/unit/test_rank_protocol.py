"""The exchange between ranks (templates/device/rank_exchange.py, chain_ranks.py), explored exhaustively: every interleaving of a few ranks.

A rank runs launches one after the other, each of one of its builds. In every position of a launch a CTA stages its logits at every peer,
publishes its record, and waits for records in its rank's mailbox. Direct: it writes its record into every rank's mailbox, and waits for every
CTA's of all ranks. In two stages: it writes it into its rank's memory; the rank's leader, its first CTA, reads these and writes the rank's into
every mailbox; all wait for the ranks' records. A CTA tells the CTA of the same number of every peer when its logits are there, before the last
position of all positions but that, after it of all; it waits for the peers' words, and copies what they staged: all positions but the last
first. Only the first CTA of a rank waits for the last position's records, and only after that. Each store and each load is a step of its own,
but that a CTA stages a position at all its peers in one: each peer sees only its own part, and may do so at any time.

Memory is one cell per 64-bit word, seen whole; a cell of staging stands for one CTA's logits of a position. That these stores come before
the word that tells of them is what the fences are for: without them the word comes first, which is one of the mistakes that must be found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

STEPS = 2  # positions of a launch
Operation = tuple[object, ...]
Groups = list[list[Operation]]


@dataclass(frozen=True)
class Protocol:
    """Ranks, their CTAs and launches and, by its flags, the mistaken relatives of the protocol."""

    ranks: int = 2
    ctas: int = 1
    direct: bool = False
    builds: tuple[int, ...] = (0, 0, 0)  # which build each launch is of
    counts_launches: bool = True  # records are tagged by launch and position, else by the position alone
    mailbox_parities: int = 2
    sentinel: bool = False  # a record has no tag: payload 0 means "not here yet", and a reader clears behind itself
    says_zero: bool = True  # one record's payload is 0, as a score of +0.0 with token 0 would be
    shares_mailbox: bool = False  # all builds write into one mailbox
    staging_parities: int = 2
    own_parity: bool = False  # the parity of the staging follows the build's own launches, not the sampler's
    counts_late: bool = False  # a CTA reads the number of the launch when it tells its peers, not when it starts
    tells_first: bool = False  # a CTA tells its peers before it has staged the last position

    def sequence(self, launch: int, step: int) -> int:
        """Number of an exchange among those of its build."""
        before = sum(build == self.builds[launch] for build in self.builds[:launch])
        return before * STEPS + step if self.counts_launches else step

    def record(self, launch: int, step: int, rank: int) -> tuple[int, int]:
        """Tag and payload, another one in every exchange."""
        payload = (launch * STEPS + step) * self.ranks + rank + (0 if self.says_zero else 1)
        return (0 if self.sentinel else self.sequence(launch, step) + 1, payload)

    def mailbox(self, launch: int, step: int, reader: int, *source: int) -> tuple[object, ...]:
        build = 0 if self.shares_mailbox else self.builds[launch]
        return "mailbox", build, self.sequence(launch, step) % self.mailbox_parities, reader, *source

    def local(self, launch: int, step: int, rank: int, cta: int) -> tuple[object, ...]:
        return "local", self.builds[launch], self.sequence(launch, step) % 2, rank, cta

    def staging(self, launch: int, step: int, reader: int, source: int, cta: int) -> tuple[object, ...]:
        count = launch
        if self.own_parity:
            count = sum(build == self.builds[launch] for build in self.builds[:launch])
        return "staging", count % self.staging_parities, step, reader, source, cta

    def publish(self, launch: int, step: int, rank: int, cta: int) -> Groups:
        """Writing a position's record."""
        everywhere, record = range(self.ranks), self.record(launch, step, rank)
        if self.direct:
            return [[("store", self.mailbox(launch, step, r, rank, cta), record) for r in everywhere]]
        own = (self.sequence(launch, step) + 1, launch, step)
        groups: Groups = [[("store", self.local(launch, step, rank, cta), own)]]
        if cta == 0:
            groups.append([("local", self.local(launch, step, rank, k), own) for k in range(self.ctas)])
            groups.append([("store", self.mailbox(launch, step, r, rank), record) for r in everywhere])
        return groups

    def collect(self, launch: int, step: int, rank: int) -> Groups:
        """Waiting for a position's records."""
        writers = (
            [(r, k) for r in range(self.ranks) for k in range(self.ctas)]
            if self.direct
            else [(r,) for r in range(self.ranks)]
        )
        return [[("record", self.mailbox(launch, step, rank, *w), self.record(launch, step, w[0])) for w in writers]]

    def program(self, rank: int, cta: int) -> Groups:
        """What a CTA does, as groups of operations; those of one group are done in any order, a group after the one before."""
        peers = [other for other in range(self.ranks) if other != rank]
        groups: Groups = []
        for launch in range(len(self.builds)):
            count: Groups = [[("count", ("count", rank), launch)]]
            groups += [] if self.counts_late else count
            early, whole = 2 * launch + 1, 2 * launch + 2

            def tell(what: int) -> Groups:
                return [[("store", ("arrival", p, rank, cta), what) for p in peers]]

            def wait(what: int) -> Groups:
                return [[("arrival", ("arrival", rank, p, cta), what) for p in peers]]

            def copy(launch: int, steps: range) -> Groups:
                return [[("copy", self.staging(launch, s, rank, p, cta), (launch, s)) for p in peers for s in steps]]

            for step in range(STEPS):
                last = step + 1 == STEPS
                staged = tuple(self.staging(launch, step, p, rank, cta) for p in peers)
                groups += [[("stage", staged, (launch, step))]]
                first, *others = self.publish(launch, step, rank, cta)
                told = tell(early) if step + 2 == STEPS else tell(whole) if last else [[]]
                if last and self.counts_late:
                    groups += [first, *count, *told, *others]
                elif last and self.tells_first:
                    groups[-1:] = [*told, first, *others, groups[-1]]
                else:  # a warp of its own tells the peers
                    groups += [first + told[0], *others]
                groups += [] if last else self.collect(launch, step, rank)
            groups += wait(early) + copy(launch, range(STEPS - 1))
            groups += self.collect(launch, STEPS - 1, rank) if cta == 0 else []
            groups += wait(whole) + copy(launch, range(STEPS - 1, STEPS))
            if cta == 0:
                groups.append([("store", ("count", rank), launch + 1)])
            groups.append([("end", rank, launch)])
        return groups


class Wrong(Exception):
    """A CTA took something for what it is not."""


# What lies in each cell, and by CTA the group it is in and a bit for each of its operations that is done.
State = tuple[tuple[object, ...], tuple[tuple[int, int], ...]]


class Exploration:
    """All states that a protocol can reach."""

    def __init__(self, protocol: Protocol) -> None:
        self.sentinel = protocol.sentinel
        self.who = [(rank, cta) for rank in range(protocol.ranks) for cta in range(protocol.ctas)]
        programs = [protocol.program(rank, cta) for rank, cta in self.who]
        operations = [operation for program in programs for group in program for operation in group]
        places = {at for kind, at, _ in operations if kind not in ("end", "stage")}
        self.cells = sorted(places.union(*[at for kind, at, _ in operations if kind == "stage"]), key=str)
        number = {cell: n for n, cell in enumerate(self.cells)}

        def numbered(kind: str, at: Any) -> Any:
            return at if kind == "end" else tuple(number[cell] for cell in at) if kind == "stage" else number[at]

        self.programs = [
            [[(kind, numbered(kind, at), value) for kind, at, value in group] for group in program]
            for program in programs
        ]
        self.ends = [
            [n for n, group in enumerate(program) if group[0][0] == "end"] for program in self.programs
        ]  # by CTA and launch
        self.count = 0

    def ready(self, memory: tuple, places: tuple, me: int, kind: str, at: object, wanted: object) -> bool:
        """Whether an operation can be done now. Raises Wrong where it takes what it should not."""
        if kind in ("store", "stage"):
            return True
        if kind == "end":  # a rank's next launch starts when all CTAs of this one have ended
            mine = [other for other, (rank, _) in enumerate(self.who) if rank == at]
            return all(places[other][0] >= self.ends[other][wanted] for other in mine)  # type: ignore[index]
        found = memory[at]  # type: ignore[index]
        if kind == "count":
            found = found or 0
            if found != wanted:
                raise Wrong(f"{self.who[me]} counted {found} launches for {wanted}")
            return True
        if kind == "arrival":
            return found is not None and found >= wanted  # type: ignore[operator]
        if kind != "copy":
            nothing = found is None or (self.sentinel and kind == "record" and found[1] == 0)
            if nothing or found[0] != wanted[0]:  # type: ignore[index]
                return False
        if found != wanted:
            verb = "copied" if kind == "copy" else "took"
            raise Wrong(f"{self.who[me]} {verb} {found} for {wanted} of {self.cells[at]}")  # type: ignore[index]
        return True

    def following(self, state: State) -> Iterator[State]:
        memory, places = state
        for me, (group, done) in enumerate(places):
            if group == len(self.programs[me]):
                continue
            operations = self.programs[me][group]
            for n, (kind, at, value) in enumerate(operations):
                if done >> n & 1 or not self.ready(memory, places, me, kind, at, value):
                    continue
                after = memory
                for cell in at if kind == "stage" else (at,) if kind == "store" else ():
                    after = (*after[:cell], value, *after[cell + 1 :])
                if kind == "record" and self.sentinel:
                    after = (*memory[:at], (0, 0), *memory[at + 1 :])
                now = done | 1 << n
                place = (group + 1, 0) if now == (1 << len(operations)) - 1 else (group, now)
                yield after, (*places[:me], place, *places[me + 1 :])

    def explore(self) -> str | None:
        """What goes wrong in some interleaving, or None when every one ends with every CTA through all launches."""
        seen: set[State] = set()
        waiting: list[State] = [((None,) * len(self.cells), ((0, 0),) * len(self.who))]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            self.count += 1
            try:
                found = list(self.following(state))
            except Wrong as wrong:
                return str(wrong)
            if not found and any(place[0] != len(self.programs[me]) for me, place in enumerate(state[1])):
                return f"stuck at {[place[0] for place in state[1]]}"
            waiting += found
        return None


def explore(**flags: object) -> str:
    return Exploration(Protocol(**flags)).explore() or ""  # type: ignore[arg-type]


# --- the protocol ---


@pytest.mark.parametrize(
    ("ranks", "ctas", "builds", "direct"),
    [
        *[(2, 1, (0, 0, 0, 0, 0), direct) for direct in (False, True)],
        *[(2, 1, (0, 1, 0, 0, 1, 1), direct) for direct in (False, True)],
        (3, 1, (0,), False),  # two ranks at most write directly
        (2, 2, (0, 0), False),
    ],
)
def test_every_interleaving_ends_with_the_right_tokens_and_logits(
    ranks: int, ctas: int, builds: tuple[int, ...], direct: bool
) -> None:
    exploration = Exploration(Protocol(ranks=ranks, ctas=ctas, builds=builds, direct=direct))
    assert exploration.explore() is None
    assert exploration.count > 500  # it did go through interleavings


# --- mistakes that have been made ---


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_launch_count_a_stale_record_is_taken(ranks: int, direct: bool) -> None:
    assert "took" in explore(ranks=ranks, builds=(0, 0), counts_launches=False, direct=direct)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_with_one_mailbox_parity_a_fast_rank_overwrites_what_a_slow_one_waits_for(ranks: int, direct: bool) -> None:
    assert "stuck" in explore(ranks=ranks, builds=(0, 0), mailbox_parities=1, direct=direct)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sentinel_that_a_record_can_take_waits_for_ever(ranks: int) -> None:
    assert explore(ranks=ranks, builds=(0,), sentinel=True, says_zero=False) == ""
    assert "stuck" in explore(ranks=ranks, builds=(0,), sentinel=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_one_staging_parity_the_next_launch_overwrites_what_a_slow_rank_still_copies(ranks: int) -> None:
    assert "copied" in explore(ranks=ranks, builds=(0, 0), staging_parities=1)


def test_builds_with_one_mailbox_take_each_others_records() -> None:
    """Each build counts its own launches, so their tags and parities meet."""
    assert explore(builds=(0, 1), shares_mailbox=True) != ""


def test_a_staging_parity_by_the_builds_own_count_is_one_parity() -> None:
    """Two launches of two builds in a row would have the same one."""
    assert "copied" in explore(builds=(0, 1), own_parity=True)


def test_a_count_that_is_read_late_may_be_the_next_launchs() -> None:
    """The first CTA may have ended and counted the launch when another one tells its peers."""
    assert "counted" in explore(ctas=2, builds=(0, 0), counts_late=True)


@pytest.mark.parametrize("ctas", [1, 2])
def test_a_peer_that_is_told_before_the_logits_are_there_copies_old_ones(ctas: int) -> None:
    assert "copied" in explore(ctas=ctas, builds=(0, 0), tells_first=True)
