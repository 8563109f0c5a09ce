"""The runner of phases over ranks, with phases that need no GPU: what passes, what fails, and that every wait is bounded."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.harness import ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # a machine with few cores takes long to start so many processes
SHORT_SECONDS, SHORT_PREPARE_SECONDS = 2.0, 10.0
FAKE = '''
"""Phases that do by themselves what the real ones do through a GPU."""

import os, signal, sys, time

from tests.harness import ranks
from tests.harness.checks import CheckFailed


class Run:
    def __init__(self, task):
        self.task, self.last = task, task.rank == task.world - 1

    def bitwise(self):
        yield
        return {"part": self.task.part, "ended": time.time()}

    def late(self):
        yield
        if self.last:
            raise CheckFailed({"chain": "no error"})
        return {"ms": 7}

    def graph(self):
        yield
        return {"started": time.time()}

    def killed(self):
        yield
        if self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"ms": 7}

    def differ_rows(self):
        yield
        return {"found": self.last, "message": ""}

    def differ_shape(self):
        yield
        return {"found": False, "message": ""}

    def agree(self):
        if self.last:
            raise RuntimeError("cannot prepare")
        yield
        return {}

    def lone(self):
        yield
        time.sleep(600)

    def grid(self):
        time.sleep(600)
        yield


ranks.Run = Run
if __name__ == "__main__":
    sys.exit(ranks.main(sys.argv[1:]))
'''


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run phases of two ranks, which each have a process; the summary, and the seconds that it took."""
    (tmp_path / "fake_phases.py").write_text(FAKE)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(ranks, "MODULE", "fake_phases")
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 1.0)

    def of(*phases: str, world: int = 2, batches: int = 1, limit: float = SECONDS) -> tuple[dict[str, Any], float]:
        task, *_ = ranks.parse(["--world", str(world), "--batches", str(batches)])
        started = time.monotonic()
        summary = ranks.run_phases(task, phases, seconds=limit)
        assert json.loads(json.dumps(summary)) == summary
        return summary, time.monotonic() - started

    return of


def test_phases_that_pass_and_fail(run: Any) -> None:
    summary, _ = run("late", "killed", "differ_rows", "differ_shape")
    phases = summary["phases"]
    assert {name: found["passed"] for name, found in phases.items()} == {
        "late": False,
        "killed": True,
        "differ_rows": True,  # one rank has found it
        "differ_shape": False,  # none has
    }
    assert not summary["passed"]
    late = phases["late"]["ranks"]
    assert late[0]["covered"] == {"ms": 7} and late[0]["failure"] is None
    assert late[1]["failure"] == "CheckFailed: chain: no error"
    assert phases["killed"]["ranks"][1]["covered"] == {"killed": True}


def test_batches_are_shared_out_and_replays_come_last(run: Any) -> None:
    summary, _ = run("graph", "bitwise", world=1, batches=2)
    assert summary["passed"] and list(summary["phases"]) == ["graph", "bitwise 1 of 2", "bitwise 2 of 2"]
    graph, *parts = (found["ranks"][0]["covered"] for found in summary["phases"].values())
    assert [part["part"] for part in parts] == [0, 1]
    assert graph["started"] >= max(part["ended"] for part in parts)


def test_a_rank_that_cannot_prepare_ends_its_phase(run: Any) -> None:
    summary, seconds = run("agree")
    found = summary["phases"]["agree"]
    assert not found["passed"] and seconds < SECONDS
    assert found["ranks"][1]["failure"] == "RuntimeError: cannot prepare"
    assert found["ranks"][0]["failure"] is not None


@pytest.mark.parametrize("phase", ["lone", "grid"])
def test_a_phase_that_hangs_is_ended(run: Any, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """`lone` hangs while it runs, `grid` while it prepares."""
    monkeypatch.setattr(ranks, "PREPARE_SECONDS", SHORT_PREPARE_SECONDS)
    summary, seconds = run(phase, world=1, limit=SHORT_SECONDS)
    (rank,) = summary["phases"][phase]["ranks"]
    assert "exit code -9" in rank["failure"] or "no end within" in rank["failure"]
    assert seconds < SHORT_PREPARE_SECONDS + 2 * SHORT_SECONDS + 10


@pytest.mark.parametrize("phase", ["lone", "bitwize", ""])
def test_phases_are_checked(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ranks.parse(["--phases", f"late,{phase}"])
    assert "expected some of agree, bitwise, graph" in capsys.readouterr().err


def test_what_is_run_by_default() -> None:
    task, phases, seconds, target = ranks.parse([])
    assert (task.world, task.emulated, task.batches, task.replays) == (2, False, 1000, 10_000)
    assert phases == ranks.REAL_PHASES and seconds == ranks.PHASE_SECONDS and target is None
    assert ranks.parse(["--emulated"])[1] == ranks.EMULATED_PHASES
    assert ranks.parse(["--phases", "late,killed"])[1] == ["late", "killed"]


def test_a_replay_delays_one_rank_by_each_amount_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[list[int]] = [[], []]
    for rank in range(2):
        one = ranks.Run.__new__(ranks.Run)
        one.task, *_ = ranks.parse([])
        one.place = ranks.Place(rank, 2, torch.device("cpu"), None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles, rank=rank: slept[rank].append(cycles))
        for replay in range(2 * len(ranks.DELAY_CYCLES)):
            before = sum(map(len, slept))
            one.delay(replay)
            assert sum(map(len, slept)) - before <= (replay % 2 == rank)
    assert slept[0] == slept[1] == [cycles for cycles in ranks.DELAY_CYCLES if cycles]
