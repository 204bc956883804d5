# SPDX-License-Identifier: Apache-2.0
"""From routing ids and bf16 tokens to the f16 pool: count, place, quantise or scale, publish.

Every CTA counts all ids in shared memory and so knows the pool layout without a grid barrier; it then places and writes
the rows of its own contiguous share of the tokens. Called by the kernel at the start of a launch; knows no tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx

MATH_BARRIER = 9
"""Named barrier of all math warps; 1 and 2 are the warpgroups' own, 10 the scheduler's."""

BATCH_TOKENS = 64
"""Tokens whose largest magnitudes are kept in shared memory at a time (bf16 activation mode)."""

COLUMNS_PER_ITEM = 1024
"""Columns of one warp's staging item: four 16-byte loads per lane in flight."""

MAXIMA_COLUMNS = 2048
"""Columns of one item of the search for largest magnitudes: eight 16-byte loads per lane in flight."""


def takes_one_token(cfg) -> bool:
    """Whether the math warps together hold a whole token in registers: the way for CTAs with a single one."""
    return -(-cfg.layer.hidden_size // COLUMNS_PER_ITEM) <= cfg.tile.math_warpgroups * 4


@cute.jit
def load_one_token(cfg, x: Int64, token, wanted, warp, lane):
    """This warp's columns of a token, where `wanted`; issued early, for :func:`stage_one_token`."""
    base = warp * COLUMNS_PER_ITEM + lane * 8
    hidden = const_expr(cfg.layer.hidden_size)
    address = x + (Int64(token) * hidden + base) * 2
    inside = [wanted if base + p * 256 < hidden else Int32(0) for p in range(COLUMNS_PER_ITEM // 256)]
    return [ptx.ldg128_if(address + p * 512, inside[p]) for p in range(COLUMNS_PER_ITEM // 256)], inside


@cute.jit
def _load_item(x: Int64, hidden: cutlass.Constexpr, token, base, pieces: cutlass.Constexpr):
    """8 bf16 columns per lane and piece of 256 columns, all loads in flight; and which pieces lie inside the row."""
    inside = [Int32(1) if base + p * 256 < hidden else Int32(0) for p in range(pieces)]
    address = x + (Int64(token) * hidden + base) * 2
    return [ptx.ldg128_if(address + p * 512, inside[p]) for p in range(pieces)], inside


@cute.jit
def _store_rows(top_k: cutlass.Constexpr, hidden: cutlass.Constexpr, pool: Int64, slot_row, column, inside, words):
    """16 bytes to every live pool row of a token; lane s holds the row of slot s."""
    for s in cutlass.range_constexpr(top_k):
        row = cute.arch.shuffle_sync(slot_row, s)
        live = inside if row >= 0 else Int32(0)
        ptx.stg128_if(pool + (Int64(row) * hidden + column) * 2, *words, live)


@cute.jit
def _store_nvfp4(cfg, words, inside, target: tuple, slot_row, token, column, qs: Float32, lane):
    """Quantise 8 columns per lane and store them: one piece of a token."""
    values = []
    for w in cutlass.range_constexpr(4):
        values += list(ptx.unpack_bf16(words[w]))
    amax = ptx.abs_max8(values)
    amax = ptx.max_nan(amax, ptx.shuffle_xor1_f(amax))
    scale, inverse = ptx.nvfp4_block_scale(amax, qs)
    if const_expr(cfg.exchange):
        payload, row_bytes, scales, scale_row_bytes = target
        codes = [ptx.e2m1_pair_codes(values[2 * w], values[2 * w + 1], inverse) << (8 * w) for w in range(4)]
        word = codes[0] | codes[1] | codes[2] | codes[3]
        ptx.stg32_if(payload + Int64(token) * Int64(row_bytes) + column // 2, word, inside)
        byte = ptx.e4m3_pair_codes(scale, Float32(0.0)) & 0xFF
        first = inside if lane % 2 == 0 else Int32(0)
        ptx.stg8_if(scales + Int64(token) * Int64(scale_row_bytes) + column // 16, byte, first)
    else:
        pairs = [ptx.nvfp4_pair_as_f16(values[2 * w], values[2 * w + 1], inverse, scale) for w in range(4)]
        _store_rows(cfg.layer.top_k, cfg.layer.hidden_size, target[0], slot_row, column, inside, pairs)


@cute.jit
def _row_exponent(largest):
    """p of RN16(x * 2^p), from the bits of a row's largest bf16 magnitude."""
    biased = largest // 128
    p = Int32(141) - biased
    p = p if p < 126 else Int32(126)
    return Int32(0) if biased == 255 or largest == 0 else p


@cute.jit
def _add_maximum(loaded, pieces: cutlass.Constexpr, maximum: Int32, lane):
    """Raise a shared word to the largest bf16 magnitude (as bits) of what this warp has loaded."""
    largest = Int32(0)
    for p in cutlass.range_constexpr(pieces):
        for w in cutlass.range_constexpr(4):
            magnitude = loaded[p][w] & 0x7FFF7FFF
            largest = ptx.max_u32(largest, ptx.max_u32(magnitude & 0xFFFF, (magnitude >> 16) & 0xFFFF))
    largest = ptx.warp_max_u32(largest)
    if lane == 0:
        ptx.shared_max(maximum, largest)


@cute.jit
def _store_bf16(cfg, words, inside, target: tuple, slot_row, token, column, p):
    """Scale 8 columns per lane by 2^p and store them as f16: one piece of a token."""
    factor = ptx.as_float((p + 127) * 0x800000)
    scaled = []
    for w in cutlass.range_constexpr(4):
        low, high = ptx.unpack_bf16(words[w])
        scaled.append(ptx.pack_f16_saturating(ptx.mul_rn(low, factor), ptx.mul_rn(high, factor)))
    if const_expr(cfg.exchange):
        ptx.stg128_if(target[0] + Int64(token) * Int64(target[1]) + column * 2, *scaled, inside)
    else:
        _store_rows(cfg.layer.top_k, cfg.layer.hidden_size, target[0], slot_row, column, inside, scaled)


@cute.jit
def _store_row_scale(cfg, target: tuple, row_scale: Int64, slot_row, token, p, lane):
    """2^-p beside the row or rows of a token."""
    if const_expr(cfg.exchange):
        if lane == 0:
            ptx.stg32(target[2] + Int64(token) * Int64(target[3]), (Int32(127) - p) * 0x800000)
    elif slot_row >= 0:
        ptx.stg32(row_scale + Int64(slot_row) * 4, (Int32(127) - p) * 0x800000)


@cute.jit
def stage_one_token(
    cfg, loaded, inside, target: tuple, noted: Int32, maximum: Int32, scales: Int64, row_scale: Int64, token, warp, lane
):
    """The only token of this CTA, from the registers of its math warps.

    `noted`: shared pool rows of the token's slots (one rank), `maximum`: a zeroed shared word.
    """
    layer = cfg.layer
    base = warp * COLUMNS_PER_ITEM + lane * 8
    pieces = const_expr(COLUMNS_PER_ITEM // 256)
    if const_expr(layer.activation_mode == "bf16"):
        _add_maximum(loaded, pieces, maximum, lane)
    slot_row = Int32(-1)
    if const_expr(layer.activation_mode == "bf16" or not cfg.exchange):
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=cfg.tile.math_warpgroups * 128)
    if const_expr(not cfg.exchange):
        if lane < layer.top_k:
            slot_row = ptx.lds32(noted + lane * 4)
    if const_expr(layer.activation_mode == "bf16"):
        p = _row_exponent(ptx.lds32(maximum))
        for piece in cutlass.range_constexpr(pieces):
            _store_bf16(cfg, loaded[piece], inside[piece], target, slot_row, token, base + piece * 256, p)
        if warp == 0:
            _store_row_scale(cfg, target, row_scale, slot_row, token, p, lane)
    else:
        qs = ptx.as_float(ptx.ldg32(scales + layer.num_local_experts * 16))
        for piece in cutlass.range_constexpr(pieces):
            _store_nvfp4(cfg, loaded[piece], inside[piece], target, slot_row, token, base + piece * 256, qs, lane)


@cute.jit
def stage_nvfp4(cfg, x: Int64, target: tuple, route_rows: Int64, qs: Float32, first_token, own_tokens, warp, lane):
    """The NVFP4 quantisation of this CTA's tokens: codes and scales for peers to pull, or f16 values to all pool rows.

    `target`: {pool}, or {payload, row stride, scales, scale row stride} with an exchange.
    """
    hidden, top_k = const_expr(cfg.layer.hidden_size), const_expr(cfg.layer.top_k)
    width = const_expr(COLUMNS_PER_ITEM)
    chunks, pieces = const_expr(-(-hidden // width)), const_expr(width // 256)
    warps = const_expr(cfg.tile.math_warpgroups * 4)
    item = own_tokens * chunks * warp // warps
    end = own_tokens * chunks * (warp + 1) // warps
    known = Int32(-1)
    slot_row = Int32(-1)
    while item < end:
        local = item // chunks
        token = first_token + local
        base = (item - local * chunks) * width + lane * 8
        if const_expr(not cfg.exchange):
            if local != known:
                slot_row = ptx.ldg32_if(
                    route_rows + Int64(token * top_k + lane) * 4, Int32(1) if lane < top_k else Int32(0)
                )
                known = local
        loaded, inside = _load_item(x, hidden, token, base, pieces)
        for p in cutlass.range_constexpr(pieces):
            _store_nvfp4(cfg, loaded[p], inside[p], target, slot_row, token, base + p * 256, qs, lane)
        item = item + 1


@cute.jit
def _find_maxima(cfg, x: Int64, maxima: Int32, first_token, count, warp, lane):
    """Largest bf16 magnitude (as bits) of `count` token rows into the zeroed shared words `maxima`."""
    hidden = const_expr(cfg.layer.hidden_size)
    chunks = const_expr(-(-hidden // MAXIMA_COLUMNS))
    item = warp
    while item < count * chunks:
        local = item // chunks
        base = (item - local * chunks) * MAXIMA_COLUMNS + lane * 8
        loaded, _ = _load_item(x, hidden, first_token + local, base, MAXIMA_COLUMNS // 256)
        _add_maximum(loaded, MAXIMA_COLUMNS // 256, maxima + local * 4, lane)
        item = item + const_expr(cfg.tile.math_warpgroups * 4)


@cute.jit
def stage_bf16(
    cfg,
    x: Int64,
    target: tuple,
    route_rows: Int64,
    row_scale: Int64,
    maxima: Int32,
    first_token,
    own_tokens,
    warp,
    lane,
    mtid,
):
    """RN16(x * 2^p) of this CTA's tokens, p from a row's largest value, and 2^-p beside them.

    `target` as for :func:`stage_nvfp4`.
    """
    hidden, top_k = const_expr(cfg.layer.hidden_size), const_expr(cfg.layer.top_k)
    width = const_expr(COLUMNS_PER_ITEM)
    chunks, pieces = const_expr(-(-hidden // width)), const_expr(width // 256)
    warps = const_expr(cfg.tile.math_warpgroups * 4)
    start = Int32(0)
    while start < own_tokens:
        count = own_tokens - start
        count = count if count < BATCH_TOKENS else Int32(BATCH_TOKENS)
        if mtid < BATCH_TOKENS:
            ptx.sts32(maxima + mtid * 4, 0)
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=warps * 32)
        _find_maxima(cfg, x, maxima, first_token + start, count, warp, lane)
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=warps * 32)
        item = count * chunks * warp // warps
        end = count * chunks * (warp + 1) // warps
        known = Int32(-1)
        slot_row = Int32(-1)
        while item < end:
            local = item // chunks
            token = first_token + start + local
            base = (item - local * chunks) * width + lane * 8
            if const_expr(not cfg.exchange):
                if local != known:
                    mine = Int32(1) if lane < top_k else Int32(0)
                    slot_row = ptx.ldg32_if(route_rows + Int64(token * top_k + lane) * 4, mine)
                    known = local
            loaded, inside = _load_item(x, hidden, token, base, pieces)
            p = _row_exponent(ptx.lds32(maxima + local * 4))
            for piece in cutlass.range_constexpr(pieces):
                _store_bf16(cfg, loaded[piece], inside[piece], target, slot_row, token, base + piece * 256, p)
            if base == lane * 8:  # the row's first item
                _store_row_scale(cfg, target, row_scale, slot_row, token, p, lane)
            item = item + 1
        cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=warps * 32)
        start = start + BATCH_TOKENS
