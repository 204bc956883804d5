# SPDX-License-Identifier: Apache-2.0
"""The PTX interpreter on small programs: values, divergence, ordering rules, barriers, hangs, and what it refuses."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from tools.ptxsim import (
    BarrierError,
    DeadlockError,
    GlobalMemory,
    OrderError,
    SimError,
    TensorMap,
    UnsupportedInstruction,
    parse,
    run_launch,
)

_HEADER = """
.version 9.4
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry k(
 .param .u64 k_param_0,
 .param .u64 k_param_1
)
.reqntid %d, 1, 1
{
 .reg .pred %%p<20>;
 .reg .b32 %%r<60>;
 .reg .b64 %%rd<30>;
 ld.param.b64 %%rd1, [k_param_0];
 ld.param.b64 %%rd2, [k_param_1];
 mov.u32 %%r1, %%tid.x;
 mul.wide.u32 %%rd3, %%r1, 4;
 add.s64 %%rd4, %%rd1, %%rd3;
 add.s64 %%rd5, %%rd2, %%rd3;
"""

MBARRIER_WAIT = (
    "{ .reg .pred q; again: mbarrier.try_wait.parity.shared.b64 q, [%r40], %r41; @q bra done; bra again; done: }"
)


def run(
    body: str,
    first: NDArray[np.generic] | None = None,
    *,
    threads: int = 32,
    grid: int = 1,
    seed: int = 0,
    ranks: int = 1,
    check_order: bool = True,
    tensor: bool = False,
) -> NDArray[np.uint32]:
    """Run `body` with parameter 0 = a buffer holding `first`, parameter 1 = 4 KB; returns that as u32."""
    memory = GlobalMemory(1 << 16)
    source = memory.add("in", np.zeros(1024, np.uint32) if first is None else first)
    target = memory.add("out", np.zeros(1024, np.uint32))
    argument: int | TensorMap = TensorMap(source, 16, 128, 128, 8, 128, 16, True) if tensor else source
    header = _HEADER % threads
    if tensor:  # the parameter is the descriptor itself, not a number to load
        header = header.replace("ld.param.b64 %rd1, [k_param_0];", "mov.b64 %rd1, k_param_0;")
    program = parse(header + body + "\n ret;\n}\n")
    run_launch(program, memory, [[argument, target]] * ranks, grid=grid, seed=seed, check_order=check_order)
    return memory.view("out").view(np.uint32).copy()


def f32_bits(values: list[float]) -> NDArray[np.uint32]:
    """fp32 bit patterns, padded to 32 lanes."""
    out = np.zeros(32, np.float32)
    out[: len(values)] = values
    return out.view(np.uint32)


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("instruction", "a", "b", "expected"),
    [
        ("add.s32 %r5, %r3, %r4", 0xFFFFFFFF, 2, 1),
        ("sub.s32 %r5, %r3, %r4", 1, 2, 0xFFFFFFFF),
        ("mul.lo.s32 %r5, %r3, %r4", 0x10001, 0x10001, 0x20001),
        ("mul.hi.u32 %r5, %r3, %r4", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE),
        ("div.s32 %r5, %r3, %r4", -7 & 0xFFFFFFFF, 2, -3 & 0xFFFFFFFF),
        ("rem.s32 %r5, %r3, %r4", -7 & 0xFFFFFFFF, 2, -1 & 0xFFFFFFFF),
        ("shl.b32 %r5, %r3, %r4", 1, 32, 0),
        ("shr.s32 %r5, %r3, %r4", 0x80000000, 40, 0xFFFFFFFF),
        ("shr.u32 %r5, %r3, %r4", 0x80000000, 31, 1),
        ("min.s32 %r5, %r3, %r4", 0xFFFFFFFF, 1, 0xFFFFFFFF),
        ("max.u32 %r5, %r3, %r4", 0xFFFFFFFF, 1, 0xFFFFFFFF),
        ("lop3.b32 %r5, %r3, %r4, 0x8E008E00, 0x28", 0xF0F0F0F0, 0xFF00FF00, 0x0E000E00),
        ("prmt.b32 %r5, %r3, %r4, 0x6420", 0x33221100, 0x77665544, 0x66442200),
        ("shf.l.wrap.b32 %r5, %r3, %r4, 8", 0x11223344, 0x55667788, 0x66778811),
    ],
)
def test_integer_instruction_gives_the_manuals_value(instruction: str, a: int, b: int, expected: int) -> None:
    body = f"mov.b32 %r3, {a}; mov.b32 %r4, {b}; {instruction}; st.global.b32 [%rd5], %r5;"
    assert (run(body)[:32] == expected).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([448.0, 1000.0, 0.001953125, 17.0, -0.0], [0x7E, 0x7E, 1, 0x58, 0x80]),
        ([float("nan"), -1e9, 18.0, 19.0, 2**-10], [0x7F, 0xFE, 0x59, 0x5A, 0]),
    ],
)
def test_cvt_e4m3_rounds_to_even_and_saturates(values: list[float], expected: list[int]) -> None:
    body = (
        "ld.global.b32 %r4, [%rd4]; mov.b32 %r3, 0; {.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %r3, %r4;"
        " cvt.u32.u16 %r5, h;} st.global.b32 [%rd5], %r5;"
    )
    assert run(body, f32_bits(values))[: len(values)].tolist() == expected


def test_cvt_e2m1_ties_go_to_the_even_code() -> None:
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.1, float("nan")]
    body = (
        "ld.global.b32 %r4, [%rd4]; mov.b32 %r3, 0; {.reg .b8 b; .reg .b16 h; cvt.rn.satfinite.e2m1x2.f32 b, %r3, %r4;"
        " cvt.u32.u8 %r5, b;} st.global.b32 [%rd5], %r5;"
    )
    assert run(body, f32_bits(values))[: len(values)].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 7]


def test_fma_rounds_once() -> None:
    """Cases where rounding the product, or the sum to float64, first gives another result."""
    rng = np.random.default_rng(1)
    a = rng.uniform(1, 2, 32).astype(np.float32)
    b = rng.uniform(1, 2, 32).astype(np.float32)
    c = (-(a * b)).astype(np.float32)
    c[16:] = np.float32(2.0**-70)
    body = (
        "ld.global.b32 %r3, [%rd4]; ld.global.b32 %r4, [%rd4+128]; ld.global.b32 %r5, [%rd4+256];"
        "fma.rn.f32 %r6, %r3, %r4, %r5; st.global.b32 [%rd5], %r6;"
    )
    got = run(body, np.concatenate([a, b, c]))[:32].view(np.float32)
    for x, y, z, g in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        candidates = [np.nextafter(g, np.float32(d)) for d in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(g)) - exact) <= abs(Fraction(float(o)) - exact) for o in candidates)


def test_min_nan_passes_nan_and_plain_min_drops_it() -> None:
    body = (
        "ld.global.b32 %r3, [%rd4]; min.NaN.f32 %r4, %r3, 0f3F800000; min.f32 %r5, %r3, 0f3F800000;"
        "st.global.b32 [%rd5], %r4; st.global.b32 [%rd5+128], %r5;"
    )
    out = run(body, f32_bits([float("nan"), 0.5])).view(np.float32)
    assert np.isnan(out[0]) and out[1] == 0.5
    assert out[32] == 1.0 and out[33] == 0.5


# --------------------------------------------------------------------------------------------------------- divergence
def test_lanes_diverge_and_meet_again() -> None:
    body = """
    mov.b32 %r3, 0;
    mov.b32 %r4, 0;
LOOP: add.s32 %r3, %r3, 1;
    add.s32 %r4, %r4, %r3;
    setp.lt.s32 %p1, %r3, %r1;
    @%p1 bra LOOP;
    bar.warp.sync -1;
    shfl.sync.idx.b32 %r5, %r4, 31, 31, -1;
    st.global.b32 [%rd5], %r4;
    st.global.b32 [%rd5+128], %r5;
"""
    out = run(body)
    wanted = [max(n, 1) * (max(n, 1) + 1) // 2 for n in range(32)]
    assert out[:32].tolist() == wanted
    assert (out[32:64] == wanted[31]).all()


def test_warp_instruction_that_some_lanes_never_reach_is_an_error() -> None:
    body = "setp.lt.s32 %p1, %r1, 16; @%p1 bra SKIP; bar.warp.sync -1; SKIP: elect.sync %r3|%p2, -1; "
    with pytest.raises(SimError, match="by some lanes of a warp only"):
        run(body + "setp.lt.s32 %p3, %r1, 8; @%p3 bra END; elect.sync %r4|%p4, -1; END: bar.warp.sync -1;")


def test_register_without_a_value_is_an_error() -> None:
    with pytest.raises(SimError, match="%r9' is read before"):
        run("add.s32 %r3, %r9, 1;")


def test_unknown_instruction_is_refused_with_its_line() -> None:
    with pytest.raises(UnsupportedInstruction, match=r"line \d+: tanh.approx.f32"):
        run("tanh.approx.f32 %r3, %r3;")


def test_access_outside_every_buffer_names_the_nearest() -> None:
    with pytest.raises(SimError, match=r"near in\+0x1000"):
        run("ld.global.b32 %r3, [%rd1+4096];")


# ------------------------------------------------------------------------------------------------------------ ordering
def message(store: str, load: str, *, between: str = "", scope_grid: int = 2) -> str:
    """CTA 0 writes data, then a flag; CTA 1 polls the flag, then reads the data."""
    return f"""
    mov.u32 %r3, %ctaid.x;
    setp.ne.b32 %p1, %r3, 0;
    @%p1 bra READER;
    mov.b32 %r4, 7;
    st.global.b32 [%rd4+512], %r4;
    bar.warp.sync -1;
    setp.ne.b32 %p2, %r1, 0;
    @%p2 bra END;
    {between}
    {store} [%rd1], 1;
    bra END;
READER:
    setp.ne.b32 %p2, %r1, 0;
    @%p2 bra JOIN;
POLL: {load} %r5, [%rd1];
    setp.eq.b32 %p3, %r5, 0;
    @%p3 bra POLL;
JOIN: bar.warp.sync -1;
    ld.global.b32 %r6, [%rd4+512];
    st.global.b32 [%rd5], %r6;
END:
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_release_and_acquire_order_plain_data(seed: int) -> None:
    out = run(message("st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"), grid=2, seed=seed)
    assert (out[:32] == 7).all()


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("st.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32"),
        ("st.release.gpu.global.b32", "ld.relaxed.gpu.global.b32"),
        ("st.release.cta.global.b32", "ld.acquire.gpu.global.b32"),
        ("st.release.gpu.global.b32", "ld.acquire.cta.global.b32"),
    ],
)
def test_weak_flag_or_narrow_scope_is_an_error(store: str, load: str) -> None:
    with pytest.raises(OrderError, match="nothing orders"):
        run(message(store, load), grid=2)


def test_fence_makes_a_relaxed_flag_a_release() -> None:
    text = message("st.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32", between="fence.acq_rel.gpu;")
    assert (run(text, grid=2)[:32] == 7).all()


@pytest.mark.parametrize(("scope", "fine"), [("sys", True), ("gpu", False)])
def test_flag_between_ranks_needs_system_scope(scope: str, fine: bool) -> None:
    """Both virtual GPUs run the same code on one buffer: CTA 0 of both write, CTA 1 of both read."""
    text = message(f"red.release.{scope}.global.add.u32", f"ld.acquire.{scope}.global.b32").replace(
        "setp.eq.b32 %p3, %r5, 0", "setp.lt.u32 %p3, %r5, 2"
    )
    one_writer = text.replace("st.global.b32 [%rd4+512], %r4;", "red.relaxed.sys.global.max.u32 [%rd4+512], %r4;")
    one_writer = one_writer.replace("st.global.b32 [%rd5], %r6;", "red.relaxed.sys.global.max.u32 [%rd5], %r6;")
    if fine:
        assert (run(one_writer, grid=2, ranks=2)[:32] == 7).all()
    else:
        with pytest.raises(OrderError):
            run(one_writer, grid=2, ranks=2)


INIT_FENCE = "fence.mbarrier_init.release.cluster;"
TENSOR_LOAD = """
    mov.b32 %r40, __dynamic_shmem__0;
    mov.b32 %r41, 0;
    setp.ne.b32 %p5, %r1, 0;
    @%p5 bra WAIT;
    mbarrier.init.shared.b64 [%r40], 1;
    INIT_FENCE
    mbarrier.arrive.expect_tx.shared.b64 _, [%r40], 1024;
    mov.b32 %r42, 0;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
     [%r40+1024], [%rd1, {%r42, %r42}], [%r40];
WAIT: bar.warp.sync -1;
    BARRIER_WAIT
    shl.b32 %r43, %r1, 2;
    add.s32 %r43, %r43, %r40;
    ld.shared.b32 %r44, [%r43+1152];
    st.global.b32 [%rd5], %r44;
"""


def test_tensor_load_swizzles_and_completes_on_its_barrier() -> None:
    data = np.arange(16 * 32, dtype=np.uint32)
    body = TENSOR_LOAD.replace("INIT_FENCE", INIT_FENCE).replace("BARRIER_WAIT", MBARRIER_WAIT)
    out = run(body, data, tensor=True)
    row = data[32:64].reshape(8, 4)  # row 1: its 16-byte pieces are permuted by xor with 1
    assert (out[:32].reshape(8, 4) == row[np.arange(8) ^ 1]).all()


def test_tensor_load_without_the_wait_is_an_error() -> None:
    body = TENSOR_LOAD.replace("INIT_FENCE", INIT_FENCE).replace("BARRIER_WAIT", "")
    for seed in range(4):  # a late copy is caught when it lands or outlives its CTA, an early one when it is read
        with pytest.raises((OrderError, BarrierError), match=r"nothing orders|after its CTA has left"):
            run(body, tensor=True, seed=seed)


def test_tensor_load_on_an_unfenced_barrier_is_an_error() -> None:
    body = TENSOR_LOAD.replace("INIT_FENCE", "").replace("BARRIER_WAIT", MBARRIER_WAIT)
    with pytest.raises(BarrierError, match="before fence"):
        run(body, tensor=True)


def bulk_store(fence: str, wait: str) -> str:
    """32 lanes write shared memory, one stores it in bulk, then all read it back from global memory."""
    return f"""
    mov.b32 %r40, __dynamic_shmem__0;
    shl.b32 %r43, %r1, 2;
    add.s32 %r44, %r43, %r40;
    st.shared.b32 [%r44], %r1;
    {fence}
    bar.warp.sync -1;
    setp.ne.b32 %p5, %r1, 0;
    @%p5 bra JOIN;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r40], 128;
    cp.async.bulk.commit_group;
    {wait}
JOIN: bar.warp.sync -1;
    ld.global.b32 %r5, [%rd5];
    add.s32 %r5, %r5, 1;
    st.global.b32 [%rd5+128], %r5;
"""


def test_bulk_store_with_fence_and_full_wait_is_readable() -> None:
    out = run(bulk_store("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"))
    assert out[32:64].tolist() == list(range(1, 33))


def test_bulk_store_without_proxy_fence_is_an_error() -> None:
    with pytest.raises(OrderError, match="no fence"):
        run(bulk_store("", "cp.async.bulk.wait_group 0;"))


def test_bulk_store_waited_for_reads_only_is_an_error() -> None:
    for seed in range(4):
        with pytest.raises(OrderError, match="nothing orders"):
            run(bulk_store("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"), seed=seed)


# ------------------------------------------------------------------------------------------------------------ barriers
def pingpong(count: int, arrivals: int) -> str:
    """Warp 1 arrives on an mbarrier of warp 0 that expects `count` arrivals; warp 0 waits."""
    return (
        "mov.b32 %r40, __dynamic_shmem__0; mov.b32 %r41, 0; setp.ne.b32 %p5, %r1, 0; @%p5 bra READY;"
        f"mbarrier.init.shared.b64 [%r40], {count}; fence.mbarrier_init.release.cluster;"
        "READY: bar.sync 0; setp.ge.s32 %p6, %r1, 32; @%p6 bra ARRIVE;"
        + MBARRIER_WAIT
        + "bra END; ARRIVE: setp.ne.b32 %p7, %r1, 32; @%p7 bra END;"
        + "mbarrier.arrive.shared.b64 _, [%r40], 1;" * arrivals
        + "END: bar.warp.sync -1;"
    )


def test_mbarrier_with_the_right_count_lets_the_waiter_go() -> None:
    run(pingpong(2, 2), threads=64)


def test_mbarrier_with_too_few_arrivals_is_a_deadlock_with_the_missing_number() -> None:
    with pytest.raises(DeadlockError, match="phase 0: 1 arrivals"):
        run(pingpong(2, 1), threads=64)


def test_mbarrier_with_too_many_arrivals_is_an_error() -> None:
    with pytest.raises(BarrierError, match=r"left in the middle|more arrivals"):
        run(pingpong(2, 3), threads=64)


def test_named_barrier_orders_shared_memory_and_its_absence_is_an_error() -> None:
    body = """
    mov.b32 %r40, __dynamic_shmem__0;
    shl.b32 %r43, %r1, 2;
    add.s32 %r44, %r43, %r40;
    st.shared.b32 [%r44], %r1;
    bar.sync 1, 64;
    xor.b32 %r43, %r43, 128;
    add.s32 %r44, %r43, %r40;
    ld.shared.b32 %r5, [%r44];
    st.global.b32 [%rd5], %r5;
"""
    assert run(body, threads=64)[:64].tolist() == [n ^ 32 for n in range(64)]
    with pytest.raises(OrderError, match="shared memory of CTA 0"):
        run(body.replace("bar.sync 1, 64;", ""), threads=64)


def test_named_barrier_that_a_warp_skips_is_a_deadlock_that_names_it() -> None:
    with pytest.raises(DeadlockError, match="named barrier 3"):
        run("setp.ge.s32 %p1, %r1, 32; @%p1 bra END; bar.sync 3, 64; END: bar.warp.sync -1;", threads=64)


def test_poll_that_nobody_answers_ends_as_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="a value in memory"):
        run("POLL: ld.acquire.gpu.global.b32 %r5, [%rd1]; setp.eq.b32 %p3, %r5, 0; @%p3 bra POLL;")


def test_launch_arguments_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(SimError, match="the kernel has 2"):
        run_launch(parse(_HEADER % 32 + "ret;\n}\n"), GlobalMemory(1 << 12), [[1]], grid=1)


def test_f32_literal_helper_agrees_with_struct() -> None:
    """The tests' own bit patterns: a wrong helper would hide wrong conversions."""
    assert f32_bits([1.5])[0] == struct.unpack("<I", struct.pack("<f", 1.5))[0]
