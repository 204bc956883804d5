# SPDX-License-Identifier: Apache-2.0
"""The tuner's hands on a GPU: a real layer, a bucket pinned to one tactic after another, times of graph replays.

Called by the `tune` command. Everything goes through the layer's public path, so what is measured is what serving runs.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.tuning.tactic import Tactic

logger = logging.getLogger(__name__)

FORWARDS_PER_GRAPH = 4
REPLAYS = 15
_WARM_UPS = 2

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Timer = Callable[[Callable[[], object], Communicator, float], float]


class TunableLayer(Protocol):
    """The part of :class:`~trtllm_megamoe.layer.MegaMoELayer` that measuring needs."""

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        """Run a bucket with a tactic."""

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_tokens_over_ranks: int | None = None,
    ) -> torch.Tensor:
        """One launch."""

    def raise_if_failed(self) -> None:
        """Raise what a launch reported."""

    def close(self) -> None:
        """Give the workspace back."""


def time_replays(run: Callable[[], object], comm: Communicator, timeout_s: float) -> float:
    """Microseconds of one `run`, the median of graph replays; ranks meet before each. Collective.

    The number of runs is the same on all ranks, whatever each of them measures.
    """
    for _ in range(_WARM_UPS):
        run()
    graph = torch.cuda.CUDAGraph()
    for turn in range(comm.size):  # ranks in one process: a capture must not meet another one
        torch.cuda.synchronize()
        comm.barrier(timeout_s)
        if turn == comm.rank:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(FORWARDS_PER_GRAPH):
                    run()
    comm.barrier(timeout_s)
    times = []
    for _ in range(1 + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def replay(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
            start.record()
            graph.replay()
            end.record()

        torch.cuda.synchronize()
        comm.launch_together(replay, timeout_s)
        torch.cuda.synchronize()
        comm.barrier(timeout_s)
        times.append(1e3 * start.elapsed_time(end) / FORWARDS_PER_GRAPH)
    return float(statistics.median(times[1:]))


class LayerRunner:
    """Implements :class:`~trtllm_megamoe.tuning.tuner.CandidateRunner`; a context manager that closes its layer.

    Args:
        build: Makes the layer and loads its weights. Collective; called again after a launch failed.
        make_step: Inputs of a step with this many tokens on this rank.
        timer: Times a callable on all ranks; see :func:`time_replays`.
        comm: The ranks.
        timeout_s: Longest wait in each exchange.
    """

    def __init__(
        self,
        build: Callable[[], TunableLayer],
        make_step: Callable[[int], Step],
        comm: Communicator,
        timeout_s: float,
        timer: Timer = time_replays,
    ) -> None:
        self._build, self._make_step, self._timer = build, make_step, timer
        self._comm, self._timeout_s = comm, timeout_s
        self._layer = build()
        self._step: tuple[int, Step] | None = None

    def __enter__(self) -> LayerRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error peers may be gone; closing is collective
            self._layer.close()

    def prepare(self, tactic: Tactic, bucket: int) -> None:
        """Load the tactic's kernel; what cannot be had raises."""
        self._layer.pin_tactic(bucket, tactic)

    def measure(self, tactic: Tactic, bucket: int) -> float:
        """Microseconds of a full bucket on this rank. Collective."""
        if self._step is None or self._step[0] != bucket:
            self._step = (bucket, self._make_step(bucket))
        x, topk_ids, topk_weights = self._step[1]
        run = partial(self._layer.forward, x, topk_ids, topk_weights, bucket)
        time_us = self._timer(run, self._comm, self._timeout_s)
        self._layer.raise_if_failed()  # replays of a failed launch are short
        return time_us

    def recover(self) -> None:
        """A failed launch leaves a workspace nobody can use: build the layer anew. Collective."""
        logger.warning("building the layer anew after a failed launch")
        with contextlib.suppress(Exception):  # it failed; what it says about that is in the log already
            self._layer.close()
        self._layer = self._build()
