"""Worker processes: the handshake, what they print, and what becomes of them when one fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from dsparkgen.workers import Ended, Worker, WorkerFailed, finish_together, start_ranks, wait_all_ready

MODULE = """
import json, os, signal, sys, time
from dsparkgen.workers import wait_for_go, wait_for_the_end
task = json.loads(sys.argv[1])
print("a line of a library", flush=True)
what = task.get("ranks", {}).get(os.environ.get("RANK"), task["do"])
if what == "fail":
    sys.exit(3)
if what == "hang":
    time.sleep(600)
if what == "time":
    print(json.dumps({"before": 1}), flush=True)
    wait_for_go()
print(json.dumps({name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}), flush=True)
if task.get("stay"):
    wait_for_the_end()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_worker.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))


def test_a_worker_prepares_waits_and_works(capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker("a_worker", {"do": "time"})
    worker.wait_ready()
    worker.go()
    ended = worker.finish()
    assert ended.code == 0 and ended.lines[0] == {"before": 1} and ended.lines[1]["RANK"] is None
    assert "a line of a library" in capfd.readouterr().err


def test_a_worker_that_is_done_stays_until_it_is_ended() -> None:
    worker = Worker("a_worker", {"do": "time", "stay": True})
    worker.wait_ready()
    assert worker.work() is None and [*worker.lines[0]] == ["before"] and len(worker.lines) == 2
    assert worker._process.poll() is None
    worker.kill()
    assert worker._process.wait(timeout=10) < 0
    worker = Worker("a_worker", {"do": "time"})
    worker.wait_ready()
    assert worker.work() == "the worker ended with exit code 0"


def test_a_worker_that_fails_says_how() -> None:
    worker = Worker("a_worker", {"do": "fail"})
    with pytest.raises(WorkerFailed, match="the worker ended with exit code 3"):
        worker.wait_ready()


def test_a_worker_whose_time_runs_out_is_ended() -> None:
    worker = Worker("a_worker", {"do": "hang"}, seconds=2.0)
    ended = worker.finish()
    assert ended.code < 0 and worker.ending(ended.code) == "no end within 2 s"


def test_a_worker_without_the_word_ends() -> None:
    worker = Worker("a_worker", {"do": "time"})
    worker.wait_ready()
    worker._process.stdin.close()  # type: ignore[union-attr]
    assert worker.finish() == Ended([{"before": 1}], 1)


def test_ranks_find_each_other() -> None:
    ended = finish_together(start_ranks("a_worker", {"do": "print"}, 3))
    assert [end.lines[0]["RANK"] for end in ended] == ["0", "1", "2"]
    assert {end.lines[0]["WORLD_SIZE"] for end in ended} == {"3"}
    assert len({end.lines[0]["MASTER_PORT"] for end in ended}) == 1


def test_ranks_that_prepare_do_not_wait_for_one_that_failed() -> None:
    started = time.monotonic()
    workers = start_ranks("a_worker", {"do": "hang", "ranks": {"1": "fail"}}, 2)
    assert wait_all_ready(workers) == "rank 1: the worker ended with exit code 3"
    assert time.monotonic() - started < 60
    workers = start_ranks("a_worker", {"do": "time"}, 2)
    assert wait_all_ready(workers) is None
    for worker in workers:
        worker.go()
    assert [end.code for end in finish_together(workers)] == [0, 0]


def test_when_a_rank_fails_the_others_do_not_wait_for_it_forever() -> None:
    started = time.monotonic()
    workers = start_ranks("a_worker", {"do": "hang", "ranks": {"1": "fail", "2": "print"}}, 3)
    ended = finish_together(workers, grace_seconds=0.5)
    assert [end.code for end in ended[1:]] == [3, 0] and ended[0].code < 0
    assert time.monotonic() - started < 60
