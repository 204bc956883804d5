# SPDX-License-Identifier: Apache-2.0
"""The offline tuner: measure every legal tactic of every bucket on all ranks together, keep the best.

Pure control flow: what is measured, and how, is the runner's. Every rank takes every step whatever happens on it, all
decisions come from values that all ranks have exchanged, and rank 0's word is final, so ranks cannot end with different
tactics (B41). Holds no state between calls, and nothing of a runner (R33). Serving never comes here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtllm_megamoe.agreement import require_rank_identical
from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace

logger = logging.getLogger(__name__)

MIN_GAIN = 0.01
"""A candidate replaces the heuristic's tactic only if it is faster by this share: less is noise between runs."""


class CandidateRunner(Protocol):
    """Runs one tactic of one bucket on this rank."""

    def prepare(self, tactic: Tactic, bucket: int) -> None:
        """Compile, load, allocate. Not collective; whatever it raises skips the candidate on all ranks, unlaunched."""

    def measure(self, tactic: Tactic, bucket: int) -> float:
        """Launch and return this rank's time in microseconds. Collective; every wait in it is bounded."""

    def recover(self) -> None:
        """After a candidate failed in `measure` on some rank: make launches possible again. Collective."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A candidate that did not run, and the first rank that said why."""

    tactic: Tactic
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class TunedBucket:
    """Outcome for one bucket. Times are those of the slowest rank; None where the tactic did not run."""

    bucket: int
    tactic: Tactic
    time_us: float | None
    heuristic_us: float | None
    num_candidates: int
    failures: tuple[Failure, ...] = ()


def tune(
    space: TacticSpace,
    buckets: Sequence[int],
    runner: CandidateRunner,
    comm: Communicator,
    timeout_s: float,
    *,
    known: Mapping[int, TunedBucket] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[TunedBucket]:
    """Tune each bucket. Collective.

    Args:
        space: The legal tactics; the same on all ranks, which is checked first.
        buckets: Buckets in the order in which to tune them.
        runner: This rank's hands.
        comm: The ranks.
        timeout_s: Longest wait in each exchange, above the longest single measurement.
        known: Earlier outcomes. Rank 0's count, on every rank; known buckets are not measured again.
        progress: Called with (bucket, candidates done) after each candidate.

    Returns:
        The same list on every rank, one outcome per bucket, in order.

    Raises:
        MegaMoeRankDivergenceError: Ranks differ in buckets or candidates; nothing was measured.
        MegaMoeTimeoutError, MegaMoeAbortedError: A rank is gone. Not raised for a failing candidate.
    """
    candidates = {bucket: space.legal_candidates(bucket) for bucket in buckets}
    require_rank_identical(
        {"kernel": space.kernel, "buckets": list(buckets), "candidates": candidates}, comm, timeout_s
    )
    settled: dict[int, TunedBucket] = comm.allgather(dict(known or {}), timeout_s)[0]
    outcomes = []
    for bucket in buckets:
        if bucket in settled:
            logger.info("bucket %d: %s, known already", bucket, settled[bucket].tactic)
            outcomes.append(settled[bucket])
        else:
            outcomes.append(_tune_bucket(bucket, candidates[bucket], runner, comm, timeout_s, progress))
    return outcomes


def _tune_bucket(
    bucket: int,
    candidates: Sequence[Tactic],
    runner: CandidateRunner,
    comm: Communicator,
    timeout_s: float,
    progress: Callable[[int, int], None] | None,
) -> TunedBucket:
    started = time.perf_counter()
    times: dict[Tactic, float] = {}
    failures: list[Failure] = []
    for done, tactic in enumerate(candidates, start=1):
        outcome = _try_candidate(tactic, bucket, runner, comm, timeout_s)
        if isinstance(outcome, Failure):
            logger.warning("bucket %d: %s failed on rank %d: %s", bucket, tactic, outcome.rank, outcome.reason)
            failures.append(outcome)
        else:
            times[tactic] = outcome
        if progress is not None:
            progress(bucket, done)
    chosen = comm.allgather(_choose(candidates, times), timeout_s)[
        0
    ]  # all computed it; rank 0's is the one that counts
    tuned = TunedBucket(
        bucket, chosen, times.get(chosen), times.get(candidates[0]), len(candidates), tuple(failures)
    )  # fmt: skip
    if tuned.time_us is None:
        logger.warning("bucket %d: no candidate ran; the heuristic's %s stays", bucket, chosen)
    else:
        heuristic = "failed" if tuned.heuristic_us is None else f"{tuned.heuristic_us:.1f} us"
        seconds = time.perf_counter() - started
        logger.info(
            "bucket %d: %s, %.1f us (heuristic: %s), %d candidates, %d failed, tuned in %.1f s",
            bucket, chosen, tuned.time_us, heuristic, len(candidates), len(failures), seconds,
        )  # fmt: skip
    return tuned


def _choose(candidates: Sequence[Tactic], times: Mapping[Tactic, float]) -> Tactic:
    """The fastest; the heuristic's (the first) unless another one is clearly faster, or it did not run."""
    if not times:
        return candidates[0]
    fastest = min(times, key=lambda tactic: times[tactic])
    if candidates[0] in times and times[fastest] > (1 - MIN_GAIN) * times[candidates[0]]:
        return candidates[0]
    return fastest


def _try_candidate(
    tactic: Tactic, bucket: int, runner: CandidateRunner, comm: Communicator, timeout_s: float
) -> float | Failure:
    """Time on the slowest rank, or why it failed on any; the same on all ranks."""
    obstacle: str | None = None
    try:
        runner.prepare(tactic, bucket)
    except Exception as err:  # whatever a compiler or an allocator raises; the others must hear of it
        obstacle = _describe(err)
    failure = _first_failure(tactic, comm.allgather(obstacle, timeout_s))
    if failure is not None:
        return failure  # nobody launched, so nobody waits for a rank that could not
    time_us = math.nan
    try:
        time_us = runner.measure(tactic, bucket)
        if not (math.isfinite(time_us) and time_us > 0):
            obstacle = f"measured {time_us} us"
    except Exception as err:
        obstacle = _describe(err)
    reports: list[tuple[str | None, float]] = comm.allgather((obstacle, time_us), timeout_s)
    failure = _first_failure(tactic, [reason for reason, _ in reports])
    if failure is not None:
        runner.recover()
        return failure
    return max(measured for _, measured in reports)


def _first_failure(tactic: Tactic, obstacles: Sequence[str | None]) -> Failure | None:
    for rank, reason in enumerate(obstacles):
        if reason is not None:
            return Failure(tactic, rank, reason)
    return None


def _describe(err: Exception) -> str:
    return f"{type(err).__name__}: {err}"
