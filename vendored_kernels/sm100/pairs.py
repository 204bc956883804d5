# SPDX-License-Identifier: Apache-2.0
"""Two CTAs on one tile: what the even CTA, the leader, tells the odd one, and waits and arrivals that cross.

Every function also serves single CTAs, which are their own leaders: then it is the plain local operation. Called by the
main loop and the epilogue; the kernel lends `wait` and `give_back_entry` to R (`common/release.py`).

Who has what, in a pair: each CTA its 128 weight rows, half of the tokens and the scales of all tokens, in its shared
memory and, scales and results, in its TMEM. The leader's full barriers count the bytes of both CTAs' loads; the leader
issues every MMA, and a commit arrives at both CTAs. The leader alone claims tiles and waits for tokens, so that both
run the same tiles and give up on the same ones; nothing that the other CTA knows by itself decides what it runs.

Order between the two, as cheap as the manual allows: a word that is handed over, with all that its writer knows, takes
a release of the cluster, which drains the writer's stores to L2; giving a read entry back concerns shared memory only;
giving an accumulator back is a matter of tcgen05 fences, its arrival and wait are relaxed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .. import ptx
from . import instructions

LEADER, FOLLOWER = 0, 1

BOTH = 3
"""Mask of a commit that arrives at both CTAs."""


def _at(barrier, cta):
    """Address of a barrier in one of the CTAs."""
    return instructions.of_cta(Int32(barrier.toint()), Int32(cta))


@cute.jit
def cta_rank(cfg, bidx):
    """0 for a leader."""
    rank = Int32(LEADER)
    if const_expr(cfg.pair):
        rank = bidx & 1
    return rank


@cute.jit
def sync_ctas(cfg):
    """All threads of the CTA, or of the pair."""
    if const_expr(cfg.pair):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@cute.jit
def wait(cfg, barrier, phase):
    """Wait for arrivals of which some may come from the other CTA, and for what they bring."""
    if const_expr(cfg.pair):
        instructions.cluster_wait_acquire(Int32(barrier.toint()), phase)
    else:
        cute.arch.mbarrier_wait(barrier, phase)


@cute.jit
def leader_word(cfg, address: Int32):
    """A word of the leader's shared memory; behind `sync_ctas` or a hand-over."""
    word = Int32(0)
    if const_expr(cfg.pair):
        word = instructions.cluster_lds32(instructions.of_cta(address, Int32(LEADER)))
    else:
        word = ptx.lds32(address)
    return word


@cute.jit
def store_to_both(cfg, address: Int32, value, more: cutlass.Constexpr = 0):
    """The leader stores a word here, and plus `more` at the same place of the other CTA."""
    ptx.sts32(address, value)
    if const_expr(cfg.pair):
        instructions.cluster_sts32(instructions.of_cta(address, Int32(FOLLOWER)), value + more)


@cute.jit
def hand_over(cfg, barrier):
    """One lane of the leader arrives at this barrier and at the other CTA's, with all that it knows."""
    cute.arch.mbarrier_arrive(barrier)
    if const_expr(cfg.pair):
        instructions.cluster_arrive_release(_at(barrier, FOLLOWER))


@cute.jit
def give_back_entry(cfg, barrier):
    """One lane says to the leader's barrier that its warp has read an entry of the ring."""
    if const_expr(cfg.pair):
        instructions.fence_release_own_shared()
        instructions.cluster_arrive_relaxed(_at(barrier, LEADER))
    else:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def give_back_accumulator(cfg, barrier):
    """One lane says to the leader's barrier that its warp has loaded an accumulator; behind tcgen05.fence::before."""
    if const_expr(cfg.pair):
        instructions.cluster_arrive_relaxed(_at(barrier, LEADER))
    else:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def wait_for_accumulator(cfg, barrier, phase):
    """Until it is full (epilogue warps: a commit of the leader) or given back (MMA warp); then tcgen05.fence::after."""
    if const_expr(cfg.pair):
        instructions.cluster_wait_relaxed(Int32(barrier.toint()), phase)
    else:
        cute.arch.mbarrier_wait(barrier, phase)
