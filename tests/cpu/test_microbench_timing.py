# SPDX-License-Identifier: Apache-2.0
"""The GPU timers' order of events with a scripted GPU: captures in turns, replays together, the slowest rank counts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from microbench.timing import MEETINGS, Mode, TimingSpec
from microbench.timing_cuda import time_eager, time_graph
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.tuning.runner import FORWARDS_PER_GRAPH, REPLAYS, time_replays

RANKS = 3
WATCHDOG_S = 60.0


class Gpu:
    """Counts captures that overlap and replays that miss one; a replay takes 1 ms and the rank's number more."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.capturing = 0
        self.overlaps = 0
        self.num_replays = 0
        self.clock_ms: dict[str, float] = {}

    def now(self) -> float:
        return self.clock_ms.get(threading.current_thread().name, 0.0)

    def work(self, milliseconds: float) -> None:
        self.clock_ms[threading.current_thread().name] = self.now() + milliseconds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = device.now()

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    class Graph:
        def replay(self) -> None:
            with device.lock:
                device.num_replays += 1
                assert device.capturing == 0, "a replay met a capture"
            device.work(1.0 + int(threading.current_thread().name.rsplit("-", 1)[1]))

    @contextlib.contextmanager
    def capture(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        with device.lock:
            device.overlaps += device.capturing
            device.capturing += 1
        yield
        with device.lock:
            device.capturing -= 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return device


@pytest.mark.parametrize("mode", Mode)
def test_time_graph_captures_in_turns_and_counts_the_slowest_rank(gpu: Gpu, mode: Mode) -> None:
    spec = TimingSpec(mode, warmup=2, iters=5, forwards_per_graph=4, timeout_s=20.0)

    def body(comm: Communicator) -> Any:
        calls: list[int] = []

        def forward(index: int) -> torch.Tensor:
            calls.append(index)
            return torch.tensor([float(index), float(comm.rank)])

        return time_graph(forward, spec, comm), calls

    for rank, (timed, calls) in enumerate(run_threads(RANKS, body, WATCHDOG_S)):
        assert calls == [0, 1, 2, 3] * 2, "warm-up and capture; replays call nothing"
        assert timed.samples.slowest_us == (3000 / 4,) * 5
        assert [row[0] for row in timed.samples.per_rank_us] == [1000 / 4, 2000 / 4, 3000 / 4]
        assert timed.repeated.tolist() == [0.0, float(rank)]
    assert gpu.overlaps == 0
    assert gpu.num_replays == RANKS * 7


@pytest.mark.parametrize("timer", [time_eager, time_graph])
def test_ranks_meet_on_the_gpu_before_every_iteration_in_lockstep_only(gpu: Gpu, timer: Any) -> None:
    """The meeting is enqueued before the window that is timed, and is not in it."""

    def run(mode: Mode) -> tuple[Any, int]:
        met: list[int] = []

        def body(comm: Communicator) -> Any:
            spec = TimingSpec(mode, 1, 3, 4, 20.0, meet=lambda: met.append(comm.rank))
            return timer(lambda index: torch.tensor(float(index)), spec, comm)

        return run_threads(2, body, WATCHDOG_S), len(met)

    (_, none), (timed, some) = run(Mode.BURST), run(Mode.LOCKSTEP)
    assert none == 0
    assert some == 2 * (1 + MEETINGS), "once to warm up, then captured"
    replays = (0, 4) if timer is time_eager else (4, 2 * 4)
    assert gpu.num_replays == 2 * sum(replays), "in lockstep a meeting more in every iteration"
    if timer is time_graph:
        assert timed[0].samples.slowest_us == (2000 / 4,) * 3


@pytest.mark.parametrize("timer", [time_eager, time_graph])
def test_settling_takes_its_time_alike_on_all_ranks_and_is_not_counted(gpu: Gpu, timer: Any) -> None:
    def body(comm: Communicator) -> Any:
        calls: list[int] = []

        def forward(index: int) -> torch.Tensor:
            calls.append(index)
            return torch.tensor(0.0)

        started = time.monotonic()
        timed = timer(forward, TimingSpec(Mode.BURST, 1, 3, 4, 20.0, settle_s=0.1), comm)
        return len(calls), time.monotonic() - started, len(timed.samples.slowest_us)

    (calls, seconds, samples), *others = run_threads(2, body, WATCHDOG_S)
    assert seconds >= 0.1 and samples == 3
    assert others[0][0] == calls and others[0][2] == samples
    assert (calls if timer is time_eager else gpu.num_replays) > 4


def test_time_eager_counts_each_forward(gpu: Gpu) -> None:
    def body(comm: Communicator) -> Any:
        def forward(index: int) -> torch.Tensor:
            gpu.work(1.0 + comm.rank + index)
            return torch.tensor(float(index))

        spec = TimingSpec(Mode.LOCKSTEP, warmup=1, iters=3, forwards_per_graph=4, timeout_s=20.0)
        return time_eager(forward, spec, comm)

    for timed in run_threads(2, body, WATCHDOG_S):
        assert timed.samples.slowest_us == (3000.0, 4000.0, 5000.0)


def test_tuners_timer_agrees_on_the_number_of_launches(gpu: Gpu) -> None:
    def body(comm: Communicator) -> float:
        return time_replays(lambda: None, comm, 20.0)

    times = run_threads(RANKS, body, WATCHDOG_S)
    assert times == [1000 * (1 + rank) / FORWARDS_PER_GRAPH for rank in range(RANKS)]
    assert gpu.num_replays == RANKS * (1 + REPLAYS)
    assert gpu.overlaps == 0
