# SPDX-License-Identifier: Apache-2.0
"""PTX that only the Blackwell kernel issues by hand, beside that of ../ptx.py and under the same rules."""

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..ptx import _memory_op, _pure_op

fence_after_sync = _memory_op("tcgen05.fence::after_thread_sync;", "")
fence_before_sync = _memory_op("tcgen05.fence::before_thread_sync;", "")
sts8 = _memory_op("{.reg .b16 h; cvt.u16.u32 h, $1; st.shared.b8 [$0], h;}", "rr")
sts16 = _memory_op("{.reg .b16 h; cvt.u16.u32 h, $1; st.shared.b16 [$0], h;}", "rr")
sts_pair = _memory_op("st.shared.v2.b32 [$0], {$1,$2};", "rrr")
# The other CTA of a pair: addresses of its shared memory, and order that reaches it.
of_cta = _pure_op("mapa.shared::cluster.u32 $0, $1, $2;", "rr", "r")
cluster_lds32 = _memory_op("ld.shared::cluster.b32 $0, [$1];", "r", "r")
cluster_sts32 = _memory_op("st.shared::cluster.b32 [$0], $1;", "rr")
cluster_arrive_release = _memory_op("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", "r")
cluster_arrive_relaxed = _memory_op("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [$0];", "r")
fence_release_own_shared = _memory_op("fence.release.sync_restrict::shared::cta.cluster;", "")
_TRY_WAIT = (
    "{{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.{}.cluster.shared::cta.b64 p, [$0], $1, 10000000;\n"
    "@p bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}}"
)
cluster_wait_acquire = _memory_op(_TRY_WAIT.format("acquire"), "rr")
cluster_wait_relaxed = _memory_op(_TRY_WAIT.format("relaxed"), "rr")
shuffle_xor4 = _memory_op("shfl.sync.bfly.b32 $0, $1, 4, 31, -1;", "r", "r")
shuffle_xor16_f = _memory_op("shfl.sync.bfly.b32 $0, $1, 16, 31, -1;", "f", "f")
round_bf16 = _pure_op("{.reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h;}", "f", "r")

nvfp4_block_code = _pure_op(
    # (amax, qs) -> (e4m3 byte, qs / scale; 0 for a zero scale, NaN for a NaN one): docs/numerics.md section 2
    "{.reg .f32 s, z, d; .reg .b16 e, h, l; .reg .b32 w; .reg .pred p; mul.rn.f32 s, $3, 0f3E2AAAAB; "
    "mul.rn.f32 s, $2, s; mov.f32 z, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 e, z, s; cvt.u32.u16 $0, e; "
    "cvt.rn.f16x2.e4m3x2 w, e; mov.b32 {l, h}, w; cvt.f32.f16 s, l; div.rn.f32 d, $3, s; "
    "setp.eq.f32 p, s, 0f00000000; selp.f32 $1, 0f00000000, d, p;}",
    "ff",
    "rf",
    early=True,
)


@dsl_user_op
def nvfp4_codes8(values, inverse, *, loc=None, ip=None):
    """8 fp32 values times `inverse`, each rounded to e2m1: one word, the first value in the low nibble.

    A zero `inverse` marks a zero block, whose codes are all 0 (the product alone would keep the signs).
    """
    scaled = "".join(f"mul.rn.f32 v{i}, ${i + 1}, $9; " for i in range(8))
    pairs = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, v{2 * i + 1}, v{2 * i}; " for i in range(4))
    text = (
        "{.reg .f32 v0, v1, v2, v3, v4, v5, v6, v7; .reg .b8 b0, b1, b2, b3; .reg .pred p; .reg .b32 w; "
        + scaled
        + pairs
        + "mov.b32 w, {b0, b1, b2, b3}; setp.eq.f32 p, $9, 0f00000000; selp.b32 $0, 0, w, p;}"
    )
    result = llvm.inline_asm(
        T.i32(),
        [Float32(v).ir_value(loc=loc, ip=ip) for v in (*values, inverse)],
        text,
        "=r" + ",f" * 9,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(result)


@dsl_user_op
def load_tmem(address, count: int, *, loc=None, ip=None):
    """`count` TMEM columns of this warp's 32 lanes, one fp32 each per lane; complete when it returns.

    Load and wait are one piece of assembly, so that nothing is scheduled between them.
    """
    registers = ", ".join(f"${i}" for i in range(count))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [${count}];\ntcgen05.wait::ld.sync.aligned;"
    struct = llvm.StructType.get_literal([T.f32()] * count)
    result = llvm.inline_asm(
        struct,
        [Int32(address).ir_value(loc=loc, ip=ip)],
        text,
        ",".join(["=f"] * count + ["r", "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(count)]
