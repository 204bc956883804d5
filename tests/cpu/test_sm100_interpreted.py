# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernel's PTX in the interpreter: codes, scales and outputs equal to the oracle, planted faults caught.

tests/data/ptx holds four builds that cover every token block, wire format, score placement, the clamp, and shapes with
tails everywhere (H not a multiple of 64, 2I and H not of 128, K not of 256); and one of a pair of CTAs, with an odd
number of row tiles in both GEMMs. No hardware, no compiler.
"""

from __future__ import annotations

import pytest

from tests.helpers.sm100_case import Sm100Case
from tests.helpers.synthetic import RoutingKind
from tools.ptxsim import SimError
from tools.ptxsim.mutate import abort_seen_at_entry, mutants
from vendored_kernels.common.sites import FAULT_STAGED, SITE_PEER


@pytest.mark.parametrize(
    ("build", "kind", "count", "grid"),
    [
        ("b32", RoutingKind.MASKED_30, 13, 2),
        ("b64", RoutingKind.HOT_EXPERT, 40, 2),
        ("b128", RoutingKind.ZIPF, 50, 2),
        ("b256", RoutingKind.HOT_EXPERT, 80, 2),
        ("b32", RoutingKind.RANDOM, 2, 3),
        ("b32", RoutingKind.ALL_MASKED, 3, 1),
        ("b128", RoutingKind.RANDOM, 0, 2),
        ("pair", RoutingKind.HOT_EXPERT, 67, 4),
        ("pair", RoutingKind.DUPLICATES, 9, 2),
        ("pair", RoutingKind.ALL_MASKED, 3, 4),
        ("pair", RoutingKind.RANDOM, 0, 2),
    ],
)
def test_blackwell_kernel_ptx_equals_the_oracle(build: str, kind: RoutingKind, count: int, grid: int) -> None:
    """Bit for bit: sums of this size are exact in fp32, or round to the same bf16."""
    case = Sm100Case(build, kind, count)
    case.check(case.run(seed=count, grid=grid))


@pytest.mark.parametrize("build", ["b32", "pair"])
def test_blackwell_kernel_nan_infinity_and_zero_rows_follow_the_codecs(build: str) -> None:
    case = Sm100Case(build, RoutingKind.RANDOM, 6, special=True)
    assert case.expected.out[1].isnan().all() and case.expected.out[0].isfinite().all()
    case.check(case.run())


@pytest.mark.parametrize("build", ["b32", "pair"])
def test_blackwell_kernel_second_launch_on_the_same_workspace_with_int32_ids_equals_the_first(build: str) -> None:
    case = Sm100Case(build, RoutingKind.DUPLICATES, 5)
    case.check(case.run(seed=7, launches=2, ids=case.routing.topk_ids.int()))


@pytest.mark.parametrize("build", ["b32", "pair"])
def test_blackwell_wait_that_never_ends_is_recorded_and_the_launch_ends(build: str) -> None:
    """A pair's leader gives up for both CTAs, and both leave."""
    case = Sm100Case(build, RoutingKind.RANDOM, 3)
    run = case.run(fault_step=FAULT_STAGED, timeout_ns=20_000, check_order=False, patience=4000)
    assert (run.error[0], run.error[2], run.error[5], run.error[6]) == (1, 1, 3, 2)


@pytest.mark.parametrize("build", ["b32", "pair"])
def test_blackwell_abort_that_goes_up_while_a_launch_begins_does_not_split_ctas(build: str) -> None:
    case = Sm100Case(build, RoutingKind.RANDOM, 3)
    case.check(case.run(abort_seen_at_entry(case.kernel.text, "others")))


@pytest.mark.parametrize("build", ["b32", "pair"])
def test_blackwell_abort_that_only_some_ctas_see_at_entry_is_recorded(build: str) -> None:
    case = Sm100Case(build, RoutingKind.RANDOM, 3)
    text = abort_seen_at_entry(case.kernel.text, "other CTAs")
    run = case.run(text, grid=4, aborts=[1], check_order=False, patience=4000)
    assert run.error[0] == 1 and run.error[2] == SITE_PEER


@pytest.fixture(scope="module")
def case() -> Sm100Case:
    """The case of the planted faults: more tiles than ring slots, more stages than the pipeline holds."""
    return Sm100Case("b32", RoutingKind.RANDOM, 12)


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("wait removed", "", 0),
        ("wait removed", "", 2),
        ("wait removed", "", 3),
        ("arrival removed", "", 1),
        ("announced bytes removed", "", 0),
        ("commit removed", "", 0),
        ("commit removed", "", 1),
        ("tcgen05 fence removed", "after", -2),
        ("tcgen05 fence removed", "before", 1),
        ("tcgen05 load wait removed", "", 0),
        ("dealloc removed", "", 0),
        ("release weakened", "red.release", 0),
        ("fence removed", "fence.mbarrier_init", 0),
    ],
)
def test_planted_fault_is_caught(case: Sm100Case, kind: str, needle: str, which: int) -> None:
    chosen = [m for m in mutants(case.kernel.text, (kind,)) if needle in m.before][which]
    with pytest.raises((SimError, AssertionError)):  # bytes read too early arrive as poison: then the result is wrong
        case.check(case.run(chosen.text, max_rounds=3000))


@pytest.fixture(scope="module")
def pair() -> Sm100Case:
    """The same of a pair: more tiles than ring slots."""
    return Sm100Case("pair", RoutingKind.RANDOM, 4)


@pytest.mark.parametrize(
    ("kind", "needle", "number"),
    [
        ("arrival removed", "shared::cluster", 6),  # two that hand over; three entries and an accumulator given back
        ("multicast to the leader only", "", 2),
        ("multicast to the other CTA only", "", 2),
        ("cluster release weakened", "", 2),
        ("announced bytes removed", "", 4),
    ],
)
def test_planted_fault_in_what_crosses_a_pair_is_caught(pair: Sm100Case, kind: str, needle: str, number: int) -> None:
    chosen = [m for m in mutants(pair.kernel.text, (kind,)) if needle in m.before]
    assert len(chosen) == number
    for mutant in chosen:
        with pytest.raises((SimError, AssertionError)):
            pair.check(pair.run(mutant.text, max_rounds=3000))
