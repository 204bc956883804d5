# SPDX-License-Identifier: Apache-2.0
"""The lint's rule on bulk stores, which no shipped kernel has: on small texts, and as part of both lints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import check_blackwell, check_kernels
from tools.bulk_stores import unwaited_bulk_stores

DATA = Path(__file__).parent.parent / "data" / "ptx"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 1024;"
TENSOR = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r2, %r3}], [%r1];"
REDUCE = "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%rd1], [%r1], 1024;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 1024, [%r2];"
COMMIT, WAIT = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"
RELEASE = "red.release.gpu.global.add.u32 [%rd3], 1;"


@pytest.mark.parametrize("store", [STORE, TENSOR, REDUCE])
@pytest.mark.parametrize(
    "release",
    [
        RELEASE,
        "@%p2 st.release.sys.global.b32 [%rd3], 1;",
        "atom.acq_rel.gpu.global.add.u32 %r4, [%rd3], 1;",
        "fence.acq_rel.sys;",
        "fence.sc.gpu;",
    ],
)
@pytest.mark.parametrize(
    ("between", "sound"),
    [
        ([COMMIT, WAIT], True),
        ([COMMIT, "add.s32 %r9, %r9, 1;", WAIT, "bar.sync 1, 128;"], True),
        ([], False),
        ([COMMIT], False),
        ([WAIT], False),  # waits for nothing: the store is not in a group yet
        ([COMMIT, "cp.async.bulk.wait_group.read 0;"], False),
        ([COMMIT, "cp.async.bulk.wait_group 1;"], False),
        ([COMMIT, f"@%p3 {WAIT}"], False),
        ([COMMIT, "fence.proxy.async;"], False),
    ],
)
def test_bulk_store_is_committed_and_fully_waited_for_before_a_release(
    store: str, release: str, between: list[str], sound: bool
) -> None:
    faults = unwaited_bulk_stores([store, *between, release])
    assert (faults == []) == sound
    if not sound:
        assert "cp.async.bulk.wait_group 0" in faults[0]


def test_second_store_needs_its_own_wait_and_every_unwaited_store_is_a_fault() -> None:
    assert unwaited_bulk_stores([STORE, COMMIT, STORE, COMMIT, WAIT, RELEASE]) == []
    assert len(unwaited_bulk_stores([STORE, COMMIT, WAIT, STORE, COMMIT, RELEASE])) == 1
    assert len(unwaited_bulk_stores([STORE, COMMIT, STORE, WAIT, RELEASE])) == 1, "the second is in no group"
    assert len(unwaited_bulk_stores([STORE, RELEASE, TENSOR, RELEASE])) == 2


def test_store_that_nothing_waits_for_before_the_end_is_a_fault() -> None:
    assert unwaited_bulk_stores([RELEASE, STORE, COMMIT]) != []
    assert unwaited_bulk_stores([RELEASE, STORE, COMMIT, WAIT, "ret;"]) == []


def test_loads_and_kernels_without_bulk_stores_have_no_fault() -> None:
    assert unwaited_bulk_stores([LOAD, RELEASE]) == []


@pytest.mark.parametrize("kernel", ["sm90_nvfp4", "sm90_ranks2", "sm100_b32", "sm100_ranks2"])
def test_both_lints_have_the_rule(kernel: str) -> None:
    """A shipped kernel with a bulk store in front of its first release: found without the wait only."""
    text = (DATA / f"{kernel}.ptx").read_text()
    facts = json.loads((DATA / f"{kernel}.json").read_text())
    first = text.index("red.release")

    def faults_with(*added: str) -> list[str]:
        changed = text[:first] + "".join(f"{line}\n\t" for line in added) + text[first:]
        if facts["arch"] == "sm_90a":
            found = check_kernels.lint_ptx(changed, facts["layer"]["ep_size"] > 1)
        else:
            found = check_blackwell.lint_ptx(changed, facts)
        return [fault for fault in found if "wait_group" in fault]

    assert len(faults_with(STORE, COMMIT)) == 1
    assert faults_with(STORE, COMMIT, WAIT) == faults_with() == []
