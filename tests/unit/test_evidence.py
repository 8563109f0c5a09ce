"""Evidence of GPU runs: its seal, its states, and what makes it be rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsparkgen import evidence

NOW, BEFORE, NEVER = "a" * 12, "b" * 12, "c" * 12
KERNELS = {
    "toy/chain": {"inputs": NOW, "earlier": [BEFORE]},
    "toy/noise": {"inputs": NOW, "earlier": []},
}
ARCHS = {"toy": ("sm_90a", "sm_100a")}
ROW = {"kernel": "chain", "vocab_size": 64, "num_steps": 3, "rank_dim": 64, "tp": 1, "rows": 1, "us": 9.0}


def verified(kernel: str, digest: str, arch: str = "sm_90a") -> dict[str, Any]:
    return {"kernel": kernel, "arch": arch, "inputs": digest, "checks": {"bitwise": {"batches": 200}}}


def write(results: Path, **entries: Any) -> Path:
    return evidence.record(results, "h200", "toy", "dsparkgen verify", **entries)


def test_states(tmp_path: Path) -> None:
    write(tmp_path, verified=[verified("chain", BEFORE), verified("noise", NOW)])
    table = {(s.kernel, s.arch): s.state for s in evidence.states(tmp_path, KERNELS, ARCHS)}
    assert table == {
        ("chain", "sm_90a"): "stale",
        ("chain", "sm_100a"): "compiled only",
        ("noise", "sm_90a"): "verified",
        ("noise", "sm_100a"): "compiled only",
    }
    lines = evidence.states(tmp_path, KERNELS, ARCHS)
    assert [s.kernel for s in evidence.missing(lines, "sm_90a")] == ["chain"]
    text = evidence.render_table(lines)
    assert "toy    chain   sm_90a   stale" in text and "compiled only" in text


def test_runs_over_ranks_stand_beside_the_state_of_one_gpu(tmp_path: Path) -> None:
    over = [verified("chain", NOW) | {"tp": 2}, verified("chain", BEFORE) | {"tp": 4, "emulated": True}]
    write(tmp_path, verified=[verified("chain", BEFORE), *over, verified("chain", NOW) | {"tp": 8, "emulated": True}])
    evidence.record(tmp_path, "h200-x4", "toy", "dsparkgen verify", verified=[verified("chain", NOW) | {"tp": 4}])
    state = next(s for s in evidence.states(tmp_path, KERNELS, ARCHS) if (s.kernel, s.arch) == ("chain", "sm_90a"))
    assert (state.state, state.device, state.ranks) == ("stale", "h200", ("2", "4", "8 emulated"))
    assert evidence.render_table([state]).splitlines()[1].endswith("2, 4, 8 emulated")
    assert evidence.problems(tmp_path, KERNELS) == []
    document = evidence.load(evidence.results_path(tmp_path, "h200", "toy"))
    assert [(e.get("tp"), e.get("emulated")) for e in document["verified"]] == [
        (None, None),
        (2, None),
        (4, True),
        (8, True),
    ]


def test_rows_of_ranks_are_told_apart(tmp_path: Path) -> None:
    rows = [ROW | {"inputs": NOW}, ROW | {"inputs": NOW, "tp": 2}, ROW | {"inputs": NOW, "tp": 2, "emulated": True}]
    write(tmp_path, rows=rows)
    path = write(tmp_path, rows=[rows[1] | {"us": 5.0}])
    found = [(row["tp"], row.get("emulated"), row["us"]) for row in evidence.load(path)["rows"]]
    assert found == [(1, None, 9.0), (2, None, 5.0), (2, True, 9.0)]
    assert (evidence.folder("h200", 1), evidence.folder("h200", 2), evidence.folder("h200", 4)) == (
        "h200",
        "h200",
        "h200-x4",
    )


def test_a_fresh_run_replaces_a_stale_one_and_keeps_the_rest(tmp_path: Path) -> None:
    write(tmp_path, verified=[verified("chain", BEFORE), verified("noise", NOW)])
    write(tmp_path, rows=[ROW | {"inputs": BEFORE}])
    write(tmp_path, verified=[verified("chain", NOW)], rows=[ROW | {"inputs": NOW, "us": 8.0}])
    path = write(tmp_path, rows=[ROW | {"inputs": NOW, "rows": 8}])
    document = evidence.load(path)
    assert {(e["kernel"], e["inputs"]) for e in document["verified"]} == {("chain", NOW), ("noise", NOW)}
    assert [(r["rows"], r["us"]) for r in document["rows"]] == [(1, 8.0), (8, 9.0)]
    assert evidence.problems(tmp_path, KERNELS) == []


def test_the_newest_intact_run_decides_over_gpus(tmp_path: Path) -> None:
    write(tmp_path, verified=[verified("chain", BEFORE)])
    evidence.record(tmp_path, "h100", "toy", "dsparkgen verify", verified=[verified("chain", NOW)])
    state = next(s for s in evidence.states(tmp_path, KERNELS, ARCHS) if (s.kernel, s.arch) == ("chain", "sm_90a"))
    assert (state.state, state.device) == ("verified", "h100")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["rows"][0].update(us=1.0),
        lambda d: d["verified"][0].update(inputs=NOW),
        lambda d: d.update(date="2026-01-01"),
        lambda d: d.update(seal="0" * 64),
    ],
)
def test_a_hand_edit_breaks_the_seal(tmp_path: Path, edit: Any) -> None:
    path = write(tmp_path, rows=[ROW | {"inputs": NOW}], verified=[verified("chain", BEFORE)])
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(evidence.EvidenceError, match="edited by hand"):
        evidence.load(path)
    assert len(evidence.problems(tmp_path, KERNELS)) == 1
    with pytest.raises(evidence.EvidenceError):
        write(tmp_path, rows=[ROW | {"inputs": NOW}])
    assert json.loads(path.read_text()) == document  # an edit is never sealed over


def test_reformatting_keeps_the_seal(tmp_path: Path) -> None:
    path = write(tmp_path, rows=[ROW | {"inputs": NOW}])
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    assert evidence.problems(tmp_path, KERNELS) == []


def test_a_digest_that_was_never_checked_in_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, verified=[verified("chain", NEVER)], rows=[ROW | {"inputs": BEFORE}])
    (problem,) = evidence.problems(tmp_path, KERNELS)
    assert NEVER in problem and "toy/chain" in problem
    write(tmp_path, verified=[verified("chain", NOW)])
    assert evidence.problems(tmp_path, KERNELS) == []
    evidence.record(tmp_path, "h200", "gone", "dsparkgen verify", verified=[verified("chain", NOW)])
    path = evidence.results_path(tmp_path, "h200", "gone")
    assert evidence.problems(tmp_path, KERNELS) == [
        f"{path}: no spec describes gone any more; delete this file or bring back specs/gone.toml"
    ]


def test_rows_of_throw_away_code_are_held_to_their_parent(tmp_path: Path) -> None:
    write(tmp_path, rows=[ROW | {"inputs": NEVER, "parent": NOW, "vocab_size": 32}])
    assert evidence.problems(tmp_path, KERNELS) == []
    assert len(evidence.current_rows(tmp_path, "h200", "toy", KERNELS)) == 1
    write(tmp_path, rows=[ROW | {"inputs": NEVER, "parent": "d" * 12, "vocab_size": 32}])
    assert "d" * 12 in evidence.problems(tmp_path, KERNELS)[0]


def test_only_rows_of_the_checked_in_kernels_may_be_quoted(tmp_path: Path) -> None:
    assert evidence.current_rows(tmp_path, "h200", "toy", KERNELS) == []
    write(tmp_path, rows=[ROW | {"inputs": NOW}, ROW | {"inputs": BEFORE, "rows": 4}])
    assert [row["rows"] for row in evidence.current_rows(tmp_path, "h200", "toy", KERNELS)] == [1]


def test_a_timing_verifies_nothing(tmp_path: Path) -> None:
    assert not evidence.is_verified(tmp_path, "h200", "toy", "chain", KERNELS)
    over = verified("chain", NOW) | {"tp": 2}
    write(tmp_path, rows=[ROW | {"inputs": NOW}], verified=[verified("chain", BEFORE), verified("noise", NOW), over])
    assert not evidence.is_verified(tmp_path, "h200", "toy", "chain", KERNELS)
    write(tmp_path, verified=[verified("chain", NOW)])
    assert evidence.is_verified(tmp_path, "h200", "toy", "chain", KERNELS)


def test_a_file_in_the_wrong_folder_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, verified=[verified("chain", NOW)])
    (tmp_path / "b200").mkdir()
    path.rename(tmp_path / "b200" / "toy.json")
    assert "expected 'b200'" in evidence.problems(tmp_path, KERNELS)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON"),
        ("[]", "device: expected str, got NoneType"),
        ('{"device": 1}', "device: expected str, got int"),
    ],
)
def test_malformed_files_say_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "h200" / "toy.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(evidence.EvidenceError, match=expected):
        evidence.load(path)


def test_results_of_another_machine_are_taken(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, rows=[ROW | {"inputs": NOW, "us": 9.0}], verified=[verified("chain", BEFORE), verified("noise", NOW)])
    other = [ROW | {"inputs": BEFORE, "us": 7.0}, ROW | {"inputs": NOW, "tp": 2, "us": 5.0}]
    file = write(there, rows=other, verified=[verified("chain", NOW), verified("noise", NOW) | {"checks": {}}])
    path = evidence.take(here, file, KERNELS)
    document = evidence.load(path)
    assert path == evidence.results_path(here, "h200", "toy")
    assert [(row["tp"], row["us"]) for row in document["rows"]] == [
        (1, 9.0),
        (2, 5.0),
    ]  # what is of earlier code stays out
    assert {entry["kernel"]: entry["inputs"] for entry in document["verified"]} == {"chain": NOW, "noise": NOW}
    assert next(entry for entry in document["verified"] if entry["kernel"] == "noise")["checks"] == {}
    assert evidence.problems(here, KERNELS) == []


def test_the_command_is_kept_without_the_files_of_its_machine(tmp_path: Path) -> None:
    path = evidence.record(tmp_path, "h200", "toy", "dsparkgen bench toy --json /somewhere/x.json --rows 1 --record")
    assert evidence.load(path)["command"] == "dsparkgen bench toy --json FILE --rows 1 --record"


def test_results_that_no_run_can_have_written_are_not_taken(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    kept = write(here, rows=[ROW | {"inputs": NOW}]).read_text()
    file = write(there, rows=[ROW | {"inputs": NEVER}])
    with pytest.raises(evidence.EvidenceError, match="match no toy/chain that was ever checked in"):
        evidence.take(here, file, KERNELS)
    file.write_text(file.read_text().replace("9.0", "1.0"))
    with pytest.raises(evidence.EvidenceError, match="edited by hand"):
        evidence.take(here, file, KERNELS)
    assert evidence.results_path(here, "h200", "toy").read_text() == kept
