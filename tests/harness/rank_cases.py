"""Failures of samplers whose vocabulary is split over ranks, as in known_cases.py: small inputs with their right outcome.

A trial knows nothing of ranks: what it yields must come out alike on every rank, and without ranks. What makes it a case of
ranks is where its tokens lie for the WORLDS that it is drawn with.
"""

from __future__ import annotations

import torch

from .cases import Case, exact_case
from .known_cases import INF, NAN, RANK, Known, Trial, greedy, with_logits

PAD_LOGIT = 100.0

# Of each trial: the model's vocabulary, and the numbers of ranks that it is for.
WORLDS: dict[str, tuple[int, ...]] = {}
RANK_CASES: list[Known] = []


def ranks(vocab_size: int, *worlds: int):  # type: ignore[no-untyped-def]  # a decorator of trials
    """Register a trial, by its function's name, for a toy vocabulary and these numbers of ranks."""

    def add(function):  # type: ignore[no-untyped-def]
        RANK_CASES.append(Known(function.__name__, {"vocab_size": vocab_size}, lambda device, config: function(device)))
        WORLDS[function.__name__] = worlds
        return function

    return add


def with_pads(case: Case, rows: int, value: float) -> Case:
    """The case, its head and base logits lying in larger storage: so many rows of the head in all, pads of one value."""
    steps, vocab = case.num_steps, case.vocab_size
    head = torch.full((rows, case.rank_dim), value, dtype=torch.bfloat16, device=case.device)
    head[:vocab] = case.head_weight
    base = torch.full((case.rows, steps, rows), value, dtype=case.base_logits.dtype, device=case.device)
    base[:, :, :vocab] = case.base_logits
    return case.replace(head_weight=head[:vocab], base_logits=base[:, :, :vocab])


def _pads(vocab: int, padded: int, device: torch.device) -> Trial:
    """Random batches with pads behind the last rank's rows: as without them, whatever the pads hold."""
    plain = exact_case(vocab, RANK, 3, 3, seed=vocab, device=device)
    want, want_cache = yield plain
    for value in (PAD_LOGIT, INF, NAN):
        tokens, cache = yield with_pads(plain, padded, value)
        assert torch.equal(tokens, want) and torch.equal(cache, want_cache)
        assert int(tokens[:3].max()) < vocab
    masked = torch.full((vocab,), -INF, device=device)
    tokens, _ = yield with_pads(with_logits(plain, masked), padded, PAD_LOGIT)
    assert tokens[:3].tolist() == [[0] * 3] * 3


@ranks(10, 4)
def case_15_pad_rows_of_the_last_rank_never_win(device: torch.device) -> Trial:
    """Three rows a rank, two of them pads of the last one."""
    yield from _pads(10, 12, device)


@ranks(2, 4, 8)
def case_15_ranks_that_own_nothing(device: torch.device) -> Trial:
    """One row a rank for the first two, none for the others."""
    yield from _pads(2, 8, device)


@ranks(99, 3, 6, 16)
def case_15_ranks_with_partial_tiles(device: torch.device) -> Trial:
    """33, 17 and 7 rows a rank: no shard is a multiple of a tile, and the last rank has fewer."""
    yield from _pads(99, 112, device)


@ranks(8, 2, 4)
def case_16_winners_of_another_rank(device: torch.device) -> Trial:
    """Three rows whose winners are 1, 6 and 4, each with another best on the rank that does not win."""
    logits = torch.zeros(3, 1, 8)
    for row, (winner, loser) in enumerate([(1, 5), (6, 2), (4, 0)]):
        logits[row, :, winner], logits[row, :, loser] = 5.0, 4.0
    tokens, _ = yield with_logits(greedy(8, device, 3), logits.expand(3, 3, 8).to(device))
    assert tokens[:3].tolist() == [[1] * 3, [6] * 3, [4] * 3]


@ranks(8, 2, 4)
def case_16_rows_are_not_taken_for_ranks(device: torch.device) -> Trial:
    """More rows than ranks: row r's winner at position i is r + i, modulo the vocabulary."""
    rows = 7
    logits = torch.zeros(rows, 3, 8)
    for row in range(rows):
        for step in range(3):
            logits[row, step, (row + step) % 8] = 5.0
    tokens, _ = yield with_logits(greedy(8, device, rows), logits.to(device))
    assert tokens[:rows].tolist() == [[(row + step) % 8 for step in range(3)] for row in range(rows)]


# Of a vocabulary of 64, by row: logits at some tokens, all others, the winner. Ranks begin at 16, 32 and 48.
TIES: tuple[tuple[dict[int, float], float, int], ...] = (
    ({}, 0.5, 0),  # constant
    ({}, 0.0, 0),  # token 0 with a payload of zero, like a record that nobody has written
    ({}, -0.0, 0),
    ({15: 2.0, 16: 2.0}, 0.0, 15),  # the last of a tile and rank, the first of the next
    ({31: 2.0, 32: 2.0}, 0.0, 31),
    ({40: 2.0, 45: 2.0}, 0.0, 40),  # twice on one rank, not the first
    ({20: 0.0, 50: -0.0}, -1.0, 20),  # zeros of both signs tie, across ranks
    ({20: -0.0, 50: 0.0}, -1.0, 20),
    ({5: -2.0, 60: -1.5}, -3.0, 60),  # negative values order as numbers
    ({10: INF, 63: INF}, 0.0, 10),
    ({63: -3e38}, -INF, 63),
    ({}, -INF, 0),
    ({10: INF, 40: NAN, 60: NAN}, 0.0, 40),  # NaN before infinity, the first of both ranks' NaN
    ({}, NAN, 0),
)


@ranks(64, 2, 4, 8)
def case_18_ties_across_ranks_give_the_lowest_id(device: torch.device) -> Trial:
    """Packed keys of ranks keep value and id order."""
    for start in range(0, len(TIES), 7):
        part = TIES[start : start + 7]
        logits = torch.empty(len(part), 3, 64)
        for row, (marks, rest, _) in enumerate(part):
            logits[row] = rest
            for token, value in marks.items():
                logits[row, :, token] = value
        tokens, _ = yield with_logits(greedy(64, device, len(part)), logits.to(device))
        assert tokens[: len(part)].tolist() == [[want] * 3 for *_, want in part]


@ranks(64, 2, 4, 8)
def case_18_zero_weights_and_logits_draw_token_0(device: torch.device) -> Trial:
    """All ties, at every position."""
    tokens, _ = yield with_logits(greedy(64, device, 8), torch.zeros(64, device=device))
    assert tokens[:8].tolist() == [[0] * 3] * 8


@ranks(64, 2, 8, 16)
def case_33_records_like_an_empty_mailbox_arrive(device: torch.device) -> Trial:
    """Winners of +0.0, -0.0 and token 0, in batches of fewer rows than a warp has lanes: every call ends."""
    for rows in (1, 8):
        for zero in (0.0, -0.0):
            tokens, _ = yield with_logits(greedy(64, device, rows), torch.full((64,), zero, device=device))
            assert tokens[:rows].tolist() == [[0] * 3] * rows
            above = torch.full((64,), -1.0, device=device)
            above[63] = zero
            tokens, _ = yield with_logits(greedy(64, device, rows), above)
            assert tokens[:rows].tolist() == [[63] * 3] * rows
