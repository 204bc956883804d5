# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: the transport for tests, tutorials and machines without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trtllm_megamoe.comm.base import Communicator, SharedBytes
from trtllm_megamoe.errors import MegaMoeAbortedError, MegaMoeConfigError, MegaMoeTimeoutError

Result = TypeVar("Result")


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
        self.size = group.size

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        self._round += 1
        return self._group.exchange(self.rank, self._round, value, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self.allgather(None, timeout_s)

    def allocate_shared(self, num_bytes: int, timeout_s: float) -> SharedBytes:
        views = self.allgather(torch.empty(num_bytes, dtype=torch.uint8), timeout_s)
        return SharedBytes(views, release=lambda: None)  # the tensors die with their last reference

    def fence(self) -> None:
        with self._group.changed:
            pass


def single() -> Communicator:
    """A group of one rank: the degenerate communicator of EP 1."""
    return ThreadCommunicator(_ThreadGroup(1), 0)


def run_threads(ep_size: int, fn: Callable[[Communicator], Result], timeout_s: float) -> list[Result]:
    """Run `fn(comm)` on `ep_size` threads, one per rank, and return the results in rank order.

    When ranks fail, the error of the first rank that failed by itself (not because a peer stopped) is raised.

    Args:
        ep_size: Number of ranks, at least 1.
        fn: Called once per rank with that rank's communicator.
        timeout_s: Longest wait for all threads together, seconds.

    Raises:
        MegaMoeTimeoutError: A thread has not returned in time; the text names it.
    """
    if ep_size < 1:
        raise MegaMoeConfigError(f"ep_size must be at least 1, got {ep_size}")
    group = _ThreadGroup(ep_size)
    results: list[Any] = [None] * ep_size
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
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
