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
    SITE_CELLS,
    SITE_PEER,
    SITE_POOL,
    SITE_RETURNS,
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


@pytest.mark.parametrize(
    ("kind", "needle"),
    [
        ("fence removed", "fence.acq_rel.sys"),
        ("scope narrowed", "red.release.sys"),
        ("acquire weakened", "ld.acquire.sys.global.b64"),
    ],
)
def test_ranks_planted_fault_in_the_protocol_is_caught(case: RanksCase, kind: str, needle: str) -> None:
    case.require_caught(kind, needle)


def test_ranks_gpu_scope_between_ranks_is_caught(case: RanksCase) -> None:
    case.require_system_scope()


def test_ranks_of_pairs_gpu_scope_between_ranks_is_caught() -> None:
    RanksCase("sm100_pair_ranks2", RoutingKind.RANDOM, (3, 2)).require_system_scope()


@pytest.mark.parametrize(
    ("step", "sites"),
    [
        (FAULT_PUBLISH, {SITE_CELLS}),
        (FAULT_PULL, {SITE_POOL, SITE_RETURNS}),
    ],
)
@pytest.mark.parametrize("build", ["sm100_ranks2", "sm100_pair_ranks2"])
def test_rank_that_stops_before_a_step_ends_every_launch_with_a_record(build: str, step: int, sites: set[int]) -> None:
    """Rank 0 stops; both ranks' launches end, and both records name a wait of that step or the other's failure.

    So do those of a second launch, which finds the abort words up.
    """
    case = RanksCase(build, RoutingKind.RANDOM, (3, 2))
    run = case.run(fault_steps=(step, 0), grid=2, launches=2, timeout_ns=20_000, check_order=False, patience=4000)
    assert all(error[0] == 1 for error in run.errors)
    found = {error[2] for error in run.errors}
    assert found & sites and found <= sites | {SITE_PEER}


@pytest.mark.parametrize(("timeout_ns", "grid"), [(0, 2), (800, 4), (2500, 2), (7000, 4)])
def test_waits_of_pairs_that_expire_at_any_moment_end_every_launch(timeout_ns: int, grid: int) -> None:
    """They look at the clock after two polls instead of 1024: early, or in one CTA only. A hang is an error."""
    case = RanksCase("sm100_pair_ranks2", RoutingKind.RANDOM, (5, 3))
    text, changed = re.subn(r"(setp\.(?:ne|eq)\.\w+\s+%p\d+, %r\d+), 1024;", r"\1, 2;", case.kernel.text)
    assert changed == 12  # two comparisons in each of six waits
    run = case.run(text, grid=grid, seed=grid, timeout_ns=timeout_ns, check_order=False, patience=2000)
    if not any(error[0] for error in run.errors):
        case.check(run)
