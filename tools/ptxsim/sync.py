# SPDX-License-Identifier: Apache-2.0
"""Instructions between threads: named, cluster and memory barriers, fences, shuffles, elections. None moves data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import BarrierError, PartialWarp, SimError, UnsupportedInstruction
from .loadstore import fence_acq_rel, fence_release_own_shared
from .machine import LANES, Machine, Mask, Mbarrier, NamedBarrier, Warp
from .memory import CTA_SHIFT
from .operands import address, lanes, value
from .order import ASYNC_GLOBAL, ASYNC_SHARED, GENERIC, SHARED_ROWS, TENSOR, Events
from .parse import Instruction

Function = Callable[[Warp, Mask], Any]
BLOCK = "block"


def whole(w: Warp, m: Mask, what: str) -> None:
    """Raise unless all 32 lanes execute the instruction together; run.py then lets the other lanes come here first."""
    if m is not None:
        raise PartialWarp(f"{what} by some lanes of a warp only")


def _bar_sync(ins: Instruction, machine: Machine) -> Function:
    number = value(ins.operands[0], "b32", machine)
    threads = value(ins.operands[1], "b32", machine) if len(ins.operands) > 1 else None

    def run(w: Warp, m: Mask) -> str | None:
        whole(w, m, "barrier")
        barrier = w.cta.named.setdefault(int(number(w)[0]), NamedBarrier())
        wanted = int(threads(w)[0]) if threads is not None else machine.program.threads
        if w.waiting is None:
            if barrier.arrived and barrier.threads != wanted:
                raise BarrierError(f"named barrier with {barrier.threads} threads joined with {wanted}")
            w.waiting = barrier.generation
            w.waits_for = f"named barrier {int(number(w)[0])}"
            barrier.threads = wanted
            _join(barrier, w)
            if LANES * len(barrier.arrived) == wanted:
                _end(barrier)
                machine.progress = True
        if w.waiting == barrier.generation:
            generation = barrier.generation
            w.still_blocked = lambda: barrier.generation == generation
            return BLOCK
        assert barrier.done is not None
        w.learn(barrier.done)
        w.waiting = None
        return None

    return run


def _bar_arrive(ins: Instruction, machine: Machine) -> Function:
    """Joins a named barrier without waiting for it."""
    number, threads = value(ins.operands[0], "b32", machine), value(ins.operands[1], "b32", machine)

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "barrier")
        barrier = w.cta.named.setdefault(int(number(w)[0]), NamedBarrier())
        wanted = int(threads(w)[0])
        if barrier.arrived and barrier.threads != wanted:
            raise BarrierError(f"named barrier with {barrier.threads} threads joined with {wanted}")
        barrier.threads = wanted
        _join(barrier, w)
        if LANES * len(barrier.arrived) == wanted:
            _end(barrier)
        machine.progress = True

    return run


def _join(barrier: NamedBarrier, w: Warp) -> None:
    barrier.arrived.add(id(w))
    if barrier.gathered is None:
        barrier.gathered = w.views.copy()
    else:
        np.maximum(barrier.gathered, w.views, out=barrier.gathered)
    w.tick()


def _end(barrier: NamedBarrier) -> None:
    barrier.done, barrier.gathered = barrier.gathered, None
    barrier.arrived = set()
    barrier.generation += 1


def _cluster_barrier(ins: Instruction, machine: Machine) -> Function:
    def state(w: Warp) -> NamedBarrier:
        return machine.cluster_state.setdefault((w.cta.rank, w.cta.cluster), NamedBarrier())

    if ins.has("relaxed"):
        raise UnsupportedInstruction(ins.text)

    def arrive(w: Warp, m: Mask) -> None:
        whole(w, m, "cluster barrier")
        barrier = state(w)
        if w.cluster_arrived:
            raise BarrierError("a warp arrives twice at the cluster barrier")
        w.waiting = None
        w.cluster_arrived = True
        w.cluster_generation = barrier.generation
        _join(barrier, w)
        if len(barrier.arrived) == machine.cluster_size * machine.program.threads // LANES:
            _end(barrier)
        machine.progress = True

    def wait(w: Warp, m: Mask) -> str | None:
        barrier = state(w)
        if not w.cluster_arrived:
            raise BarrierError("a wait at the cluster barrier without an arrival")
        w.waits_for = "cluster barrier"
        if barrier.generation == w.cluster_generation:
            return BLOCK
        assert barrier.done is not None
        w.learn(barrier.done)
        w.cluster_met, w.cluster_arrived = True, False
        return None

    return arrive if ins.parts[2] == "arrive" else wait


def _mbarrier(ins: Instruction, machine: Machine) -> Function:
    action = ins.parts[1]
    if action == "init":
        at, count = address(ins.operands[0], "u32", machine), value(ins.operands[1], "b32", machine)

        def init(w: Warp, m: Mask) -> None:
            for lane in lanes(m).tolist():
                offset = int(at(w)[lane]) & ((1 << CTA_SHIFT) - 1)
                if offset % 8 or offset in w.cta.mbarriers:
                    raise BarrierError(f"mbarrier at {offset:#x} of {w.cta.name} is misaligned or initialised twice")
                name = f"mbarrier {offset:#x} of {w.cta.name}"
                vector = machine.components.vector()
                w.cta.mbarriers[offset] = Mbarrier(
                    name, int(count(w)[lane]), w, machine.components.new(name, asynchronous=True), vector
                )
            w.tick()

        return init
    if action == "inval":
        raise UnsupportedInstruction(ins.text)
    if action in ("try_wait", "test_wait") and ins.has("parity"):
        at, parity = address(ins.operands[1], "u32", machine), value(ins.operands[2], "b32", machine)
        tensor_only, scope = ins.has("relaxed"), _scope(ins)

        def wait(w: Warp, m: Mask) -> str | None:
            which = lanes(m)
            addresses, parities = at(w)[which], parity(w)[which] & 1
            if (addresses != addresses[0]).any() or (parities != parities[0]).any():
                raise SimError("lanes of a warp wait for different barriers or phases")
            if int(addresses[0]) >> CTA_SHIFT != w.cta.cluster_rank:
                raise SimError("wait for another CTA's barrier")
            barrier = w.cta.mbarrier(int(addresses[0]), user=w)
            wanted = int(parities[0])
            if (barrier.phase & 1) == wanted:
                if action == "test_wait":  # asks, and goes on
                    w.put(ins.operands[0], np.zeros(LANES, bool), m)
                    return None
                w.still_blocked = lambda: (barrier.phase & 1) == wanted
                w.waits_for = (
                    f"{barrier.name}, phase {barrier.phase}: {barrier.pending} arrivals, {barrier.bytes} bytes"
                )
                return BLOCK
            w.learn(np.where(machine.components.tensor, barrier.done, 0) if tensor_only else barrier.done)
            if scope == "cluster" and not tensor_only and barrier.far_done is not None:
                w.learn(barrier.far_done)
            w.put(ins.operands[0], np.ones(LANES, bool), m)
            return None

        return wait
    if action in ("arrive", "expect_tx"):
        return _mbarrier_arrive(ins, machine)
    raise UnsupportedInstruction(ins.text)


def _scope(ins: Instruction) -> str:
    """Of an mbarrier instruction: the CTA unless it says otherwise."""
    return "cluster" if ins.has("cluster") else "cta"


def _brought(w: Warp, machine: Machine, relaxed: bool, scope: str, *, far: bool) -> tuple[Events | None, Events | None]:
    """What an arrival by a thread brings: to waits of any scope, and from another CTA to acquires of the cluster only.

    Execution order of tcgen05 goes along without a release, if the scope reaches the waiter.
    """
    released: Events | None = w.views
    if relaxed:
        fence_scope, released = w.fence_release if w.fence_release is not None else ("", None)
        if far and fence_scope == "cta":
            released = None
    if far and scope == "cta":
        return None, None
    tensor = np.where(machine.components.tensor, w.views, 0)
    if far:
        return tensor, None if released is None else released[:SHARED_ROWS]
    return tensor if released is None else np.maximum(tensor[:SHARED_ROWS], released[:SHARED_ROWS]), None


def _mbarrier_arrive(ins: Instruction, machine: Machine) -> Function:
    expect = ins.has("expect_tx")
    relaxed, scope = ins.has("relaxed"), _scope(ins)
    arrive = ins.parts[1] == "arrive"
    remote = ins.has("shared::cluster")
    operands = ins.operands if ins.operands[0].startswith("[") else ins.operands[1:]
    at = address(operands[0], "u32", machine)
    number = value(operands[1], "b32", machine) if len(operands) > 1 else None

    def run(w: Warp, m: Mask) -> None:
        for lane in lanes(m).tolist():
            target = int(at(w)[lane])
            far = target >> CTA_SHIFT != w.cta.cluster_rank
            if far and not remote:
                raise SimError("arrival on another CTA's barrier without shared::cluster")
            n = 1 if number is None else int(number(w)[lane])
            barrier = w.cta.mbarrier(target, user=w)
            brought = _brought(w, machine, relaxed, scope, far=far)
            barrier.arrive((1 if expect else n) if arrive else 0, n if expect else 0, *brought)
        w.tick()
        machine.progress = True

    return run


def _fence(ins: Instruction, machine: Machine) -> Function:
    name = ins.opcode

    def fence_barriers(w: Warp) -> None:
        for barrier in w.cta.mbarriers.values():
            if barrier.owner is w and barrier.fence is None:
                barrier.fence = (w.component, w.clock)

    def init_fence(w: Warp, m: Mask) -> None:
        fence_barriers(w)
        w.tick()

    if ins.has("mbarrier_init"):
        return init_fence
    if name.startswith("fence.proxy.async"):
        rows = [ASYNC_GLOBAL, ASYNC_SHARED]
        if ins.parts[-1] == "global":
            rows = [ASYNC_GLOBAL]
        elif ins.parts[-1].startswith("shared"):
            rows = [ASYNC_SHARED]

        def proxy(w: Warp, m: Mask) -> None:
            fence_barriers(w)
            w.proxy_fence(rows)

        return proxy
    if name == "fence.release.sync_restrict::shared::cta.cluster":
        return lambda w, m: fence_release_own_shared(w)
    if ins.has("acq_rel") or ins.has("sc"):
        scope = ins.parts[-1]
        return lambda w, m: fence_acq_rel(w, scope)
    raise UnsupportedInstruction(ins.text)


def _shuffle(ins: Instruction, machine: Machine) -> Function:
    mode = ins.parts[2]
    target, _, valid = ins.operands[0].partition("|")
    source, offset, clamp = (value(t, "b32", machine) for t in ins.operands[1:4])
    own = np.arange(LANES)

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "shuffle")
        b, c = offset(w).astype(np.int64) & 31, clamp(w).astype(np.int64)
        segment, limit = (c >> 8) & 31, c & 31
        top = (own & segment) | (limit & ~segment)
        other = {"up": own - b, "down": own + b, "bfly": own ^ b, "idx": (own & segment) | (b & ~segment)}[mode]
        fine = other >= top if mode == "up" else other <= top
        w.put(target, source(w)[np.where(fine, other, own)], None)
        if valid:
            w.put(valid, fine, None)

    return run


def _redux(ins: Instruction, machine: Machine) -> Function:
    source = value(ins.operands[1], ins.parts[-1], machine)
    functions: dict[str, Any] = {"max": np.maximum, "min": np.minimum, "add": np.add, "or": np.bitwise_or}
    fn = functions[ins.parts[2]]

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "redux")
        w.put(ins.operands[0], np.full(LANES, fn.reduce(source(w))).astype(source(w).dtype).view(np.uint32), None)

    return run


def _vote(ins: Instruction, machine: Machine) -> Function:
    source = value(ins.operands[1].lstrip("!"), "pred", machine)
    flip = ins.operands[1].startswith("!")

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "vote")
        p = source(w) ^ flip
        if ins.has("ballot"):
            w.put(ins.operands[0], np.full(LANES, sum(1 << i for i in np.nonzero(p)[0].tolist()), np.uint32), None)
        elif ins.has("any") or ins.has("all"):
            w.put(ins.operands[0], np.full(LANES, bool(p.any() if ins.has("any") else p.all())), None)
        else:
            raise UnsupportedInstruction(ins.text)

    return run


def _elect(ins: Instruction, machine: Machine) -> Function:
    target, predicate = ins.operands[0].split("|")

    def run(w: Warp, m: Mask) -> None:
        whole(w, m, "elect.sync")
        w.put(target, np.zeros(LANES, np.uint32), None)
        w.put(predicate, np.arange(LANES) == 0, None)

    return run


def tensor_fence(w: Warp, *, after: bool) -> None:
    """tcgen05.fence: `after` brings what synchronisation has shown to the tensor view, `before` sends loads along."""
    if after:
        np.maximum(w.views[TENSOR], w.views[GENERIC], out=w.views[TENSOR])
    else:
        w.views[:SHARED_ROWS, w.tmem_loads] = w.tmem_waited
    w.tick()


def compile_sync(ins: Instruction, machine: Machine) -> Function | None:
    """A function of (warp, mask), or None if this is no instruction of this module."""
    base = ins.parts[0]
    if ins.opcode == "bar.warp.sync":
        return lambda w, m: whole(w, m, "bar.warp.sync")
    if ins.opcode in ("bar.sync", "barrier.sync", "barrier.cta.sync", "barrier.sync.aligned", "bar.cta.sync"):
        return _bar_sync(ins, machine)
    if ins.opcode in ("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive"):
        return _bar_arrive(ins, machine)
    if ins.opcode.startswith("barrier.cluster"):
        return _cluster_barrier(ins, machine)
    if base == "mbarrier":
        return _mbarrier(ins, machine)
    if base == "fence":
        return _fence(ins, machine)
    if base == "shfl":
        return _shuffle(ins, machine)
    if base == "redux":
        return _redux(ins, machine)
    if base == "vote":
        return _vote(ins, machine)
    if base == "elect":
        return _elect(ins, machine)
    if base in ("setmaxnreg", "prefetch", "griddepcontrol", "nanosleep"):
        return lambda w, m: None
    return None
