# SPDX-License-Identifier: Apache-2.0
"""Bounded waits on global counters and the error record they leave.

A wait polls with acquire loads; every 1024 polls it looks at the clock and at the abort word. When it gives up it
returns 1 and the caller skips its later waits: the launch then runs to its end on whatever the memory holds, so no role
is left hanging, and the host finds the record and raises.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import ptx

POLLS_PER_CHECK = 1024


@cute.jit
def record_failure(error: Int64, abort: Int64, site, index, epoch, expected, seen):
    """First failure wins the record {set, rank, site, index, epoch, expected, seen, 0}; all raise the abort word."""
    if ptx.flag_exchange_acq_rel_gpu(error, 1) == 0:
        ptx.stg64(error + 8, Int64(0))
        ptx.stg64(error + 16, Int64(site))
        ptx.stg64(error + 24, Int64(index))
        ptx.stg64(error + 32, Int64(epoch))
        ptx.stg64(error + 40, Int64(expected))
        ptx.stg64(error + 48, Int64(seen))
    ptx.flag_store_release_sys(abort, 1)


@cute.jit
def wait_at_least(
    address: Int64, target, error: Int64, abort: Int64, timeout_ns: Int64, site: cutlass.Constexpr, index, epoch
):
    """Poll a counter until it reaches `target`; returns 1 when it gave up, else 0."""
    start = cute.arch.globaltimer()
    seen = ptx.flag_load_acquire_gpu(address)
    polls = Int32(0)
    gave_up = Int32(0)
    while seen < target and gave_up == 0:
        polls = polls + 1
        if polls == POLLS_PER_CHECK:
            polls = Int32(0)
            if ptx.flag_load_acquire_sys(abort) != 0:
                gave_up = Int32(1)
            elif cute.arch.globaltimer() - start > timeout_ns:
                record_failure(error, abort, Int32(site), index, epoch, target, seen)
                gave_up = Int32(1)
        if gave_up == 0:
            seen = ptx.flag_load_acquire_gpu(address)
    return gave_up
