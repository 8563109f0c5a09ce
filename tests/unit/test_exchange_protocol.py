"""The exchange's protocol (templates/device/exchange.py), explored exhaustively: every interleaving of a few CTAs over a few exchanges.

A CTA writes its record of exchange s, then reads every CTA's record until each carries the tag of s, then goes on to s + 1. What it reads
must be what the others wrote in s. The same model holds for ranks and their mailboxes. Memory is one cell per record: a record is a single
64-bit word, so it is seen whole, and one writer's stores to one word are seen in their order. The mistakes that such exchanges have been
seen to make (no tag, one parity, a sentinel that data can take, a row that is not written every time) are given as variants and must fail.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

EXCHANGES = 5  # positions of one launch and of the next: the sequence number goes on
EMPTY = (0, 0)  # a fresh buffer: tag 0 is never sent


@dataclass(frozen=True)
class Protocol:
    """The exchange and, by its flags, its mistaken relatives."""

    ctas: int = 2
    parities: int = 2
    tagged: bool = True
    tags: int = 7  # how many tags there are before they repeat; 2^tag_bits - 1 in the kernel
    sentinel: int | None = None  # without a tag: the payload that means "not here yet"
    clears: bool = False  # without a tag: a reader clears its word behind itself
    skips: frozenset[int] = (
        frozenset()
    )  # exchanges in which no CTA writes or reads, as for a row that a call does not use

    def tag(self, exchange: int) -> int:
        return exchange % self.tags + 1 if self.tagged else 1

    def payload(self, cta: int, exchange: int) -> int:
        """What the CTA has to say: another value in every exchange, and 0 once, as a score of +0.0 with token 0 would be."""
        return (exchange * self.ctas + cta) % (EXCHANGES * self.ctas - 1)


@dataclass(frozen=True)
class State:
    """Memory by [parity][writer] (by [parity][writer][reader] where readers clear), and each CTA's place: exchange, wrote, read."""

    memory: tuple[tuple[tuple[int, int], ...], ...]
    places: tuple[tuple[int, bool, frozenset[int]], ...]


class Wrong(Exception):
    """A CTA took a record for one that it is not."""


def start(p: Protocol) -> State:
    empty = EMPTY if p.sentinel is None else (1, p.sentinel)
    return State(((empty,) * (p.ctas * p.ctas),) * p.parities, ((0, False, frozenset()),) * p.ctas)


def cell(p: Protocol, writer: int, reader: int) -> int:
    return writer * p.ctas + (reader if p.clears else 0)


def steps(p: Protocol, state: State) -> Iterator[State]:
    """Every state that one CTA can make next. Raises Wrong where it would take a stale or foreign record."""
    for me, (exchange, wrote, read) in enumerate(state.places):
        if exchange == EXCHANGES:
            continue
        bank = exchange % p.parities
        if exchange in p.skips:
            yield _move(state, me, (exchange + 1, False, frozenset()))
        elif not wrote:
            memory = state.memory
            for reader in range(p.ctas) if p.clears else (me,):
                memory = _store(memory, bank, cell(p, me, reader), (p.tag(exchange), p.payload(me, exchange)))
            yield _move(replace(state, memory=memory), me, (exchange, True, read))
        elif len(read) == p.ctas:
            yield _move(state, me, (exchange + 1, False, frozenset()))
        else:
            for writer in set(range(p.ctas)) - read:
                tag, payload = state.memory[bank][cell(p, writer, me)]
                here = tag == p.tag(exchange) and (p.sentinel is None or payload != p.sentinel)
                if not here:
                    continue  # it polls again
                if payload != p.payload(writer, exchange):
                    raise Wrong(f"CTA {me} in exchange {exchange} took {payload} for CTA {writer}'s record")
                after = state
                if p.clears:
                    word = (1, p.sentinel if p.sentinel is not None else 0)
                    after = replace(state, memory=_store(state.memory, bank, cell(p, writer, me), word))
                yield _move(after, me, (exchange, True, read | {writer}))


def _store(memory: tuple, bank: int, at: int, word: tuple[int, int]) -> tuple:
    words = memory[bank][:at] + (word,) + memory[bank][at + 1 :]
    return memory[:bank] + (words,) + memory[bank + 1 :]


def _move(state: State, me: int, place: tuple[int, bool, frozenset[int]]) -> State:
    return replace(state, places=state.places[:me] + (place,) + state.places[me + 1 :])


def explore(p: Protocol) -> str | None:
    """What goes wrong in some interleaving, or None when every one ends with every CTA through all exchanges."""
    seen, open_states = set(), [start(p)]
    while open_states:
        state = open_states.pop()
        if state in seen:
            continue
        seen.add(state)
        try:
            following = list(steps(p, state))
        except Wrong as wrong:
            return str(wrong)
        if not following and any(exchange != EXCHANGES for exchange, _, _ in state.places):
            return f"stuck at {state.places}"
        open_states += following
    return None


@pytest.mark.parametrize("ctas", [2, 3])
def test_every_interleaving_ends_with_the_right_records(ctas: int) -> None:
    assert explore(Protocol(ctas=ctas)) is None


def test_two_tags_are_too_few_and_three_are_enough() -> None:
    """A word holds the record of two exchanges before, so tags may repeat after three: the modulus 2^tag_bits - 1 is at least that."""
    assert explore(Protocol(tags=3)) is None
    assert explore(Protocol(tags=2)) is not None


@pytest.mark.parametrize("ctas", [2, 3])
def test_without_a_tag_a_stale_record_is_taken(ctas: int) -> None:
    assert "took" in (explore(Protocol(ctas=ctas, tagged=False)) or "")


@pytest.mark.parametrize("ctas", [2, 3])
def test_with_one_parity_a_fast_writer_overwrites_what_a_slow_reader_waits_for(ctas: int) -> None:
    assert "stuck" in (explore(Protocol(ctas=ctas, parities=1)) or "")


def test_a_sentinel_that_data_can_take_waits_for_ever() -> None:
    """Readers that clear behind themselves and take payload 0 for "not here yet": right until a payload is 0."""
    assert "stuck" in (explore(Protocol(tagged=False, sentinel=0, clears=True)) or "")


def test_a_row_that_some_exchanges_do_not_write_meets_an_old_tag() -> None:
    """Why every row slot is written in every exchange of a build: left out of a few, its word is old enough for the tag to repeat."""
    assert explore(Protocol(tags=4, skips=frozenset({1, 2, 3}))) is not None
    assert explore(Protocol(tags=4)) is None
