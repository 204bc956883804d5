# SPDX-License-Identifier: Apache-2.0
"""Every PTX instruction that the kernels issue by hand, one small function each.

Called by the kernel modules inside a trace. Rules of this file: a function that touches memory is side-effecting and
clobbers memory, so that it stays between the barriers around it; arithmetic is pure; every fp32 operation that must not
be contracted into an fma is written with `.rn`. Flags (counters, epochs, abort words) have their own access functions
with order and scope in the name; no other function may be used on them.
"""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .common.formulas import swiglu_text

_I32 = (Int32, lambda: T.i32(), "r")
_I64 = (Int64, lambda: T.i64(), "l")
_F32 = (Float32, lambda: T.f32(), "f")
_KIND = {"r": _I32, "l": _I64, "f": _F32}


def _op(text, ins, outs, args, *, volatile, loc, ip, early=False):
    """Inline assembly: `ins`/`outs` are constraint letters (r i32, l i64, f f32); outputs are numbered first."""
    values = [_KIND[c][0](a).ir_value(loc=loc, ip=ip) for c, a in zip(ins, args, strict=True)]
    mark = "=&" if early else "="
    constraints = [mark + c for c in outs] + list(ins) + (["~{memory}"] if volatile else [])
    if len(outs) == 0:
        result = None
    elif len(outs) == 1:
        result = _KIND[outs[0]][1]()
    else:
        result = llvm.StructType.get_literal([_KIND[c][1]() for c in outs])
    res = llvm.inline_asm(
        result,
        values,
        text,
        ",".join(constraints),
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if len(outs) == 0:
        return None
    if len(outs) == 1:
        return _KIND[outs[0]][0](res)
    return tuple(_KIND[c][0](llvm.extractvalue(_KIND[c][1](), res, [i], loc=loc, ip=ip)) for i, c in enumerate(outs))


def _memory_op(text, ins, outs="", *, early=False):
    """A function (addresses and values) -> result(s) for one memory instruction."""

    @dsl_user_op
    def issue(*args, loc=None, ip=None):
        return _op(text, ins, outs, args, volatile=True, loc=loc, ip=ip, early=early)

    return issue


def _pure_op(text, ins, outs, *, early=False):
    """A function of register values only."""

    @dsl_user_op
    def compute(*args, loc=None, ip=None):
        return _op(text, ins, outs, args, volatile=False, loc=loc, ip=ip, early=early)

    return compute


# ---------------------------------------------------------------------------------------------------- flags and fences
flag_load_acquire_gpu = _memory_op("ld.acquire.gpu.global.b32 $0, [$1];", "l", "r")
flag_load_acquire_sys = _memory_op("ld.acquire.sys.global.b32 $0, [$1];", "l", "r")
flag_add_release_gpu = _memory_op("red.release.gpu.global.add.u32 [$0], $1;", "lr")
flag_store_release_sys = _memory_op("st.release.sys.global.b32 [$0], $1;", "lr")
flag_fetch_add_acq_rel_gpu = _memory_op("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", "lr", "r")
flag_exchange_acq_rel_gpu = _memory_op("atom.acq_rel.gpu.global.exch.b32 $0, [$1], $2;", "lr", "r")
claim_add_relaxed_gpu = _memory_op("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", "lr", "r")
fence_proxy_async = _memory_op("fence.proxy.async;", "")
# Flags in a peer's memory. A cell's store is relaxed behind a fence of the same thread: one fence for many cells.
peer_flag_load_acquire_sys64 = _memory_op("ld.acquire.sys.global.b64 $0, [$1];", "l", "l")
peer_flag_add_release_sys64 = _memory_op("red.release.sys.global.add.u64 [$0], $1;", "ll")
peer_flag_store_relaxed_sys64 = _memory_op("st.relaxed.sys.global.b64 [$0], $1;", "ll")
fence_acq_rel_sys = _memory_op("fence.acq_rel.sys;", "")

# ------------------------------------------------------------------------------------------------------- plain global
ldg32 = _memory_op("ld.global.b32 $0, [$1];", "l", "r")
ldg64 = _memory_op("ld.global.b64 $0, [$1];", "l", "l")
ldg128f = _memory_op("ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", "l", "ffff")
stg32 = _memory_op("st.global.b32 [$0], $1;", "lr")
stg64 = _memory_op("st.global.b64 [$0], $1;", "ll")
stg_pair = _memory_op("st.global.v2.b32 [$0], {$1,$2};", "lrr")
stg128 = _memory_op("st.global.v4.b32 [$0], {$1,$2,$3,$4};", "lrrrr")
stg8 = _memory_op("{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h;}", "lr")
stg16 = _memory_op("{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h;}", "lr")
_IF = "{.reg .pred p; setp.ne.s32 p, %s, 0; "
stg32_if = _memory_op(_IF % "$2" + "@p st.global.b32 [$0], $1;}", "lrr")
stg8_if = _memory_op(_IF % "$2" + ".reg .b16 h; cvt.u16.u32 h, $1; @p st.global.b8 [$0], h;}", "lrr")
stg128_if = _memory_op(_IF % "$5" + "@p st.global.v4.b32 [$0], {$1,$2,$3,$4};}", "lrrrrr")
ldg32_if = _memory_op(_IF % "$2" + "mov.b32 $0, -1; @p ld.global.b32 $0, [$1];}", "lr", "r", early=True)
ldg8_if = _memory_op(
    _IF % "$2" + ".reg .b16 h; mov.b16 h, 0; @p ld.global.b8 h, [$1]; cvt.u32.u16 $0, h;}", "lr", "r", early=True
)
ldg16_if = _memory_op(
    _IF % "$2" + ".reg .b16 h; mov.b16 h, 0; @p ld.global.b16 h, [$1]; cvt.u32.u16 $0, h;}", "lr", "r", early=True
)
ldg_pair_if = _memory_op(
    _IF % "$3" + "mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0,$1}, [$2];}", "lr", "rr", early=True
)
ldg128_if = _memory_op(
    _IF % "$5"
    + "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0,$1,$2,$3}, [$4];}",
    "lr",
    "rrrr",
    early=True,
)

# ------------------------------------------------------------------------------------------------------------- shared
lds32 = _memory_op("ld.shared.b32 $0, [$1];", "r", "r")
lds64 = _memory_op("ld.shared.b64 $0, [$1];", "r", "l")
lds_pair = _memory_op("ld.shared.v2.b32 {$0,$1}, [$2];", "r", "rr")
lds_pair_f = _memory_op("ld.shared.v2.f32 {$0,$1}, [$2];", "r", "ff")
lds128 = _memory_op("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "r", "rrrr")
lds128f = _memory_op("ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "r", "ffff")
ldsf = _memory_op("ld.shared.f32 $0, [$1];", "r", "f")
sts32 = _memory_op("st.shared.b32 [$0], $1;", "rr")
sts64 = _memory_op("st.shared.b64 [$0], $1;", "rl")
stsf = _memory_op("st.shared.f32 [$0], $1;", "rf")
shared_add = _memory_op("atom.shared.add.u32 $0, [$1], $2;", "rr", "r")
shared_max = _memory_op("red.shared.max.u32 [$0], $1;", "rr")
shared_add_if = _memory_op(_IF % "$2" + "@p red.shared.add.u32 [$0], $1;}", "rrr")
bulk_load = _memory_op(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "rlrr"
)


@dsl_user_op
def stsm_transposed(addr, values, *, loc=None, ip=None):
    """1, 2 or 4 transposed 8x8 b16 matrices to shared memory; lanes 0..8*len-1 give the row addresses."""
    n = len(values)
    regs = ", ".join(f"${i + 1}" for i in range(n))
    text = f"stmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16 [$0], {{{regs}}};"
    _op(text, "r" + "r" * n, "", (addr, *values), volatile=True, loc=loc, ip=ip)


# ----------------------------------------------------------------------------------------------------- warp exchanges
broadcast_lane0 = _memory_op("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "r", "r")
shuffle_up = _memory_op("shfl.sync.up.b32 $0, $1, $2, 0, -1;", "rr", "r")
shuffle_xor1_f = _memory_op("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "f", "f")
shuffle_xor1 = _memory_op("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "r", "r")
shuffle_xor2 = _memory_op("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", "r", "r")
barrier_is_done = _memory_op(
    "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p;}", "rr", "r"
)
thread_index = _memory_op("mov.u32 $0, %tid.x;", "", "r")
clock64 = _memory_op("mov.u64 $0, %clock64;", "", "l")
ballot = _memory_op("{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1;}", "r", "r")
warp_max_u32 = _memory_op("redux.sync.max.u32 $0, $1, 0xffffffff;", "r", "r")

# --------------------------------------------------------------------------------------------------------- fp32 maths
mul_rn = _pure_op("mul.rn.f32 $0, $1, $2;", "ff", "f")
add_rn = _pure_op("add.rn.f32 $0, $1, $2;", "ff", "f")
div_rn = _pure_op("div.rn.f32 $0, $1, $2;", "ff", "f")
first_bit = _pure_op("{.reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t;}", "r", "r")
as_bits = _pure_op("mov.b32 $0, $1;", "f", "r")
as_float = _pure_op("mov.b32 $0, $1;", "r", "f")
max_u32 = _pure_op("max.u32 $0, $1, $2;", "rr", "r")
pack_bf16 = _pure_op("cvt.rn.bf16x2.f32 $0, $2, $1;", "ff", "r")
unpack_bf16 = _pure_op(
    "{.reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t;}", "r", "ff", early=True
)
pack_f16 = _pure_op("cvt.rn.f16x2.f32 $0, $2, $1;", "ff", "r")
_SATURATE = "min.NaN.f32 {v}, {v}, 0f477FE000; max.NaN.f32 {v}, {v}, 0fC77FE000; "
pack_f16_saturating = _pure_op(
    "{.reg .f32 a, b; mov.f32 a, $1; mov.f32 b, $2; "
    + _SATURATE.format(v="a")
    + _SATURATE.format(v="b")
    + "cvt.rn.f16x2.f32 $0, b, a;}",
    "ff",
    "r",
)
clamp_above = _pure_op("min.NaN.f32 $0, $1, $2;", "ff", "f")
clamp_both = _pure_op(
    "{.reg .f32 n; neg.f32 n, $2; min.NaN.f32 n, $1, $2; neg.f32 $0, $2; max.NaN.f32 $0, n, $0;}", "ff", "f", early=True
)


def make_swiglu(alpha: float, beta: float):
    """h(g, u) = g * sigmoid(alpha * g) * (u + beta); see `formulas.swiglu_text`."""
    return _pure_op(swiglu_text(alpha, beta), "ff", "f")


@dsl_user_op
def abs_max8(values, *, loc=None, ip=None):
    """max |v| of 8 floats, NaN if one is NaN."""
    text = "{.reg .f32 a, b; abs.f32 a, $1; " + "".join(f"abs.f32 b, ${i}; max.NaN.f32 a, a, b; " for i in range(2, 9))
    return _op(text + "mov.f32 $0, a;}", "f" * 8, "f", values, volatile=False, loc=loc, ip=ip)


max_nan = _pure_op("max.NaN.f32 $0, $1, $2;", "ff", "f")

# ------------------------------------------------------------------------------------------------------ NVFP4 encoders
nvfp4_block_scale = _pure_op(
    # (amax, qs) -> (scale as fp32, qs / scale or 0): docs/numerics.md section 2
    "{.reg .f32 s, z, d; .reg .b16 e, h, l; .reg .b32 w; .reg .pred p; mul.rn.f32 s, $3, 0f3E2AAAAB; "
    "mul.rn.f32 s, $2, s; mov.f32 z, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 e, z, s; cvt.rn.f16x2.e4m3x2 w, e; "
    "mov.b32 {l, h}, w; cvt.f32.f16 s, l; div.rn.f32 d, $3, s; setp.gt.f32 p, s, 0f00000000; "
    "selp.f32 $1, d, 0f00000000, p; mov.f32 $0, s;}",
    "ff",
    "ff",
    early=True,
)
# Round |a| to the e2m1 grid, ties to the even code: adding sign * 2^(22 + max(exponent, 0)) leaves one mantissa bit.
_ROUND_E2M1 = (
    "mov.b32 i, {a}; and.b32 e, i, 0x7f800000; max.s32 e, e, 0x3f800000; add.s32 e, e, 0x0B000000; "
    "and.b32 s, i, 0x80000000; or.b32 e, e, s; mov.b32 m, e; add.rn.f32 {a}, {a}, m; sub.rn.f32 {a}, {a}, m; "
    "min.f32 {a}, {a}, 0f40C00000; max.f32 {a}, {a}, 0fC0C00000; "
)
_QUANTISE = "mul.rn.f32 {a}, {a}, $3; " + _ROUND_E2M1 + "mul.rn.f32 {a}, {a}, $4; "
nvfp4_pair_as_f16 = _pure_op(
    # (v0, v1, qs / scale, scale) -> packed f16 of scale * e2m1(v * qs / scale); a NaN scale makes both NaN
    "{.reg .f32 a, b, m; .reg .b32 i, e, s; mov.f32 a, $1; mov.f32 b, $2; "
    + _QUANTISE.format(a="a")
    + _QUANTISE.format(a="b")
    + "cvt.rn.f16x2.f32 $0, b, a;}",
    "ffff",
    "r",
)

nvfp4_codes_as_f16 = _pure_op(
    # (8 codes, e4m3 scale byte) -> 4 words of packed f16 scale * code, exact; a NaN scale makes all NaN
    "{.reg .b32 b, t, s; .reg .b16 c, l, h; cvt.u16.u32 c, $5; cvt.rn.f16x2.e4m3x2 s, c; mov.b32 {l, h}, s; "
    "mov.b32 s, {l, l}; "
    + "".join(
        f"shr.u32 b, $4, {8 * w}; shl.b32 t, b, 9; and.b32 ${w}, t, 0x00000E00; "
        f"shl.b32 t, b, 12; and.b32 t, t, 0x00008000; or.b32 ${w}, ${w}, t; "
        f"shl.b32 t, b, 21; and.b32 t, t, 0x0E000000; or.b32 ${w}, ${w}, t; "
        f"shl.b32 t, b, 24; and.b32 t, t, 0x80000000; or.b32 ${w}, ${w}, t; "
        f"mul.rn.f16x2 ${w}, ${w}, s; mov.b32 t, 0x74007400; mul.rn.f16x2 ${w}, ${w}, t; "
        for w in range(4)
    )
    + "}",
    "rr",
    "rrrr",
    early=True,
)

# ---------------------------------------------------------------------------------------------------- wire format maths
e2m1_pair_codes = _pure_op(
    # (r0, r1, 6 / amax) -> two 4-bit codes in the low byte; NaN becomes code 7
    "{.reg .f32 a, b, m; .reg .b32 i, e, s; mul.rn.f32 a, $1, $3; mul.rn.f32 b, $2, $3; "
    + _ROUND_E2M1.format(a="a")
    + _ROUND_E2M1.format(a="b")
    + "mul.rn.f32 a, a, 0f38800000; mul.rn.f32 b, b, 0f38800000; cvt.rn.f16x2.f32 i, b, a; "
    "shr.u32 e, i, 12; and.b32 e, e, 8; shr.u32 s, i, 9; and.b32 s, s, 7; or.b32 e, e, s; "
    "shr.u32 s, i, 24; and.b32 s, s, 0x80; or.b32 e, e, s; shr.u32 s, i, 21; and.b32 s, s, 0x70; or.b32 $0, e, s;}",
    "fff",
    "r",
)
e2m1_pair_values = _pure_op(
    # low byte -> the two values
    "{.reg .b32 a, b; .reg .b16 h, l; shl.b32 a, $2, 9; and.b32 a, a, 0x0E00; shl.b32 b, $2, 12; and.b32 b, b, 0x8000; "
    "or.b32 a, a, b; cvt.u16.u32 l, a; cvt.f32.f16 $0, l; mul.rn.f32 $0, $0, 0f46800000; "
    "shl.b32 a, $2, 5; and.b32 a, a, 0x0E00; shl.b32 b, $2, 8; and.b32 b, b, 0x8000; "
    "or.b32 a, a, b; cvt.u16.u32 h, a; cvt.f32.f16 $1, h; mul.rn.f32 $1, $1, 0f46800000;}",
    "r",
    "ff",
    early=True,
)
e4m3_pair_codes = _pure_op("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $2, $1; cvt.u32.u16 $0, h;}", "ff", "r")
e4m3_pair_values = _pure_op(
    "{.reg .b16 c, h, l; .reg .b32 w; cvt.u16.u32 c, $2; cvt.rn.f16x2.e4m3x2 w, c; mov.b32 {l, h}, w; "
    "cvt.f32.f16 $0, l; cvt.f32.f16 $1, h;}",
    "r",
    "ff",
    early=True,
)

# ------------------------------------------------------------------------------------------- weight decode and wgmma
_DECODE = """{{
.reg .b16 cl, ch, sl, sh;
.reg .b32 sp, s0, s1, t0, t1, t2, t3;
mov.b32 {{cl, ch}}, $5;
cvt.rn.f16x2.e4m3x2 sp, {half};
mov.b32 {{sl, sh}}, sp;
mov.b32 s0, {{sl, sl}};
mov.b32 s1, {{sh, sh}};
shl.b32 t0, $4, 6;
shl.b32 t1, $4, 9;
shr.u32 t2, $4, 3;
shl.b32 t3, $4, 2;
and.b32 t0, t0, 0x8E008E00;
and.b32 t1, t1, 0x8E008E00;
lop3.b32 t2, t2, $4, 0x8E008E00, 0x28;
lop3.b32 t3, t3, $4, 0x8E008E00, 0x28;
mul.rn.f16x2 $0, t0, s0;
mul.rn.f16x2 $1, t1, s1;
mul.rn.f16x2 $2, t2, s0;
mul.rn.f16x2 $3, t3, s1;
}}"""


@dsl_user_op
def decode_fragment(code_word, scale_word, upper: bool, *, loc=None, ip=None):
    """8 weights of an m64k16 fragment -> 4 packed f16 A registers, exact, times 2^-14 (code layout 2).

    `scale_word` holds two e4m3 pairs (rows g and g+8 of two k16 steps); `upper` picks the second.
    """
    text = _DECODE.format(half="ch" if upper else "cl")
    return _op(text, "rr", "rrrr", (code_word, scale_word), volatile=False, loc=loc, ip=ip)


@dsl_user_op
def wgmma_f16(n: int, acc, a, descriptor, *, loc=None, ip=None):
    """acc (n/2 fp32) += A (4 packed f16 registers, m64k16) * B (shared-memory descriptor, k16 x n); returns acc."""
    na = n // 2
    d = ", ".join(f"${i}" for i in range(na))
    r = ", ".join(f"${na + i}" for i in range(4))
    text = (
        "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{d}}}, {{{r}}}, ${na + 4}, p, 1, 1, 0;}}"
    )
    struct = llvm.StructType.get_literal([T.f32()] * na)
    values = [Int32(v).ir_value(loc=loc, ip=ip) for v in a]
    values.append(Int64(descriptor).ir_value(loc=loc, ip=ip))
    values += [Float32(v).ir_value(loc=loc, ip=ip) for v in acc]
    constraints = ",".join(["=f"] * na + ["r"] * 4 + ["l"] + [str(i) for i in range(na)])
    res = llvm.inline_asm(
        struct,
        values,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), res, [i], loc=loc, ip=ip)) for i in range(na)]
