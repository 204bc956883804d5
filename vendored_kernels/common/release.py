# SPDX-License-Identifier: Apache-2.0
"""R, the warp that tells others of finished tiles, and the entry by which a tile's warps know their tile.

Called by the kernel's role branch, of any architecture; knows no arithmetic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx
from . import exchange
from .tiles import END, FC1, FC2, FC2_DONE

INFO_BYTES = 32
"""A ring entry: {kind, expert, row tile, first pool row, valid rows, token block of the launch, width index (Hopper),
given up}. The last word is T's: its wait for this tile's tokens failed, so nobody may be told that the tile is
finished. Where two CTAs work on a tile, each has an entry, written by the same warps; they differ in the row tile."""

MOST_UNANNOUNCED = 8
"""Finished fc2 tiles that other ranks are told of at once."""


@cute.jit
def release_warp(
    cfg,
    ring_slots: cutlass.Constexpr,
    wait: cutlass.Constexpr,
    give_back: cutlass.Constexpr,
    ifull,
    iempty,
    done,
    info: Int32,
    bank: Int64,
    ready: Int64,
    ex: Int32,
    table: Int32,
    control: Int32,
    returns_at: Int64,
    fault_step,
    lane,
):
    """R: publishes finished tiles, so that no warp that computes waits for a release.

    Announcing result rows to other ranks costs a fence of the whole system, so it is done when no further tile is
    finished, or for MOST_UNANNOUNCED tiles at once. Nothing is left at the end: the entry that ends the list is never a
    finished tile. `wait(barrier, phase)` and `give_back(barrier)` are how an entry comes and goes.
    """
    slot, slot_phase = Int32(0), Int32(0)
    kind = Int32(FC1)
    rows = Int32(0)
    unannounced = Int32(0)
    while kind != END:
        if const_expr(cfg.exchange):
            if unannounced > 0:
                next_is_done = ptx.barrier_is_done(Int32((ifull + slot).toint()), slot_phase)
                next_is_done = next_is_done & ptx.barrier_is_done(Int32((done + slot).toint()), slot_phase)
                if ptx.broadcast_lane0(next_is_done) == 0 or unannounced == MOST_UNANNOUNCED:
                    exchange.give_back(cfg, ex, table, control, returns_at, fault_step, rows, lane)
                    rows = Int32(0)
                    unannounced = Int32(0)
        wait(ifull + slot, slot_phase)
        entry = info + slot * INFO_BYTES
        kind = ptx.lds32(entry)
        expert, row_tile = ptx.lds32(entry + 4), ptx.lds32(entry + 8)
        row0, valid, counter = ptx.lds32(entry + 12), ptx.lds32(entry + 16), ptx.lds32(entry + 20)
        given_up = Int32(0)
        if kind != END:
            cute.arch.mbarrier_wait(done + slot, slot_phase)
            given_up = ptx.lds32(entry + 28)
        cute.arch.sync_warp()  # every lane has read the entry before lane 0 gives it back
        if lane == 0:
            give_back(iempty + slot)
        if given_up == 0:
            if kind == FC1:
                if lane == 0:
                    ptx.fence_proxy_async()
                    ptx.flag_add_release_gpu(ready + Int64(counter) * 4, 1)
            elif kind == FC2:
                if const_expr(cfg.exchange):
                    rows = rows + exchange.rows_of(
                        cfg, ex, table, control, returns_at, fault_step, expert, row_tile, row0, valid, lane
                    )
                    unannounced = unannounced + 1
                elif lane == 0:
                    ptx.flag_add_release_gpu(bank + FC2_DONE * 4, 1)
        slot = slot + 1
        if slot == ring_slots:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1
