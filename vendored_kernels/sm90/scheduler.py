# SPDX-License-Identifier: Apache-2.0
"""The tile stream (`common/tiles.py`) at work: W claims tiles and streams weights, T loads tokens once they are ready.

R (`common/release.py`) tells others of finished tiles. Called by the kernel's producer branch; knows no arithmetic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.typing import AddressSpace

from .. import ptx, timeline
from ..common import stamps
from ..common.release import INFO_BYTES
from ..common.sites import SITE_FC1, SITE_POOL, SITE_STAGED
from ..common.tiles import CLAIM, END, FC1, FC2, STAGED, TableOffsets
from ..common.waits import COUNT_BITS, GIVEN_UP, RANK, wait_at_least
from .config import (
    K_STEP,
    POOL_BLOCK_ROWS,
    RECORD_BYTES,
    fc1_records,
    fc1_steps,
    fc2_records,
    fc2_steps,
)


@cute.jit
def weight_warp(
    cfg, bars, tab: Int32, blocks, info: Int32, weights_at: Int32, w1: Int64, w2: Int64, bank: Int64, bidx, gdim, lane
):
    """W: claims tiles, hands them to the other warps, streams weight records; never waits for tokens."""
    full, empty, _tfull, _tempty, ifull, iempty, _done = bars
    at = const_expr(TableOffsets(cfg.table_experts))
    layer, tile = cfg.layer, cfg.tile
    r1, r2 = const_expr(cfg.fc1_row_tiles), const_expr(cfg.fc2_row_tiles)
    per_tile, per_stage = const_expr(tile.rows // 128), const_expr(cfg.steps_per_stage)
    total = (r1 + r2) * blocks
    stage, phase = Int32(0), Int32(1)
    slot, slot_phase = Int32(0), Int32(1)
    segment = Int32(0)
    t = bidx
    while t < total:
        ahead = Int32(0)
        if lane == 0:
            ahead = ptx.claim_add_relaxed_gpu(bank + CLAIM * 4, 1)
        while t >= ptx.lds32(tab + at.segment_start + segment * 4 + 4):
            segment = segment + 1
        packed = ptx.lds32(tab + at.segment_expert + segment * 4)
        position = ptx.lds32(tab + at.segment_order + segment * 4)
        block0 = ptx.lds32(tab + at.first_block + position * 4)
        in_expert = ptx.lds32(tab + at.first_block + position * 4 + 4) - block0
        q = t - ptx.lds32(tab + at.segment_start + segment * 4)
        row_tile = q // in_expert
        block = q - row_tile * in_expert
        kind, expert = packed // 65536, packed % 65536
        cute.arch.mbarrier_wait(iempty + slot, slot_phase)
        rows = ptx.lds32(tab + at.rows + expert * 4) - block * tile.widest
        width = Int32(len(tile.token_widths) - 1)
        for i in cutlass.range_constexpr(len(tile.token_widths) - 2, -1, -1):
            if rows <= tile.token_widths[i]:
                width = Int32(i)
        if lane == 0:
            entry = info + slot * INFO_BYTES
            ptx.sts32(entry, kind)
            ptx.sts32(entry + 4, expert)
            ptx.sts32(entry + 8, row_tile)
            ptx.sts32(entry + 12, ptx.lds32(tab + at.first_row + expert * 4) + block * tile.widest)
            ptx.sts32(entry + 16, rows if rows < tile.widest else Int32(tile.widest))
            ptx.sts32(entry + 20, block0 + block)
            ptx.sts32(entry + 24, width)
            cute.arch.mbarrier_arrive(ifull + slot)
        slot = slot + 1
        if slot == cfg.ring_slots:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1
        # Lanes 0 and 1 copy one record each: the two halves of a whole tile, or two steps of a half tile. Past the end
        # they repeat the last record: the tokens that it would meet are zero-filled, the rows not stored.
        steps = Int32(fc1_steps(layer))
        records = Int32(fc1_records(layer))
        base = w1
        if kind == FC2:
            steps = Int32(fc2_steps(layer))
            records = Int32(fc2_records(layer))
            base = w2
        sub = lane // per_tile
        record = row_tile * per_tile + lane % per_tile
        record = record if record < records else records - 1
        source = base + (Int64(expert * records + record) * Int64(steps)) * RECORD_BYTES
        target = weights_at + lane * RECORD_BYTES
        for k in cutlass.range((steps + (per_stage - 1)) // per_stage, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * RECORD_BYTES)
            cute.arch.sync_warp()
            if lane < 2:
                step = k * per_stage + sub
                step = step if step < steps else steps - 1
                ptx.bulk_load(
                    target + stage * cfg.weight_stage_bytes,
                    source + Int64(step) * RECORD_BYTES,
                    Int32(RECORD_BYTES),
                    (full + stage).toint(),
                )
            stage = stage + 1
            if stage == cfg.weight_stages:
                stage = Int32(0)
                phase = phase ^ 1
        t = ptx.broadcast_lane0(ahead) + gdim
    cute.arch.mbarrier_wait(iempty + slot, slot_phase)
    if lane == 0:
        entry = info + slot * INFO_BYTES
        ptx.sts32(entry, END)
        ptx.sts32(entry + 4, r2 * blocks)
        cute.arch.mbarrier_arrive(ifull + slot)


@cute.jit
def _fetch_row_facts(
    cfg,
    kind: cutlass.Constexpr,
    entry: Int32,
    mine: Int32,
    control: Int32,
    pool_meta: Int64,
    row_scale: Int64,
    row_weight: Int64,
    lane,
):
    """T: what the epilogue needs of each row of a tile: its route and token owner (fc2), or scale and weight (fc1)."""
    layer = cfg.layer
    widest = const_expr(cfg.tile.widest)
    row0, valid = ptx.lds32(entry + 12), ptx.lds32(entry + 16)
    for part in cutlass.range_constexpr(-(-widest // 32)):
        j = lane + part * 32
        if j < valid:
            row = Int64(row0 + j)
            if const_expr(kind == FC2):
                # After a failure nothing says whose rows these are: they go to a row of this rank.
                known = Int32(1) - ptx.lds32(entry + 28)
                source, route = ptx.ldg_pair_if(pool_meta + row * 8, known)
                word = route
                if const_expr(layer.ep_size > 1):
                    source = source if known != 0 else ptx.lds32(control + RANK)
                    word = route + source * (1 << COUNT_BITS)
                ptx.sts32(mine + j * 4, word)
            else:
                if const_expr(layer.activation_mode == "bf16"):
                    ptx.sts32(mine + j * 4, ptx.ldg32(row_scale + row * 4))
                if const_expr(layer.weigh_before_requant):
                    ptx.sts32(mine + (widest + j) * 4, ptx.ldg32(row_weight + row * 4))


@cute.jit
def token_warp(
    cfg,
    bars,
    info: Int32,
    rows_at: Int32,
    tokens_at: Int32,
    maps: tuple,
    table: Int32,
    control: Int32,
    pool_meta: Int64,
    row_scale: Int64,
    row_weight: Int64,
    bank: Int64,
    ready: Int64,
    pool_ready: Int64,
    staging_ctas,
    row_pieces: cutlass.Constexpr,
    map_rank,
    lane,
    stamps_at: Int32,
):
    """T: waits until a tile's tokens are readable, then TMA-loads them; fetches each row's route, scale or weight.

    `row_pieces`: arrivals per pool row on `pool_ready`; 0 where tokens are staged by this rank alone.
    """
    ranks = const_expr(cfg.layer.ep_size)
    _wfull, _wempty, full, empty, ifull, iempty, _done = bars
    layer, tile = cfg.layer, cfg.tile
    per_stage = const_expr(cfg.steps_per_stage)
    widest = const_expr(tile.widest)
    stage, phase = Int32(0), Int32(1)
    entries = Int32(0)
    kind = Int32(FC1)
    staged = Int32(0)
    at = const_expr(TableOffsets(cfg.table_experts))
    while kind != END:
        slot = entries % cfg.ring_slots
        cute.arch.mbarrier_wait(ifull + slot, entries // cfg.ring_slots % 2)
        entry = info + slot * INFO_BYTES
        # What a tile needs is read where it is needed: this warp has few registers, and the entry stays until the end.
        kind = ptx.lds32(entry)
        mine = rows_at + slot * (widest * 4 * cfg.row_words)
        if kind != END:
            gave_up = ptx.lds32(control + GIVEN_UP)
            if gave_up == 0:
                if kind == FC2:  # whoever computed fc1 had waited for these rows, so what describes them is there too
                    counter = ptx.lds32(entry + 20)
                    gave_up = wait_at_least(
                        ready + Int64(counter) * 4, cfg.fc1_row_tiles, control, ranks, SITE_FC1, counter
                    )
                elif const_expr(row_pieces > 0):
                    # Lane l waits for the l-th 32-row block of the pool that the tile touches.
                    row0, valid = ptx.lds32(entry + 12), ptx.lds32(entry + 16)
                    block = row0 // POOL_BLOCK_ROWS + lane
                    first = block * POOL_BLOCK_ROWS
                    expert = ptx.lds32(entry + 4)
                    if first < row0 + valid:
                        end = ptx.lds32(table + at.first_row + expert * 4) + ptx.lds32(table + at.rows + expert * 4)
                        rows = end - first if end - first < POOL_BLOCK_ROWS else Int32(POOL_BLOCK_ROWS)
                        gave_up = wait_at_least(
                            pool_ready + Int64(block) * 4, rows * row_pieces, control, ranks, SITE_POOL, block
                        )
                    gave_up = Int32(1) if ptx.ballot(gave_up) != 0 else Int32(0)
                    cute.arch.sync_warp()  # what one lane has acquired, all lanes read
                elif staged == 0:
                    gave_up = wait_at_least(bank + STAGED * 4, staging_ctas, control, ranks, SITE_STAGED, 0)
                    staged = Int32(1)
            if const_expr(cfg.timestamps):
                if entries == 0 and lane == 0:
                    stamps.event(stamps_at, timeline.FIRST_ROWS)
            if lane == 0:
                ptx.sts32(entry + 28, gave_up)
                ptx.sts32(control + GIVEN_UP, gave_up)
            ptx.fence_proxy_async()
            cute.arch.sync_warp()
        first_row = ptx.lds32(entry + 12)
        width = ptx.lds32(entry + 24)
        for v in cutlass.range_constexpr(len(tile.token_widths) * 2):
            n = const_expr(tile.token_widths[v // 2])
            one = maps[v // 2 * 5]
            if width == v // 2 and kind == v % 2:
                atom, tensor = maps[v // 2 * 5 + 1 + 2 * (v % 2)], maps[v // 2 * 5 + 2 + 2 * (v % 2)]
                layout = cute.make_layout(
                    (*one.outer.shape, cfg.token_stages), stride=(*one.outer.stride, cfg.token_stage_bytes // 2)
                )
                pointer = cute.make_ptr(Float16, tokens_at, AddressSpace.smem, assumed_align=1024)
                smem = cute.make_tensor(cute.recast_ptr(pointer, one.inner, dtype=Float16), layout)
                if const_expr(cfg.all_ranks):
                    tensor = tensor[(None, None, map_rank)]
                gmem = cute.local_tile(cute.domain_offset((first_row, 0), tensor), (n, K_STEP * per_stage), (0, None))
                ts, tg = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
                )
                steps = const_expr(fc1_steps(layer) if v % 2 == FC1 else fc2_steps(layer))
                for k in cutlass.range(-(-steps // per_stage), unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    cute.copy(atom, tg[(None, k)], ts[(None, stage)], tma_bar_ptr=full + stage)
                    if k == 0:  # while the copy is under way; the arrival that follows publishes them too
                        _fetch_row_facts(cfg, v % 2, entry, mine, control, pool_meta, row_scale, row_weight, lane)
                        cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, n * K_STEP * 2 * per_stage)
                    stage = stage + 1
                    if stage == cfg.token_stages:
                        stage = Int32(0)
                        phase = phase ^ 1
        cute.arch.sync_warp()  # every lane has read the entry before lane 0 gives it back
        if lane == 0:
            cute.arch.mbarrier_arrive(iempty + entries % cfg.ring_slots)
        entries = entries + 1
