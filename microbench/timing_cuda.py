# SPDX-License-Identifier: Apache-2.0
"""Time forwards on a GPU by CUDA events: launched one by one, or replayed as a graph (R40).

Used by the runner with an engine that only enqueues. Events lie around each forward or replay, so that the host's own
work counts only where the GPU waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from microbench.timing import Forward, Mode, Timed, TimingSpec, merge
from trtllm_megamoe.comm import Communicator


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_events(enqueue: Callable[[int], object], spec: TimingSpec, comm: Communicator) -> list[float]:
    """Microseconds of each timed `enqueue(i)` on this rank; without a barrier they follow each other on the GPU."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for index in range(spec.warmup + spec.iters):
        if spec.mode is Mode.LOCKSTEP or index == spec.warmup:
            torch.cuda.synchronize()
            comm.barrier(spec.timeout_s)
        start, end = _new_event(), _new_event()
        start.record()
        enqueue(index)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events[spec.warmup :]]


def time_eager(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """Each forward launched by the host. Collective."""
    mine = _time_events(forward, spec, comm)
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), forward(0))


def time_graph(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """One graph of `forwards_per_graph` forwards, replayed; a sample is a replay over their number. Collective."""
    count = spec.forwards_per_graph
    for index in range(count):
        forward(index)  # capture needs everything loaded and allocated
    torch.cuda.synchronize()
    comm.barrier(spec.timeout_s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [forward(index) for index in range(count)]
    mine = [us / count for us in _time_events(lambda _: graph.replay(), spec, comm)]
    return Timed(merge(comm.allgather(mine, spec.timeout_s)), captured[0].clone(), count)
