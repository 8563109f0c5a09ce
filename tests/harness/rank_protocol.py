"""The exchange between ranks (templates/device/rank_exchange.py, chain_ranks.py, rank_logits.py) as programs for interleavings.py.

A rank runs launches one after the other, each of one of its builds; a CTA of a rank is an agent, the rank its team, a launch's end a join. In
every position a CTA stages its logits at every peer, publishes its record, and waits for records in its rank's mailbox. Direct: it writes
its record into every rank's mailbox, and waits for every CTA's of all ranks. In two stages: it writes it into its rank's memory; the rank's
leader, its first CTA, reads these and writes the rank's into every mailbox; all wait for the ranks' records. Meanwhile, in any order with
these, it copies what the CTAs of its number of the peers have staged of the position before, and blanks it; in the last position that one's too.
Only the first CTA of a rank waits for the last position's records. At a launch's start that one greets the peers, behind a fence, and during the
first position it waits for their greetings.

A word of memory stands for a record, a greeting, or one CTA's logits of a position. Nothing but these tells what has arrived: logits may be seen
before or after the record of their position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.harness.interleavings import BLANK, Exploration, Fence, Join, Operation, Program, Put, Set, Take


class Word(NamedTuple):
    """A word of memory: what it is for, whose memory it is in, and which one of these."""

    kind: str
    rank: int
    which: tuple[int, ...] = ()


class Record(NamedTuple):
    """A record. Its tag says which exchange it is of, as far as it does; launch and position, which it is of."""

    tag: int
    launch: int
    step: int
    payload: int


class Logits(NamedTuple):
    """A CTA's logits of a position."""

    launch: int
    step: int


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
    counts_late: bool = False  # a CTA reads the launch's number with the last position's copies, not at the start
    draws: bool = True  # else drafts are greedy: no logits, no greetings
    trusts_records: bool = False  # where a position's records are there, its logits are taken to be there
    blanks: bool = True  # whoever has copied logits blanks their place
    greets: bool = True  # and its rank's next launch says that it has started
    fences: bool = True  # which releases the blanking
    stages_blank: bool = False  # some logits look like a blank place
    stages_past_end: bool = False  # build 0 also stages what only build 1 has a reader for

    def sequence(self, launch: int, step: int) -> int:
        """Number of an exchange among those of its build."""
        before = sum(build == self.builds[launch] for build in self.builds[:launch])
        return before * self.steps + step if self.counts_launches else step

    def record(self, launch: int, step: int, rank: int) -> Record:
        """Another payload in every exchange."""
        payload = (launch * self.steps + step) * self.ranks + rank + (0 if self.says_zero else 1)
        return Record(0 if self.sentinel else self.sequence(launch, step) + 1, launch, step, payload)

    def take_record(self, word: Word, launch: int, step: int, rank: int) -> Take:
        """Waiting for a rank's record of a position: for whatever has its tag, or is there at all."""
        wanted = self.record(launch, step, rank)
        every = [self.record(n, s, rank) for n in range(len(self.builds)) for s in range(self.steps)]
        like = [one for one in every if one.tag == wanted.tag and not (self.sentinel and one.payload == 0)]
        return Take(word, frozenset(like), frozenset({wanted}), (BLANK,) if self.sentinel else ())

    def mailbox(self, launch: int, step: int, reader: int, *source: int) -> Word:
        build = 0 if self.shares_mailbox else self.builds[launch]
        return Word("mailbox", reader, (build, self.sequence(launch, step) % self.mailbox_parities, *source))

    def local(self, launch: int, step: int, rank: int, cta: int) -> Word:
        return Word("local", rank, (self.builds[launch], self.sequence(launch, step) % 2, cta))

    def staged(self, launch: int, step: int, reader: int, source: int, cta: int, written: bool) -> list[Word]:
        """Where a CTA's logits lie: as the builds differ, in build 1 in one more place than in build 0."""
        count = launch
        if self.own_parity:
            count = sum(build == self.builds[launch] for build in self.builds[:launch])
        more = self.builds[launch] == 1 or (self.stages_past_end and written)
        parity = count % self.staging_parities
        return [Word("staging", reader, (parity, step, source, cta, n)) for n in range(2 if more and step else 1)]

    def logits(self, launch: int, step: int) -> object:
        return BLANK if self.stages_blank and step == 0 else Logits(launch, step)

    def publish(self, launch: int, step: int, rank: int, cta: int) -> Program:
        """Writing a position's record."""
        everywhere, record = range(self.ranks), self.record(launch, step, rank)
        if self.direct:
            return [[Put(tuple(self.mailbox(launch, step, r, rank, cta) for r in everywhere), record)]]
        groups: Program = [[Put((self.local(launch, step, rank, cta),), record)]]
        if cta == 0:
            groups.append(
                [self.take_record(self.local(launch, step, rank, k), launch, step, rank) for k in range(self.ctas)]
            )
            groups.append([Put(tuple(self.mailbox(launch, step, r, rank) for r in everywhere), record)])
        return groups

    def collect(self, launch: int, step: int, rank: int) -> list[Operation]:
        """Waiting for a position's records."""
        ctas = range(self.ctas) if self.direct else ()
        writers = [(r, k) for r in range(self.ranks) for k in ctas] or [(r,) for r in range(self.ranks)]
        return [
            self.take_record(self.mailbox(launch, step, rank, *writer), launch, step, writer[0]) for writer in writers
        ]

    def copy(self, launch: int, position: int, arrived: bool, rank: int, cta: int) -> Iterator[Operation]:
        """Copying a position of the peers. `arrived`: the records of the position are there."""
        wanted = self.logits(launch, position)
        every = {self.logits(n, position) for n in range(len(self.builds))}
        every = every | {BLANK} if self.trusts_records and arrived else every - {BLANK}
        for peer in range(self.ranks):
            for word in self.staged(launch, position, rank, peer, cta, False) if peer != rank else ():
                yield Take(word, frozenset(every), frozenset({wanted}), (BLANK,) if self.blanks else ())

    def program(self, rank: int, cta: int) -> Program:
        """What a CTA does."""
        launches = range(len(self.builds))
        peers = [other for other in range(self.ranks) if other != rank]
        groups: Program = []
        for launch in launches:
            counted = Word("count", rank)
            count: Program = [
                [Take(counted, frozenset({BLANK, *launches, len(launches)}), frozenset({launch or BLANK}))]
            ]
            groups += [] if self.counts_late else count
            greets = cta == 0 and self.greets and self.draws
            if greets:
                groups += [[Fence()]] if self.fences else []
                groups.append([Put(tuple(Word("hello", peer, (rank,)) for peer in peers), launch + 1)])
            for step in range(self.steps):
                last = step + 1 == self.steps
                words = [word for peer in peers for word in self.staged(launch, step, peer, rank, cta, True)]
                groups += [[Put(tuple(words), self.logits(launch, step))]] if self.draws else []
                groups += self.publish(launch, step, rank, cta)
                groups += count if last and self.counts_late else []
                found = [] if last and cta else self.collect(launch, step, rank)
                if step == 0 and greets:
                    said = frozenset(range(launch + 1, len(self.builds) + 1))
                    found += [Take(Word("hello", rank, (peer,)), said, said) for peer in peers]
                for position in range(max(step - 1, 0), self.steps if last else step) if self.draws else ():
                    found += self.copy(launch, position, position < step, rank, cta)
                groups.append(found)
            if cta == 0:
                groups.append([Set(Word("count", rank), launch + 1)])
            groups.append([Join()])
        return [group for group in groups if group]

    def exploration(self, *, reduced: bool = True) -> Exploration:
        """All its interleavings."""
        who = [(rank, cta) for rank in range(self.ranks) for cta in range(self.ctas)]
        return Exploration([self.program(*one) for one in who], [rank for rank, _ in who], reduced=reduced)
