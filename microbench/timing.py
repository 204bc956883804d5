# SPDX-License-Identifier: Apache-2.0
"""Time forwards on every rank and merge: the slowest rank of each iteration, then the distribution over iterations.

Used by the runner. Knows nothing of what is timed. All methods share one signature: `(forward, spec, comm) -> Timed`;
those that need a GPU are in :mod:`microbench.timing_cuda`.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_megamoe.comm import Communicator

SETTLE_S = 0.2
"""So long a GPU replays before anything is timed, unless a user says otherwise."""

MEETINGS = 8
"""So many in a row last longer than the host needs to enqueue what is timed behind them."""


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


@dataclass(frozen=True, slots=True)
class TimingSpec:
    """How often and with which barriers.

    Attributes:
        forwards_per_graph: Of graph replays only.
        settle_s: On a GPU, seconds of replays before the timed ones, at least: until then clocks and power still move.
        meet: On a GPU in lockstep, work that no rank's GPU leaves before all have come to it; enqueued before every
            iteration. A host barrier alone leaves the ranks apart by what their launches take.
    """

    mode: Mode
    warmup: int
    iters: int
    forwards_per_graph: int
    timeout_s: float
    settle_s: float = 0.0
    meet: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Samples, and what forward 0 gives after all of them: the same bits as before, or the times are of nothing."""

    samples: Samples
    repeated: torch.Tensor
    iters_per_graph: int | None = None


Forward = Callable[[int], torch.Tensor]
"""Call i of a rotation over layers and inputs; collective."""


def time_host(forward: Forward, spec: TimingSpec, comm: Communicator) -> Timed:
    """Time `forward(i)` with the host's clock, for engines that return when the result is there.

    The barrier is outside the timed window.

    Returns:
        The same samples on every rank.

    Collective: yes.
    """
    mine: list[float] = []
    comm.barrier(spec.timeout_s)
    for index in range(spec.warmup + spec.iters):
        if spec.mode is Mode.LOCKSTEP or index == spec.warmup:
            comm.barrier(spec.timeout_s)
        started = time.perf_counter_ns()
        forward(index)
        mine.append((time.perf_counter_ns() - started) / 1e3)
    samples = merge(comm.allgather(mine[spec.warmup :], spec.timeout_s))
    return Timed(samples, forward(0))
