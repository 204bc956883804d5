# SPDX-License-Identifier: Apache-2.0
"""The top-k sum at the token owner: decode result rows, multiply, add in slot order, one rounding (numerics section 5).

Called by the math warps after all fc2 tiles of the launch are published; reads result rows by token * K + slot.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from ..common.routing import load_expert
from ..common.wire import PIECES, SLOTS_IN_FLIGHT, decode, load_row


def items_per_token(cfg) -> int:
    """Items of a token's row."""
    return -(-cfg.layer.hidden_size // (256 * PIECES))


@cute.jit
def sum_routes(
    cfg,
    ids: Int64,
    ids_are_64,
    weights: Int64,
    results: Int64,
    scales: Int64,
    y: Int64,
    first_item,
    own_items,
    warp,
    lane,
):
    """y columns of this CTA's items, an item being a few hundred columns of a token; a warp takes a run of them."""
    layer = cfg.layer
    hidden, top_k = const_expr(layer.hidden_size), const_expr(layer.top_k)
    pieces = const_expr(PIECES)
    chunks = const_expr(items_per_token(cfg))
    warps = const_expr(cfg.tile.math_warpgroups * 4)
    item = first_item + own_items * warp // warps
    end = first_item + own_items * (warp + 1) // warps
    known = Int32(-1)
    slot_live = Int32(0)
    slot_weight = Int32(0)
    while item < end:
        token = item // chunks
        column0 = (item - token * chunks) * (256 * pieces) + lane * 8
        if token != known:  # lane s looks up slot s
            mine = Int32(1) if lane < top_k else Int32(0)
            expert = load_expert(ids, token * top_k + lane, mine, ids_are_64, layer.num_experts)
            slot_live = Int32(1) if expert >= 0 else Int32(0)
            if const_expr(not layer.weigh_before_requant):
                slot_weight = ptx.ldg32_if(weights + Int64(token * top_k + lane) * 4, slot_live)
            known = token
        inside = [Int32(1) if column0 + p * 256 < hidden else Int32(0) for p in range(pieces)]
        sums = [[Float32(0.0) for _ in range(8)] for _ in range(pieces)]
        for s0 in cutlass.range_constexpr(0, top_k, SLOTS_IN_FLIGHT):
            slots = const_expr(min(SLOTS_IN_FLIGHT, top_k - s0))
            live = [cute.arch.shuffle_sync(slot_live, s0 + s) for s in range(slots)]
            raw = [
                [
                    load_row(layer, results, scales, token * top_k + s0 + s, column0 + p * 256, live[s] * inside[p])
                    for p in range(pieces)
                ]
                for s in range(slots)
            ]
            for s in cutlass.range_constexpr(slots):
                weight = ptx.as_float(cute.arch.shuffle_sync(slot_weight, s0 + s))
                for p in cutlass.range_constexpr(pieces):
                    values = decode(layer, raw[s][p])
                    if const_expr(not layer.weigh_before_requant):
                        values = [ptx.mul_rn(v, weight) for v in values]
                    for v in cutlass.range_constexpr(8):
                        added = ptx.add_rn(sums[p][v], values[v])
                        sums[p][v] = added if live[s] != 0 else sums[p][v]
        for p in cutlass.range_constexpr(pieces):
            words = [ptx.pack_bf16(sums[p][2 * w], sums[p][2 * w + 1]) for w in range(4)]
            ptx.stg128_if(y + (Int64(token) * hidden + column0 + p * 256) * 2, *words, inside[p])
        item = item + 1
