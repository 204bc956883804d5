# SPDX-License-Identifier: Apache-2.0
"""Time forwards on every rank and merge: the slowest rank of each iteration, then the distribution over iterations.

Used by the runner. Knows nothing of what is timed.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_megamoe.comm import Communicator


class Mode(str, enum.Enum):
    """Where the ranks meet: before every iteration, or once before the first (replays back to back)."""

    LOCKSTEP = "lockstep"
    BURST = "burst"


@dataclass(frozen=True, slots=True)
class Samples:
    """Microseconds per iteration: `slowest_us` is the MAX over ranks of each, `per_rank_us` what every rank saw."""

    slowest_us: tuple[float, ...]
    per_rank_us: tuple[tuple[float, ...], ...]

    def summary(self) -> dict[str, float | list[float]]:
        """p50, p10, p90, mean and min of the slowest rank per iteration, and each rank's own median."""
        slowest = np.asarray(self.slowest_us)
        p10, p50, p90 = (float(value) for value in np.percentile(slowest, (10, 50, 90)))
        return {
            "p50": p50,
            "p10": p10,
            "p90": p90,
            "mean": float(slowest.mean()),
            "min": float(slowest.min()),
            "per_rank_p50": [float(np.median(row)) for row in self.per_rank_us],
        }


def merge(per_rank_us: Sequence[Sequence[float]]) -> Samples:
    """MAX over ranks per iteration."""
    return Samples(tuple(map(max, zip(*per_rank_us, strict=True))), tuple(tuple(row) for row in per_rank_us))


def time_forwards(
    forward: Callable[[int], object],
    *,
    mode: Mode,
    warmup: int,
    iters: int,
    comm: Communicator,
    timeout_s: float,
) -> Samples:
    """Call `forward(i)` for i = 0 .. warmup + iters - 1 and time the last `iters` of them with the host's clock.

    The barrier is outside the timed window. For engines that return when the result is there.

    Returns:
        The same samples on every rank.

    Collective: yes.
    """
    mine: list[float] = []
    comm.barrier(timeout_s)
    for index in range(warmup + iters):
        if mode is Mode.LOCKSTEP or index == warmup:
            comm.barrier(timeout_s)
        started = time.perf_counter_ns()
        forward(index)
        mine.append((time.perf_counter_ns() - started) / 1e3)
    return merge(comm.allgather(mine[warmup:], timeout_s))
