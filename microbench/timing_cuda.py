# SPDX-License-Identifier: Apache-2.0
"""Time forwards on a GPU by CUDA events: launched one by one, or replayed as a graph (R40).

Used by the runner with an engine that only enqueues. Events lie around each forward or replay, so that the host's own
work counts only where the GPU waits for it. Ranks that share one GPU capture in turns and replay together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from microbench.timing import MEETINGS, Forward, Mode, Timed, TimingSpec, merge
from trtllm_megamoe.comm import Communicator

_SETTLE_BATCH = 8


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Stopwatch:
    """Pairs of events on this rank's stream."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, enqueue: Callable[[], object]) -> None:
        """Enqueue between two events."""
        start, end = _new_event(), _new_event()
        start.record()
        enqueue()
        end.record()
        self._events.append((start, end))

    def microseconds(self) -> list[float]:
        """All of them, once the GPU has come so far."""
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in self._events]


def _settle(once: Callable[[int], object], spec: TimingSpec, comm: Communicator) -> None:
    """Untimed iterations for at least `settle_s`, the same number on all ranks."""
    started = time.monotonic()
    passed = 0.0
    while passed < spec.settle_s:
        for index in range(_SETTLE_BATCH):
            once(index)
        torch.cuda.synchronize()
        passed = max(comm.allgather(time.monotonic() - started, spec.timeout_s))


def _repeat(once: Callable[[int], None], spec: TimingSpec, comm: Communicator) -> None:
    """Warm-up and timed iterations, ranks meeting as the mode says; without a barrier they queue up on the GPU."""
    for index in range(spec.warmup + spec.iters):
        if spec.mode is Mode.LOCKSTEP or index == spec.warmup:
            torch.cuda.synchronize()
            comm.barrier(spec.timeout_s)
        once(index)


def _capture(enqueue: Callable[[], object], comm: Communicator, timeout_s: float) -> torch.cuda.CUDAGraph:
    """Collective. Ranks in one process take turns: a capture must not meet another one, nor a rank that allocates."""
    graph = torch.cuda.CUDAGraph()
    in_turns = comm.transport == "threads"
    torch.cuda.synchronize()
    for turn in range(comm.size if in_turns else 1):
        comm.barrier(timeout_s)
        if turn == comm.rank or not in_turns:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                enqueue()
    comm.barrier(timeout_s)
    return graph


def meeting_of(meet: Callable[[], object], comm: Communicator, timeout_s: float) -> Callable[[], None]:
    """Enqueues a meeting of the ranks' GPUs that lasts until the host has enqueued what follows. Collective.

    Args:
        meet: Work that no rank's GPU leaves before all have come. Captured, so that the host is far ahead of it.
    """
    meet()  # capture needs everything loaded
    return _capture(lambda: [meet() for _ in range(MEETINGS)], comm, timeout_s).replay


def _meeting_in(spec: TimingSpec, comm: Communicator) -> Callable[[], None] | None:
    """The meeting before every iteration, where the mode has one."""
    if spec.mode is not Mode.LOCKSTEP or spec.meet is None:
        return None
    return meeting_of(spec.meet, comm, spec.timeout_s)


def time_eager(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """Each forward launched by the host. Collective."""
    watch, meeting = _Stopwatch(), _meeting_in(spec, comm)

    def once(index: int) -> None:
        if meeting is not None:
            comm.launch_together(meeting, spec.timeout_s)
        watch.around(lambda: forward(index))

    _settle(forward, spec, comm)
    _repeat(once, spec, comm)
    mine = watch.microseconds()[spec.warmup :]
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), forward(0))


def time_graph(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """One graph of `forwards_per_graph` forwards, replayed; a sample is a replay over their number. Collective."""
    count = spec.forwards_per_graph
    for index in range(count):
        forward(index)  # capture needs everything loaded and allocated
    captured: list[torch.Tensor] = []
    graph = _capture(lambda: captured.extend(forward(index) for index in range(count)), comm, spec.timeout_s)
    watch, meeting = _Stopwatch(), _meeting_in(spec, comm)

    def replay() -> None:
        if meeting is not None:
            meeting()
        watch.around(graph.replay)

    _settle(lambda _: comm.launch_together(graph.replay, spec.timeout_s), spec, comm)
    _repeat(lambda _: comm.launch_together(replay, spec.timeout_s), spec, comm)
    mine = [us / count for us in watch.microseconds()[spec.warmup :]]
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), captured[0].clone(), count)
