# SPDX-License-Identifier: Apache-2.0
"""From routing ids to pool rows: count, lay out, place. One rank.

Every CTA counts all ids in shared memory and so knows the pool layout without a grid barrier; it then places the routes
of its own contiguous share of the tokens. Called by kernels at the start of a launch; knows no tiles and no formats.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx


@cute.jit
def load_expert(ids: Int64, index, in_range, ids_are_64, experts: cutlass.Constexpr):
    """Expert of a route, or -1 when its id lies outside [0, experts) or `in_range` is 0."""
    address = ids + Int64(index) * Int64(4 + 4 * ids_are_64)
    low = ptx.ldg32_if(address, in_range)
    high = ptx.ldg32_if(address + 4, in_range * ids_are_64)
    expert = low if low < experts else Int32(-1)
    if ids_are_64 != 0:
        expert = expert if high == 0 else Int32(-1)
    return expert


@cute.jit
def count_routes(
    experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    counts: Int32,
    cursors: Int32,
    ids: Int64,
    ids_are_64,
    routes,
    first_own,
    tidx,
):
    """Add up ids per expert: those before this CTA's share in `cursors`, all others in `counts` (both zeroed)."""
    i = tidx
    while i < routes:
        found = []
        for j in cutlass.range_constexpr(4):
            index = i + j * threads
            found.append(load_expert(ids, index, Int32(1) if index < routes else Int32(0), ids_are_64, experts))
        for j in cutlass.range_constexpr(4):
            table = cursors if i + j * threads < first_own else counts
            ptx.shared_add_if(table + found[j] * 4, 1, Int32(1) if found[j] >= 0 else Int32(0))
        i = i + 4 * threads


@cute.jit
def lay_out_pool(
    slots: cutlass.Constexpr, block_rows: cutlass.Constexpr, counts: Int32, offsets: Int32, cursors: Int32, lane
):
    """One warp: total rows, first pool row (a multiple of `block_rows`) and this CTA's write cursor of every expert."""
    carry = Int32(0)
    for first in cutlass.range_constexpr(0, slots, 32):
        word = (first + lane) * 4
        before = ptx.lds32(cursors + word)
        total = before + ptx.lds32(counts + word)
        padded = (total + (block_rows - 1)) // block_rows * block_rows
        upto = padded
        for d in (1, 2, 4, 8, 16):
            other = ptx.shuffle_up(upto, d)
            upto = upto + (other if lane >= d else Int32(0))
        start = carry + upto - padded
        ptx.sts32(counts + word, total)
        ptx.sts32(offsets + word, start)
        ptx.sts32(cursors + word, start + before)
        carry = carry + cute.arch.shuffle_sync(upto, 31)


@cute.jit
def place_routes(
    experts: cutlass.Constexpr,
    keep_weights: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    cursors: Int32,
    ids: Int64,
    ids_are_64,
    weights: Int64,
    row_meta: Int64,
    row_weight: Int64,
    route_rows: Int64,
    first_route,
    own_routes,
    thread,
    noted: cutlass.Constexpr = 0,
    noted_at=0,
):
    """Give each of this CTA's routes a pool row (-1: masked) and describe the row.

    `noted_at`: shared memory for the rows of the first `noted` routes as well.
    """
    i = thread
    while i < own_routes:
        route = first_route + i
        expert = load_expert(ids, route, Int32(1), ids_are_64, experts)
        row = Int32(-1)
        if expert >= 0:
            row = ptx.shared_add(cursors + expert * 4, 1)
            ptx.stg_pair(row_meta + Int64(row) * 8, Int32(0), route)
            if const_expr(keep_weights):
                ptx.stg32(row_weight + Int64(row) * 4, ptx.ldg32(weights + Int64(route) * 4))
        ptx.stg32(route_rows + Int64(route) * 4, row)
        if const_expr(noted > 0):
            if i < noted:
                ptx.sts32(noted_at + i * 4, row)
        i = i + threads
