# SPDX-License-Identifier: Apache-2.0
"""The GEMM pipeline of one tile after the other: weight and token loads by TMA, block-scaled FP4 MMA into TMEM.

W claims tiles and streams weights with their scales; T waits until a tile's tokens are readable and streams them; the
MMA warp copies scales to TMEM and issues tcgen05.mma. Called by the kernel's role branch. In a pair of CTAs the leader
does what there is one of (`pairs.py`): claims, waits for tokens, MMAs.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float4E2M1FN, Float8E4M3FN, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.typing import AddressSpace

from .. import ptx
from ..common import tiles
from ..common.release import INFO_BYTES
from ..common.sites import SITE_FC1, SITE_POOL, SITE_STAGED
from ..common.units import READY_ROWS
from ..common.waits import COUNT_BITS, GIVEN_UP, RANK, wait_at_least
from . import instructions, pairs
from .config import (
    ATOM_ROWS,
    EPILOGUE_WARPS,
    K_ATOM,
    K_STAGE,
    RING_SLOTS,
    TILE_ROWS,
    scale_atoms,
    scale_block,
    scale_column,
)

NO_TILE = -1
"""Kind of what a leader's W streams before its first tile."""


def _group(cfg):
    """CTAs that an MMA, a scale copy or a commit belongs to."""
    return tcgen05.CtaGroup.TWO if cfg.pair else tcgen05.CtaGroup.ONE


def make_mma(cfg):
    """The tiled MMA: 128 weight rows a CTA x a token block x 64, block-scaled FP4, operands in shared memory."""
    shape = (cfg.mma_rows, cfg.tile.tokens, K_ATOM)
    return cute.make_tiled_mma(tcgen05.MmaMXF4NVF4Op(Float8E4M3FN, shape, _group(cfg), tcgen05.OperandSource.SMEM))


def shared_layouts(cfg, mma):
    """Shared-memory layouts of all stages: weight codes, token codes, weight scales, token scales."""
    tiler = (cfg.mma_rows, cfg.tile.tokens, K_STAGE)
    return (
        sm100_utils.make_smem_layout_a(mma, tiler, Float4E2M1FN, cfg.stages),
        sm100_utils.make_smem_layout_b(mma, tiler, Float4E2M1FN, cfg.stages),
        blockscaled.make_smem_layout_sfa(mma, tiler, 16, cfg.stages),
        blockscaled.make_smem_layout_sfb(mma, tiler, 16, cfg.stages),
    )


def _codes(address, rows, reduction):
    """Packed e2m1 (rows, reduction), K contiguous."""
    pointer = cute.make_ptr(cutlass.Uint8, address, AddressSpace.gmem, assumed_align=128)
    layout = cute.make_layout((rows, reduction), stride=(reduction, 1))
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Float4E2M1FN), layout)


def _scales(address, blocks, reduction):
    """Scale atoms as u64: one row per 128-row block, 64 of them per K atom, so that coordinates count K elements."""
    pointer = cute.make_ptr(Int64, address, AddressSpace.gmem, assumed_align=128)
    width = scale_atoms(reduction) * K_ATOM
    return cute.make_tensor(pointer, cute.make_layout((blocks, width), stride=(width, 1)))


def tensor_maps(cfg, mma, layouts, weights, weight_scales, tokens, token_scales, rows, pool_rows, reduction):
    """(atom, tensor) of weight codes, token codes, weight scales, token scales of one GEMM with `rows` per expert."""
    experts = cfg.layer.num_local_experts
    tiler = (cfg.mma_rows, cfg.tile.tokens, K_STAGE)
    one = cute.make_layout((1, 1, 1, 1))
    if cfg.pair:
        one = cute.tiled_divide(cute.make_layout((cfg.tile.ctas, 1, 1)), (mma.thr_id.shape,))
    op = cpasync.CopyBulkTensorTileG2SOp(_group(cfg))
    first = [cute.slice_(layout, (None, None, None, 0)) for layout in layouts[:2]]
    a = cute.nvgpu.make_tiled_tma_atom_A(
        op, _codes(weights, experts * rows, reduction), first[0], tiler, mma, one.shape
    )
    b = cute.nvgpu.make_tiled_tma_atom_B(op, _codes(tokens, pool_rows, reduction), first[1], tiler, mma, one.shape)
    out = [*a, *b]
    blocks = -(-rows // ATOM_ROWS) * experts
    for address, count, height in (
        (weight_scales, blocks, 1),
        (token_scales, pool_rows // ATOM_ROWS, cfg.token_scale_blocks),
    ):
        box = cute.make_layout((height, K_STAGE), stride=(K_STAGE, 1))
        out += list(cpasync.make_tiled_tma_atom(op, _scales(address, count, reduction), box, (height, K_STAGE)))
    return out


@cute.jit
def _stream(
    cfg, k_tiles: cutlass.Constexpr, codes, scales, num_bytes: cutlass.Constexpr, full, empty, cta, stage, phase
):
    """Load all stages of one tile: `codes` and `scales` are (atom, global partition, shared partition).

    A pair's loads all signal the leader's barrier (the hardware turns the address), so the leader announces them.
    """
    for k in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        if cta == pairs.LEADER:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, const_expr(num_bytes * cfg.tile.ctas))
        cute.copy(codes[0], codes[1][None, k], codes[2][None, stage], tma_bar_ptr=full + stage)
        cute.copy(scales[0], scales[1][None, k], scales[2][None, stage], tma_bar_ptr=full + stage)
        stage = stage + 1
        if stage == cfg.stages:
            stage = Int32(0)
            phase = phase ^ 1
    return stage, phase


def _partition(atom, smem, gmem, modes):
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, modes), cute.group_modes(gmem, 0, modes)
    )


@cute.jit
def _weight_tile(
    cfg,
    k_tiles: cutlass.Constexpr,
    maps,
    mma,
    smem,
    rows: cutlass.Constexpr,
    expert,
    row_tile,
    bars,
    cta,
    stage,
    phase,
):
    """Stream the weights of one CTA's tile; what lies beyond an expert's rows meets zero scales or is dropped later."""
    full, empty = bars[0], bars[1]
    first_row = expert * rows + (row_tile - cta) * TILE_ROWS
    block = expert * const_expr(-(-rows // ATOM_ROWS)) + row_tile
    tile = cute.local_tile(cute.domain_offset((first_row, 0), maps[1]), (cfg.mma_rows, K_STAGE), (0, None))
    codes_s, codes_g = _partition(maps[0], smem[0], mma.get_slice(cta).partition_A(tile), 3)
    scales = cute.local_tile(cute.domain_offset((block, 0), maps[5]), (1, K_STAGE), (0, None))
    scales_s, scales_g = _partition(maps[4], smem[2], scales, 2)
    return _stream(
        cfg,
        k_tiles,
        (maps[0], codes_g, codes_s),
        (maps[4], scales_g, scales_s),
        cfg.weight_bytes,
        full,
        empty,
        cta,
        stage,
        phase,
    )


@cute.jit
def _token_tile(cfg, k_tiles: cutlass.Constexpr, maps, mma, smem, row0, bars, cta, stage, phase):
    """Stream the tokens of one tile, or this CTA's half, and the scales of the whole 128-row blocks that hold them."""
    full, empty = bars[0], bars[1]
    tile = cute.local_tile(cute.domain_offset((row0, 0), maps[3]), (cfg.tile.tokens, K_STAGE), (0, None))
    codes_s, codes_g = _partition(maps[2], smem[1], mma.get_slice(cta).partition_B(tile), 3)
    height = const_expr(cfg.token_scale_blocks)
    scales = cute.local_tile(cute.domain_offset((scale_block(row0), 0), maps[7]), (height, K_STAGE), (0, None))
    scales_s, scales_g = _partition(maps[6], smem[3], scales, 2)
    return _stream(
        cfg,
        k_tiles,
        (maps[2], codes_g, codes_s),
        (maps[6], scales_g, scales_s),
        cfg.token_bytes,
        full,
        empty,
        cta,
        stage,
        phase,
    )


@cute.jit
def _stream_weights(cfg, maps1, maps2, mma, smem, kind, expert, row_tile, bars, cta, stage, phase):
    """The weights of one CTA's tile of either GEMM."""
    layer = cfg.layer
    if kind == tiles.FC1:
        stage, phase = _weight_tile(
            cfg,
            cfg.fc1_k_tiles,
            maps1,
            mma,
            smem,
            2 * layer.intermediate_size,
            expert,
            row_tile,
            bars,
            cta,
            stage,
            phase,
        )
    else:
        stage, phase = _weight_tile(
            cfg, cfg.fc2_k_tiles, maps2, mma, smem, layer.hidden_size, expert, row_tile, bars, cta, stage, phase
        )
    return stage, phase


@cute.jit
def _await_commits(cfg, empty, stage, phase):
    """Every commit has arrived before this CTA may leave."""
    for _ in cutlass.range_constexpr(cfg.stages):
        cute.arch.mbarrier_wait(empty + stage, phase)
        stage = stage + 1
        if stage == cfg.stages:
            stage = Int32(0)
            phase = phase ^ 1


@cute.jit
def weight_warp(cfg, bars, table: Int32, blocks, info: Int32, maps1, maps2, mma, smem, bank: Int64, bidx, gdim, lane):
    """W: claims tiles, hands them to the other warps, streams weights; never waits for tokens."""
    ifull, iempty = bars[4], bars[5]
    at = const_expr(tiles.TableOffsets(cfg.table_experts))
    block_rows = const_expr(cfg.tile.tokens)
    total = const_expr(cfg.fc1_row_tiles + cfg.fc2_row_tiles) * blocks
    stage, phase = Int32(0), Int32(1)
    slot, slot_phase = Int32(0), Int32(1)
    segment = Int32(0)
    t = bidx
    while t < total:
        ahead = Int32(0)
        if lane == 0:
            ahead = ptx.claim_add_relaxed_gpu(bank + tiles.CLAIM * 4, 1)
        segment, kind, expert, row_tile, block, counter = tiles.locate(cfg.table_experts, table, segment, t)
        cute.arch.mbarrier_wait(iempty + slot, slot_phase)
        rows = ptx.lds32(table + at.rows + expert * 4) - block * block_rows
        if lane == 0:
            entry = info + slot * INFO_BYTES
            ptx.sts32(entry, kind)
            ptx.sts32(entry + 4, expert)
            ptx.sts32(entry + 8, row_tile)
            ptx.sts32(entry + 12, ptx.lds32(table + at.first_row + expert * 4) + block * block_rows)
            ptx.sts32(entry + 16, rows if rows < block_rows else Int32(block_rows))
            ptx.sts32(entry + 20, counter)
            cute.arch.mbarrier_arrive(ifull + slot)
        cute.arch.sync_warp()
        slot = slot + 1
        if slot == RING_SLOTS:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1
        stage, phase = _stream_weights(
            cfg, maps1, maps2, mma, smem, kind, expert, row_tile, bars, Int32(pairs.LEADER), stage, phase
        )
        t = ptx.broadcast_lane0(ahead) + gdim
    cute.arch.mbarrier_wait(iempty + slot, slot_phase)
    if lane == 0:
        entry = info + slot * INFO_BYTES
        ptx.sts32(entry, tiles.END)
        ptx.sts32(entry + 4, const_expr(cfg.fc2_row_tiles) * blocks)
        cute.arch.mbarrier_arrive(ifull + slot)
    cute.arch.sync_warp()
    _await_commits(cfg, bars[1], stage, phase)


@cute.jit
def _hand_over_tile(cfg, bars, table: Int32, info: Int32, blocks, t, total, segment, slot, slot_phase, lane):
    """A pair's leader: tile `t`, or the end, to both CTAs' rings; returns the tile and where to look for the next."""
    ifull, iempty = bars[4], bars[5]
    at = const_expr(tiles.TableOffsets(cfg.table_experts))
    block_rows = const_expr(cfg.tile.tokens)
    entry = info + slot * INFO_BYTES
    kind, expert = Int32(tiles.END), const_expr(cfg.fc2_row_tiles) * blocks
    row_tile, block, counter = Int32(0), Int32(0), Int32(0)
    if t < total:
        segment, kind, expert, row_tile, block, counter = tiles.locate(cfg.table_experts, table, segment, t)
        row_tile = row_tile * cfg.tile.ctas
    pairs.wait(cfg, iempty + slot, slot_phase)
    if lane == 0:
        pairs.store_to_both(cfg, entry, kind)
        pairs.store_to_both(cfg, entry + 4, expert)
        if kind != tiles.END:
            rows = ptx.lds32(table + at.rows + expert * 4) - block * block_rows
            pairs.store_to_both(cfg, entry + 8, row_tile, 1)
            pairs.store_to_both(cfg, entry + 12, ptx.lds32(table + at.first_row + expert * 4) + block * block_rows)
            pairs.store_to_both(cfg, entry + 16, rows if rows < block_rows else Int32(block_rows))
            pairs.store_to_both(cfg, entry + 20, counter)
        pairs.hand_over(cfg, ifull + slot)
    cute.arch.sync_warp()
    slot = slot + 1
    if slot == RING_SLOTS:
        slot = Int32(0)
        slot_phase = slot_phase ^ 1
    return kind, expert, row_tile, segment, slot, slot_phase


@cute.jit
def leader_weight_warp(
    cfg, bars, table: Int32, blocks, info: Int32, maps1, maps2, mma, smem, bank: Int64, bidx, gdim, lane
):
    """W of a pair's leader: hands a tile over to both CTAs before it streams the weights of the last one.

    So the way to the other CTA costs no time. Two tiles are a pair's from the start, the others are claimed.
    """
    total = const_expr((cfg.fc1_row_tiles + cfg.fc2_row_tiles) // cfg.tile.ctas) * blocks
    num_pairs = gdim // cfg.tile.ctas
    stage, phase = Int32(0), Int32(1)
    slot, slot_phase = Int32(0), Int32(1)
    segment = Int32(0)
    t = bidx // cfg.tile.ctas
    kind, expert, row_tile = Int32(NO_TILE), Int32(0), Int32(0)
    while kind != tiles.END:
        next_kind, next_expert, next_row_tile, segment, slot, slot_phase = _hand_over_tile(
            cfg, bars, table, info, blocks, t, total, segment, slot, slot_phase, lane
        )
        if kind == NO_TILE:
            t = t + num_pairs
        else:
            ahead = Int32(0)
            if lane == 0:  # behind the handing over, whose release would wait for it
                ahead = ptx.claim_add_relaxed_gpu(bank + tiles.CLAIM * 4, 1)
            stage, phase = _stream_weights(
                cfg, maps1, maps2, mma, smem, kind, expert, row_tile, bars, Int32(pairs.LEADER), stage, phase
            )
            t = ptx.broadcast_lane0(ahead) + num_pairs * 2
        kind, expert, row_tile = next_kind, next_expert, next_row_tile
    _await_commits(cfg, bars[1], stage, phase)


@cute.jit
def follower_weight_warp(cfg, bars, info: Int32, maps1, maps2, mma, smem, lane):
    """W of a pair's other CTA: streams the weights of the tiles that the leader hands over."""
    ifull, iempty = bars[4], bars[5]
    stage, phase = Int32(0), Int32(1)
    slot, slot_phase = Int32(0), Int32(0)
    kind = Int32(tiles.FC1)
    while kind != tiles.END:
        pairs.wait(cfg, ifull + slot, slot_phase)
        entry = info + slot * INFO_BYTES
        kind, expert, row_tile = ptx.lds32(entry), ptx.lds32(entry + 4), ptx.lds32(entry + 8)
        cute.arch.sync_warp()  # every lane has read the entry before lane 0 gives it back
        if lane == 0:
            pairs.give_back_entry(cfg, iempty + slot)
        cute.arch.sync_warp()
        if kind != tiles.END:
            stage, phase = _stream_weights(
                cfg, maps1, maps2, mma, smem, kind, expert, row_tile, bars, Int32(pairs.FOLLOWER), stage, phase
            )
        slot = slot + 1
        if slot == RING_SLOTS:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1
    _await_commits(cfg, bars[1], stage, phase)


@cute.jit
def _wait_for_rows(cfg, table: Int32, entry: Int32, control: Int32, pool_ready: Int64, lane):
    """T: until the pulled rows of all 32-row blocks that a tile touches are there, lane l for its l-th; 1: gave up."""
    at = const_expr(tiles.TableOffsets(cfg.table_experts))
    row0, valid = ptx.lds32(entry + 12), ptx.lds32(entry + 16)
    block = row0 // READY_ROWS + lane
    first = block * READY_ROWS
    gave_up = Int32(0)
    if first < row0 + valid:
        expert = ptx.lds32(entry + 4) * 4
        rows = ptx.lds32(table + at.first_row + expert) + ptx.lds32(table + at.rows + expert) - first
        rows = rows if rows < READY_ROWS else Int32(READY_ROWS)
        counter = pool_ready + Int64(block) * 4
        gave_up = wait_at_least(counter, rows * cfg.row_pieces, control, cfg.layer.ep_size, SITE_POOL, block)
    return gave_up


@cute.jit
def _await_tokens(
    cfg,
    entry: Int32,
    kind,
    row0,
    valid,
    counter,
    rows_at: Int32,
    slot,
    table: Int32,
    control: Int32,
    row_meta: Int64,
    row_weight: Int64,
    bank: Int64,
    ready: Int64,
    pool_ready: Int64,
    staging_ctas,
    staged,
    lane,
):
    """T, of a pair the leader's: until a tile's tokens are readable; each row's route or weight to whoever needs it."""
    layer, ranks = cfg.layer, const_expr(cfg.layer.ep_size)
    gave_up = ptx.lds32(control + GIVEN_UP)
    if gave_up == 0:
        if const_expr(cfg.exchange):
            gave_up = _wait_for_rows(cfg, table, entry, control, pool_ready, lane)
            cute.arch.sync_warp()  # what one lane has acquired, all lanes read
        elif staged == 0:
            gave_up = wait_at_least(bank + tiles.STAGED * 4, staging_ctas, control, ranks, SITE_STAGED, 0)
            staged = Int32(1)
    gave_up = Int32(1) if ptx.ballot(gave_up) != 0 else Int32(0)
    mine = rows_at + slot * const_expr(cfg.tile.tokens * 4)
    j = lane
    while j < valid:
        row = Int64(row0 + j)
        if kind == tiles.FC2:
            # After a failure nothing says whose rows these are: they go to a row of this rank.
            source, word = ptx.ldg_pair_if(row_meta + row * 8, Int32(1) - gave_up)
            if const_expr(ranks > 1):
                source = source if gave_up == 0 else ptx.lds32(control + RANK)
                word = word + source * (1 << COUNT_BITS)
            pairs.store_to_both(cfg, mine + j * 4, word)
        else:
            if const_expr(layer.weigh_before_requant):
                pairs.store_to_both(cfg, mine + j * 4, ptx.ldg32(row_weight + row * 4))
        j = j + 32
    if kind == tiles.FC2:
        if gave_up == 0:
            gave_up = wait_at_least(ready + Int64(counter) * 4, cfg.fc1_row_tiles, control, ranks, SITE_FC1, counter)
        gave_up = Int32(1) if ptx.ballot(gave_up) != 0 else Int32(0)
    if lane == 0:
        pairs.store_to_both(cfg, entry + 28, gave_up)
        ptx.sts32(control + GIVEN_UP, gave_up)
    return staged


@cute.jit
def token_warp(
    cfg,
    bars,
    info: Int32,
    rows_at: Int32,
    maps1,
    maps2,
    mma,
    smem,
    table: Int32,
    control: Int32,
    row_meta: Int64,
    row_weight: Int64,
    bank: Int64,
    ready: Int64,
    pool_ready: Int64,
    staging_ctas,
    cta,
    lane,
):
    """T: waits until a tile's tokens are readable, fetches each row's route or weight, then streams the tokens.

    A pair's other CTA waits for the leader's word, which brings all that the leader has acquired.
    """
    ifull, iempty, rfull = bars[4], bars[5], bars[7]
    stage, phase = Int32(0), Int32(1)
    slot, slot_phase = Int32(0), Int32(0)
    kind = Int32(tiles.FC1)
    staged = Int32(0)
    while kind != tiles.END:
        pairs.wait(cfg, ifull + slot, slot_phase)
        entry = info + slot * INFO_BYTES
        kind = ptx.lds32(entry)
        row0 = ptx.lds32(entry + 12)
        valid = ptx.lds32(entry + 16)
        counter = ptx.lds32(entry + 20)
        if kind != tiles.END:
            if cta == pairs.LEADER:
                staged = _await_tokens(
                    cfg,
                    entry,
                    kind,
                    row0,
                    valid,
                    counter,
                    rows_at,
                    slot,
                    table,
                    control,
                    row_meta,
                    row_weight,
                    bank,
                    ready,
                    pool_ready,
                    staging_ctas,
                    staged,
                    lane,
                )
            else:
                pairs.wait(cfg, rfull + slot, slot_phase)
            ptx.fence_proxy_async()
            cute.arch.sync_warp()
            if cta == pairs.LEADER:
                if lane == 0:
                    pairs.hand_over(cfg, rfull + slot)
            if kind == tiles.FC1:
                stage, phase = _token_tile(cfg, cfg.fc1_k_tiles, maps1, mma, smem, row0, bars, cta, stage, phase)
            else:
                stage, phase = _token_tile(cfg, cfg.fc2_k_tiles, maps2, mma, smem, row0, bars, cta, stage, phase)
        cute.arch.sync_warp()  # every lane has read the entry before lane 0 gives it back
        if lane == 0:
            pairs.give_back_entry(cfg, iempty + slot)
        slot = slot + 1
        if slot == RING_SLOTS:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1


def _scale_view(pointer, layout):
    """Scales of one stage in TMEM."""
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), layout)


@cute.jit
def mma_warp(cfg, bars, info: Int32, mma, smem, layouts, tmem, lane):
    """Issue all MMAs: per stage the scales to TMEM, then four steps of K 64; commits free stages and hand tiles over.

    Of a pair the leader's warp does it for both CTAs, and so gives ring entries back without leaving its CTA.
    A scale copy is ordered before later MMAs of the same thread, but not behind earlier ones: before a scale buffer is
    filled again, the commit of the stage that used it last must have arrived.
    """
    full, empty, afull, aempty, ifull, iempty = bars[:6]
    tokens = const_expr(cfg.tile.tokens)
    fragment_a = mma.make_fragment_A(smem[0])
    fragment_b = mma.make_fragment_B(smem[1])
    accumulator = mma.make_fragment_C(mma.partition_shape_C((cfg.mma_rows, tokens)))
    shape = (cfg.mma_rows, tokens, K_STAGE)
    both = pairs.BOTH if cfg.pair else None
    one_a, one_b = (cute.slice_(layouts[i], (None, None, None, 0)) for i in (2, 3))
    layout_a = blockscaled.make_tmem_layout_sfa(mma, shape, 16, one_a)
    layout_b = blockscaled.make_tmem_layout_sfb(mma, shape, 16, one_b)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(_group(cfg)), Float8E4M3FN)
    first_a = cute.filter_zeros(_scale_view(tmem + cfg.weight_scale_column, layout_a))
    first_b = cute.filter_zeros(_scale_view(tmem + cfg.token_scale_column, layout_b))
    copy_a, copy_b = tcgen05.make_s2t_copy(atom, first_a), tcgen05.make_s2t_copy(atom, first_b)
    slice_a, slice_b = copy_a.get_slice(0), copy_b.get_slice(0)
    source_a = tcgen05.get_s2t_smem_desc_tensor(copy_a, slice_a.partition_S(cute.filter_zeros(smem[2])))
    source_b = tcgen05.get_s2t_smem_desc_tensor(copy_b, slice_b.partition_S(cute.filter_zeros(smem[3])))
    target_a, target_b = slice_a.partition_D(first_a).layout, slice_b.partition_D(first_b).layout
    behind, behind_phase = Int32(0), Int32(0)  # the stage whose MMAs used the next scale buffer last
    buffer, filled = Int32(0), Int32(0)
    stage, phase = Int32(0), Int32(0)
    pair, pair_phase, second = Int32(0), Int32(1), Int32(0)
    slot, slot_phase = Int32(0), Int32(0)
    kind = Int32(tiles.FC1)
    while kind != tiles.END:
        cute.arch.mbarrier_wait(ifull + slot, slot_phase)
        entry = info + slot * INFO_BYTES
        kind = ptx.lds32(entry)
        row0 = ptx.lds32(entry + 12)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(iempty + slot)
        cute.arch.sync_warp()
        if kind != tiles.END:
            k_tiles = Int32(cfg.fc1_k_tiles) if kind == tiles.FC1 else Int32(cfg.fc2_k_tiles)
            pairs.wait_for_accumulator(cfg, aempty + pair, pair_phase)
            instructions.fence_after_sync()
            acc = cute.make_tensor(tmem + second * cfg.accumulator_stride, accumulator.layout)
            shift = Int32(0)
            if const_expr(tokens < ATOM_ROWS):
                shift = scale_column(row0)  # a scale column holds 32 tokens; the block may start inside an atom
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                instructions.fence_after_sync()
                if filled == cfg.scale_buffers:
                    cute.arch.mbarrier_wait(empty + behind, behind_phase)
                    instructions.fence_after_sync()
                    behind = behind + 1
                    if behind == cfg.stages:
                        behind = Int32(0)
                        behind_phase = behind_phase ^ 1
                else:
                    filled = filled + 1
                weights_at = tmem + (cfg.weight_scale_column + buffer * cfg.scale_buffer_columns)
                tokens_at = tmem + (cfg.token_scale_column + buffer * cfg.scale_buffer_columns)
                scales_a = _scale_view(weights_at, layout_a)
                scales_b = _scale_view(tokens_at + shift, layout_b)
                at = (None, None, None, None, stage)
                cute.copy(copy_a, source_a[at], _scale_view(weights_at, target_a))
                cute.copy(copy_b, source_b[at], _scale_view(tokens_at, target_b))
                buffer = buffer + 1
                if buffer == cfg.scale_buffers:
                    buffer = Int32(0)
                for step in cutlass.range_constexpr(K_STAGE // K_ATOM):
                    mma.set(tcgen05.Field.SFA, scales_a[None, None, step].iterator)
                    mma.set(tcgen05.Field.SFB, scales_b[None, None, step].iterator)
                    cute.gemm(mma, acc, fragment_a[None, None, step, stage], fragment_b[None, None, step, stage], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage, both, _group(cfg))
                stage = stage + 1
                if stage == cfg.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            with cute.arch.elect_one():
                tcgen05.commit(afull + pair, both, _group(cfg))
            second = second ^ 1
            pair = pair + 1
            if pair == cfg.accumulator_pairs:
                pair = Int32(0)
                pair_phase = pair_phase ^ 1
        slot = slot + 1
        if slot == RING_SLOTS:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1


def barrier_counts(cfg):
    """Arrivals per phase: loaders, MMA commit, MMA commit, epilogue warps, W, {T, R, and MMA}, epilogue warps, T.

    Of a pair: the leader's loaders, both CTAs' epilogue warps, {T, R, and MMA or W} of both.
    """
    ctas = cfg.tile.ctas
    return {
        "full": 2,
        "empty": 1,
        "afull": 1,
        "aempty": EPILOGUE_WARPS * ctas,
        "ifull": 1,
        "iempty": 3 * ctas,
        "done": EPILOGUE_WARPS,
        "rfull": 1,
    }
