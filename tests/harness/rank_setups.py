"""Set-ups of a chain sampler over ranks that agree through a real CPU group, with a fake GPU each: what each rank ends with.

A process a rank, `python -m tests.harness.rank_setups '<JSON>'`, joins a gloo group through a file and goes through all
SETUPS, in which one rank fails where the others do not. It prints one JSON object: by set-up, what happened on this rank.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from dspark_kernels._device import chain_setup, rank_memory
from dspark_kernels._device.rank_memory import Place

from . import fake_gpu
from .fake_gpu import MAX_REQS, R, Recorder, V

MODULE = "tests.harness.rank_setups"
COLLECTIVE_SECONDS = 20
ABSENT_SECONDS = 2  # of a group one of whose ranks never comes
PROCESS_SECONDS = 120
PEER_ADDRESS = 0x7E00_0000_0000  # of the fake peers' buffers
ROOT = Path(__file__).parents[2]

logger = logging.getLogger("dspark_kernels")


class Rank:
    """One rank's fake GPU, and what the sampler's set-up did with it."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world, self.group = rank, world, group
        self.gpu = Recorder()
        self.steps: list[str] = []  # what needed the peers, in order
        self.options: dict[str, Any] = {"group": group}
        self.weights: dict[str, Any] = fake_gpu.weights()
        self.config: dict[str, Any] = {"PLANS": fake_gpu.real_lines(1, 4, tp=world)}
        self.place = Place("host", "boot", f"GPU-{rank}", fabric=False)
        self.peer_access = True
        self.allocation_failure: Exception | None = None
        self.rendezvous_failure: Exception | None = None
        self.null_pointer = False
        self.buffer: torch.Tensor | None = None

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.steps.append("allocate")
        if self.allocation_failure is not None:
            raise self.allocation_failure
        self.buffer = torch.full((size,), 0xAB, dtype=dtype)
        return self.buffer

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        self.steps.append("rendezvous")
        if self.rendezvous_failure is not None:
            raise self.rendezvous_failure
        pointers = [PEER_ADDRESS + peer for peer in range(self.world)]
        pointers[self.rank] = tensor.data_ptr()
        if self.null_pointer:
            pointers[(self.rank + 1) % self.world] = 0
        return SimpleNamespace(buffer_ptrs=pointers)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """This fake GPU in the place of CUDA and of torch's symmetric memory."""
        with ExitStack() as stack:

            def replace(target: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(target, name, value))

            fake_gpu.install(self.gpu, replace)
            replace(chain_setup, "device_type", lambda tensor: "cuda")
            replace(rank_memory, "place_of", lambda device: self.place)
            visible = {f"GPU-{rank}": rank for rank in range(self.world)}
            replace(rank_memory, "visible_gpus", lambda: visible)
            replace(torch.cuda, "can_device_access_peer", lambda own, peer: self.peer_access)
            replace(torch.cuda, "synchronize", lambda device=None: None)
            replace(symmetric, "empty", self.empty)
            replace(symmetric, "rendezvous", self.rendezvous)
            yield

    def create(self) -> Any:
        """The factory, with this rank's weights and options."""
        kind = fake_gpu.make_chain(self.gpu, **self.config)
        weights = dict(self.weights)
        return kind.create(weights.pop("embed_weight"), weights.pop("head_weight"), **(weights | self.options))


# --- what one rank does otherwise ---


def every_rank_fits(one: Rank) -> None:
    """Nothing fails."""


def one_cannot_compile(one: Rank) -> None:
    if one.rank == 1:
        one.gpu.compile_failure = RuntimeError("no ptxas")


def one_has_no_head(one: Rank) -> None:
    if one.rank == 1:
        one.weights["head_weight"] = None


def one_has_a_short_head(one: Rank) -> None:
    if one.rank == 0:
        one.weights["head_weight"] = torch.zeros((V // one.world - 1, R), dtype=torch.bfloat16)


def one_cannot_allocate(one: Rank) -> None:
    if one.rank == 1:
        one.allocation_failure = torch.OutOfMemoryError("no memory")


def one_cannot_rendezvous(one: Rank) -> None:
    if one.rank == 0:
        one.rendezvous_failure = RuntimeError("no fd")


def one_gets_no_pointer(one: Rank) -> None:
    one.null_pointer = one.rank == 1


def no_peer_access(one: Rank) -> None:
    one.peer_access = one.rank != 1


def one_gpu_for_two(one: Rank) -> None:
    one.place = one.place._replace(gpu="GPU-0")


def two_hosts_without_fabric(one: Rank) -> None:
    one.place = one.place._replace(host=f"host{one.rank}", fabric=one.rank == 0)


def two_hosts_with_fabric(one: Rank) -> None:
    one.place = one.place._replace(host=f"host{one.rank}", fabric=True)


def no_plan_for_the_world(one: Rank) -> None:
    if one.rank == 1:
        one.config["PLANS"] = fake_gpu.real_lines(1, 4)


def other_max_reqs(one: Rank) -> None:
    one.weights["max_reqs"] = MAX_REQS + one.rank


def other_shard_width(one: Rank) -> None:
    one.options["shard_width"] = V // one.world + one.rank


def other_timeout(one: Rank) -> None:
    one.options["timeout_ms"] = 30_000 * (1 - one.rank)


def one_breaks_while_it_looks(one: Rank) -> None:
    if one.rank == 1:
        one.config["CACHE_DTYPES"] = None  # whatever it is that raises on one rank alone


SETUPS: tuple[Callable[[Rank], None], ...] = (
    every_rank_fits,
    one_cannot_compile,
    one_has_no_head,
    one_has_a_short_head,
    one_cannot_allocate,
    one_cannot_rendezvous,
    one_gets_no_pointer,
    no_peer_access,
    one_gpu_for_two,
    two_hosts_without_fabric,
    two_hosts_with_fabric,
    no_plan_for_the_world,
    other_max_reqs,
    other_shard_width,
    other_timeout,
    one_breaks_while_it_looks,
)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def go_through(setup: Callable[[Rank], None], rank: int, world: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """One set-up on one rank."""
    one, lines = Rank(rank, world, group), Lines()
    setup(one)
    logger.addHandler(lines)
    try:
        with one.installed():
            made = one.create()
            found = {
                "made": made is not None,
                "logged": lines.lines,
                "steps": one.steps,
                "compiled": len(one.gpu.compiled),
            }
            if made is not None:
                found |= use(one, made)
            return found
    finally:
        logger.removeHandler(lines)


def use(one: Rank, sampler: Any) -> dict[str, Any]:
    """Calls of a sampler that was built: with whole and with sharded base logits, and what it says of shards."""
    assert one.buffer is not None
    width = V // one.world
    call = fake_gpu.batch(2)
    sampler.sample(**call)
    shard = call["base_logits"][:, :, width * one.rank : width * (one.rank + 1)]
    sampler.sample(**(call | {"base_logits": shard}))
    launches = [event[2] for event in one.gpu.events if event[0] == "chain"]
    whole, part = launches
    own = (width * one.rank, width)
    return {
        "filled": not bool(one.buffer[: whole["staging"]].any())
        and bool((one.buffer[whole["staging"] :] == 0xFF).all()),
        "same": {name: whole[name] == part[name] for name in whole},
        "launch": {name: whole[name] for name in ("rank", "shard_width", "rows", "mailbox", "staging")},
        "head_offset": whole["head"] - one.weights["head_weight"].data_ptr(),
        "base_offset": whole["base"] - call["base_logits"].data_ptr(),
        "noise_starts": one.gpu.starts,
        "builds": one.gpu.ranks[0],
        "accepts": [
            sampler.accepts_shard(own),
            sampler.accepts_shard(own if one.rank == 0 else None),
            sampler.accepts_shard((own[0], width - (one.rank == 1))),
        ],
        "why_not_shard": sampler.why_not_shard((0, width)),
        "supports": [
            sampler.supports(2, call["base_logits"]),
            sampler.supports(2, shard),
            sampler.supports(2, shard[:, :, 1:]),
        ],
    }


def wait_for_an_absent_rank(rank: int) -> dict[str, Any]:
    """A rank whose peer joined the group and then never agrees: the group's own timeout ends the wait."""
    group = dist.new_group(timeout=timedelta(seconds=ABSENT_SECONDS), backend="gloo")
    if rank != 0:
        time.sleep(2 * ABSENT_SECONDS)
        return {"seconds": 0.0, "raised": None}
    started = time.monotonic()
    one = Rank(rank, dist.get_world_size(), group)
    try:
        with one.installed():
            one.create()
    except RuntimeError as error:
        return {"seconds": time.monotonic() - started, "raised": type(error).__name__}
    return {"seconds": time.monotonic() - started, "raised": None}


def work(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All set-ups on one rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    group = dist.group.WORLD
    assert group is not None
    found = {setup.__name__: go_through(setup, rank, world, group) for setup in SETUPS}
    return found | {"absent": wait_for_an_absent_rank(rank)}


def run(world: int) -> list[dict[str, Any]]:
    """A process a rank; what each found. Raises AssertionError with the output of one that fails or does not end."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", MODULE, json.dumps([rank, world, folder])],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment,
            )
            for rank in range(world)
        ]
        found = []
        try:
            for process in started:
                out, err = process.communicate(timeout=PROCESS_SECONDS)
                assert process.returncode == 0, err
                found.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in started:
                process.kill()
        return found


if __name__ == "__main__":
    print(json.dumps(work(*json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # a peer that has ended must not be waited for in a destructor
