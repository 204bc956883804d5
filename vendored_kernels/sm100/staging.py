# SPDX-License-Identifier: Apache-2.0
"""bf16 tokens to packed NVFP4 pool rows with their scales in atom order, one copy per live route.

Called by the kernel's staging warps after the routes have their pool rows; knows no tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from . import instructions
from .config import K_ATOM, STAGING_WARPS, scale_atoms, scale_word

COLUMNS_PER_ITEM = 1024
"""Columns of one warp's item: four 16-byte loads per lane in flight."""


@cute.jit
def stage_tokens(
    layer,
    x: Int64,
    pool: Int64,
    pool_scales: Int64,
    route_rows: Int64,
    qs: Float32,
    first_token,
    own_tokens,
    warp,
    lane,
):
    """Quantise this CTA's tokens into all their pool rows.

    A lane takes 8 neighbouring columns: 4 bytes of codes; two lanes share a block of 16, eight lanes a scale word of 64
    columns. Columns beyond H count as zeros, so that the last word of a row whose H is not a multiple of 64 is whole.
    """
    hidden, top_k = const_expr(layer.hidden_size), const_expr(layer.top_k)
    atoms = const_expr(scale_atoms(layer.hidden_size))
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
            for s in cutlass.range_constexpr(top_k):
                row = cute.arch.shuffle_sync(slot_row, s)
                live = Int32(1) if row >= 0 else Int32(0)
                at = pool + Int64(row) * const_expr(hidden // 2) + column // 2
                ptx.stg32_if(at, codes, live * inside[p])
                scale_at = pool_scales + scale_word(Int64(row), column // K_ATOM, atoms) * 4
                ptx.stg32_if(scale_at, word, live * leads)
        item = item + 1
