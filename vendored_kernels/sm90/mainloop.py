# SPDX-License-Identifier: Apache-2.0
"""One tile's matrix product: packed weights decoded to f16 registers (operand A), tokens in shared memory (operand B).

Called by the kernel's math warpgroups. Owns the order of decode, wgmma groups and stage release; knows no epilogue.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from .. import ptx
from .config import CODE_BYTES, RECORD_BYTES

DESCRIPTOR_SW128 = 0x4000004000010000
"""wgmma descriptor bits of a K-major operand in 128-byte swizzle: 1024 bytes between groups of 8 rows."""


@cute.jit
def operand_addresses(cfg, stages_at: Int32, mt, kh, t128):
    """This thread's first code and scale addresses in stage 0, and the token descriptor's fixed part.

    Args:
        mt: which group of m64 tiles the warpgroup owns (its pair index in half tiles).
        kh: which record of the stage it reads (half tiles only, else 0).
    """
    if const_expr(cfg.tile.rows == 128):
        record = stages_at + kh * RECORD_BYTES  # kh is 0 without a split
        tile = mt
    elif const_expr(cfg.tile.math_warpgroups == 4):
        record = stages_at + mt // 2 * RECORD_BYTES
        tile = mt % 2
    else:
        record = stages_at + mt * RECORD_BYTES
        tile = Int32(0)
    codes = record + tile * (CODE_BYTES // 2) + t128 * 16
    scales = record + CODE_BYTES + tile * 512 + (t128 // 4) * 16
    descriptor = Int64(stages_at // 16) + Int64(DESCRIPTOR_SW128)
    return codes, scales, descriptor


@cute.jit
def multiply_tile(
    cfg,
    width_index: cutlass.Constexpr,
    accs,
    buffers,
    full,
    empty,
    codes0: Int32,
    scales0: Int32,
    descriptor0: Int64,
    kh,
    steps,
    stage,
    phase,
    lane,
):
    """accs = weights x tokens over `steps` reduction steps; returns the pipeline position (stage, phase).

    A stage is released one commit group late: its last wgmma has been waited for when the next stage's first group
    leaves one group in flight.
    """
    n = const_expr(cfg.tile.token_widths[width_index])
    per_stage = const_expr(cfg.steps_per_stage[width_index])
    split = const_expr(cfg.tile.split_k)
    m64 = const_expr(cfg.tile.m64_per_warpgroup)
    step_bytes = const_expr(cfg.tile.rows // 128 * RECORD_BYTES)
    weight_bytes = const_expr(per_stage * step_bytes)
    prev = stage
    for a in cutlass.range_constexpr(m64):
        accs[a].fill(0.0)
    for k in cutlass.range((steps + (per_stage - 1)) // per_stage, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        group = 0
        for sub in cutlass.range_constexpr(1 if split else per_stage):
            codes = codes0 + (stage * cfg.stage_bytes + sub * step_bytes)
            scales = scales0 + (stage * cfg.stage_bytes + sub * step_bytes)
            offset = stage * (cfg.stage_bytes // 16) + (weight_bytes // 16 + sub * n * 16) + kh * (n * 16)
            descriptor = descriptor0 + Int64(cute.arch.make_warp_uniform(offset))
            sc = [ptx.lds128(scales + m * 512) for m in range(m64)]
            qs = [[ptx.lds128(codes + m * (CODE_BYTES // 2))] for m in range(m64)]
            for kg in cutlass.range_constexpr(2):
                for m in cutlass.range_constexpr(m64):
                    if const_expr(len(qs[m]) == 1):
                        qs[m].append(ptx.lds128(codes + (m * (CODE_BYTES // 2) + CODE_BYTES // 4)))
                    a_regs = buffers[group % 2]
                    for jj in cutlass.range_constexpr(4):
                        f = kg * 4 + jj
                        o = ptx.decode_fragment(qs[m][f // 4][f % 4], sc[m][f // 2], f % 2 == 1)
                        for v in cutlass.range_constexpr(4):
                            a_regs[jj * 4 + v] = o[v]
                    warpgroup.fence()
                    for jj in cutlass.range_constexpr(4):
                        out = ptx.wgmma_f16(
                            n,
                            [accs[m][i] for i in range(n // 2)],
                            [a_regs[jj * 4 + v] for v in range(4)],
                            descriptor + (kg * n * 8 + jj * 2),
                        )
                        for i in cutlass.range_constexpr(n // 2):
                            accs[m][i] = out[i]
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if const_expr(group == 0):
                        if k > 0:
                            if lane == 0:
                                cute.arch.mbarrier_arrive(empty + prev)
                    group += 1
        prev = stage
        stage = stage + 1
        if stage == cfg.stages:
            stage = Int32(0)
            phase = phase ^ 1
    warpgroup.wait_group(0)
    if lane == 0:
        cute.arch.mbarrier_arrive(empty + prev)
    return stage, phase


@cute.jit
def add_halves(cfg, width_index: cutlass.Constexpr, acc, exchange: Int32, mt, kh):
    """Half tiles: the second warpgroup pair's partial sums to the first, a few floats per pass."""
    n = const_expr(cfg.tile.token_widths[width_index])
    per_pass = const_expr(min(cfg.sum_floats, n // 2))
    for p0 in cutlass.range_constexpr(0, n // 2, per_pass):
        if kh == 1:
            for i in cutlass.range_constexpr(min(per_pass, n // 2 - p0)):
                ptx.stsf(exchange + i * 512, acc[p0 + i])
        cute.arch.barrier(barrier_id=5 + mt, number_of_threads=256)
        if kh == 0:
            for i in cutlass.range_constexpr(min(per_pass, n // 2 - p0)):
                acc[p0 + i] = acc[p0 + i] + ptx.ldsf(exchange + i * 512)
            cute.arch.barrier_arrive(barrier_id=7 + mt, number_of_threads=256)
        else:
            cute.arch.barrier(barrier_id=7 + mt, number_of_threads=256)
