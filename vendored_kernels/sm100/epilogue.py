# SPDX-License-Identifier: Apache-2.0
"""What happens to a tile's accumulators: SwiGLU and requantisation after fc1, the result row's encoding after fc2.

Called by the epilogue warps; rounding points follow docs/numerics.md section 4. Facts of TMEM: lane = weight row of
the tile, column = token; a warp reads lanes 32 * (warp % 4) and up. fc1 rows are interleaved by 16: a warp holds gate
and up of 16 channels = one block of the requantisation, and a tile 64 channels = one scale word of each token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from ..common import tiles, wire
from ..common.release import INFO_BYTES
from ..common.waits import COUNT_BITS
from . import instructions, pairs
from .config import (
    EPILOGUE_TOKENS,
    EPILOGUE_WARPS,
    RING_SLOTS,
    TILE_ROWS,
    TRANSPOSE_PITCH,
    scale_atoms,
    scale_word,
)

EPILOGUE_BARRIER = 1
"""Named barrier of the epilogue warps."""

TRANSPOSED_BYTES = EPILOGUE_TOKENS * TRANSPOSE_PITCH
CODES_AT = EPILOGUE_WARPS * TRANSPOSED_BYTES
SCALES_AT = CODES_AT + EPILOGUE_TOKENS * TILE_ROWS // 4
ROW_PITCH = 2 * TILE_ROWS
"""Bytes of one token's 128 bf16 columns in the fc2 buffer."""


@cute.jit
def _sync():
    cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_WARPS * 32)


@cute.jit
def _activate(layer, swiglu, gate, up):
    """Clamp and SwiGLU of one channel of one token."""
    if const_expr(layer.clamp is not None):
        gate = ptx.clamp_above(gate, float(layer.clamp))
        up = ptx.clamp_both(up, float(layer.clamp))
    return swiglu(gate, up)


@cute.jit
def fc1_pass(
    layer,
    swiglu,
    values,
    alpha: Float32,
    qs: Float32,
    buffer: Int32,
    weights_at: Int32,
    h: Int64,
    h_scales: Int64,
    row0,
    token0,
    valid,
    row_tile,
    tid,
    warp,
    lane,
):
    """32 tokens x 128 rows: 16 lanes exchange gate and up, then a lane takes a token and quantises its 16 channels."""
    inter = const_expr(layer.intermediate_size)
    upper = lane >> 4
    mine = buffer + warp * TRANSPOSED_BYTES
    for t in cutlass.range_constexpr(EPILOGUE_TOKENS // 2):
        first, second = ptx.mul_rn(values[2 * t], alpha), ptx.mul_rn(values[2 * t + 1], alpha)
        got = instructions.shuffle_xor16_f(second if upper == 0 else first)
        gate = first if upper == 0 else got
        up = got if upper == 0 else second
        channel = _activate(layer, swiglu, gate, up)
        ptx.stsf(mine + (2 * t + upper) * TRANSPOSE_PITCH + (lane & 15) * 4, channel)
    cute.arch.sync_warp()
    block = []
    for q in cutlass.range_constexpr(4):
        block += list(ptx.lds128f(mine + lane * TRANSPOSE_PITCH + q * 16))
    if const_expr(layer.weigh_before_requant):
        weight = ptx.ldsf(weights_at + (token0 + lane) * 4)
        block = [ptx.mul_rn(v, weight) for v in block]
    amax = ptx.max_nan(ptx.abs_max8(block[:8]), ptx.abs_max8(block[8:]))
    byte, inverse = instructions.nvfp4_block_code(amax, qs)
    low, high = instructions.nvfp4_codes8(block[:8], inverse), instructions.nvfp4_codes8(block[8:], inverse)
    instructions.sts_pair(buffer + CODES_AT + lane * (TILE_ROWS // 4) + warp * 8, low, high)
    instructions.sts8(buffer + SCALES_AT + lane * 4 + warp, byte)
    _sync()
    token, quarter = tid // 4, tid % 4
    channel0 = row_tile * (TILE_ROWS // 2) + quarter * 16
    if token0 + token < valid and channel0 < inter:
        low, high = ptx.lds_pair(buffer + CODES_AT + tid * 8)
        ptx.stg_pair(h + Int64(row0 + token0 + token) * const_expr(inter // 2) + channel0 // 2, low, high)
    if tid < EPILOGUE_TOKENS and token0 + tid < valid:
        word = ptx.lds32(buffer + SCALES_AT + tid * 4)
        ptx.stg32(h_scales + scale_word(Int64(row0 + token0 + tid), row_tile, scale_atoms(inter)) * 4, word)
    _sync()


@cute.jit
def fc2_pass(
    layer,
    values,
    alpha: Float32,
    buffer: Int32,
    rows_at: Int32,
    bases: Int32,
    results: Int64,
    result_scales: Int64,
    token0,
    valid,
    row_tile,
    tid,
):
    """32 tokens x 128 columns of result rows: bf16 through shared memory, then the wire format, 8 columns a thread.

    `bases`: the shared table of bases, where rows go to several ranks; then results are offsets behind them.
    """
    hidden = const_expr(layer.hidden_size)
    for t in cutlass.range_constexpr(EPILOGUE_TOKENS):
        instructions.sts16(buffer + t * ROW_PITCH + tid * 2, instructions.round_bf16(ptx.mul_rn(values[t], alpha)))
    _sync()
    for p in cutlass.range_constexpr(EPILOGUE_TOKENS * 16 // (EPILOGUE_WARPS * 32)):
        item = tid + p * (EPILOGUE_WARPS * 32)
        token, chunk = item // 16, item % 16
        column = row_tile * TILE_ROWS + chunk * 8
        words = ptx.lds128(buffer + token * ROW_PITCH + chunk * 16)
        store = Int32(1) if token0 + token < valid and column < hidden else Int32(0)
        word = Int32(0)
        if store != 0:
            word = ptx.lds32(rows_at + (token0 + token) * 4)
        base, route = Int64(0), Int64(word)
        if const_expr(layer.ep_size > 1):
            base = ptx.lds64(bases + (word >> COUNT_BITS) * 8)
            route = Int64(word & ((1 << COUNT_BITS) - 1))
        data = base + results + route * layer.data_row_bytes
        scale = base + result_scales + route * layer.scale_row_bytes
        if const_expr(layer.combine_format == "bf16"):
            ptx.stg128_if(data + column * 2, *words, store)
        elif const_expr(layer.combine_format == "fp8"):
            leads = store if chunk % 4 == 0 else Int32(0)
            wire.encode_fp8(words, data + column, scale + column // 32, store, leads)
        else:
            leads = store if chunk % 2 == 0 else Int32(0)
            wire.encode_fp4(words, data + column // 2, scale + column // 16 * 2, store, leads)
    _sync()


@cute.jit
def epilogue_warps(
    cfg,
    bars,
    info: Int32,
    rows_at: Int32,
    buffer: Int32,
    bases: Int32,
    tmem,
    scales: Int64,
    h: Int64,
    h_scales: Int64,
    results: Int64,
    result_scales: Int64,
    tid,
    warp,
    lane,
):
    """The epilogue's tile loop; returns the number of fc2 tiles of the whole launch."""
    layer = cfg.layer
    afull, aempty, ifull, done, rfull = bars[2], bars[3], bars[4], bars[6], bars[7]
    swiglu = const_expr(ptx.make_swiglu(layer.swiglu_alpha, layer.swiglu_beta))
    lanes_at = Int32(tmem.toint()) + warp * (32 << 16)
    pair, pair_phase, second = Int32(0), Int32(0), Int32(0)
    slot, slot_phase = Int32(0), Int32(0)
    kind = Int32(tiles.FC1)
    fc2_tiles = Int32(0)
    while kind != tiles.END:
        pairs.wait(cfg, ifull + slot, slot_phase)
        entry = info + slot * INFO_BYTES
        kind = ptx.lds32(entry)
        fc2_tiles = ptx.lds32(entry + 4)
        if kind != tiles.END:
            expert, row_tile = ptx.lds32(entry + 4), ptx.lds32(entry + 8)
            row0, valid = ptx.lds32(entry + 12), ptx.lds32(entry + 16)
            if const_expr(cfg.has_empty_tiles):
                filled = Int32(cfg.fc1_filled_tiles) if kind == tiles.FC1 else Int32(cfg.fc2_filled_tiles)
                valid = valid if row_tile < filled else Int32(0)
            factors = ptx.ldg128f(scales + Int64(expert) * 16)
            alpha = factors[2]
            if kind == tiles.FC1:
                alpha = factors[0] if (lane >> 4) == 0 else factors[1]
            words_at = rows_at + slot * const_expr(cfg.tile.tokens * 4)
            pairs.wait(cfg, rfull + slot, slot_phase)
            pairs.wait_for_accumulator(cfg, afull + pair, pair_phase)
            instructions.fence_after_sync()
            for i in cutlass.range(cfg.passes, unroll=1):
                j = i
                if const_expr(cfg.accumulators_overlap):  # drain the columns shared with the other accumulator first
                    j = i + (1 - second) * (cfg.passes - 1 - 2 * i)
                column = second * cfg.accumulator_stride + j * EPILOGUE_TOKENS
                values = instructions.load_tmem(lanes_at + column, EPILOGUE_TOKENS)
                if i == cfg.release_pass:
                    instructions.fence_before_sync()
                    cute.arch.sync_warp()
                    if lane == 0:
                        pairs.give_back_accumulator(cfg, aempty + pair)
                token0 = j * EPILOGUE_TOKENS
                if token0 < valid:
                    if kind == tiles.FC1:
                        fc1_pass(
                            layer,
                            swiglu,
                            values,
                            alpha,
                            factors[3],
                            buffer,
                            words_at,
                            h,
                            h_scales,
                            row0,
                            token0,
                            valid,
                            row_tile,
                            tid,
                            warp,
                            lane,
                        )
                    else:
                        fc2_pass(
                            layer,
                            values,
                            alpha,
                            buffer,
                            words_at,
                            bases,
                            results,
                            result_scales,
                            token0,
                            valid,
                            row_tile,
                            tid,
                        )
            ptx.fence_proxy_async()
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(done + slot)
            second = second ^ 1
            pair = pair + 1
            if pair == cfg.accumulator_pairs:
                pair = Int32(0)
                pair_phase = pair_phase ^ 1
        slot = slot + 1
        if slot == RING_SLOTS:
            slot = Int32(0)
            slot_phase = slot_phase ^ 1
    return fc2_tiles
