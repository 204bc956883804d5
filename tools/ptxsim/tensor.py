# SPDX-License-Identifier: Apache-2.0
"""Tensor cores: wgmma with register A (Hopper), tcgen05 block-scaled FP4 MMA, scale copies, TMEM loads (Blackwell).

Operands are decoded from descriptor bits as the PTX manual gives them, not from what a compiler meant. A wgmma is
executed when issued, but until wait_group its results hold no value and its reads are not ordered before anything.
tcgen05 work runs late; MMAs and commits run in order, a scale copy may overtake earlier MMAs (the manual orders it
before later ones only). Sums of one instruction are exact, then rounded to fp32 once; hardware rounds inside one, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import SimError, UnsupportedInstruction
from .machine import LANES, Cta, Machine, Mask, Warp
from .memory import CTA_SHIFT, TMEM_COLUMNS
from .operands import address, group, lanes, value
from .order import ASYNC_SHARED, LOCAL, SHARED_ROWS, TENSOR, Events, event
from .parse import Instruction
from .sync import tensor_fence, whole
from .values import E4M3_VALUES, FP4_VALUES

Function = Callable[[Warp, Mask], Any]

_OFFSET = (1 << CTA_SHIFT) - 1


def _rows_of_operand(descriptor: int, rows: int, row_bytes: int, swizzle_shift: int, swizzle_code: int) -> Any:
    """Shared-memory byte indices (rows, row_bytes) of a K-major operand in 128-byte swizzle."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> swizzle_shift != swizzle_code or descriptor >> 49 & 7:
        raise UnsupportedInstruction(f"matrix descriptor {descriptor:#x}: only 128-byte swizzle without base offset")
    r, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None]
    at = start + r // 8 * stride + r % 8 * 128 + byte
    return at ^ ((at >> 7 & 7) << 4)


# ------------------------------------------------------------------------------------------------------------- wgmma
def _wgmma(ins: Instruction, machine: Machine) -> Function:
    if ins.parts[1] == "fence":
        return lambda w, m: whole(w, m, "wgmma.fence")
    if ins.parts[1] == "commit_group":
        return _wgmma_commit
    if ins.parts[1] == "wait_group":
        keep = int(ins.operands[0])

        def wait(w: Warp, m: Mask) -> None:
            whole(w, m, "wgmma.wait_group")
            done = max(w.mma_committed - keep, 0)
            w.views[:SHARED_ROWS, w.mma_reads] = np.maximum(w.views[:SHARED_ROWS, w.mma_reads], done)
            for register, (number, content) in list(w.mma_pending.items()):
                if number <= done:
                    w.registers[register] = content
                    del w.mma_pending[register]

        return wait
    found = re.search(r"m64n(\d+)k16\.f32\.f16\.f16$", ins.opcode)
    if found is None or ins.operands[1][0] != "{" or ins.operands[4:] != ("1", "1", "0"):
        raise UnsupportedInstruction(ins.text)
    return _wgmma_mma(ins, machine, int(found[1]))


def _wgmma_commit(w: Warp, m: Mask) -> None:
    whole(w, m, "wgmma.commit_group")
    w.mma_committed += 1


def _wgmma_mma(ins: Instruction, machine: Machine, n: int) -> Function:
    d, a = group(ins.operands[0]), [value(t, "b32", machine) for t in group(ins.operands[1])]
    descriptor, accumulate = value(ins.operands[2], "b64", machine), value(ins.operands[3], "pred", machine)
    lane = np.arange(LANES)
    g, q = lane // 4, lane % 4

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "wgmma")
        desc = int(descriptor(w)[0])
        if (descriptor(w) != desc).any():
            raise SimError("wgmma descriptor differs between lanes")
        shared = w.cta.shared
        index = _rows_of_operand(desc, n, 32, 62, 1)
        machine.order.read(shared.record, index, w.views, ASYNC_SHARED, event(w.mma_reads, w.mma_committed + 1))
        b = shared.data[index].view(np.float16).astype(np.float64)
        full = np.empty((16, 16))
        for i, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            pair = a[i](w).view(np.float16).reshape(LANES, 2).astype(np.float64)
            full[g + row, column + 2 * q], full[g + row, column + 2 * q + 1] = pair[:, 0], pair[:, 1]
        product = full @ b.T
        keep = accumulate(w)
        for i, register in enumerate(d):
            c, row, odd = i // 4, 8 * (i // 2 % 2), i % 2
            part = product[g + row, 8 * c + 2 * q + odd]
            before = w.mma_pending[register][1] if register in w.mma_pending else w.registers.pop(register)
            old = np.where(keep, before.view(np.float32), np.float32(0)).astype(np.float64)
            w.mma_pending[register] = (w.mma_committed + 1, (part + old).astype(np.float32).view(np.uint32))
        machine.count("wgmma")

    return run


# ----------------------------------------------------------------------------------------------------------- tcgen05
def _issue(w: Warp, m: Mask, machine: Machine, what: str, *, copy: bool = False) -> tuple[int, int, Events]:
    """One lane issues: lane, sequence number among this CTA's MMAs or scale copies, views of this moment.

    An MMA follows all earlier MMAs and scale copies; a scale copy follows only what a commit has shown to be over.
    """
    which = lanes(m)
    if which.size != 1:
        raise SimError(f"{what} by {which.size} lanes: elect one")
    cta = w.cta
    if machine.tensor_group == "cta_group::2" and cta.cluster_rank % 2:
        raise UnsupportedInstruction(f"{what} of cta_group::2 by the odd CTA of a pair")
    views = w.views.copy()
    w.tick()
    if copy:
        cta.copy_number += 1
        return int(which[0]), cta.copy_number, views
    cta.tensor_number += 1
    views[TENSOR, cta.tensor_core] = cta.tensor_number
    views[TENSOR, cta.scale_copies] = cta.copy_number
    return int(which[0]), cta.tensor_number, views


def _quarters(column: int, count: int) -> Any:
    """Record indices of some columns of all lanes."""
    return (np.arange(4)[:, None] * TMEM_COLUMNS + column + np.arange(count)[None]).reshape(-1)


def _commit(ins: Instruction, machine: Machine) -> Function:
    """The arrival brings the tensor work and the copies it had waited for, but no ordinary access of the issuer."""
    at = address(ins.operands[0], "u32", machine)
    mask = value(ins.operands[1], "b32", machine) if len(ins.operands) > 1 else None

    def run(w: Warp, m: Mask) -> None:
        lane, number, issued = _issue(w, m, machine, "tcgen05.commit")
        to = int(at(w)[lane])
        targets = [to]
        if mask is not None:
            chosen = int(mask(w)[lane])
            targets = [(to & _OFFSET) | r << CTA_SHIFT for r in range(machine.cluster_size) if chosen >> r & 1]
        core, copies, copied = w.cta.tensor_core, w.cta.scale_copies, w.cta.copy_number

        def arrive() -> None:
            views = np.where(machine.components.asynchronous, issued, 0)
            views[:SHARED_ROWS, core] = number
            views[:SHARED_ROWS, copies] = copied
            for target in targets:
                w.cta.mbarrier(target, views=issued).arrive(1, 0, views)

        machine.tensor_queues[core].append((arrive, False))

    return run


def _scale_copy(ins: Instruction, machine: Machine) -> Function:
    if not (ins.has("32x128b") and ins.has("warpx4")):
        raise UnsupportedInstruction(ins.text)
    two = ins.has("cta_group::2")
    to, descriptor = address(ins.operands[0], "u32", machine), value(ins.operands[1], "u64", machine)

    def run(w: Warp, m: Mask) -> None:
        lane, number, views = _issue(w, m, machine, "tcgen05.cp", copy=True)
        target, desc = int(to(w)[lane]), int(descriptor(w)[lane])
        start, stride = (desc & 0x3FFF) << 4, (desc >> 32 & 0x3FFF) << 4
        if desc >> 61 or target >> 16:
            raise UnsupportedInstruction(f"tcgen05.cp with descriptor {desc:#x} to {target:#x}")
        row = np.arange(32)[:, None]
        index = start + row // 8 * stride + row % 8 * 16 + np.arange(16)[None]
        mark = event(w.cta.scale_copies, number)

        def copy() -> None:
            for cta in w.cta.pair() if two else [w.cta]:
                _stay(cta)
                cta.tmem.check(target, 4)
                machine.order.read(cta.shared.record, index, views, ASYNC_SHARED, mark)
                machine.order.write(cta.tmem.record, _quarters(target, 4), views, TENSOR, mark)
                words = cta.shared.data[index].view(np.uint32)
                for quarter in range(4):
                    cta.tmem.data[32 * quarter : 32 * quarter + 32, target : target + 4] = words

        machine.tensor_queues[w.cta.tensor_core].append((copy, True))
        machine.count("scale copy")

    return run


class _Idesc:
    """Instruction descriptor of kind::mxf4nvf4: only e2m1 operands, K-major, e4m3 scales, K 64."""

    def __init__(self, bits: int, ctas: int) -> None:
        self.n, self.m = (bits >> 17 & 63) * 8, (bits >> 27 & 3) * 128
        formats = (bits >> 7 & 7, bits >> 10 & 7)
        rest = bits & ~(0x7 << 7 | 0x7 << 10 | 63 << 17 | 3 << 27)
        if formats != (1, 1) or rest or self.m != 128 * ctas:
            raise UnsupportedInstruction(f"instruction descriptor {bits:#x} with {ctas} CTAs")


def _mma(ins: Instruction, machine: Machine) -> Function:
    if not (ins.has("kind::mxf4nvf4") and ins.has("block_scale") and (ins.has("block16") or ins.has("scale_vec::4X"))):
        raise UnsupportedInstruction(ins.text)
    two = ins.has("cta_group::2")
    d, sfa, sfb = (address(ins.operands[i], "u32", machine) for i in (0, 4, 5))
    a, b, idesc = (value(ins.operands[i], kind, machine) for i, kind in ((1, "u64"), (2, "u64"), (3, "u32")))
    accumulate = value(ins.operands[6], "pred", machine)

    def run(w: Warp, m: Mask) -> None:
        lane, number, views = _issue(w, m, machine, "tcgen05.mma")
        column, a_scales, b_scales = (int(get(w)[lane]) for get in (d, sfa, sfb))
        a_desc, b_desc, keep = int(a(w)[lane]), int(b(w)[lane]), bool(accumulate(w)[lane])
        group_ctas = w.cta.pair() if two else [w.cta]
        shape = _Idesc(int(idesc(w)[lane]), len(group_ctas))
        mark = event(w.cta.tensor_core, number)

        def multiply() -> None:
            for cta in group_ctas:
                _stay(cta)
            n = shape.n
            share = n // len(group_ctas)
            tokens = np.concatenate([_operand(machine, c, b_desc, share, views, mark) for c in group_ctas])
            for cta in group_ctas:
                weights = _operand(machine, cta, a_desc, 128, views, mark)
                weights = weights * _scales(machine, cta, a_scales, 128, views, mark)
                scaled = tokens * _scales(machine, cta, b_scales, n, views, mark)
                cta.tmem.check(column, n)
                machine.order.write(cta.tmem.record, _quarters(column, n), views, TENSOR, mark)
                out = weights @ scaled.T
                if keep:
                    out = out + cta.tmem.data[:, column : column + n].view(np.float32).astype(np.float64)
                cta.tmem.data[:, column : column + n] = out.astype(np.float32).view(np.uint32)

        machine.tensor_queues[w.cta.tensor_core].append((multiply, False))
        machine.count("mma")

    return run


def _stay(cta: Cta) -> None:
    """Raise if nobody keeps the memories alive that tensor work uses now."""
    if cta.has_left:
        raise SimError(f"tensor work on {cta.name} after it has left")


def _operand(machine: Machine, cta: Cta, descriptor: int, rows: int, views: Events, mark: int) -> Any:
    """K 64 of a packed e2m1 operand as float64 (rows, 64)."""
    if descriptor >> 46 & 7 != 1:
        raise UnsupportedInstruction(f"matrix descriptor {descriptor:#x}: bits 46..48 must be 0b001")
    index = _rows_of_operand(descriptor, rows, 32, 61, 2)
    machine.order.read(cta.shared.record, index, views, ASYNC_SHARED, mark)
    packed = cta.shared.data[index]
    return FP4_VALUES[np.stack([packed & 15, packed >> 4], -1).reshape(rows, 64)].astype(np.float64)


def _scales(machine: Machine, cta: Cta, at: int, rows: int, views: Events, mark: int) -> Any:
    """Block scales of K 64 for each row: lane row % 32, column row / 32."""
    if at >> 16:
        raise UnsupportedInstruction(f"scale address {at:#x}: lane and sub-word must be 0")
    columns = -(-rows // 32)
    cta.tmem.check(at, columns)
    machine.order.read(cta.tmem.record, _quarters(at, columns), views, TENSOR, mark)
    row = np.arange(rows)
    words = np.ascontiguousarray(cta.tmem.data[row % 32, at + row // 32])
    return E4M3_VALUES[words.view(np.uint8).reshape(rows, 4)].astype(np.float64).repeat(16, 1)


def _tmem_load(ins: Instruction, machine: Machine) -> Function:
    if not ins.has("32x32b"):
        raise UnsupportedInstruction(ins.text)
    targets, at = group(ins.operands[0]), address(ins.operands[1], "u32", machine)

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "tcgen05.ld")
        where = int(at(w)[0])
        lane, column = where >> 16, where & 0xFFFF
        if lane != 32 * (w.index % 4):
            raise SimError(f"tcgen05.ld of lane {lane} by warp {w.index}: a warp reaches lanes 32*(warp%4) only")
        w.cta.tmem.check(column, len(targets))
        index = lane // 32 * TMEM_COLUMNS + column + np.arange(len(targets))
        machine.order.read(w.cta.tmem.record, index, w.views, TENSOR, event(w.tmem_loads, w.tmem_clock))
        for i, target in enumerate(targets):  # reading them waits by itself: a register dependency is respected
            w.registers[target] = w.cta.tmem.data[lane : lane + 32, column + i].copy()

    return run


def _tmem_wait(w: Warp, m: Mask) -> None:
    whole(w, m, "tcgen05.wait::ld")
    w.tmem_waited = w.tmem_clock
    w.tmem_clock += 1
    w.views[TENSOR, w.tmem_loads] = w.tmem_waited


def _allocate(ins: Instruction, machine: Machine) -> Function:
    at, columns = address(ins.operands[0], "u32", machine), value(ins.operands[1], "b32", machine)

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "tcgen05.alloc")
        if machine.tensor_group == "cta_group::2" and not w.cluster_met:
            raise SimError("tcgen05.alloc of cta_group::2 before a cluster barrier has shown that the other CTA runs")
        tmem, n = w.cta.tmem, int(columns(w)[0])
        if tmem.ever or not tmem.permit or n not in (32, 64, 128, 256, 512):
            raise SimError(f"tcgen05.alloc of {n} columns: once, before relinquishing, a power of two from 32")
        tmem.ever, tmem.columns = True, n
        index = w.cta.shared.index(at(w)[:1], 4)
        machine.order.write(w.cta.shared.record, index, w.views, LOCAL, w.mark())
        w.cta.shared.data[index] = 0

    return run


def _deallocate(ins: Instruction, machine: Machine) -> Function:
    columns = value(ins.operands[1], "b32", machine)

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "tcgen05.dealloc")
        tmem = w.cta.tmem
        if tmem.columns != int(columns(w)[0]):
            raise SimError(f"tcgen05.dealloc of {int(columns(w)[0])} columns, {tmem.columns} are allocated")
        if any(machine.tensor_queues[cta.tensor_core] for cta in w.cta.peers()):
            raise SimError("tcgen05.dealloc while tensor work is in flight")
        machine.order.write(tmem.record, _quarters(0, tmem.columns), w.views, TENSOR, w.mark())
        tmem.columns = 0

    return run


_GROUPED = ("alloc", "relinquish_alloc_permit", "dealloc", "cp", "mma", "commit")
"""tcgen05 instructions that say whether they work on one CTA or on two."""


def compile_tensor(ins: Instruction, machine: Machine) -> Function | None:
    """A function of (warp, mask), or None if this is no tensor-core instruction."""
    if ins.parts[0] == "wgmma":
        return _wgmma(ins, machine)
    if ins.parts[0] != "tcgen05":
        return None
    name = ins.parts[1]
    group_of = next((part for part in ins.parts if part.startswith("cta_group::")), "")
    if name in _GROUPED:
        machine.tensor_group = machine.tensor_group or group_of
        if not group_of or group_of != machine.tensor_group:
            raise SimError(f"one kernel has one cta_group, here {machine.tensor_group!r} and {group_of!r}")
        if group_of == "cta_group::2" and machine.cluster_size % 2:
            raise SimError("cta_group::2 without pairs of CTAs")
    if name == "wait::ld":
        return _tmem_wait
    if name.startswith("fence::"):
        after = name == "fence::after_thread_sync"
        return lambda w, m: tensor_fence(w, after=after)
    if name == "relinquish_alloc_permit":

        def relinquish(w: Warp, m: Mask) -> None:
            w.cta.tmem.permit = False

        return relinquish
    makers = {
        "commit": _commit,
        "cp": _scale_copy,
        "mma": _mma,
        "ld": _tmem_load,
        "alloc": _allocate,
        "dealloc": _deallocate,
    }
    if name not in makers:
        raise UnsupportedInstruction(ins.text)
    return makers[name](ins, machine)
