# SPDX-License-Identifier: Apache-2.0
"""The PTX interpreter on two CTAs of a cluster: what crosses between them, with which order, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tools.ptxsim import (
    BarrierError,
    DeadlockError,
    GlobalMemory,
    OrderError,
    SimError,
    UnsupportedInstruction,
    parse,
    run_launch,
)

HEADER = """
.version 9.4
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry k(
 .param .u64 k_param_0
)
.reqntid 32, 1, 1
{
 .reg .pred %p<9>;
 .reg .b32 %r<60>;
 .reg .b64 %rd<9>;
 ld.param.b64 %rd1, [k_param_0];
 mov.u32 %r1, %tid.x;
 mov.u32 %r2, %ctaid.x;
 mov.b32 %r40, __dynamic_shmem__0;
 mov.b32 %r41, 0;
 mov.b32 %r5, 7;
 mul.wide.u32 %rd2, %r1, 4;
 add.s64 %rd2, %rd1, %rd2;
 setp.ne.b32 %p1, %r2, 0;
 setp.ne.b32 %p2, %r1, 0;
"""

MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
SET_UP = "@%p2 bra SET; mbarrier.init.shared.b64 [%r40], 1; fence.mbarrier_init.release.cluster; SET: bar.warp.sync -1;"


def run(body: str, *, cluster: int = 2, seed: int = 0) -> list[int]:
    """Run `body` in one cluster; returns the first words of the buffer of parameter 0."""
    memory = GlobalMemory(1 << 14)
    out = memory.add("out", np.zeros(256, np.uint32))
    program = parse(HEADER + body + "\n ret;\n}\n")
    run_launch(program, memory, [[out]], grid=cluster, cluster_size=cluster, seed=seed)
    return memory.view("out").view(np.uint32)[:64].tolist()


def wait(order: str) -> str:
    """Wait for phase 0 of the own barrier."""
    return (
        f"{{ .reg .pred q; again: mbarrier.try_wait.parity{order}.shared::cta.b64 q, [%r40], %r41; "
        "@q bra done; bra again; done: }"
    )


RELEASE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];"
RELAXED = "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r6];"
OWN_SHARED = "fence.release.sync_restrict::shared::cta.cluster;"


def hand_over(arrive: str, wait_order: str, *, before: str = MEET, after: str = MEET) -> str:
    """CTA 0 stores a word into CTA 1 and one into global memory, then arrives there; CTA 1 waits and reads its word."""
    return f"""
    {SET_UP}
    {before}
    @%p1 bra WAIT;
    @%p2 bra END;
    mapa.shared::cluster.u32 %r6, %r40, 1;
    st.global.b32 [%rd1+128], %r5;
    st.shared::cluster.b32 [%r6+64], %r5;
    {arrive}
    bra END;
WAIT: {wait(wait_order)}
    ld.shared.b32 %r7, [%r40+64];
    st.global.b32 [%rd2], %r7;
END: bar.warp.sync -1;
    {after}
"""


@pytest.mark.parametrize("arrive", [RELEASE, "fence.acq_rel.cluster;" + RELAXED])
def test_word_stored_into_the_other_cta_is_seen_behind_a_release_and_an_acquire_of_the_cluster(arrive: str) -> None:
    for seed in range(4):
        assert run(hand_over(arrive, ".acquire.cluster"), seed=seed)[:32] == [7] * 32


@pytest.mark.parametrize(
    ("arrive", "wait_order"),
    [
        (RELEASE, ""),
        (RELEASE, ".acquire.cta"),
        (RELEASE, ".relaxed.cluster"),
        (RELAXED, ".acquire.cluster"),
        (OWN_SHARED + RELAXED, ".acquire.cluster"),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r6];", ".acquire.cluster"),
        ("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r6];", ".acquire.cluster"),
    ],
)
def test_word_stored_into_the_other_cta_with_less_order_is_an_error(arrive: str, wait_order: str) -> None:
    with pytest.raises(OrderError, match="shared memory of CTA 1"):
        run(hand_over(arrive, wait_order))


GLOBAL_WORD = ("ld.shared.b32 %r7, [%r40+64];", "ld.global.b32 %r7, [%rd1+128];")


def test_release_of_the_cluster_carries_global_memory_too() -> None:
    assert run(hand_over(RELEASE, ".acquire.cluster").replace(*GLOBAL_WORD))[:32] == [7] * 32


def give_back(fence: str, read: str) -> str:
    """CTA 1 reads a word, and arrives at CTA 0, which then overwrites it."""
    return f"""
    {SET_UP}
    st.shared.b32 [%r40+64], %r5;
    st.global.b32 [%rd1+128], %r5;
    {MEET}
    mapa.shared::cluster.u32 %r6, %r40, 0;
    mapa.shared::cluster.u32 %r8, %r40, 1;
    @%p1 bra READ;
    {wait(".acquire.cluster")}
    @%p2 bra END;
    st.shared::cluster.b32 [%r8+64], %r1;
    st.global.b32 [%rd1+128], %r1;
    bra END;
READ: {read}
    bar.warp.sync -1;
    @%p2 bra END;
    {fence}
    {RELAXED}
END: bar.warp.sync -1;
    {MEET}
"""


LOCAL_READ, GLOBAL_READ = "ld.shared.b32 %r7, [%r40+64];", "ld.global.b32 %r7, [%rd1+128];"


def test_fence_of_own_shared_memory_covers_its_reads_and_no_others() -> None:
    run(give_back(OWN_SHARED, LOCAL_READ))
    run(give_back("fence.acq_rel.cluster;", LOCAL_READ + GLOBAL_READ))
    with pytest.raises(OrderError, match="out"):
        run(give_back(OWN_SHARED, LOCAL_READ + GLOBAL_READ))
    with pytest.raises(OrderError, match="shared memory of CTA 1"):
        run(give_back("", LOCAL_READ))


def test_other_cta_is_touched_only_while_it_runs() -> None:
    with pytest.raises(SimError, match="before a cluster barrier"):
        run(hand_over(RELEASE, ".acquire.cluster", before=""))
    early = "@%p1 bra LEAVE; SPIN: add.s32 %r41, %r41, 1; setp.lt.s32 %p3, %r41, 9000; @%p3 bra SPIN; mov.b32 %r41, 0;"
    late = hand_over(RELEASE, ".acquire.cluster", after="LEAVE: bar.warp.sync -1;").replace("@%p1 bra WAIT;", early)
    with pytest.raises(SimError, match="after it has left"):
        run(late)


def test_arrival_at_the_wrong_cta_leaves_the_right_one_waiting() -> None:
    with pytest.raises((DeadlockError, BarrierError)):
        own = hand_over(RELEASE, ".acquire.cluster").replace(
            "mapa.shared::cluster.u32 %r6, %r40, 1", "mov.b32 %r6, %r40"
        )
        run(own)
    with pytest.raises(SimError, match="without shared::cluster"):
        run(hand_over("mbarrier.arrive.shared.b64 _, [%r6];", ".acquire.cluster"))
    with pytest.raises(SimError, match="another CTA's shared memory"):
        run(hand_over(RELEASE, ".acquire.cluster").replace("st.shared::cluster.b32", "st.shared.b32"))


def test_cluster_barrier_that_one_cta_skips_is_a_deadlock_that_names_it() -> None:
    with pytest.raises(DeadlockError, match="cluster barrier"):
        run(f"@%p1 bra END; {MEET} END: bar.warp.sync -1;")


@pytest.mark.parametrize("half", ["barrier.cluster.arrive;", "barrier.cluster.wait;"])
def test_cluster_barrier_arrives_and_waits_in_turn(half: str) -> None:
    with pytest.raises(BarrierError, match="cluster barrier"):
        run(half + MEET)


ALLOC = "tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [%r40+64], 32;"
DEALLOC = "ld.shared.b32 %r9, [%r40+64]; tcgen05.dealloc.cta_group::{}.sync.aligned.b32 %r9, 32;"


@pytest.mark.parametrize(
    ("body", "cluster", "words"),
    [
        (ALLOC.format(2) + DEALLOC.format(1), 2, "one cta_group"),
        (ALLOC.format(1) + DEALLOC.format(2), 2, "one cta_group"),
        (ALLOC.format(2) + DEALLOC.format(2), 1, "without pairs"),
    ],
)
def test_kernel_has_one_cta_group_and_pairs_need_a_cluster(body: str, cluster: int, words: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=words):
        run(body, cluster=cluster)


def test_memory_of_a_pair_that_one_cta_does_not_free_is_an_error() -> None:
    run(MEET + ALLOC.format(2) + DEALLOC.format(2))
    with pytest.raises(SimError, match="CTA 1 has left without freeing"):
        run(MEET + ALLOC.format(2) + "@%p1 bra END;" + DEALLOC.format(2) + "END: bar.warp.sync -1;")


def test_memory_of_a_pair_is_not_allocated_before_both_ctas_run() -> None:
    with pytest.raises(SimError, match="has shown that the other CTA runs"):
        run(ALLOC.format(2) + MEET + DEALLOC.format(2))
