# SPDX-License-Identifier: Apache-2.0
"""`--phases`: where the time of one launch goes, from time stamps that a kernel of the same tactic writes.

Used by the runner behind a row's own timing, which knows nothing of it: a kernel with time stamps is a little slower,
so these numbers split a launch and never time it. What the stamps mean is in `vendored_kernels/timeline.py`.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from microbench.timing_cuda import meeting_of
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.layer import MegaMoELayer
from vendored_kernels.timeline import EVENT_NAMES, CtaTimeline, read

logger = logging.getLogger(__name__)

PHASES = ("dispatch", "fc1", "fc2", "between", "combine", "reduce")
"""A CTA's launch from its first to its last instruction, cut into pieces that add up: until its first tile begins
(counting, staging, cells, tile table, the first rows), inside fc1 tiles, inside fc2 tiles, between tiles (waiting for
weights, rows or fc1 blocks), from its last tile until all result rows of its rank are home, the top-k sum."""

LAUNCHES = 5


def spans_of(cta: CtaTimeline) -> dict[str, float] | None:
    """Nanoseconds of each phase of one CTA; None where it ran more tiles than were kept."""
    left = cta.events["left"]
    if cta.num_tiles > len(cta.tiles):
        return None
    returned = min(cta.events.get("returned", left), left)
    first = cta.tiles[0][0] if cta.tiles else min(cta.events.get("tiles_done", returned), returned)
    last = cta.tiles[-1][1] if cta.tiles else first
    inside = {is_fc2: sum(end - begin for begin, end, kind in cta.tiles if kind is is_fc2) for is_fc2 in (False, True)}
    return {
        "dispatch": first - cta.entered,
        "fc1": inside[False],
        "fc2": inside[True],
        "between": last - first - inside[False] - inside[True],
        "combine": returned - last,
        "reduce": left - returned,
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"min": ordered[0], "p50": statistics.median(ordered), "max": ordered[-1]}


def summarise(launches: Sequence[Sequence[CtaTimeline]]) -> dict[str, Any]:
    """Microseconds over the CTAs of a launch, medians over the launches.

    Returns:
        `total_us` and, by phase, `spans_us`: least, median and most of any CTA. `spans_us` is None where a CTA ran
        more tiles than the buffer keeps. `events_us`: when, since the launch's first CTA entered, the events of
        `vendored_kernels/timeline.py` came, over the CTAs that have them.
    """

    def medians(spreads: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: statistics.median(spread[name] for spread in spreads) / 1e3 for name in spreads[0]}

    spans = [[spans_of(cta) for cta in launch] for launch in launches]
    known = [[span for span in launch if span is not None] for launch in spans]
    is_whole = all(len(kept) == len(launch) for kept, launch in zip(known, launches, strict=True))
    events = {
        name: [[cta.events[name] for cta in launch if name in cta.events] for launch in launches]
        for name in EVENT_NAMES.values()
        if all(any(name in cta.events for cta in launch) for launch in launches)
    }
    return {
        "launches": len(launches),
        "ctas": len(launches[0]),
        "total_us": medians([_spread(cta.events["left"] - cta.entered for cta in launch) for launch in launches]),
        "events_us": {name: medians([_spread(times) for times in found]) for name, found in events.items()},
        "spans_us": {name: medians([_spread(span[name] for span in launch) for launch in known]) for name in PHASES}
        if is_whole
        else None,
    }


def measure(
    layer: MegaMoELayer,
    forward: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    comm: Communicator,
    timeout_s: float,
    meet: Callable[[], object] | None = None,
) -> dict[str, Any] | None:
    """Phases of the rank whose launch is the longest, the same on every rank.

    Args:
        forward: One forward of `layer` on inputs whose bucket was the latest.
        expected: What it returns without time stamps.
        meet: What the ranks' GPUs meet in before each launch, see :class:`microbench.timing.TimingSpec`; else a rank's
            dispatch contains how much later its peers launch.

    Returns:
        :func:`summarise` with `rank`; None where the bits differ from `expected` on any rank.

    Raises:
        MegaMoeUnavailableError: The engine has no time stamps, or the kernel cannot be had here.

    Collective: yes.
    """
    bucket = layer.last_bucket
    assert bucket is not None  # there was a forward
    meeting = None if meet is None else meeting_of(meet, comm, timeout_s)
    launches: list[list[CtaTimeline]] = []
    is_equal = True
    with layer.engine.record_timeline(bucket) as buffer:
        for number in range(LAUNCHES + 1):
            buffer.zero_()
            if buffer.is_cuda:
                torch.cuda.synchronize()
            comm.barrier(timeout_s)
            if meeting is not None:
                comm.launch_together(meeting, timeout_s)
            is_equal = torch.equal(forward(), expected) and is_equal  # waits for the launch
            if number:  # the first one meets what is cold
                launches.append(read(buffer.tolist()))
    found = summarise(launches)
    everybody: list[tuple[bool, dict[str, Any]]] = comm.allgather((is_equal, found), timeout_s)
    if not all(equal for equal, _ in everybody):
        logger.warning("no phases: with time stamps the launch gives other bits")
        return None
    slowest = max(range(comm.size), key=lambda rank: float(everybody[rank][1]["total_us"]["max"]))
    return {"rank": slowest, **everybody[slowest][1]}
