# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of the Hopper kernel between virtual ranks, in the interpreter, memory order checked."""

from __future__ import annotations

import pytest

from tests.helpers.ranks_case import RanksCase
from tests.helpers.synthetic import RoutingKind
from vendored_kernels.common.sites import FAULT_PUBLISH, FAULT_STAGED, SITE_CELLS, SITE_PAYLOAD, SITE_STAGED

THREE_RANKS, TWO_RANKS = "sm90_ranks3", "sm90_ranks2"


@pytest.mark.parametrize(
    ("kind", "counts", "grid", "launches"),
    [
        (RoutingKind.MASKED_30, (5, 0, 3), 2, 1),
        (RoutingKind.HOT_RANK, (2, 3, 1), 1, 2),
        (RoutingKind.ALL_MASKED, (1, 2, 0), 1, 1),
    ],
)
def test_ranks_outputs_equal_the_oracle_bit_for_bit(
    kind: RoutingKind, counts: tuple[int, ...], grid: int, launches: int
) -> None:
    case = RanksCase(THREE_RANKS, kind, counts)
    case.check(case.run(grid=grid, launches=launches, seed=sum(counts)))


@pytest.mark.parametrize(("kind", "counts"), [(RoutingKind.RANDOM, (3, 2)), (RoutingKind.HOT_RANK, (0, 4))])
def test_two_ranks_outputs_equal_the_oracle_bit_for_bit(kind: RoutingKind, counts: tuple[int, ...]) -> None:
    """The fewest ranks leave the least room between the tables in shared memory: two of them overlapped once."""
    case = RanksCase(TWO_RANKS, kind, counts)
    case.check(case.run(launches=2, seed=sum(counts)))


@pytest.fixture(scope="module")
def case() -> RanksCase:
    """The case of the planted faults: every rank sends to every rank."""
    return RanksCase(THREE_RANKS, RoutingKind.RANDOM, (3, 2, 2))


CELLS_FENCE, TAGS_FENCE, CELLS_WAIT, TAGS_WAIT, RETURNS_WAIT = 0, 1, 0, 2, 4
"""Which of their kind they are in the text."""


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("fence removed", "fence.acq_rel.sys", CELLS_FENCE),
        ("fence removed", "fence.acq_rel.sys", TAGS_FENCE),
        ("release weakened", "red.release.sys", 0),
        ("scope narrowed", "red.release.sys", 0),
        ("acquire weakened", "ld.acquire.sys.global.b64", CELLS_WAIT),
        ("acquire weakened", "ld.acquire.sys.global.b64", TAGS_WAIT),
        ("acquire weakened", "ld.acquire.sys.global.b64", RETURNS_WAIT),
    ],
)
def test_ranks_planted_fault_in_the_protocol_is_caught(case: RanksCase, kind: str, needle: str, which: int) -> None:
    case.require_caught(kind, needle, which)


@pytest.mark.parametrize(
    ("step", "sites"),
    [
        (FAULT_STAGED, {SITE_STAGED, SITE_PAYLOAD}),
        (FAULT_PUBLISH, {SITE_CELLS}),
    ],
)
def test_rank_that_stops_before_a_step_ends_every_launch_with_a_record(
    case: RanksCase, step: int, sites: set[int]
) -> None:
    case.require_stop(step, sites)


def test_ranks_gpu_scope_between_ranks_is_caught(case: RanksCase) -> None:
    case.require_system_scope()
