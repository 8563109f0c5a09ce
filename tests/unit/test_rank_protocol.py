"""The exchange between ranks (templates/device/rank_exchange.py, chain_ranks.py), explored exhaustively: every interleaving of a few ranks.

A rank runs launches one after the other, each of one of its builds. In every position of a launch a CTA stages its logits at every peer,
publishes its record, and waits for records in its rank's mailbox. Direct: it writes its record into every rank's mailbox, and waits for every
CTA's of all ranks. In two stages: it writes it into its rank's memory; the rank's leader, its first CTA, reads these and writes the rank's into
every mailbox; all wait for the ranks' records. While it waits, it copies what the CTAs of its number of the peers have staged of the position
before, and blanks it; in the last position that one's too. Only the first CTA of a rank waits for the last position's records. At its start
that one greets the peers, and during the first position it waits for their greetings. Each store and each load is a step of its own, but for
those of TO_PEERS.

Memory is one cell per word, seen whole; a cell of staging stands for one CTA's logits of a position. Stores to one cell keep their order, of
others only what PTX promises is relied on where it matters: blanking takes effect at any time after the copy, as a relaxed store may, but
before the fence of the next launch's greeting, which comes after it by the order of launches. Without that fence it may come later still, which is
one of the mistakes that must be found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

TO_PEERS = ("stage", "greet")  # done at all peers in one step: each sees only its own part, and may do so at any time
Operation = tuple[object, ...]
Groups = list[list[Operation]]


@dataclass(frozen=True)
class Protocol:
    """Ranks, their CTAs and launches and, by its flags, the mistaken relatives of the protocol."""

    ranks: int = 2
    ctas: int = 1
    steps: int = 2  # positions of a launch
    direct: bool = False
    builds: tuple[int, ...] = (0, 0, 0)  # which build each launch is of
    counts_launches: bool = True  # records are tagged by launch and position, else by the position alone
    mailbox_parities: int = 2
    sentinel: bool = False  # a record has no tag: payload 0 means "not here yet", and a reader clears behind itself
    says_zero: bool = True  # one record's payload is 0, as a score of +0.0 with token 0 would be
    shares_mailbox: bool = False  # all builds write into one mailbox
    staging_parities: int = 2
    own_parity: bool = False  # the parity of the staging follows the build's own launches, not the sampler's
    counts_late: bool = (
        False  # a CTA reads the number of the launch when it copies the last position, not when it starts
    )
    blanks: bool = True  # whoever has copied logits blanks their place
    greets: bool = True  # and its rank's next launch says so
    stages_blank: bool = False  # some logits look like a blank place
    stages_past_end: bool = False  # build 0 also stages what only build 1 has a reader for
    keeps: bool = False  # no mistake: positions between the first and the last are staged after their exchange
    in_order: bool = (
        False  # no mistake either: a CTA waits for one thing after the other, where any order would be too many
    )

    def sequence(self, launch: int, step: int) -> int:
        """Number of an exchange among those of its build."""
        before = sum(build == self.builds[launch] for build in self.builds[:launch])
        return before * self.steps + step if self.counts_launches else step

    def record(self, launch: int, step: int, rank: int) -> tuple[int, int]:
        """Tag and payload, another one in every exchange."""
        payload = (launch * self.steps + step) * self.ranks + rank + (0 if self.says_zero else 1)
        return (0 if self.sentinel else self.sequence(launch, step) + 1, payload)

    def mailbox(self, launch: int, step: int, reader: int, *source: int) -> tuple[object, ...]:
        build = 0 if self.shares_mailbox else self.builds[launch]
        return "mailbox", build, self.sequence(launch, step) % self.mailbox_parities, reader, *source

    def local(self, launch: int, step: int, rank: int, cta: int) -> tuple[object, ...]:
        return "local", self.builds[launch], self.sequence(launch, step) % 2, rank, cta

    def staging(self, launch: int, step: int, reader: int, source: int, *cta: object) -> tuple[object, ...]:
        count = launch
        if self.own_parity:
            count = sum(build == self.builds[launch] for build in self.builds[:launch])
        return "staging", count % self.staging_parities, step, reader, source, *cta

    def logits(self, launch: int, step: int) -> object:
        return None if self.stages_blank and step == 0 else (launch, step)

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

        def places(launch: int, step: int, reader: int, source: int, written: bool) -> list[tuple[object, ...]]:
            """Where the CTA's logits lie: as the builds differ, in build 1 in one more place than in build 0."""
            more = self.builds[launch] == 1 or (self.stages_past_end and written)
            return [self.staging(launch, step, reader, source, cta, n) for n in range(2 if more and step else 1)]

        for launch in range(len(self.builds)):
            count: Groups = [[("count", ("count", rank), launch)]]
            groups += [] if self.counts_late else count
            if cta == 0:
                groups.append([("greet", tuple(("hello", p, rank) for p in peers), launch + 1)])
            for step in range(self.steps):
                last = step + 1 == self.steps
                staged = tuple(at for p in peers for at in places(launch, step, p, rank, True))
                groups += [[("stage", staged, self.logits(launch, step))]]
                groups += self.publish(launch, step, rank, cta)
                groups += count if last and self.counts_late else []
                found = [] if last and cta else self.collect(launch, step, rank)[0]
                found += [("greeted", ("hello", rank, p), launch + 1) for p in peers if cta == step == 0]
                for s in [step - 1, *[step] * last] if step else []:
                    found += [
                        ("copy", at, self.logits(launch, s)) for p in peers for at in places(launch, s, rank, p, False)
                    ]
                groups += [[one] for one in found] if self.in_order else [found]
            if cta == 0:
                groups.append([("store", ("count", rank), launch + 1)])
            groups.append([("end", rank, launch)])
        return groups


class Wrong(Exception):
    """A CTA took something for what it is not."""


# What lies in each cell; by CTA the group it is in and a bit for each of its operations that is done; and the cells whose blanking by some
# CTA has not taken effect yet.
State = tuple[tuple[object, ...], tuple[tuple[int, int], ...], frozenset[tuple[int, int]]]


class Exploration:
    """All states that a protocol can reach."""

    def __init__(self, protocol: Protocol) -> None:
        self.sentinel, self.blanks, self.greets = protocol.sentinel, protocol.blanks, protocol.greets
        self.who = [(rank, cta) for rank in range(protocol.ranks) for cta in range(protocol.ctas)]
        programs = [protocol.program(rank, cta) for rank, cta in self.who]
        operations = [operation for program in programs for group in program for operation in group]
        places = {at for kind, at, _ in operations if kind not in ("end", *TO_PEERS)}
        self.cells = sorted(places.union(*[at for kind, at, _ in operations if kind in TO_PEERS]), key=str)
        number = {cell: n for n, cell in enumerate(self.cells)}

        def numbered(kind: str, at: Any) -> Any:
            return at if kind == "end" else tuple(number[cell] for cell in at) if kind in TO_PEERS else number[at]

        self.programs = [
            [[(kind, numbered(kind, at), value) for kind, at, value in group] for group in program]
            for program in programs
        ]
        self.ends = [
            [n for n, group in enumerate(program) if group[0][0] == "end"] for program in self.programs
        ]  # by CTA and launch
        self.count = 0

    def ready(self, state: State, me: int, kind: str, at: Any, wanted: Any) -> bool:
        """Whether an operation can be done now. Raises Wrong where it takes what it should not."""
        memory, places, pending = state
        if kind in ("store", "stage"):
            return True
        if kind == "greet":
            mine = [self.who[other][0] == self.who[me][0] for other, _ in pending]
            return not (self.greets and any(mine))  # the fence
        if kind == "end":  # a rank's next launch starts when all CTAs of this one have ended
            others = [other for other, (rank, _) in enumerate(self.who) if rank == at]
            return all(places[other][0] >= self.ends[other][wanted] for other in others)
        found = memory[at]
        if kind == "count":
            found = found or 0
            if found != wanted:
                raise Wrong(f"{self.who[me]} counted {found} launches for {wanted}")
            return True
        if kind == "greeted":
            return found is not None and found >= wanted  # type: ignore[operator]
        if kind == "copy":
            if found is None or (me, at) in pending:  # a load does not see what its own thread has replaced
                return False
        else:
            nothing = found is None or (self.sentinel and kind == "record" and found[1] == 0)  # type: ignore[index]
            if nothing or found[0] != wanted[0]:  # type: ignore[index]
                return False
        if found != wanted:
            verb = "copied" if kind == "copy" else "took"
            raise Wrong(f"{self.who[me]} {verb} {found} for {wanted} of {self.cells[at]}")
        return True

    def following(self, state: State) -> Iterator[State]:
        memory, places, pending = state
        for blanking in pending:
            at = blanking[1]
            yield (*memory[:at], None, *memory[at + 1 :]), places, pending - {blanking}
        for me, (group, done) in enumerate(places):
            if group == len(self.programs[me]):
                continue
            operations = self.programs[me][group]
            for n, (kind, at, value) in enumerate(operations):
                if done >> n & 1 or not self.ready(state, me, kind, at, value):
                    continue
                after, left = memory, pending
                for cell in at if kind in TO_PEERS else (at,) if kind == "store" else ():
                    after = (*after[:cell], value, *after[cell + 1 :])
                if kind == "record" and self.sentinel:
                    after = (*memory[:at], (0, 0), *memory[at + 1 :])
                if kind == "copy" and self.blanks:
                    left = pending | {(me, at)}
                now = done | 1 << n
                place = (group + 1, 0) if now == (1 << len(operations)) - 1 else (group, now)
                yield after, (*places[:me], place, *places[me + 1 :]), left

    def explore(self) -> str | None:
        """What goes wrong in some interleaving, or None when every one ends with every CTA through all launches."""
        seen: set[State] = set()
        waiting: list[State] = [((None,) * len(self.cells), ((0, 0),) * len(self.who), frozenset())]
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


def explore(**flags: Any) -> str:
    many = flags.get("ranks", 2) * flags.get("ctas", 1) > 2
    return Exploration(Protocol(**flags, in_order=many)).explore() or ""


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
    exploration = Exploration(Protocol(ranks=ranks, ctas=ctas, direct=direct, builds=builds, in_order=ranks * ctas > 2))
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
    """It takes the new logits for the old ones, or blanks them."""
    assert explore(ranks=ranks, builds=(0, 0), staging_parities=1) != ""


def test_builds_with_one_mailbox_take_each_others_records() -> None:
    """Each build counts its own launches, so their tags and parities meet."""
    assert explore(builds=(0, 1), shares_mailbox=True) != ""


def test_a_staging_parity_by_the_builds_own_count_is_one_parity() -> None:
    """Two launches of two builds in a row would have the same one."""
    assert explore(builds=(0, 1), own_parity=True) != ""


def test_a_count_that_is_read_late_may_be_the_next_launchs() -> None:
    """The first CTA may have ended and counted the launch when another one copies the last position."""
    assert "counted" in explore(ctas=2, builds=(0, 0), counts_late=True)


@pytest.mark.parametrize("ctas", [1, 2])
def test_staging_that_nobody_blanks_is_copied_again(ctas: int) -> None:
    assert explore(ctas=ctas, builds=(0, 0), blanks=False) == ""  # the other parity
    assert "copied" in explore(ctas=ctas, builds=(0, 0, 0), blanks=False)


def test_without_a_greeting_blanking_may_come_after_the_next_logits() -> None:
    assert "stuck" in explore(builds=(0, 0, 0), greets=False)


def test_logits_that_look_blank_are_waited_for_for_ever() -> None:
    assert "stuck" in explore(builds=(0,), stages_blank=True)


def test_logits_that_nobody_reads_are_taken_by_another_build() -> None:
    """Why words past a shard's end are not staged: where builds have their logits differs, and what is not read is not blanked."""
    assert explore(builds=(0, 0, 1)) == ""
    assert "copied" in explore(builds=(0, 0, 1), stages_past_end=True)
