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
def operand_addresses(cfg, weights_at: Int32, tokens_at: Int32, wg, t128):
    """This thread's first code and scale addresses in weight stage 0, and the descriptor of token stage 0."""
    record, tile = weights_at + wg * RECORD_BYTES, Int32(0)
    if const_expr(cfg.tile.rows == 128):
        record, tile = weights_at, wg
    codes = record + tile * (CODE_BYTES // 2) + t128 * 16
    scales = record + CODE_BYTES + tile * 512 + (t128 // 4) * 16
    descriptor = Int64(cute.arch.make_warp_uniform(tokens_at // 16)) + Int64(DESCRIPTOR_SW128)
    return codes, scales, descriptor


@cute.jit
def multiply_tile(
    cfg,
    width_index: cutlass.Constexpr,
    accs,
    buffers,
    bars,
    codes0: Int32,
    scales0: Int32,
    descriptor0: Int64,
    steps,
    weight_stage,
    weight_phase,
    token_stage,
    token_phase,
    lane,
):
    """accs = weights x tokens over `steps` reduction steps; returns both pipelines' positions.

    A stage is released one commit group late: its last wgmma has been waited for when the next stage's first group
    leaves one group in flight.
    """
    wfull, wempty, tfull, tempty = bars[0], bars[1], bars[2], bars[3]
    n = const_expr(cfg.tile.token_widths[width_index])
    per_stage = const_expr(cfg.steps_per_stage)
    step_bytes = const_expr(2 * RECORD_BYTES // per_stage)
    m64 = const_expr(cfg.tile.m64_per_warpgroup)
    prev_weight, prev_token = weight_stage, token_stage
    for a in cutlass.range_constexpr(m64):
        accs[a].fill(0.0)
    for k in cutlass.range((steps + (per_stage - 1)) // per_stage, unroll=1):
        cute.arch.mbarrier_wait(wfull + weight_stage, weight_phase)
        cute.arch.mbarrier_wait(tfull + token_stage, token_phase)
        group = 0
        # Made uniform once per stage, constants added behind it: else ptxas moves every descriptor through R2UR.
        descriptor = descriptor0 + Int64(cute.arch.make_warp_uniform(token_stage * (cfg.token_stage_bytes // 16)))
        for sub in cutlass.range_constexpr(per_stage):
            codes = codes0 + (weight_stage * cfg.weight_stage_bytes + sub * step_bytes)
            scales = scales0 + (weight_stage * cfg.weight_stage_bytes + sub * step_bytes)
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
                            descriptor + (sub * n * 16 + kg * n * 8 + jj * 2),
                        )
                        for i in cutlass.range_constexpr(n // 2):
                            accs[m][i] = out[i]
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if const_expr(group == 0):
                        if k > 0:
                            if lane == 0:
                                cute.arch.mbarrier_arrive(wempty + prev_weight)
                                cute.arch.mbarrier_arrive(tempty + prev_token)
                    group += 1
        prev_weight, prev_token = weight_stage, token_stage
        weight_stage = weight_stage + 1
        if weight_stage == cfg.weight_stages:
            weight_stage = Int32(0)
            weight_phase = weight_phase ^ 1
        token_stage = token_stage + 1
        if token_stage == cfg.token_stages:
            token_stage = Int32(0)
            token_phase = token_phase ^ 1
    warpgroup.wait_group(0)
    if lane == 0:
        cute.arch.mbarrier_arrive(wempty + prev_weight)
        cute.arch.mbarrier_arrive(tempty + prev_token)
    return weight_stage, weight_phase, token_stage, token_phase
