"""Timing of GPU work with a cold L2: CUDA-graph replay, rotated inputs, medians, variants interleaved in one run.

The L2 is flushed by READING 256 MB. A memset would leave it full of dirty lines, whose write-back is then charged to
the kernel that is timed (1 to 9 microseconds on an H200).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

FLUSH_BYTES = 256 * 1024 * 1024  # several times the L2 of any GPU that is described
FLUSH_READS = 2  # the second pass gives the host time to queue a direct launch that is timed before the flush ends
LEAST_REPEATS = 30
WARMUP_CALLS = 3
ROUNDS_IN_FLIGHT = 8  # rounds queued before the host waits, well under the driver's launch queue
US_PER_MS = 1000.0


class Flush:
    """Evicts the L2 by reading; owns the buffer."""

    def __init__(self, device: torch.device) -> None:
        words = FLUSH_BYTES // torch.float32.itemsize
        self._words = torch.rand(words, device=device)
        self._sum = torch.empty((), device=device)

    def __call__(self) -> None:
        for _ in range(FLUSH_READS):
            torch.sum(self._words, dim=0, out=self._sum)


def _event() -> torch.cuda.Event:
    """An event that a graph records each time it is replayed."""
    return torch.cuda.Event(enable_timing=True, external=True)


class TimedGraph:
    """A CUDA graph of a flush, what must happen just before the call, and the call with an event node on either side."""

    def __init__(self, call: Callable[[], None], flush: Flush, meet: Callable[[], None] | None = None) -> None:
        # A graph holds addresses: what is captured must keep its memory, and its code loaded, as long as it is replayed.
        self._captured = (call, flush, meet)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._start, self._end = _event(), _event()
        self._graph = torch.cuda.CUDAGraph()
        # Another thread's calls, such as those of a process group's watchdog, do not end this capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            flush()
            if meet is not None:
                meet()
            self._start.record()
            call()
            self._end.record()

    def replay_us(self) -> float:
        """Replay once and return the microseconds between the two event nodes."""
        self._graph.replay()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * US_PER_MS


class Interleaved:
    """Variants to time once a round, round after round, each time on its next input set and with a cold L2.

    A time spans the call between two event nodes of its graph, as in a decode step's graph: it includes the latency of one
    kernel launch inside a graph, 3.1 us for an empty kernel on an H200, not that of launching a graph.

    Args:
        variants: per name, one call per input set; every call is captured in a graph of its own here.
        device: the GPU.
        meet: launched between flush and call, where several GPUs must start a call together: it ends on all of them at
            about the same time. Every rank then has the same variants in the same order.
    """

    def __init__(
        self,
        variants: Mapping[str, Sequence[Callable[[], None]]],
        *,
        device: torch.device,
        meet: Callable[[], None] | None = None,
    ) -> None:
        flush = Flush(device)
        self._graphs = {name: [TimedGraph(call, flush, meet) for call in calls] for name, calls in variants.items()}

    def medians_us(self, *, repeats: int = 35, warmup_rounds: int = 3) -> dict[str, float]:
        """Median microseconds by name over `repeats` rounds, after `warmup_rounds` that do not count.

        Raises:
            ValueError: fewer than 30 repeats: a median of fewer says little on a shared machine.
        """
        if repeats < LEAST_REPEATS:
            raise ValueError(f"repeats: expected at least {LEAST_REPEATS}, got {repeats}")
        samples: dict[str, list[float]] = {name: [] for name in self._graphs}
        names = list(self._graphs)
        for turn in range(warmup_rounds + repeats):
            # Each round starts with another variant, so that none always follows the same neighbour.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                graphs = self._graphs[name]
                us = graphs[turn % len(graphs)].replay_us()
                if turn >= warmup_rounds:
                    samples[name].append(us)
        return {name: statistics.median(values) for name, values in samples.items()}


def time_behind(
    producer: Callable[[], None],
    variants: Mapping[str, Sequence[Callable[[], None]]],
    *,
    device: torch.device,
    repeats: int = 35,
    warmup_rounds: int = 3,
) -> dict[str, float]:
    """Time what each variant adds behind a kernel: total(producer + variant) - total(producer), L2 cold, in one run.

    Args:
        producer: launches a kernel that runs for longer than the host needs to launch the variant behind it, so that
            the variant is queued when the kernel ends.
        variants: per name, one call per input set. They are launched directly, not from graphs.
        device: the GPU.
        repeats: rounds that count, at least 30.
        warmup_rounds: rounds before them.

    Returns:
        Microseconds by name: the difference of the medians.

    Raises:
        ValueError: fewer than 30 repeats.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"repeats: expected at least {LEAST_REPEATS}, got {repeats}")
    flush = Flush(device)
    names: list[str | None] = [None, *variants]  # None: the producer alone
    marks: dict[str | None, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for turn in range(warmup_rounds + repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush()
            start.record()
            producer()
            if name is not None:
                variants[name][turn % len(variants[name])]()
            end.record()
            if turn >= warmup_rounds:
                marks[name].append((start, end))
        if turn % ROUNDS_IN_FLIGHT == 0:
            torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)
    totals = {name: statistics.median(s.elapsed_time(e) * US_PER_MS for s, e in pairs) for name, pairs in marks.items()}
    return {name: totals[name] - totals[None] for name in variants}
