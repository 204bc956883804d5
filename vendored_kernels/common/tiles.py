# SPDX-License-Identifier: Apache-2.0
"""The tile stream: one ordered list of fc1 and fc2 tiles in which every dependency comes earlier. No loads, no maths.

Order: non-empty experts, most rows first; fc1 segments in that order; fc2 of an expert follows as soon as `lag` fc1
tiles stand between it and the end of its own fc1; inside a segment row tile slow, token block fast. Claims increase, so
the lowest unfinished tile is always runnable and nothing can deadlock.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx

FC1, FC2, END = 0, 1, 2
"""Kinds of tiles."""

TABLE_BARRIER = 10
"""Named barrier of the four single-purpose warps while they build the table."""

BANK_WORDS = 32
CLAIM, STAGED, FC2_DONE = 0, 8, 16
"""Words of a counter bank: next claim, CTAs whose tokens are staged, finished fc2 tiles; each in its own sector."""
EXIT_WORD = 0
FIRST_BANK = 32
"""Launch counters: the exit ticket, then two banks."""


class TableOffsets:
    """Byte offsets of the shared tables; `experts` is the padded number of experts."""

    def __init__(self, experts: int) -> None:
        e = experts * 4
        self.blocks = 0  # token blocks of an expert; later: fc1 segments before its fc2
        self.order = e  # experts by descending rows, non-empty ones only
        self.first_block = 2 * e  # first token block of the i-th expert of the order (one more entry)
        self.segment_start = 3 * e + 16  # first tile of a segment (one more entry)
        self.segment_expert = 5 * e + 20  # expert + 65536 * kind
        self.segment_order = 7 * e + 24  # position in the order
        self.rows = 9 * e + 32
        self.first_row = 10 * e + 32
        self.cursors = 11 * e + 32


@cute.jit
def order_experts(
    experts: cutlass.Constexpr,
    slots: cutlass.Constexpr,
    block: cutlass.Constexpr,
    barrier_id: cutlass.Constexpr,
    tab: Int32,
    thread,
):
    """128 threads together: `order` and `first_block`, all that a reader of token rows needs, from the experts' rows.

    `experts` of `slots` table slots, token blocks of `block` rows. Returns token blocks and live experts.
    """
    at = const_expr(TableOffsets(slots))
    e = thread
    while e < experts:
        rows = ptx.lds32(tab + at.rows + e * 4)
        ptx.sts32(tab + at.blocks + e * 4, (rows + (block - 1)) // block)
        e = e + 128
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
    e = thread
    live = Int32(0)
    total = Int32(0)
    while e < const_expr(-(-experts // 128) * 128):  # every thread at least once: all need `live` and `total`
        mine = Int32(0)
        key = Int32(-1)
        if e < experts:
            key = ptx.lds32(tab + at.rows + e * 4)
            mine = ptx.lds32(tab + at.blocks + e * 4)
        position = Int32(0)
        first = Int32(0)
        total = Int32(0)
        live = Int32(0)
        for j in cutlass.range(experts, unroll=4):
            b = ptx.lds32(tab + at.blocks + j * 4)
            other = ptx.lds32(tab + at.rows + j * 4)
            one = Int32(1) if b > 0 else Int32(0)
            before = Int32(1) if other > key else (Int32(1) if other == key and j < e else Int32(0))
            first = first + b * before
            position = position + one * before
            total = total + b
            live = live + one
        if mine > 0:
            ptx.sts32(tab + at.order + position * 4, e)
            ptx.sts32(tab + at.first_block + position * 4, first)
        e = e + 128
    if thread == 0:
        ptx.sts32(tab + at.first_block + live * 4, total)
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
    return total, live


@cute.jit
def lay_out_segments(
    slots: cutlass.Constexpr,
    r1: cutlass.Constexpr,
    r2: cutlass.Constexpr,
    barrier_id: cutlass.Constexpr,
    tab: Int32,
    lag,
    total,
    live,
    thread,
):
    """128 threads together, after :func:`order_experts`: the segments of the tile stream.

    `r1` and `r2`: row tiles of fc1 and fc2 per expert; `lag`: fc1 tiles between the end of an expert's fc1 and its fc2.
    """
    at = const_expr(TableOffsets(slots))
    # fc2 of the i-th expert follows fc1 of the first m >= i with >= lag fc1 tiles since the end of fc1(i)
    i = thread
    while i < live:
        end = ptx.lds32(tab + at.first_block + i * 4 + 4)
        low = i
        high = live - 1
        while low < high:
            middle = (low + high) // 2
            enough = (ptx.lds32(tab + at.first_block + middle * 4 + 4) - end) * r1 >= lag
            high = middle if enough else high
            low = low if enough else middle + 1
        ptx.sts32(tab + at.blocks + i * 4, low + 1)
        i = i + 128
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
    i = thread
    while i < live:
        expert = ptx.lds32(tab + at.order + i * 4)
        first = ptx.lds32(tab + at.first_block + i * 4)
        m = ptx.lds32(tab + at.blocks + i * 4)
        low = Int32(0)  # becomes the number of fc2 segments before fc1(i); `blocks` ascends
        high = i
        while low < high:
            middle = (low + high) // 2
            earlier = ptx.lds32(tab + at.blocks + middle * 4) <= i
            low = middle + 1 if earlier else low
            high = high if earlier else middle
        fc1_at = (i + low) * 4
        ptx.sts32(tab + at.segment_start + fc1_at, r1 * first + r2 * ptx.lds32(tab + at.first_block + low * 4))
        ptx.sts32(tab + at.segment_expert + fc1_at, expert)
        ptx.sts32(tab + at.segment_order + fc1_at, i)
        fc2_at = (i + m) * 4
        ptx.sts32(tab + at.segment_start + fc2_at, r1 * ptx.lds32(tab + at.first_block + m * 4) + r2 * first)
        ptx.sts32(tab + at.segment_expert + fc2_at, expert + 65536)
        ptx.sts32(tab + at.segment_order + fc2_at, i)
        i = i + 128
    if thread == 0:
        ptx.sts32(tab + at.segment_start + live * 8, (r1 + r2) * total)
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)


@cute.jit
def locate(slots: cutlass.Constexpr, tab: Int32, segment, tile):
    """Where a tile lies: (segment, kind, expert, row tile, token block of the expert, token block of the launch).

    `segment` is that of an earlier tile; tiles are asked for in ascending order.
    """
    at = const_expr(TableOffsets(slots))
    while tile >= ptx.lds32(tab + at.segment_start + segment * 4 + 4):
        segment = segment + 1
    packed = ptx.lds32(tab + at.segment_expert + segment * 4)
    position = ptx.lds32(tab + at.segment_order + segment * 4)
    block0 = ptx.lds32(tab + at.first_block + position * 4)
    in_expert = ptx.lds32(tab + at.first_block + position * 4 + 4) - block0
    q = tile - ptx.lds32(tab + at.segment_start + segment * 4)
    row_tile = q // in_expert
    block = q - row_tile * in_expert
    return segment, packed // 65536, packed % 65536, row_tile, block, block0 + block


@cute.jit
def clear_bank(
    next_bank: Int64, next_ready: Int64, ready_words, next_pool_ready: Int64, pool_ready_words, bidx, gdim, lane
):
    """One warp: zeroes the other bank; the stream orders it before the next launch."""
    i = bidx * 32 + lane
    while i < ready_words:
        ptx.stg32(next_ready + Int64(i) * 4, 0)
        i = i + gdim * 32
    i = bidx * 32 + lane
    while i < pool_ready_words:
        ptx.stg32(next_pool_ready + Int64(i) * 4, 0)
        i = i + gdim * 32
    if bidx == 0:
        ptx.stg32(next_bank + Int64(lane) * 4, 0)
