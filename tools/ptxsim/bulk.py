# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies: bulk and tensor (TMA) loads that complete on an mbarrier, bulk stores in groups.

An instruction only queues work; run.py executes it at a random later time. What orders the copy was known when it was
issued, so the order checks use the views of that moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import BarrierError, SimError, UnsupportedInstruction
from .machine import AsyncWork, Cta, Machine, Mask, TensorMap, Warp
from .memory import CTA_SHIFT, GLOBAL_BASE, POISON
from .operands import PARAM_SHIFT, PARAM_SPACE, address, lanes, value
from .order import ASYNC_GLOBAL, ASYNC_SHARED, SHARED_ROWS, Events, event
from .parse import Instruction

Function = Callable[[Warp, Mask], Any]


def _land(machine: Machine, cta: Cta, target: int, data: Any, index: Any, barrier_at: int, views: Events) -> None:
    """Write loaded bytes to shared memory and count them on the barrier."""
    barrier = cta.mbarrier(barrier_at, views=views)
    mark = barrier.landing_event()
    machine.order.write(cta.shared.record, index, views, ASYNC_SHARED, mark)
    cta.shared.data[index] = data
    barrier.land(data.size)
    machine.progress = True


def _load_step(machine: Machine, cta: Cta, to: int, at: int, n: int, bar: int, views: Events) -> Callable[[], None]:
    def copy() -> None:
        memory = machine.memory
        index = memory.index(np.arange(at, at + n, 16, dtype=np.uint64), 16).reshape(-1)
        mark = cta.mbarrier(bar, views=views).landing_event()
        machine.order.read(memory.record, index, views, ASYNC_GLOBAL, mark)
        _land(machine, cta, to, memory.data[index], slice(to, to + n), bar, views)

    return copy


def _store_steps(
    machine: Machine, w: Warp, at: int, source: int, n: int, number: int, views: Events
) -> list[Callable[[], None]]:
    held: list[Any] = []

    def read() -> None:
        place = slice(source, source + n)
        machine.order.read(w.cta.shared.record, place, views, ASYNC_SHARED, event(w.bulk_reads, number))
        held.append(w.cta.shared.data[place].copy())

    def write() -> None:
        index = machine.memory.index(np.arange(at, at + n, 16, dtype=np.uint64), 16).reshape(-1)
        machine.order.write(machine.memory.record, index, views, ASYNC_GLOBAL, event(w.bulk_writes, number))
        machine.memory.data[index] = held[0]
        machine.progress = True

    return [read, write]


def _bulk_load(ins: Instruction, machine: Machine) -> Function:
    if not ins.has("mbarrier::complete_tx::bytes"):
        raise UnsupportedInstruction(ins.text)
    target, source = address(ins.operands[0], "u32", machine), address(ins.operands[1], "u64", machine)
    size, barrier = value(ins.operands[2], "b32", machine), address(ins.operands[3], "u32", machine)

    def run(w: Warp, m: Mask) -> None:
        for lane in lanes(m).tolist():
            to, at, n, bar = (int(get(w)[lane]) for get in (target, source, size, barrier))
            if to % 16 or at % 16 or n % 16:
                raise SimError("bulk copy: addresses and size must be multiples of 16")
            to &= (1 << CTA_SHIFT) - 1
            machine.async_work.append(
                AsyncWork(ins.opcode, [_load_step(machine, w.cta, to, at, n, bar, w.views.copy())])
            )
        w.tick()
        machine.count("bulk load")

    return run


def _box(machine: Machine, tensor: TensorMap, x: int, y: int) -> tuple[Any, Any, Any]:
    """Bytes of one box (zero outside), the global byte index of each, and which lie inside."""
    first = x * tensor.bits // 8
    columns = first + np.arange(tensor.box_bytes)
    rows = y + np.arange(tensor.box_rows)
    inside = ((rows >= 0) & (rows < tensor.rows))[:, None] & ((columns >= 0) & (columns < tensor.row_bytes))[None]
    index = tensor.address - GLOBAL_BASE + rows[:, None] * tensor.pitch_bytes + columns[None]
    out = np.zeros(index.shape, np.uint8)
    out[inside] = machine.memory.data[index[inside]]
    if not machine.memory.mapped[index[inside]].all():
        raise SimError("tensor map reaches beyond its buffer")
    return out, index, inside


def _tensor_load(ins: Instruction, machine: Machine) -> Function:
    if not (ins.has("2d") and ins.has("mbarrier::complete_tx::bytes")) or ins.has("multicast::cluster"):
        raise UnsupportedInstruction(ins.text)
    two = ins.has("cta_group::2")
    target, barrier = address(ins.operands[0], "u32", machine), address(ins.operands[2], "u32", machine)
    found = re.fullmatch(r"\[(\S+), \{(\S+), (\S+)\}\]", ins.operands[1])
    if found is None:
        raise UnsupportedInstruction(ins.text)
    descriptor = value(found[1], "u64", machine)
    x_at, y_at = value(found[2], "s32", machine), value(found[3], "s32", machine)

    def run(w: Warp, m: Mask) -> None:
        which = lanes(m).tolist()
        if len(which) != 1:
            raise SimError(f"tensor load by {len(which)} lanes: elect one")
        lane = which[0]
        to, bar = int(target(w)[lane]), int(barrier(w)[lane])
        at, x, y = int(descriptor(w)[lane]) - PARAM_SPACE, int(x_at(w)[lane]), int(y_at(w)[lane])
        tensor = machine.arguments[w.cta.rank][at >> PARAM_SHIFT] if at >= 0 else 0
        if not isinstance(tensor, TensorMap):
            raise SimError("the descriptor of a tensor load is not a tensor map")
        if to >> CTA_SHIFT != w.cta.cluster_rank:
            raise SimError("tensor load into another CTA")
        if w.cta.at(bar) not in (w.cta.pair() if two else [w.cta]):
            raise SimError("a tensor load signals another CTA's barrier: only of its pair, and with cta_group::2")
        to &= (1 << CTA_SHIFT) - 1
        views = w.views.copy()

        def copy() -> None:
            data, index, inside = _box(machine, tensor, x, y)
            offset = to + np.arange(data.size)
            if tensor.swizzle:
                if to % 1024 or data.shape[1] != 128:
                    raise SimError("a swizzled box must be 128 bytes wide and start at a multiple of 1024")
                offset = offset ^ ((offset >> 7 & 7) << 4)
            elif to % 128:
                raise SimError("a box must start at a multiple of 128 bytes")
            mark = w.cta.mbarrier(bar, views=views).landing_event()
            if w.cta.has_left:  # the barrier may be the other CTA's
                raise BarrierError(f"a tensor load writes into {w.cta.name} after it has left")
            memory = machine.memory
            racy = inside & memory.racy[np.where(inside, index, 0)]
            stale = machine.order.unordered(memory.record, index[racy], views, ASYNC_GLOBAL)
            data[racy] = np.where(stale, POISON, data[racy])
            machine.order.read(memory.record, index[inside & ~racy], views, ASYNC_GLOBAL, mark)
            _land(machine, w.cta, to, data.reshape(-1), offset, bar, views)

        machine.async_work.append(AsyncWork(ins.opcode, [copy]))
        w.tick()
        machine.count("tensor load")

    return run


def _bulk_store(ins: Instruction, machine: Machine) -> Function:
    target, source = address(ins.operands[0], "u64", machine), address(ins.operands[1], "u32", machine)
    size = value(ins.operands[2], "b32", machine)

    def run(w: Warp, m: Mask) -> None:
        for lane in lanes(m).tolist():
            at, frm, n = int(target(w)[lane]), int(source(w)[lane]) & ((1 << CTA_SHIFT) - 1), int(size(w)[lane])
            if at % 16 or frm % 16 or n % 16:
                raise SimError("bulk copy: addresses and size must be multiples of 16")
            steps = _store_steps(machine, w, at, frm, n, w.bulk_number + 1, w.views.copy())
            work = AsyncWork(ins.opcode, steps)
            w.bulk_open.append(work)
            machine.async_work.append(work)
        w.tick()
        machine.count("bulk store")

    return run


def _commit_group(w: Warp, m: Mask) -> None:
    w.bulk_groups.append(w.bulk_open)
    w.bulk_open = []
    w.bulk_number += 1


def _wait_group(ins: Instruction, machine: Machine) -> Function:
    keep, read_only = int(ins.operands[0]), ins.has("read")

    def run(w: Warp, m: Mask) -> str | None:
        groups = w.bulk_groups[: max(len(w.bulk_groups) - keep, 0)]
        if any(not work.done if not read_only else len(work.steps) == 2 for group in groups for work in group):
            w.waits_for = "bulk stores"
            return "block"
        number = max(w.bulk_number - keep, 0)
        views = w.views
        for row in range(SHARED_ROWS):
            views[row, w.bulk_reads] = max(views[row, w.bulk_reads], number)
            if not read_only:
                views[row, w.bulk_writes] = max(views[row, w.bulk_writes], number)
        return None

    return run


def compile_bulk(ins: Instruction, machine: Machine) -> Function | None:
    """A function of (warp, mask), or None if this is no bulk instruction."""
    if not ins.opcode.startswith("cp.async.bulk"):
        return None
    if ins.has("commit_group"):
        return _commit_group
    if ins.has("wait_group"):
        return _wait_group(ins, machine)
    if ins.has("tensor"):
        return _tensor_load(ins, machine)
    space = ins.parts[3]
    if space.startswith("shared"):
        return _bulk_load(ins, machine)
    if space == "global":
        return _bulk_store(ins, machine)
    raise UnsupportedInstruction(ins.text)
