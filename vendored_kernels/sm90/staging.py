# SPDX-License-Identifier: Apache-2.0
"""From routing ids and bf16 tokens to the f16 pool: count, place, quantise or scale, publish.

Every CTA counts all ids in shared memory and so knows the pool layout without a grid barrier; it then places and writes
the rows of its own contiguous share of the tokens, one token at a time. Called by the kernel at the start of a launch;
knows no tiles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .. import ptx
from .config import STRIP_COLUMNS

MATH_BARRIER = 9
"""Named barrier of all math warps; 1 and 2 are the warpgroups' own, 10 the scheduler's."""

MAXIMA = 4
"""Shared words for the largest magnitudes of successive tokens (bf16 activation mode), used in turns."""

NOTED_WORDS = MAXIMA + 16
"""Shared words of staging: the maxima, then the pool rows of the first token's slots (one rank; MAX_TOP_K of them)."""


@cute.jit
def clear_maxima(noted: Int32):
    """One thread, before the launch's first barrier: those of the first two tokens; staging clears the others."""
    ptx.sts64(noted, Int64(0))


def _columns(cfg, warp, lane):
    """First of the lane's 8 columns in each strip of its warp."""
    warps = cfg.tile.math_warpgroups * 4
    return [(strip * warps + warp) * STRIP_COLUMNS + lane * 8 for strip in range(cfg.staged_strips)]


@cute.jit
def _inside(cfg, column, wanted):
    return wanted if column < cfg.layer.hidden_size else Int32(0)


@cute.jit
def load_token(cfg, x: Int64, token, wanted, warp, lane):
    """This warp's strips of a token, where `wanted`, all in flight; of the CTA's first token while routes are counted."""
    row = x + Int64(token) * const_expr(cfg.layer.hidden_size * 2)
    return [ptx.ldg128_if(row + column * 2, _inside(cfg, column, wanted)) for column in _columns(cfg, warp, lane)]


@cute.jit
def _store_rows(top_k: cutlass.Constexpr, hidden: cutlass.Constexpr, pool: Int64, slot_row, column, inside, words):
    """16 bytes to every live pool row of a token; lane s holds the row of slot s."""
    for s in cutlass.range_constexpr(top_k):
        row = cute.arch.shuffle_sync(slot_row, s)
        live = inside if row >= 0 else Int32(0)
        ptx.stg128_if(pool + (Int64(row) * hidden + column) * 2, *words, live)


@cute.jit
def _store_nvfp4(cfg, words, inside, target: tuple, slot_row, token, column, qs: Float32, lane):
    """Quantise 8 columns per lane and store them: one strip of a token."""
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
def _add_maximum(loaded, strips: cutlass.Constexpr, maximum: Int32, lane):
    """Raise a shared word to the largest bf16 magnitude (as bits) of what this warp has loaded."""
    largest = Int32(0)
    for p in cutlass.range_constexpr(strips):
        for w in cutlass.range_constexpr(4):
            magnitude = loaded[p][w] & 0x7FFF7FFF
            largest = ptx.max_u32(largest, ptx.max_u32(magnitude & 0xFFFF, (magnitude >> 16) & 0xFFFF))
    largest = ptx.warp_max_u32(largest)
    if lane == 0:
        ptx.shared_max(maximum, largest)


@cute.jit
def _store_bf16(cfg, words, inside, target: tuple, slot_row, token, column, p):
    """Scale 8 columns per lane by 2^p and store them as f16: one strip of a token."""
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
def stage_tokens(
    cfg,
    x: Int64,
    first: list,
    target: tuple,
    route_rows: Int64,
    noted: Int32,
    scales: Int64,
    row_scale: Int64,
    first_token,
    own_tokens,
    warp,
    lane,
):
    """This CTA's tokens, one after another, by all math warps; while one is stored the next one is on its way.

    bf16 mode: RN16(x * 2^p), p from the row's largest value, and 2^-p beside it. nvfp4 mode: the NVFP4 quantisation, as
    codes and scales for peers to pull, or as f16 values. `target`: {pool}, a row for each slot of the token, or {payload,
    row stride, scales, scale row stride} with an exchange. `first`: the first token's strips. `noted`: NOTED_WORDS with
    cleared maxima; the caller's threads may still be placing routes, here is a barrier before their rows are read.
    """
    layer, top_k = cfg.layer, const_expr(cfg.layer.top_k)
    strips = const_expr(cfg.staged_strips)
    words = cute.make_rmem_tensor((strips * 4,), Int32)
    for i in cutlass.range_constexpr(strips * 4):
        words[i] = first[i // 4][i % 4]
    qs = Float32(0.0)
    if const_expr(layer.activation_mode == "nvfp4"):
        qs = ptx.as_float(ptx.ldg32(scales + layer.num_local_experts * 16))
        if const_expr(not cfg.exchange):
            cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=cfg.tile.math_warpgroups * 128)
    has_slot = Int32(1) if lane < top_k else Int32(0)
    slot_row = Int32(-1)
    for local in cutlass.range(own_tokens, unroll=1):
        token = first_token + local
        held = [[words[strip * 4 + w] for w in range(4)] for strip in range(strips)]
        p = Int32(0)
        if const_expr(layer.activation_mode == "bf16"):
            maximum = noted + (local & (MAXIMA - 1)) * 4
            _add_maximum(held, strips, maximum, lane)
            cute.arch.barrier(barrier_id=MATH_BARRIER, number_of_threads=cfg.tile.math_warpgroups * 128)
            p = _row_exponent(ptx.lds32(maximum))
            if warp == 0 and lane == 0:  # whose last readers have passed this barrier; raised again behind the next one
                ptx.sts32(noted + ((local + 2) & (MAXIMA - 1)) * 4, 0)
        more = Int32(1) if local + 1 < own_tokens else Int32(0)
        following = load_token(cfg, x, token + 1, more, warp, lane)
        next_row = Int32(-1)
        if const_expr(not cfg.exchange):
            if local == 0 and lane < top_k:
                slot_row = ptx.lds32(noted + (MAXIMA + lane) * 4)
            next_row = ptx.ldg32_if(route_rows + (Int64(token + 1) * top_k + lane) * 4, more * has_slot)
        columns = _columns(cfg, warp, lane)
        for strip in cutlass.range_constexpr(strips):
            inside = _inside(cfg, columns[strip], Int32(1))
            if const_expr(layer.activation_mode == "bf16"):
                _store_bf16(cfg, held[strip], inside, target, slot_row, token, columns[strip], p)
            else:
                _store_nvfp4(cfg, held[strip], inside, target, slot_row, token, columns[strip], qs, lane)
        if const_expr(layer.activation_mode == "bf16"):
            if warp == 0:
                _store_row_scale(cfg, target, row_scale, slot_row, token, p, lane)
        for i in cutlass.range_constexpr(strips * 4):
            words[i] = following[i // 4][i % 4]
        slot_row = next_row
