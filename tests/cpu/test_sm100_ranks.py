# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernel between virtual ranks, in the interpreter, memory order checked: equals the oracle bit for bit.

tests/data/ptx holds four builds that cover the three wires, both score placements, rows of one and two pieces, tails
of every dimension, two and three ranks, single CTAs and pairs. All memory that is no input starts as NaN; pulled rows
and fc1 output are compared as well as y.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers.ranks_case import RanksCase
from tests.helpers.synthetic import RoutingKind
from vendored_kernels.common.sites import (
    FAULT_PUBLISH,
    FAULT_PULL,
    FAULT_STAGED,
    SITE_CELLS,
    SITE_PAYLOAD,
    SITE_POOL,
    SITE_RETURNS,
    SITE_STAGED,
)


@pytest.mark.parametrize(
    ("build", "kind", "counts", "grid", "launches"),
    [
        ("sm100_ranks2", RoutingKind.MASKED_30, (0, 5), 2, 2),
        ("sm100_ranks2_wide", RoutingKind.DUPLICATES, (2, 1), 1, 1),
        ("sm100_ranks3", RoutingKind.RANDOM, (3, 0, 2), 1, 1),
        ("sm100_pair_ranks2", RoutingKind.MASKED_30, (0, 5), 2, 2),
        ("sm100_pair_ranks2", RoutingKind.DUPLICATES, (9, 4), 4, 1),
    ],
)
def test_ranks_outputs_equal_the_oracle_bit_for_bit(
    build: str, kind: RoutingKind, counts: tuple[int, ...], grid: int, launches: int
) -> None:
    case = RanksCase(build, kind, counts)
    case.check(case.run(grid=grid, launches=launches, seed=sum(counts)))


@pytest.fixture(scope="module")
def case() -> RanksCase:
    """The case of the planted faults and of the time-outs: every rank sends to every rank."""
    return RanksCase("sm100_ranks2", RoutingKind.RANDOM, (3, 2))


CELLS_FENCE, TAGS_FENCE, CELLS_WAIT, TAGS_WAIT = 0, 1, 0, 4
"""Which of their kind they are in the text."""


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("fence removed", "fence.acq_rel.sys", CELLS_FENCE),
        ("fence removed", "fence.acq_rel.sys", TAGS_FENCE),
        ("scope narrowed", "red.release.sys", 0),
        ("acquire weakened", "ld.acquire.sys.global.b64", CELLS_WAIT),
        ("acquire weakened", "ld.acquire.sys.global.b64", TAGS_WAIT),
    ],
)
def test_ranks_planted_fault_in_the_protocol_is_caught(case: RanksCase, kind: str, needle: str, which: int) -> None:
    case.require_caught(kind, needle, which)


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("fence removed", "fence.acq_rel.sys", TAGS_FENCE),
        ("acquire weakened", "ld.acquire.sys.global.b64", TAGS_WAIT),
    ],
)
def test_ranks_of_pairs_planted_fault_at_payload_tags_is_caught(kind: str, needle: str, which: int) -> None:
    RanksCase("sm100_pair_ranks2", RoutingKind.RANDOM, (3, 2)).require_caught(kind, needle, which)


def test_ranks_gpu_scope_between_ranks_is_caught(case: RanksCase) -> None:
    case.require_system_scope()


def test_ranks_of_pairs_gpu_scope_between_ranks_is_caught() -> None:
    RanksCase("sm100_pair_ranks2", RoutingKind.RANDOM, (3, 2)).require_system_scope()


@pytest.mark.parametrize(
    ("step", "sites"),
    [
        (FAULT_STAGED, {SITE_STAGED, SITE_PAYLOAD}),
        (FAULT_PUBLISH, {SITE_CELLS}),
        (FAULT_PULL, {SITE_POOL, SITE_RETURNS}),
    ],
)
@pytest.mark.parametrize("build", ["sm100_ranks2", "sm100_pair_ranks2"])
def test_rank_that_stops_before_a_step_ends_every_launch_with_a_record(build: str, step: int, sites: set[int]) -> None:
    RanksCase(build, RoutingKind.RANDOM, (3, 2)).require_stop(step, sites)


@pytest.mark.parametrize(("timeout_ns", "grid"), [(0, 2), (800, 4), (2500, 2), (7000, 4)])
def test_waits_of_pairs_that_expire_at_any_moment_end_every_launch(timeout_ns: int, grid: int) -> None:
    """They look at the clock after two polls instead of 1024: early, or in one CTA only. A hang is an error."""
    case = RanksCase("sm100_pair_ranks2", RoutingKind.RANDOM, (5, 3))
    text, changed = re.subn(r"(setp\.(?:ne|eq)\.\w+\s+%p\d+, %r\d+), 1024;", r"\1, 2;", case.kernel.text)
    assert changed == 14  # two comparisons in each of seven waits
    run = case.run(text, grid=grid, seed=grid, timeout_ns=timeout_ns, check_order=False, patience=2000)
    if not any(error[0] for error in run.errors):
        case.check(run)
