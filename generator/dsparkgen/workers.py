"""Processes of this tool on a machine with GPUs: each has CUDA contexts and compiled kernels of its own.

A worker is ``python -m <module> '<task as JSON>'``. It prints one JSON object a line; anything else that it prints goes to
stderr. One that is timed calls `wait_for_go` once everything is compiled, so that many can prepare side by side and then
have the GPU to themselves, one after another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 540.0  # a worker's whole life, waiting for its turn included
GRACE_SECONDS = 20.0  # for the other ranks once one has failed: enough to run into a kernel's own timeout
READY, DONE = {"ready": True}, {"done": True}
GO = "go\n"


class WorkerFailed(Exception):
    """A worker ended without having prepared; says how."""


@dataclass(frozen=True)
class Ended:
    """What a worker printed, and how it ended."""

    lines: list[dict[str, Any]]
    code: int  # exit code; negative: killed by that signal


class Worker:
    """One started worker. ``finish`` it, or ``kill`` it."""

    def __init__(
        self,
        module: str,
        task: Mapping[str, Any],
        *,
        seconds: float = SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {}),
        )
        self.seconds, self.timed_out = seconds, False
        self._lines: list[dict[str, Any]] = []
        self._timer = threading.Timer(seconds, self._run_out)
        self._timer.daemon = True
        self._timer.start()

    def wait_ready(self) -> None:
        """Wait until the worker has prepared. Raises WorkerFailed when it ends instead."""
        for found in self._read():
            if found == READY:
                return
            self._lines.append(found)
        raise WorkerFailed(self.ending(self.finish().code))

    def go(self) -> None:
        """Let a prepared worker do its work."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(GO)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; finish says how

    def work(self) -> str | None:
        """Let a prepared worker work until it says that it is done; how it ended, where it did instead.

        It goes on living, so that giving back its memory does not disturb the worker that is timed next. `kill` it in the end.
        """
        self.go()
        for found in self._read():
            if found == DONE:
                return None
            self._lines.append(found)
        return self.ending(self.finish().code)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has printed so far."""
        return self._lines

    def finish(self) -> Ended:
        """Read what it prints until it ends."""
        self._lines += self._read()
        code = self._process.wait()
        self._timer.cancel()
        return Ended(self._lines, code)

    def kill(self) -> None:
        """End it now."""
        self._timer.cancel()
        self._process.kill()

    def ending(self, code: int) -> str:
        """How it ended, in words."""
        return f"no end within {self.seconds:.0f} s" if self.timed_out else f"the worker ended with exit code {code}"

    def _run_out(self) -> None:
        self.timed_out = True
        self._process.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                sys.stderr.write(line)


def start_ranks(module: str, task: Mapping[str, Any], world: int, *, seconds: float = SECONDS) -> list[Worker]:
    """One worker a GPU of this machine, with the variables that torch.distributed's "env://" reads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # nothing here uses it, and torch binds it where it can
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world))
    return [Worker(module, task, seconds=seconds, environment=shared | variables) for variables in own]


def wait_all_ready(workers: Sequence[Worker]) -> str | None:
    """Wait until workers that wait for each other have prepared; when one ends instead, all are killed. How it ended, or None."""
    failures: list[str] = []

    def wait(rank: int) -> None:
        try:
            workers[rank].wait_ready()
        except WorkerFailed as error:
            failures.append(f"rank {rank}: {error}")
            for worker in workers:
                worker.kill()

    with ThreadPoolExecutor(max_workers=max(1, len(workers))) as pool:
        list(pool.map(wait, range(len(workers))))
    return failures[0] if failures else None


def finish_together(workers: Sequence[Worker], *, grace_seconds: float = GRACE_SECONDS) -> list[Ended]:
    """Wait for workers that wait for each other: once one has failed, the others have `grace_seconds` to end by themselves."""
    failed = threading.Event()
    done = threading.Event()

    def finish(worker: Worker) -> Ended:
        ended = worker.finish()
        if ended.code != 0:
            failed.set()
        return ended

    def watch() -> None:
        failed.wait()
        if not done.wait(grace_seconds):
            for worker in workers:
                worker.kill()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with ThreadPoolExecutor(max_workers=max(1, len(workers))) as pool:
        ended = list(pool.map(finish, workers))
    done.set()
    failed.set()
    watcher.join()
    return ended


def wait_for_the_end() -> None:
    """In a worker: say that the work is done, and stay until the process that started this one ends it."""
    print(json.dumps(DONE), flush=True)
    sys.stdin.read()


def wait_for_go() -> None:
    """In a worker: say that everything is prepared, and wait for the word. Ends the process where it never comes."""
    print(json.dumps(READY), flush=True)
    if sys.stdin.readline() != GO:
        raise SystemExit("the process that started this one is gone")
