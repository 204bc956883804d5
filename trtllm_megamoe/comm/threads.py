# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: the transport for tests, tutorials and machines without MPI.

On a GPU every rank is a thread with a stream of its own (virtual ranks, design D9). The stream belongs to the thread
and not to an engine: torch's current stream is thread-local, so everything a rank does between two launches (inputs,
outputs, weights) is ordered with them, and none of it lands on the default stream that all threads share.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeAbortedError, MegaMoeConfigError, MegaMoeTimeoutError

Result = TypeVar("Result")

_MOST_STREAMS = 32
"""torch hands out this many different streams of a GPU, then the first one again."""


class _ThreadGroup:
    """State that the ranks of one group share: an exchange board and a lock that serves as the memory fence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.board: dict[int, list[Any]] = {}
        self.arrived: dict[int, set[int]] = {}
        self.changed = threading.Condition()
        self.failed_rank: int | None = None

    def exchange(self, rank: int, round_index: int, value: Any, timeout_s: float) -> list[Any]:
        """Post `value` for a collective round and return all ranks' values once everybody has posted."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            slots = self.board.setdefault(round_index, [None] * self.size)
            arrived = self.arrived.setdefault(round_index, set())
            slots[rank] = value
            arrived.add(rank)
            self.changed.notify_all()
            while len(arrived) < self.size:
                if self.failed_rank is not None:
                    raise MegaMoeAbortedError(
                        f"rank {rank}: rank {self.failed_rank} failed; this collective cannot complete"
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = sorted(set(range(self.size)) - arrived)
                    raise MegaMoeTimeoutError(
                        f"rank {rank}: waited {timeout_s:g} s in collective {round_index} for ranks {missing}"
                    )
                self.changed.wait(left)
            # a rank in round n+1 proves nothing about others still reading round n, but one in n+2 does
            self.board.pop(round_index - 2, None)
            self.arrived.pop(round_index - 2, None)
            return list(slots)

    def fail(self, rank: int) -> None:
        """Mark the group failed, so that no peer waits for this rank."""
        with self.changed:
            if self.failed_rank is None:
                self.failed_rank = rank
            self.changed.notify_all()


class ThreadCommunicator(Communicator):
    """One thread's handle; create through :func:`run_threads` or :func:`single`."""

    transport = "threads"

    def __init__(self, group: _ThreadGroup, rank: int) -> None:
        self._group = group
        self._round = 0
        self.rank = rank
        self.size = self.world_size = group.size

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        self._round += 1
        return self._group.exchange(self.rank, self._round, value, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self.allgather(None, timeout_s)

    def fence(self) -> None:
        with self._group.changed:
            pass

    def launch_together(self, launch: Callable[[], None], timeout_s: float) -> None:
        if self.size == 1:
            return launch()
        self.barrier(timeout_s)
        launch()
        self.barrier(timeout_s)


def single() -> Communicator:
    """A group of one rank: the degenerate communicator of EP 1."""
    return ThreadCommunicator(_ThreadGroup(1), 0)


def run_threads(
    ep_size: int,
    fn: Callable[[Communicator], Result],
    timeout_s: float,
    device: torch.device | str | None = None,
) -> list[Result]:
    """Run `fn(comm)` on `ep_size` threads, one per rank, and return the results in rank order.

    When ranks fail, the error of the first rank that failed by itself (not because a peer stopped) is raised.

    Args:
        ep_size: Number of ranks, at least 1; at most 32 on a GPU.
        fn: Called once per rank with that rank's communicator.
        timeout_s: Longest wait for all threads together, seconds.
        device: A GPU on which all ranks work: every thread gets it as current device, and a non-blocking stream of its
            own as current stream, which is idle when `fn`'s result is returned. None: no GPU is touched.

    Raises:
        MegaMoeConfigError: An illegal number of ranks.
        MegaMoeTimeoutError: A thread has not returned in time; the text names it.
    """
    if ep_size < 1:
        raise MegaMoeConfigError(f"ep_size must be at least 1, got {ep_size}")
    streams = _rank_streams(ep_size, device)
    group = _ThreadGroup(ep_size)
    results: list[Any] = [None] * ep_size
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with _working_on(streams[rank]):
                results[rank] = fn(ThreadCommunicator(group, rank))
        except BaseException as err:
            failures.append((rank, err))
            group.fail(rank)

    threads = [threading.Thread(target=body, args=(r,), name=f"ep-rank-{r}", daemon=True) for r in range(ep_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [r for r, thread in enumerate(threads) if thread.is_alive()]
    if failures:
        own_fault = [err for _, err in failures if not isinstance(err, MegaMoeAbortedError)]
        raise (own_fault or [failures[0][1]])[0]
    if stuck:
        raise MegaMoeTimeoutError(f"ranks {stuck} of {ep_size} did not return within {timeout_s:g} s")
    return results


def _rank_streams(ep_size: int, device: torch.device | str | None) -> list[torch.cuda.Stream | None]:
    """One stream for each rank, all different: made together, before any thread can ask for one in between."""
    if device is None or torch.device(device).type != "cuda":
        return [None] * ep_size
    if ep_size > _MOST_STREAMS:
        raise MegaMoeConfigError(f"at most {_MOST_STREAMS} virtual ranks fit one GPU (a stream each), got {ep_size}")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # launches that wait for each other must not share a hardware queue; read when the GPU's context is made
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_MOST_STREAMS))
    return [torch.cuda.Stream(device) for _ in range(ep_size)]  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _working_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
