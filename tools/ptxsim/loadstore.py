# SPDX-License-Identifier: Apache-2.0
"""ld, st, red, atom on global and shared memory, parameters, and memory-order semantics of flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PartialWarp, SimError, UnsupportedInstruction
from .machine import LANES, Machine, Mask, Warp
from .memory import CTA_SHIFT
from .operands import PARAM_SHIFT, PARAM_SPACE, address, group, lanes, value
from .order import ASYNC_GLOBAL, GENERIC, LOCAL, SHARED_ROWS, Flag, Record
from .parse import Instruction

Function = Callable[[Warp, Mask], Any]

_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
_BYTES |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8}
_STRONG = ("acquire", "release", "acq_rel", "relaxed")


def _scope(ins: Instruction) -> str:
    return next((p for p in ins.parts if p in ("sys", "gpu", "cluster", "cta")), "gpu")


class _Place:
    """The memory an instruction works on and its address getter."""

    def __init__(self, ins: Instruction, operand: str, machine: Machine) -> None:
        self.shared = any(p.startswith("shared") for p in ins.parts)
        if not self.shared and not ins.has("global"):
            raise UnsupportedInstruction(ins.text)
        self.get = address(operand, "u32" if self.shared else "u64", machine)
        self.machine = machine
        self.cluster = ins.has("shared::cluster")
        self.view = LOCAL if self.shared else GENERIC

    def index(
        self, w: Warp, which: NDArray[np.int64], size: int
    ) -> tuple[NDArray[np.uint8], Record, NDArray[np.int64]]:
        """Memory, record and byte indices of the accesses of some lanes."""
        addresses = self.get(w)[which]
        if not self.shared:
            memory = self.machine.memory
            return memory.data, memory.record, memory.index(addresses, size)
        owner = w.cta
        if self.cluster:
            owner = w.cta.at(int(addresses[0]), w)
        if (addresses >> np.uint64(CTA_SHIFT) != owner.cluster_rank).any():
            raise SimError("access to another CTA's shared memory by an ordinary load or store")
        return owner.shared.data, owner.shared.record, owner.shared.index(addresses, size)

    def flag(self, w: Warp, lane: int) -> Flag:
        """Synchronisation state of the word that a lane addresses."""
        at = int(self.get(w)[lane])
        if self.cluster:
            raise UnsupportedInstruction("a strong access of another CTA's shared memory")
        if self.shared:
            return w.cta.shared_flags.setdefault(at, Flag())
        return self.machine.flag(at)


def compile_load(ins: Instruction, machine: Machine) -> Function:
    """ld of any space."""
    size = _BYTES[ins.parts[-1]]
    targets = group(ins.operands[0])
    if ins.has("param"):
        return _load_parameter(ins, machine, size, targets)
    if ins.has("volatile") or ins.has("nc"):
        raise UnsupportedInstruction(ins.text)
    place = _Place(ins, ins.operands[1], machine)
    total = size * len(targets)
    dtype = np.dtype(f"<u{size}")
    strong = next((p for p in ins.parts if p in _STRONG), None)
    scope = _scope(ins)

    def run(w: Warp, m: Mask) -> str | None:
        which = lanes(m)
        if not which.size:
            return None
        data, record, index = place.index(w, which, total)
        machine.order.read(record, index, w.views, place.view, w.mark(strong is not None))
        words = data[index].view(dtype)
        for i, target in enumerate(targets):
            out = np.zeros(LANES, np.uint64 if size == 8 else np.uint32)
            out[which] = words[:, i]
            w.put(target, out, m)
        if strong is None:
            return None
        for lane in which:
            _acquire(w, place.flag(w, int(lane)), strong, scope)
        return "yield"

    return run


def _acquire(w: Warp, flag: Flag, order: str, scope: str) -> None:
    if order in ("acquire", "acq_rel"):
        for views in flag.acquire(scope, *w.place()):
            w.learn(views)
    elif order == "relaxed":
        w.relaxed_seen[id(flag)] = (scope, flag)


def _release(w: Warp, flag: Flag, order: str, scope: str, *, keep: bool) -> None:
    if order in ("release", "acq_rel"):
        flag.release(scope, *w.place(), w.views, keep=keep)
        w.tick()
    elif w.fence_release is not None:
        flag.release(w.fence_release[0], *w.place(), w.fence_release[1], keep=keep)
    elif not keep:
        flag.overwrite()


def _load_parameter(ins: Instruction, machine: Machine, size: int, targets: list[str]) -> Function:
    inner = ins.operands[1].strip("[]")
    if inner.startswith("param:"):
        number, _, offset = inner[6:].partition("+")
        place = PARAM_SPACE + (int(number) << PARAM_SHIFT) + int(offset or 0)
    else:
        raise UnsupportedInstruction(ins.text)

    def run(w: Warp, m: Mask) -> None:
        for i, target in enumerate(targets):
            at = place + i * size - PARAM_SPACE
            argument = machine.arguments[w.cta.rank][at >> PARAM_SHIFT]
            if not isinstance(argument, int):
                raise SimError("a tensor map is read as a number")
            number = (argument >> 8 * (at & ((1 << PARAM_SHIFT) - 1))) & ((1 << 8 * size) - 1)
            w.put(target, np.full(LANES, number, np.uint64 if size == 8 else np.uint32), m)

    return run


def compile_store(ins: Instruction, machine: Machine) -> Function:
    """st to global or shared memory."""
    size = _BYTES[ins.parts[-1]]
    place = _Place(ins, ins.operands[0], machine)
    sources = [value(text, "b64" if size == 8 else "b32", machine) for text in group(ins.operands[1])]
    total = size * len(sources)
    dtype = np.dtype(f"<u{size}")
    strong = next((p for p in ins.parts if p in _STRONG), None)
    scope = _scope(ins)
    if ins.has("volatile"):
        raise UnsupportedInstruction(ins.text)

    def run(w: Warp, m: Mask) -> None:
        which = lanes(m)
        if not which.size:
            return
        data, record, index = place.index(w, which, total)
        words = np.empty((which.size, len(sources)), dtype)
        for i, source in enumerate(sources):
            words[:, i] = source(w)[which].astype(dtype)
        new = words.view(np.uint8).reshape(which.size, total)
        repeated = data[index] == new
        if place.cluster:  # a moment of its own: what releases only this CTA's shared memory stops before it
            w.tick()
            w.remote_clock = w.clock
        mark = w.mark(strong is not None)
        if repeated.any():
            repeated &= machine.order.unordered(record, index, w.views, place.view)
            record.repeat(index[repeated], mark)
        machine.order.write(record, index[~repeated], w.views, place.view, mark)
        data[index] = new
        machine.progress = True
        if place.cluster:
            w.tick()
        if strong is not None:
            for lane in which:
                _release(w, place.flag(w, int(lane)), strong, scope, keep=False)

    return run


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
    "max": max,
    "min": min,
    "exch": lambda a, b: b,
}


def compile_atomic(ins: Instruction, machine: Machine) -> Function:
    """red and atom: lanes one after the other, strong, relaxed unless they say otherwise."""
    kind = ins.parts[-1]
    size = _BYTES[kind]
    has_result = ins.parts[0] == "atom"
    operands = ins.operands[1:] if has_result else ins.operands
    name = next((p for p in ins.parts if p in _OPERATIONS or p == "cas"), None)
    if name is None or (kind in ("s32", "s64", "f32") and name in ("max", "min")):
        raise UnsupportedInstruction(ins.text)
    place = _Place(ins, operands[0], machine)
    sources = [value(text, "b64" if size == 8 else "b32", machine) for text in operands[1:]]
    order = next((p for p in ins.parts if p in _STRONG), "relaxed")
    scope = _scope(ins)
    limit = (1 << 8 * size) - 1

    def run(w: Warp, m: Mask) -> None:
        which = lanes(m)
        given = [source(w) for source in sources]
        old = np.zeros(LANES, np.uint64 if size == 8 else np.uint32)
        for lane in which.tolist():
            data, record, index = place.index(w, np.array([lane]), size)
            at = index[0]
            machine.order.read(record, at, w.views, place.view, w.mark(True))
            machine.order.write(record, at, w.views, place.view, w.mark(True))
            seen = int.from_bytes(data[at].tobytes(), "little")
            if name == "cas":
                new = int(given[1][lane]) if seen == int(given[0][lane]) & limit else seen
            else:
                new = _OPERATIONS[name](seen, int(given[0][lane])) & limit
            data[at] = np.frombuffer(new.to_bytes(size, "little"), np.uint8)
            old[lane] = seen
            flag = place.flag(w, lane)
            _acquire(w, flag, order, scope)
            _release(w, flag, order, scope, keep=True)
        if has_result and which.size:
            w.put(ins.operands[0], old, m)
        machine.progress = True

    return run


def compile_stmatrix(ins: Instruction, machine: Machine) -> Function:
    """stmatrix of 8x8 16-bit matrices, transposed or not."""
    count = next(int(p[1:]) for p in ins.parts if p in ("x1", "x2", "x4"))
    at = address(ins.operands[0], "u32", machine)
    sources = [value(text, "b32", machine) for text in group(ins.operands[1])]
    transposed = ins.has("trans")
    lane = np.arange(LANES)

    def run(w: Warp, m: Mask) -> None:
        if m is not None:
            raise PartialWarp("stmatrix by some lanes of a warp only")
        for i in range(count):
            matrix = np.empty((8, 8), np.uint16)
            raw = sources[i](w)
            matrix[lane // 4, 2 * (lane % 4)] = raw & 0xFFFF
            matrix[lane // 4, 2 * (lane % 4) + 1] = raw >> 16
            if transposed:
                matrix = np.ascontiguousarray(matrix.T)
            index = w.cta.shared.index(at(w)[8 * i : 8 * i + 8], 16)
            machine.order.write(w.cta.shared.record, index, w.views, LOCAL, w.mark())
            w.cta.shared.data[index] = matrix.view(np.uint8).reshape(8, 16)
        machine.progress = True

    return run


def fence_acq_rel(w: Warp, scope: str) -> None:
    """fence.acq_rel: earlier relaxed loads acquire, later relaxed stores release."""
    for seen_scope, flag in w.relaxed_seen.values():
        narrow = min((scope, seen_scope), key=["cta", "cluster", "gpu", "sys"].index)
        for views in flag.acquire(narrow, *w.place()):
            w.learn(views)
    w.relaxed_seen.clear()
    w.fence_release = (scope, w.views[:SHARED_ROWS].copy())
    w.tick()


def fence_release_own_shared(w: Warp) -> None:
    """fence.release.sync_restrict::shared::cta.cluster: later relaxed arrivals release what was done to own memory."""
    views = w.views[:SHARED_ROWS].copy()
    views[[GENERIC, ASYNC_GLOBAL]] = 0
    if w.remote_clock:
        views[:, w.component] = np.minimum(views[:, w.component], w.remote_clock - 1)
    w.fence_release = ("cluster", views)
    w.tick()
