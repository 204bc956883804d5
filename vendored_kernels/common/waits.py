# SPDX-License-Identifier: Apache-2.0
"""Bounded waits on counters and cells, and the error record they leave.

A wait polls with acquire loads; every 1024 polls it looks at the clock and at the abort word. When it gives up it
returns 1 and the caller skips its later waits: the launch then runs to its end on harmless values, so no role is left
hanging, and the host finds the record and raises. What a wait needs besides its address lies in the control block in
shared memory, because registers are scarce where waits are; the kernel fills the block before its first wait.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx
from .sites import SITE_CELLS, SITE_PEER, SITE_POOL

POLLS_PER_CHECK = 1024

LAUNCH, TOKENS, RANK, ERROR, ABORT, TIMEOUT, PEERS, ABORT_AT, GIVEN_UP, CTAS = 0, 8, 12, 16, 24, 32, 40, 48, 56, 60
"""Bytes of the control block: u64 finished launches; i32 tokens, rank; addresses of the error record and of this rank's
abort word; u64 timeout in ns; address of the table of shared bases; the abort word's offset behind a base; i32 whether
T gave up (Hopper, at first: the abort word as thread 0 saw it at entry), CTAs of the rank."""

COUNT_BITS = 24
"""A size cell: the launch's tag above, the count in so many low bits."""


@cute.jit
def record_failure(control: Int32, ranks: cutlass.Constexpr, site, index, expected: Int64, seen: Int64, blamed):
    """First failure wins the record {set, rank, site, index, epoch, expected, seen, 0}; all abort words go up.

    An abort word says who gave up and for whom it waited: rank + 1, and in the next byte `blamed` + 1 (0: itself).
    """
    error = ptx.lds64(control + ERROR)
    rank = ptx.lds32(control + RANK)
    if ptx.flag_exchange_acq_rel_gpu(error, 1) == 0:
        ptx.stg64(error + 8, Int64(rank))
        ptx.stg64(error + 16, Int64(site))
        ptx.stg64(error + 24, Int64(index))
        ptx.stg64(error + 32, ptx.lds64(control + LAUNCH))
        ptx.stg64(error + 40, expected)
        ptx.stg64(error + 48, seen)
    if const_expr(ranks == 1):
        ptx.flag_store_release_sys(ptx.lds64(control + ABORT), Int32(1))
    else:
        peers = ptx.lds64(control + PEERS)
        for r in cutlass.range(ranks, unroll=1):
            word = rank + 1 + (blamed + 1) * 256
            ptx.flag_store_release_sys(ptx.ldg64(peers + Int64(r) * 8) + ptx.lds64(control + ABORT_AT), word)


@cute.jit
def record_departure(control: Int32):
    """This rank leaves because some rank has failed: unless it was the one that recorded why, it records who."""
    error = ptx.lds64(control + ERROR)
    if ptx.flag_exchange_acq_rel_gpu(error, 1) == 0:
        ptx.stg64(error + 8, Int64(ptx.lds32(control + RANK)))
        ptx.stg64(error + 16, Int64(SITE_PEER))
        word = ptx.flag_load_acquire_sys(ptx.lds64(control + ABORT))
        ptx.stg64(error + 24, Int64((word & 255) - 1))
        ptx.stg64(error + 32, ptx.lds64(control + LAUNCH))
        ptx.stg64(error + 40, Int64((word >> 8) - 1))


@cute.jit
def _limit(control: Int32, patience: cutlass.Constexpr):
    """Nanoseconds that a wait may take."""
    limit = ptx.lds64(control + TIMEOUT)
    if const_expr(patience > 1):
        limit = limit * patience
    return limit


@cute.jit
def _gives_up(control: Int32, start: Int64, patience: cutlass.Constexpr = 1):
    """0: go on waiting; 1: some rank has aborted; 2: the time is up, `patience` times the launch's limit."""
    verdict = Int32(0)
    if ptx.flag_load_acquire_sys(ptx.lds64(control + ABORT)) != 0:
        verdict = Int32(1)
    elif cute.arch.globaltimer() - start > _limit(control, patience):
        verdict = Int32(2)
    return verdict


@cute.jit
def wait_at_least(address: Int64, target, control: Int32, ranks: cutlass.Constexpr, site: cutlass.Constexpr, index):
    """Poll a counter of this GPU until it reaches `target`; returns 1 when it gave up, else 0."""
    start = cute.arch.globaltimer()
    seen = ptx.flag_load_acquire_gpu(address)
    polls = Int32(0)
    gave_up = Int32(0)
    while seen < target and gave_up == 0:
        polls = polls + 1
        if polls == POLLS_PER_CHECK:
            polls = Int32(0)
            gave_up = _gives_up(control, start, 2 if site == SITE_POOL else 1)
            if gave_up == 2:
                record_failure(control, ranks, Int32(site), index, Int64(target), Int64(seen), Int32(-1))
        if gave_up == 0:
            seen = ptx.flag_load_acquire_gpu(address)
    return Int32(1) if gave_up != 0 else Int32(0)


@cute.jit
def wait_for_cell(address: Int64, tag: Int64, control: Int32, ranks: cutlass.Constexpr, index, source):
    """Poll a size cell until it carries `tag`; returns its count, or -1 when it gave up."""
    start = cute.arch.globaltimer()
    seen = ptx.peer_flag_load_acquire_sys64(address)
    polls = Int32(0)
    gave_up = Int32(0)
    while (seen >> COUNT_BITS) != tag and gave_up == 0:
        polls = polls + 1
        if polls == POLLS_PER_CHECK:
            polls = Int32(0)
            gave_up = _gives_up(control, start)
            if gave_up == 2:
                record_failure(control, ranks, Int32(SITE_CELLS), index, tag, seen >> COUNT_BITS, source)
        if gave_up == 0:
            seen = ptx.peer_flag_load_acquire_sys64(address)
    return Int32(-1) if gave_up != 0 else Int32(seen & ((1 << COUNT_BITS) - 1))


@cute.jit
def wait_for_peer(
    address: Int64, target: Int64, control: Int32, ranks: cutlass.Constexpr, site: cutlass.Constexpr, peer
):
    """Poll a word that only a peer raises until it reaches `target`; returns 1 when it gave up, else 0."""
    start = cute.arch.globaltimer()
    seen = ptx.peer_flag_load_acquire_sys64(address)
    polls = Int32(0)
    gave_up = Int32(0)
    while seen < target and gave_up == 0:
        polls = polls + 1
        if polls == POLLS_PER_CHECK:
            polls = Int32(0)
            gave_up = _gives_up(control, start)
            if gave_up == 2:
                record_failure(control, ranks, Int32(site), peer, target, seen, peer)
        if gave_up == 0:
            seen = ptx.peer_flag_load_acquire_sys64(address)
    return Int32(1) if gave_up != 0 else Int32(0)
