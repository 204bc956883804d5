# SPDX-License-Identifier: Apache-2.0
"""Yields the results of many reads in their order while threads are busy with the next large ones.

Used by :mod:`trtllm_megamoe.weights.checkpoint`. Knows nothing of files: a read is a byte count and a function. Small
reads stay with the caller's thread, because handing one over costs more than the read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch


def _num_readers() -> int:
    """A quarter of this process's cores: on two cores reading ahead was measured to gain nothing, and more than four
    threads to be slower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores // 4)


READERS = _num_readers()
"""Threads; without any the caller reads everything."""
AHEAD_BYTES = 32 << 20
"""How far threads may be ahead of the caller; at least one large read."""
LARGE_BYTES = 256 << 10
"""Reads from here on are handed to threads."""


class Read(NamedTuple):
    """One tensor to come."""

    nbytes: int
    run: Callable[[], torch.Tensor]


def read_in_order(reads: Iterable[Read]) -> Generator[torch.Tensor, None, None]:
    """Run all reads and yield what they return, in order; the first read that fails raises when its turn comes.

    No thread is left, and no read begins any more, once the iterator is exhausted, closed or has raised.
    """
    todo = list(reads)
    large = deque(read for read in todo if read.nbytes >= LARGE_BYTES)
    if not large or not READERS:
        yield from (read.run() for read in todo)
        return
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="megamoe-read")
    started: deque[Future[torch.Tensor]] = deque()
    ahead_bytes = 0
    try:
        for read in todo:
            while large and (ahead_bytes + large[0].nbytes <= AHEAD_BYTES or not started):
                ahead_bytes += large[0].nbytes
                started.append(pool.submit(large.popleft().run))
            if read.nbytes < LARGE_BYTES:
                yield read.run()
            else:
                ahead_bytes -= read.nbytes
                yield started.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
