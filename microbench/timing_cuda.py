# SPDX-License-Identifier: Apache-2.0
"""Time forwards on a GPU by CUDA events: launched one by one, or replayed as a graph (R40).

Used by the runner with an engine that only enqueues. Events lie around each forward or replay, so that the host's own
work counts only where the GPU waits for it. Ranks that share one GPU capture in turns and replay together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from microbench.timing import Forward, Mode, Timed, TimingSpec, merge
from trtllm_megamoe.comm import Communicator


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


def _repeat(once: Callable[[int], None], spec: TimingSpec, comm: Communicator) -> None:
    """Warm-up and timed iterations, ranks meeting as the mode says; without a barrier they queue up on the GPU."""
    for index in range(spec.warmup + spec.iters):
        if spec.mode is Mode.LOCKSTEP or index == spec.warmup:
            torch.cuda.synchronize()
            comm.barrier(spec.timeout_s)
        once(index)


def time_eager(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """Each forward launched by the host. Collective."""
    watch = _Stopwatch()
    _repeat(lambda index: watch.around(lambda: forward(index)), spec, comm)
    mine = watch.microseconds()[spec.warmup :]
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), forward(0))


def time_graph(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """One graph of `forwards_per_graph` forwards, replayed; a sample is a replay over their number. Collective."""
    count = spec.forwards_per_graph
    for index in range(count):
        forward(index)  # capture needs everything loaded and allocated
    graph = torch.cuda.CUDAGraph()
    captured: list[torch.Tensor] = []
    # ranks in one process: a capture must not meet another one, nor a rank that allocates
    in_turns = comm.transport == "threads"
    torch.cuda.synchronize()
    for turn in range(comm.size if in_turns else 1):
        comm.barrier(spec.timeout_s)
        if turn == comm.rank or not in_turns:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured += [forward(index) for index in range(count)]
    comm.barrier(spec.timeout_s)
    watch = _Stopwatch()
    _repeat(lambda _: comm.launch_together(lambda: watch.around(graph.replay), spec.timeout_s), spec, comm)
    mine = [us / count for us in watch.microseconds()[spec.warmup :]]
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), captured[0].clone(), count)
