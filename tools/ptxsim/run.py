# SPDX-License-Identifier: Apache-2.0
"""Runs a launch: random interleaving of warps and of asynchronous work, deadlock detection, checks at the end.

The door of the package: `run_launch`. The same seed gives the same run; other seeds give other interleavings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .alu import compile_alu
from .bulk import compile_bulk
from .errors import BarrierError, DeadlockError, PartialWarp, SimError, UnsupportedInstruction
from .loadstore import compile_atomic, compile_load, compile_stmatrix, compile_store
from .machine import LANES, Machine, TensorMap, Warp
from .memory import GlobalMemory
from .operands import value
from .order import GENERIC
from .parse import Instruction, Program
from .sync import compile_sync
from .tensor import compile_tensor

ROUND_NS = 100
"""Advance of %globaltimer per scheduling round."""
PACES = (1, 1, 2, 4, 16)
"""A warp takes part in one round of so many, drawn per warp: some run far ahead of others."""
MAX_SLICE = 250
"""Most instructions of a warp in one round."""
PATIENCE = 400
"""Rounds without a store, an arrival or asynchronous work after which a launch counts as hung."""

_PLAIN, _JUMP, _EXIT = range(3)


@dataclass(frozen=True, slots=True)
class _Step:
    kind: int
    run: Callable[[Warp, Any], Any] | None
    guard: Callable[[Warp], Any] | None
    target: int


@dataclass(frozen=True)
class RunReport:
    """What a finished launch did: rounds, instructions of all warps, counts of asynchronous work by name."""

    rounds: int
    instructions: int
    counts: dict[str, int]


def _compile(ins: Instruction, machine: Machine) -> _Step:
    guard: Callable[[Warp], Any] | None = None
    if ins.guard is not None:
        positive = value(ins.guard, "pred", machine)
        guard = (lambda w: ~positive(w)) if ins.guard_negated else positive
    if ins.parts[0] == "bra":
        return _Step(_JUMP, None, guard, ins.target)
    if ins.parts[0] in ("ret", "exit"):
        return _Step(_EXIT, None, guard, -1)
    try:
        run = _function(ins, machine)
    except (SimError, KeyError) as err:
        raise UnsupportedInstruction(f"line {ins.line}: {ins.text} ({err})") from None
    if run is None:
        raise UnsupportedInstruction(f"line {ins.line}: {ins.text}")
    return _Step(_PLAIN, run, guard, -1)


def _function(ins: Instruction, machine: Machine) -> Callable[[Warp, Any], Any] | None:
    makers: dict[str, Callable[[Instruction, Machine], Callable[[Warp, Any], Any]]] = {
        "ld": compile_load,
        "st": compile_store,
        "red": compile_atomic,
        "atom": compile_atomic,
        "stmatrix": compile_stmatrix,
    }
    if ins.parts[0] in makers:
        return makers[ins.parts[0]](ins, machine)
    for make in (compile_sync, compile_bulk, compile_tensor, compile_alu):
        found = make(ins, machine)
        if found is not None:
            return found
    return None


class Launch:
    """One launch, step by step; most callers want `run_launch`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.code = [_compile(ins, machine) for ins in machine.program.instructions]
        self.instructions = 0

    def _step(self, w: Warp) -> str | None:
        """One instruction of the lanes that are furthest behind."""
        if w.pcs is None:
            pc, mask = w.pc, None
        else:
            pc = int(w.pcs[w.live & ~w.parked].min())
            mask = w.live & ~w.parked & (w.pcs == pc)
        step = self.code[pc]
        taken = mask
        if step.guard is not None:
            wanted = step.guard(w)
            taken = wanted if mask is None else wanted & mask
            if taken.all():
                taken = None
        if step.kind == _PLAIN:
            if step.guard is None or taken is None or taken.any():
                try:
                    result = step.run(w, taken)  # type: ignore[misc]
                except PartialWarp as err:
                    if mask is None:
                        raise
                    self._park(w, mask, err)
                    return None
                if result == "block":
                    return "block"
                self._advance(w, mask, pc + 1)
                return None if result is None else str(result)
            self._advance(w, mask, pc + 1)
        elif step.kind == _JUMP:
            if step.guard is None or taken is None:
                self._advance(w, mask, step.target)
            elif not taken.any():
                self._advance(w, mask, pc + 1)
            else:
                pcs = np.full(LANES, pc) if w.pcs is None else w.pcs
                fallen = pcs == pc if mask is None else mask
                w.pcs = np.where(taken, step.target, np.where(fallen, pc + 1, pcs))
        else:
            w.live = w.live & ~(np.ones(LANES, bool) if taken is None else taken)
            if w.live.any():
                if w.pcs is None:
                    w.pcs = np.full(LANES, pc + 1)
                elif mask is not None:
                    w.pcs[mask] = pc + 1
            else:
                w.running = False
        return None

    @staticmethod
    def _park(w: Warp, mask: Any, reason: PartialWarp) -> None:
        """Some lanes are at an instruction that needs all: they wait for the others to come to the same one."""
        assert w.pcs is not None
        w.parked = w.parked | mask
        if not (w.live & ~w.parked).any():
            first = int(w.pcs[w.live][0])
            if not w.live.all() or (w.pcs != first).any():
                raise reason
            w.parked = np.zeros(LANES, bool)
            w.pcs, w.pc = None, first

    @staticmethod
    def _advance(w: Warp, mask: Any, to: int) -> None:
        if mask is None:
            w.pc = to
            return
        assert w.pcs is not None
        w.pcs[mask] = to
        first = int(w.pcs[0])
        if w.live.all() and (w.pcs == first).all():
            w.pcs, w.pc = None, first

    def _run_slice(self, w: Warp, length: int) -> None:
        if w.still_blocked is not None:
            if w.still_blocked():
                return
            w.still_blocked = None
        try:
            for _ in range(length):
                result = self._step(w)
                if result == "block":
                    return
                self.instructions += 1
                if not w.running or result == "yield":
                    return
        except KeyError as err:
            raise SimError(f"{self.where(w)}: register {err} is read before it holds a value") from None
        except SimError as err:
            raise type(err)(f"{self.where(w)}: {err}") from None

    def where(self, w: Warp) -> str:
        """Warp, line and instruction."""
        ahead = w.live & ~w.parked if (w.live & ~w.parked).any() else w.live
        pc = w.pc if w.pcs is None else int(w.pcs[ahead].min())
        ins = self.machine.program.instructions[pc]
        return f"{w.name}, line {ins.line} `{ins.text}`"

    def _async_round(self) -> None:
        machine = self.machine
        rng, work = machine.rng, machine.async_work
        for _ in range(int(rng.integers(0, 1 + len(work)))):
            item = work[int(rng.integers(len(work)))]
            try:
                item.steps[0]()
            except SimError as err:
                raise type(err)(f"{item.name}: {err}") from None
            item.steps.pop(0)
            machine.progress = True
            if item.done:
                work.remove(item)
        for queue in machine.tensor_queues.values():
            for _ in range(int(rng.integers(0, 1 + len(queue)))):
                copies = [i for i, (_, is_copy) in enumerate(queue) if is_copy]
                i = copies[0] if copies and rng.integers(2) else 0  # a scale copy may overtake earlier MMAs
                try:
                    queue[i][0]()
                except SimError as err:
                    raise type(err)(f"tensor core: {err}") from None
                queue.pop(i)
                machine.progress = True

    def run(self, max_rounds: int, patience: int) -> RunReport:
        """To the end.

        Raises:
            DeadlockError: nothing moves any more, or `max_rounds` are over.
            SimError: any other fault.
        """
        machine = self.machine
        idle = rounds = 0
        for w in machine.warps:
            w.pace = int(machine.rng.choice(PACES))
        while True:
            active = [w for w in machine.warps if w.running]
            if not active:
                break
            rounds += 1
            machine.clock_ns += ROUND_NS
            machine.progress = False
            before = self.instructions
            order = machine.rng.permutation(len(active))
            lengths = machine.rng.integers(1, MAX_SLICE, len(active))
            for i in order:
                if idle or active[i].pace == 1 or int(machine.rng.integers(active[i].pace)) == 0:
                    self._run_slice(active[i], int(lengths[i]))
            self._async_round()
            pending = bool(machine.async_work) or any(machine.tensor_queues.values())
            if machine.progress:
                idle = 0
            elif not pending:
                idle += 1 if self.instructions > before else patience // 4
            if idle >= patience or rounds >= max_rounds:
                self._report_hang(rounds)
        self._finish()
        return RunReport(rounds, self.instructions, dict(machine.counts))

    def _report_hang(self, rounds: int) -> None:
        stuck = [
            f"{self.where(w)} waits for {w.waits_for or 'a value in memory'}" for w in self.machine.warps if w.running
        ]
        raise DeadlockError(f"no end after {rounds} rounds; {len(stuck)} warps are left:\n" + "\n".join(stuck[:40]))

    def _finish(self) -> None:
        machine = self.machine
        while machine.async_work or any(machine.tensor_queues.values()):
            self._async_round()
        for w in machine.warps:
            known = int(w.views[GENERIC, w.bulk_writes])
            if w.bulk_open or known < w.bulk_number:
                raise SimError(f"{w.name} has left without waiting for its bulk stores")
        for cta in machine.ctas:
            if cta.tmem.columns:
                raise SimError(f"{cta.name} has left without freeing its {cta.tmem.columns} TMEM columns")
            for barrier in cta.mbarriers.values():
                if barrier.bytes or barrier.pending != barrier.count:
                    raise BarrierError(
                        f"{barrier.name} is left in the middle of phase {barrier.phase}: "
                        f"{barrier.pending} of {barrier.count} arrivals and {barrier.bytes} bytes are missing"
                    )


def run_launch(
    program: Program,
    memory: GlobalMemory,
    arguments: Sequence[Sequence[int | TensorMap]],
    *,
    grid: int,
    cluster_size: int = 1,
    seed: int = 0,
    check_order: bool = True,
    max_rounds: int = 20000,
    patience: int = PATIENCE,
) -> RunReport:
    """Execute one launch on every virtual rank at the same time.

    Args:
        program: the kernel.
        memory: global memory of all ranks; changed in place.
        arguments: per rank, one entry per kernel parameter: an integer (address or number) or a tensor map.
        grid: CTAs per rank, all resident.
        cluster_size: CTAs per cluster.
        seed: chooses the interleaving.
        check_order: check every access against the memory model.
        max_rounds: scheduling rounds after which the launch counts as hung.
        patience: rounds of polling without any progress after which it counts as hung.

    Raises:
        SimError: what the program did wrong, with instruction, line and warp.
    """
    with np.errstate(all="ignore"):
        machine = Machine(program, memory, arguments, grid, cluster_size, seed, check_order)
        return Launch(machine).run(max_rounds, patience)
