# SPDX-License-Identifier: Apache-2.0
"""Wire formats of a route's result row (docs/numerics.md section 3) and the top-k sum over them (section 5)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from .routing import load_expert

PIECES = 2
"""256-column pieces of one item of the sum; their loads are in flight together."""

SLOTS_IN_FLIGHT = 8
"""Rows whose loads are issued together; bounds the registers."""


@cute.jit
def encode_fp8(words, data: Int64, scale: Int64, store, store_scale):
    """8 bf16 columns to e4m3, one e8m0 byte per 32 columns (4 lanes); all lanes of the warp must call."""
    largest = Int32(0)
    for w in cutlass.range_constexpr(4):
        magnitude = words[w] & 0x7FFF7FFF
        largest = ptx.max_u32(largest, ptx.max_u32(magnitude & 0xFFFF, (magnitude >> 16) & 0xFFFF))
    largest = ptx.max_u32(largest, ptx.shuffle_xor1(largest))
    largest = ptx.max_u32(largest, ptx.shuffle_xor2(largest))
    byte = largest // 128 - 8 + (Int32(1) if (largest & 127) > 0x60 else Int32(0))
    byte = byte if byte > 0 else Int32(0)
    byte = Int32(254) if largest == 0x7F80 else byte
    byte = Int32(255) if largest > 0x7F80 else byte
    factor = ptx.as_float((Int32(254) - byte) * 0x800000 if byte < 254 else Int32(0x00400000))
    out = []
    for w in cutlass.range_constexpr(4):
        low, high = ptx.unpack_bf16(words[w])
        out.append(ptx.e4m3_pair_codes(ptx.mul_rn(low, factor), ptx.mul_rn(high, factor)))
    low_word = out[0] | (out[1] * 65536)
    high_word = out[2] | (out[3] * 65536)
    low_word = Int32(0x7F7F7F7F) if byte == 255 else low_word
    high_word = Int32(0x7F7F7F7F) if byte == 255 else high_word
    if store != 0:
        ptx.stg_pair(data, low_word, high_word)
    if store_scale != 0:
        ptx.stg8(scale, byte)


@cute.jit
def encode_fp4(words, data: Int64, scale: Int64, store, store_scale):
    """8 bf16 columns to e2m1, one bf16 amax per 16 columns (2 lanes); all lanes of the warp must call."""
    largest = Int32(0)
    for w in cutlass.range_constexpr(4):
        magnitude = words[w] & 0x7FFF7FFF
        largest = ptx.max_u32(largest, ptx.max_u32(magnitude & 0xFFFF, (magnitude >> 16) & 0xFFFF))
    largest = ptx.max_u32(largest, ptx.shuffle_xor1(largest))
    inverse = ptx.div_rn(6.0, ptx.as_float(largest * 65536))
    zero = Int32(1) if largest == 0 or ptx.as_bits(inverse) == 0x7F800000 else Int32(0)
    word = Int32(0)
    for w in cutlass.range_constexpr(4):
        low, high = ptx.unpack_bf16(words[w])
        word = word | (ptx.e2m1_pair_codes(low, high, inverse) * (1 << (8 * w)))
    word = Int32(0) if zero != 0 else word
    amax = Int32(0) if zero != 0 else largest
    word = Int32(0x77777777) if largest > 0x7F80 else word
    amax = Int32(0x7FC0) if largest > 0x7F80 else amax
    if store != 0:
        ptx.stg32(data, word)
    if store_scale != 0:
        ptx.stg16(scale, amax)


def load_row(layer, results, scales, route, column, live):
    """8 columns of one result row as raw words (zeros when not live)."""
    data = results + Int64(route) * layer.data_row_bytes
    scale = scales + Int64(route) * layer.scale_row_bytes
    if layer.combine_format == "bf16":
        return ptx.ldg128_if(data + column * 2, live)
    if layer.combine_format == "fp8":
        return (*ptx.ldg_pair_if(data + column, live), ptx.ldg8_if(scale + column // 32, live))
    return (ptx.ldg32_if(data + column // 2, live), ptx.ldg16_if(scale + column // 16 * 2, live))


@cute.jit
def decode(layer, raw):
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


def items_per_token(layer) -> int:
    """Items of the sum in a token's row."""
    return -(-layer.hidden_size // (256 * PIECES))


@cute.jit
def sum_routes(
    layer,
    warps: cutlass.Constexpr,
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
    """y columns of this CTA's items by `warps` warps, an item being some columns of a token; a warp takes a run.

    For after all fc2 tiles are published; result rows by token * K + slot, added in slot order, one rounding.
    """
    hidden, top_k = const_expr(layer.hidden_size), const_expr(layer.top_k)
    pieces = const_expr(PIECES)
    chunks = const_expr(items_per_token(layer))
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
