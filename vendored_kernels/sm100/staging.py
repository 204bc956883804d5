# SPDX-License-Identifier: Apache-2.0
"""bf16 tokens to packed NVFP4 rows: into the pool with their scales in atom order, or staged once for peers to pull.

Called by the kernel's staging warps after the routes are placed, and by the helper warps for rows of peers; no tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from . import instructions
from .config import K_ATOM, PIECE_COLUMNS, STAGING_WARPS, scale_atoms, scale_word

COLUMNS_PER_ITEM = 1024
"""Columns of one warp's item: four 16-byte loads per lane in flight."""


@cute.jit
def stage_tokens(
    cfg,
    x: Int64,
    target: tuple,
    route_rows: Int64,
    qs: Float32,
    first_token,
    own_tokens,
    warp,
    lane,
):
    """Quantise this CTA's tokens into all their pool rows, or with an exchange into this rank's staged rows.

    `target`: {pool, its scales}, or {payload, row stride, scales, scale row stride}; staged scales lie in column order.
    A lane takes 8 neighbouring columns: 4 bytes of codes; two lanes share a block of 16, eight lanes a scale word of 64
    columns. Columns beyond H count as zeros, so that the last word of a row whose H is not a multiple of 64 is whole.
    """
    hidden, top_k = const_expr(cfg.layer.hidden_size), const_expr(cfg.layer.top_k)
    atoms = const_expr(scale_atoms(hidden))
    pieces = const_expr(COLUMNS_PER_ITEM // 256)
    chunks = const_expr(-(-hidden // COLUMNS_PER_ITEM))
    item = own_tokens * chunks * warp // STAGING_WARPS
    end = own_tokens * chunks * (warp + 1) // STAGING_WARPS
    known = Int32(-1)
    slot_row = Int32(-1)
    while item < end:
        local = item // chunks
        token = first_token + local
        base = (item - local * chunks) * COLUMNS_PER_ITEM + lane * 8
        if const_expr(not cfg.exchange):
            if local != known:
                slot_row = ptx.ldg32_if(
                    route_rows + Int64(token * top_k + lane) * 4, Int32(1) if lane < top_k else Int32(0)
                )
                known = local
        inside = [Int32(1) if base + p * 256 < hidden else Int32(0) for p in range(pieces)]
        address = x + (Int64(token) * hidden + base) * 2
        loaded = [ptx.ldg128_if(address + p * 512, inside[p]) for p in range(pieces)]
        for p in cutlass.range_constexpr(pieces):
            column = base + p * 256
            values = []
            for w in cutlass.range_constexpr(4):
                values += list(ptx.unpack_bf16(loaded[p][w]))
            amax = ptx.abs_max8(values)
            amax = ptx.max_nan(amax, ptx.shuffle_xor1_f(amax))
            byte, inverse = instructions.nvfp4_block_code(amax, qs)
            codes = instructions.nvfp4_codes8(values, inverse)
            word = byte << ((lane & 6) * 4)
            word = word | ptx.shuffle_xor2(word)
            word = word | instructions.shuffle_xor4(word)
            leads = Int32(1) if (lane & 7) == 0 and column < const_expr(atoms * K_ATOM) else Int32(0)
            if const_expr(cfg.exchange):
                payload, row_bytes, scales, scale_row_bytes = target
                ptx.stg32_if(payload + Int64(token) * Int64(row_bytes) + column // 2, codes, inside[p])
                ptx.stg32_if(scales + Int64(token) * Int64(scale_row_bytes) + column // K_ATOM * 4, word, leads)
            else:
                pool, pool_scales = target
                for s in cutlass.range_constexpr(top_k):
                    row = cute.arch.shuffle_sync(slot_row, s)
                    live = Int32(1) if row >= 0 else Int32(0)
                    at = pool + Int64(row) * const_expr(hidden // 2) + column // 2
                    ptx.stg32_if(at, codes, live * inside[p])
                    scale_at = pool_scales + scale_word(Int64(row), column // K_ATOM, atoms) * 4
                    ptx.stg32_if(scale_at, word, live * leads)
        item = item + 1


@cute.jit
def copy_piece(
    cfg,
    pool: Int64,
    pool_scales: Int64,
    row_weight: Int64,
    payload: Int64,
    payload_scales: Int64,
    weight: Int64,
    row,
    piece,
    lane,
):
    """One warp: a piece of a staged row into a pool row, its scales into atoms; with the first piece the row's weight.

    A lane copies 16 bytes of codes twice and one scale word; the word behind the last whole one was staged as a whole.
    """
    hidden, atoms = const_expr(cfg.layer.hidden_size), const_expr(scale_atoms(cfg.layer.hidden_size))
    column, atom = piece * PIECE_COLUMNS + lane * 32, piece * const_expr(PIECE_COLUMNS // K_ATOM) + lane
    inside = [Int32(1) if column + p * 1024 < hidden else Int32(0) for p in range(PIECE_COLUMNS // 1024)]
    has_scale = Int32(1) if atom < atoms else Int32(0)
    codes = [ptx.ldg128_if(payload + (column + p * 1024) // 2, inside[p]) for p in range(PIECE_COLUMNS // 1024)]
    scale = ptx.ldg32_if(payload_scales + atom * 4, has_scale)
    if const_expr(cfg.layer.weigh_before_requant):
        once = Int32(1) if piece == 0 and lane == 0 else Int32(0)
        ptx.stg32_if(row_weight + Int64(row) * 4, ptx.ldg32_if(weight, once), once)
    target = pool + Int64(row) * const_expr(hidden // 2) + column // 2
    for p in cutlass.range_constexpr(PIECE_COLUMNS // 1024):
        ptx.stg128_if(target + p * 512, *codes[p], inside[p])
    ptx.stg32_if(pool_scales + scale_word(Int64(row), atom, atoms) * 4, scale, has_scale)
