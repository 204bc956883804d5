# SPDX-License-Identifier: Apache-2.0
"""What happens to a tile's accumulators: SwiGLU and requantisation after fc1, the result row's encoding after fc2.

Called by the kernel's math warpgroups after a tile's last wgmma; rounding points follow docs/numerics.md section 4.
Fragment facts: a thread holds tokens 8c+2q and 8c+2q+1 (q = lane % 4) of physical rows g and g+8 (g = lane / 4) of its
warp's 16 rows; acc[4c], acc[4c+1] are row g, acc[4c+2], acc[4c+3] row g+8. fc1: g is gate, g+8 up of one channel; fc2:
logical columns 2g and 2g+1. Accumulators carry a factor 2^-14 that the alphas undo.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import ptx
from ..common.waits import COUNT_BITS
from ..common.wire import encode_fp4, encode_fp8


def _runs(count: int):
    """[0, count) in runs of 4, 2, 1: stmatrix stores that many 8x8 matrices."""
    runs, i = [], 0
    while i < count:
        j = 4 if count - i >= 4 else 2 if count - i >= 2 else 1
        runs.append((i, i + j))
        i += j
    return runs


@cute.jit
def _activate(cfg, swiglu, gate, up):
    """Clamp and SwiGLU of one channel of one token."""
    if const_expr(cfg.layer.clamp is not None):
        gate = ptx.clamp_above(gate, float(cfg.layer.clamp))
        up = ptx.clamp_both(up, float(cfg.layer.clamp))
    return swiglu(gate, up)


@cute.jit
def fc1_nvfp4(
    cfg,
    swiglu,
    n: cutlass.Constexpr,
    acc,
    m: cutlass.Constexpr,
    expert_scales,
    staging: Int32,
    rows_at: Int32,
    weights_at: Int32,
    h_tile: Int64,
    channel0,
    valid,
    barrier_id,
    t128,
    lane,
    warp4,
):
    """SwiGLU in registers, fp32 through shared memory, blocks of 16 channels quantised and stored as f16 values."""
    inter = const_expr(cfg.layer.intermediate_size)
    pitch = const_expr(cfg.fc1_pitch)
    alpha_gate, alpha_up, qs = expert_scales[0], expert_scales[1], expert_scales[3]
    mine = staging + (lane % 4) * 2 * pitch + (warp4 * 8 + lane // 4) * 4
    for p0 in cutlass.range_constexpr(0, n, cfg.pass_tokens):
        p1 = const_expr(min(n, p0 + cfg.pass_tokens))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for c in cutlass.range_constexpr(p0 // 8, p1 // 8):
            for i in cutlass.range_constexpr(2):
                gate = ptx.mul_rn(acc[4 * c + i], alpha_gate)
                up = ptx.mul_rn(acc[4 * c + 2 + i], alpha_up)
                ptx.stsf(mine + ((c * 8 - p0 + i) * pitch), _activate(cfg, swiglu, gate, up))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for p in cutlass.range_constexpr(((p1 - p0) * 4 + 127) // 128):
            item = t128 + p * 128
            if item < (p1 - p0) * 4:
                token = item // 4
                chunk = item % 4
                source = staging + token * pitch + chunk * 32
                values = list(ptx.lds128f(source)) + list(ptx.lds128f(source + 16))
                if const_expr(cfg.layer.weigh_before_requant):
                    weight = ptx.ldsf(weights_at + (p0 + token) * 4)
                    values = [ptx.mul_rn(v, weight) for v in values]
                amax = ptx.abs_max8(values)
                amax = ptx.max_nan(amax, ptx.shuffle_xor1_f(amax))
                scale, inverse = ptx.nvfp4_block_scale(amax, qs)
                words = [ptx.nvfp4_pair_as_f16(values[2 * w], values[2 * w + 1], inverse, scale) for w in range(4)]
                channel = channel0 + m * 32 + chunk * 8
                if p0 + token < valid and channel < inter:
                    ptx.stg128(h_tile + (Int64(p0 + token) * inter + channel) * 2, *words)


@cute.jit
def fc1_bf16(
    cfg,
    swiglu,
    n: cutlass.Constexpr,
    acc,
    m: cutlass.Constexpr,
    expert_scales,
    staging: Int32,
    rows_at: Int32,
    weights_at: Int32,
    h_tile: Int64,
    channel0,
    valid,
    barrier_id,
    t128,
    lane,
    warp4,
):
    """SwiGLU, bf16, the expert's power of two and f16 in registers; through shared memory for 16-byte stores."""
    inter = const_expr(cfg.layer.intermediate_size)
    pitch = const_expr(cfg.fc1_pitch)
    alpha_gate, alpha_up, factor = expert_scales[0], expert_scales[1], expert_scales[3]
    mine = staging + warp4 * 16 + lane * pitch
    for p0 in cutlass.range_constexpr(0, n, cfg.pass_tokens):
        p1 = const_expr(min(n, p0 + cfg.pass_tokens))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for c0, c1 in _runs((p1 - p0) // 8):
            packed = []
            for c in cutlass.range_constexpr(p0 // 8 + c0, p0 // 8 + c1):
                row_scales = ptx.lds_pair_f(rows_at + (c * 8 + (lane % 4) * 2) * 4)
                if const_expr(cfg.layer.weigh_before_requant):
                    weights = ptx.lds_pair_f(weights_at + (c * 8 + (lane % 4) * 2) * 4)
                values = []
                for i in cutlass.range_constexpr(2):
                    gate = ptx.mul_rn(ptx.mul_rn(acc[4 * c + i], row_scales[i]), alpha_gate)
                    up = ptx.mul_rn(ptx.mul_rn(acc[4 * c + 2 + i], row_scales[i]), alpha_up)
                    value = _activate(cfg, swiglu, gate, up)
                    if const_expr(cfg.layer.weigh_before_requant):
                        value = ptx.mul_rn(value, weights[i])
                    values.append(value)
                low, high = ptx.unpack_bf16(ptx.pack_bf16(values[0], values[1]))
                packed.append(ptx.pack_f16_saturating(ptx.mul_rn(low, factor), ptx.mul_rn(high, factor)))
            ptx.stsm_transposed(mine + c0 * 8 * pitch, packed)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for p in cutlass.range_constexpr(((p1 - p0) * 4 + 127) // 128):
            item = t128 + p * 128
            if item < (p1 - p0) * 4:
                token = item // 4
                chunk = item % 4
                words = ptx.lds128(staging + token * pitch + chunk * 16)
                channel = channel0 + m * 32 + chunk * 8
                if p0 + token < valid and channel < inter:
                    ptx.stg128(h_tile + (Int64(p0 + token) * inter + channel) * 2, *words)


@cute.jit
def _result_row(cfg, bases: Int32, results: Int64, word, row_bytes: cutlass.Constexpr):
    """Address of a route's result row; with several ranks `word` also names the token owner (scheduler.token_warp)."""
    if const_expr(cfg.layer.ep_size == 1):
        return results + Int64(word) * row_bytes
    return ptx.lds64(bases + (word >> COUNT_BITS) * 8) + results + Int64(word & ((1 << COUNT_BITS) - 1)) * row_bytes


@cute.jit
def fc2_direct(
    cfg,
    n: cutlass.Constexpr,
    accs,
    expert_scales,
    rows_at: Int32,
    bases: Int32,
    results: Int64,
    column0,
    valid,
):
    """bf16 result rows straight from registers: 8 lanes fill one 32-byte sector."""
    hidden = const_expr(cfg.layer.hidden_size)
    alpha = expert_scales[2]
    thread = ptx.thread_index()  # read here: kept over the tile loop, what follows from it would be spilled
    lane = thread % 32
    column = column0 + thread // 32 % 4 * 16 + lane // 4 * 2
    for c in cutlass.range_constexpr(n // 8):
        token = c * 8 + (lane % 4) * 2
        routes = ptx.lds_pair(rows_at + token * 4)
        for i in cutlass.range_constexpr(2):
            if token + i < valid:
                row = _result_row(cfg, bases, results, routes[i], hidden * 2) + column * 2
                for m in cutlass.range_constexpr(cfg.tile.m64_per_warpgroup):
                    if column + m * 64 < hidden:
                        low = ptx.mul_rn(accs[m][4 * c + i], alpha)
                        high = ptx.mul_rn(accs[m][4 * c + 2 + i], alpha)
                        ptx.stg32(row + m * 128, ptx.pack_bf16(low, high))


@cute.jit
def fc2_encoded(
    cfg,
    n: cutlass.Constexpr,
    acc,
    m: cutlass.Constexpr,
    expert_scales,
    staging: Int32,
    rows_at: Int32,
    bases: Int32,
    results: Int64,
    result_scales: Int64,
    column0,
    valid,
    barrier_id,
    t128,
    lane,
    warp4,
):
    """bf16 rows through shared memory, then fp8 or fp4 with block scales; columns column0 + m*64 .. + 63."""
    layer = cfg.layer
    hidden = const_expr(layer.hidden_size)
    pitch = const_expr(cfg.fc2_pitch)
    alpha = expert_scales[2]
    mine = staging + (lane % 4) * 2 * pitch + (warp4 * 16 + lane // 4 * 2) * 2
    for p0 in cutlass.range_constexpr(0, n, cfg.pass_tokens):
        p1 = const_expr(min(n, p0 + cfg.pass_tokens))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for c in cutlass.range_constexpr(p0 // 8, p1 // 8):
            for i in cutlass.range_constexpr(2):
                low = ptx.mul_rn(acc[4 * c + i], alpha)
                high = ptx.mul_rn(acc[4 * c + 2 + i], alpha)
                ptx.sts32(mine + (c * 8 - p0 + i) * pitch, ptx.pack_bf16(low, high))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        for p in cutlass.range_constexpr(((p1 - p0) * 8 + 127) // 128):
            item = t128 + p * 128
            if item < (p1 - p0) * 8:
                token = item // 8
                chunk = item % 8
                column = column0 + m * 64 + chunk * 8
                words = ptx.lds128(staging + token * pitch + chunk * 16)
                store = Int32(1) if p0 + token < valid and column < hidden else Int32(0)
                route = ptx.lds32(rows_at + (p0 + token) * 4)
                route = route if store != 0 else Int32(0)
                data = _result_row(cfg, bases, results, route, layer.data_row_bytes)
                scale = _result_row(cfg, bases, result_scales, route, layer.scale_row_bytes)
                if const_expr(layer.combine_format == "fp8"):
                    first = store if chunk % 4 == 0 else Int32(0)
                    encode_fp8(words, data + column, scale + column // 32, store, first)
                else:
                    first = store if chunk % 2 == 0 else Int32(0)
                    encode_fp4(words, data + column // 2, scale + column // 16 * 2, store, first)
