"""The d2t tensor of a checkpoint: what is refused, and the tables that kernels read."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dspark_kernels._device import vocabulary  # noqa: E402

CPU = torch.device("cpu")
REDUCED = SimpleNamespace(MODEL="m", VOCAB_SIZE=10, DRAFT_VOCAB_SIZE=4, SAMPLING_LIMIT=10, D2T=True)
FULL = SimpleNamespace(MODEL="m", VOCAB_SIZE=4, DRAFT_VOCAB_SIZE=4, SAMPLING_LIMIT=4, D2T=False)
MAP = torch.tensor([2, 3, 3, 5])  # target ids 2, 4, 5, 8


def limited(limit: int) -> SimpleNamespace:
    return SimpleNamespace(**vars(REDUCED) | {"SAMPLING_LIMIT": limit})


def test_tables_of_a_reduced_vocabulary() -> None:
    targets = vocabulary.target_ids(REDUCED, MAP, CPU)
    assert targets.dtype == torch.int32 and targets.tolist() == [2, 4, 5, 8]
    drafts = vocabulary.draft_ids(REDUCED, targets)
    assert drafts.dtype == torch.int32 and drafts[:10].tolist() == [-1, -1, 0, -1, 1, 2, -1, -1, 3, -1]


def test_ids_from_the_limit_on_are_not_drafted() -> None:
    config = limited(5)
    targets = vocabulary.target_ids(config, MAP, CPU)
    assert vocabulary.draft_ids(config, targets)[:10].tolist() == [-1, -1, 0, -1, 1, -1, -1, -1, -1, -1]


def test_a_full_vocabulary_has_no_tables() -> None:
    for d2t in (None, torch.zeros(4, dtype=torch.int64)):
        assert vocabulary.target_ids(FULL, d2t, CPU) is None
    assert vocabulary.draft_ids(FULL, None) is None


@pytest.mark.parametrize(
    ("config", "d2t", "message"),
    [
        (REDUCED, None, r"d2t: expected int64 \[4\] that maps draft to target ids, got None"),
        (REDUCED, MAP.int(), r"d2t: expected int64 \[4\], contiguous on cpu, got int32"),
        (REDUCED, MAP[:3], r"d2t: expected int64 \[4\].* got int64 \[3\]"),
        (REDUCED, torch.tensor([2, 3, 3, 7]), r"d2t: expected target ids in \[0, 10\), got 2 to 10"),
        (REDUCED, torch.tensor([-1, 3, 3, 5]), r"d2t: expected target ids in \[0, 10\), got -1 to 8"),
        (REDUCED, torch.tensor([2, 3, 2, 5]), "d2t: expected 4 different target ids, got 3"),
        (limited(2), MAP, "d2t: expected a target id below the sampling limit, 2, got 2 as the lowest"),
        (FULL, torch.tensor([0, 1, 0, -1]), "d2t: expected None or zeros.* got 2 others"),
    ],
)
def test_maps_that_do_not_fit(config: SimpleNamespace, d2t: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"m: {message}"):
        vocabulary.target_ids(config, d2t, CPU)
