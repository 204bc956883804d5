# SPDX-License-Identifier: Apache-2.0
"""The top-k sum at the token owner: decode result rows, multiply, add in slot order, one rounding (numerics section 5).

Called by the math warps after all fc2 tiles of the launch are published; reads result rows by token * K + slot.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from .staging import load_expert

PIECES = 2
"""256-column pieces of one item; their loads are in flight together."""

SLOTS_IN_FLIGHT = 8
"""Rows whose loads are issued together; bounds the registers."""


def items_per_token(cfg) -> int:
    """Items of a token's row."""
    return -(-cfg.layer.hidden_size // (256 * PIECES))


def _load_row(layer, results, scales, route, column, live):
    """8 columns of one result row as raw words (zeros when not live)."""
    data = results + Int64(route) * layer.data_row_bytes
    scale = scales + Int64(route) * layer.scale_row_bytes
    if layer.combine_format == "bf16":
        return ptx.ldg128_if(data + column * 2, live)
    if layer.combine_format == "fp8":
        return (*ptx.ldg_pair_if(data + column, live), ptx.ldg8_if(scale + column // 32, live))
    return (ptx.ldg32_if(data + column // 2, live), ptx.ldg16_if(scale + column // 16 * 2, live))


@cute.jit
def _decode(layer, raw):
    """8 fp32 values of a row's raw words."""
    values = []
    if const_expr(layer.combine_format == "bf16"):
        for w in cutlass.range_constexpr(4):
            values += list(ptx.unpack_bf16(raw[w]))
    elif const_expr(layer.combine_format == "fp8"):
        factor = ptx.as_float(raw[2] * 0x800000 if raw[2] > 0 else Int32(0x00400000))
        for w in cutlass.range_constexpr(2):
            for s in cutlass.range_constexpr(2):
                low, high = ptx.e4m3_pair_values((raw[w] >> (16 * s)) & 0xFFFF)
                values += [ptx.mul_rn(low, factor), ptx.mul_rn(high, factor)]
    else:
        step = ptx.mul_rn(ptx.as_float(raw[1] * 65536), ptx.as_float(Int32(0x3E2AAAAB)))
        for w in cutlass.range_constexpr(4):
            low, high = ptx.e2m1_pair_values((raw[0] >> (8 * w)) & 0xFF)
            values += [ptx.mul_rn(low, step), ptx.mul_rn(high, step)]
    return values


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
                    _load_row(layer, results, scales, token * top_k + s0 + s, column0 + p * 256, live[s] * inside[p])
                    for p in range(pieces)
                ]
                for s in range(slots)
            ]
            for s in cutlass.range_constexpr(slots):
                weight = ptx.as_float(cute.arch.shuffle_sync(slot_weight, s0 + s))
                for p in cutlass.range_constexpr(pieces):
                    values = _decode(layer, raw[s][p])
                    if const_expr(not layer.weigh_before_requant):
                        values = [ptx.mul_rn(v, weight) for v in values]
                    for v in cutlass.range_constexpr(8):
                        added = ptx.add_rn(sums[p][v], values[v])
                        sums[p][v] = added if live[s] != 0 else sums[p][v]
        for p in cutlass.range_constexpr(pieces):
            words = [ptx.pack_bf16(sums[p][2 * w], sums[p][2 * w + 1]) for w in range(4)]
            ptx.stg128_if(y + (Int64(token) * hidden + column0 + p * 256) * 2, *words, inside[p])
        item = item + 1
