# SPDX-License-Identifier: Apache-2.0
"""State of one launch: warps with their registers, CTAs with barriers and memories, the queues of asynchronous work.

Instruction modules change it, run.py schedules it. It knows no instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BarrierError, SimError
from .memory import CTA_SHIFT, GlobalMemory, SharedMemory, TensorMemory
from .order import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    GENERIC,
    LOCAL,
    ORDINARY,
    SHARED_ROWS,
    Components,
    Events,
    Flag,
    Order,
    event,
)
from .parse import Program

LANES = 32
Mask = NDArray[np.bool_] | None
"""Active lanes; None stands for all 32."""


@dataclass(frozen=True)
class TensorMap:
    """What a two-dimensional TMA descriptor says; the caller states it, host code is not interpreted.

    Attributes:
        address: first byte.
        rows, row_bytes: extent; everything outside reads as zero.
        pitch_bytes: bytes from row to row.
        box_rows, box_bytes: one load.
        bits: bits of one column coordinate.
        swizzle: 128-byte swizzle, or rows as they are.
    """

    address: int
    rows: int
    row_bytes: int
    pitch_bytes: int
    box_rows: int
    box_bytes: int
    bits: int
    swizzle: bool


class Mbarrier:
    """An mbarrier: phase, pending arrivals, pending bytes, and what its completed phases make visible.

    What threads of its own CTA and asynchronous work bring is apart from what threads of other CTAs release: only a
    wait that acquires at cluster scope brings the latter.
    """

    def __init__(self, name: str, count: int, owner: Warp, component: int, vector: Events) -> None:
        self.name, self.count, self.owner, self.component = name, count, owner, component
        self.pending, self.bytes, self.phase = count, 0, 0
        self.fence: tuple[int, int] | None = None
        self.gathered, self.done = vector, vector.copy()
        self.far: Events | None = None
        self.far_done: Events | None = None
        self.set_up = (owner.component, owner.clock)

    def arrive(self, arrivals: int, expected_bytes: int, views: Events | None, far: Events | None = None) -> bool:
        """Count arrivals and announced bytes; True if that ended a phase. `far`: released by another CTA's thread."""
        if views is not None:
            np.maximum(self.gathered[:SHARED_ROWS], views[:SHARED_ROWS], out=self.gathered[:SHARED_ROWS])
        if far is not None:
            self.far = far.copy() if self.far is None else np.maximum(self.far, far)
        self.bytes += expected_bytes
        self.pending -= arrivals
        return self._complete()

    def land(self, size: int) -> bool:
        """Bytes of an asynchronous copy have arrived."""
        self.bytes -= size
        return self._complete()

    def landing_event(self) -> int:
        """The event of bytes that land now."""
        return event(self.component, self.phase + 1)

    def _complete(self) -> bool:
        if self.pending < 0:
            raise BarrierError(f"{self.name}: more arrivals than its count {self.count} in one phase")
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.count
        self.gathered[:SHARED_ROWS, self.component] = self.phase
        self.done = self.gathered.copy()
        self.far_done = self.far
        return True


@dataclass
class NamedBarrier:
    """bar.sync: the warps that have arrived and what they bring."""

    arrived: set[int] = field(default_factory=set)
    threads: int = 0
    generation: int = 0
    gathered: Events | None = None
    done: Events | None = None


class Warp:
    """32 lanes: registers by name, one program counter while they agree, one each while they do not."""

    def __init__(self, cta: Cta, index: int, vector: Events, components: Components) -> None:
        self.cta, self.index = cta, index
        self.registers: dict[str, NDArray[Any]] = {}
        self.pc = 0
        self.pcs: NDArray[np.int64] | None = None
        self.live = np.ones(LANES, bool)
        self.parked = np.zeros(LANES, bool)
        self.running = True
        self.pace = 1
        self.thread_index = (np.arange(LANES) + LANES * index).astype(np.uint32)
        self.views = vector
        name = f"warp {index} of {cta.name}"
        self.name = name
        self.component: int = components.new(name)
        self.clock: int = 1
        self.bulk_reads = components.new(f"bulk store (reads) of {name}")
        self.bulk_writes = components.new(f"bulk store of {name}")
        self.mma_reads = components.new(f"wgmma of {name}")
        self.tmem_loads = components.new(f"tcgen05.ld of {name}", tensor=True)
        self.waiting: Any = None
        self.waits_for = ""
        self.still_blocked: Callable[[], bool] | None = None
        self.cluster_generation = -1
        self.cluster_met = False
        self.cluster_arrived = False
        self.remote_clock = 0
        self.bulk_open: list[Any] = []
        self.bulk_groups: list[list[Any]] = []
        self.bulk_number = 0
        self.mma_committed = 0
        self.mma_pending: dict[str, tuple[int, NDArray[Any]]] = {}
        self.tmem_clock = 1
        self.tmem_waited = 0
        self.fence_release: tuple[str, Events] | None = None
        self.relaxed_seen: dict[int, tuple[str, Flag]] = {}
        self.views[:SHARED_ROWS, self.component] = 0
        self.views[[GENERIC, LOCAL], self.component] = 1

    def tick(self) -> None:
        """After a release: later accesses are not part of it."""
        self.clock += 1
        self.views[[GENERIC, LOCAL], self.component] = self.clock

    def mark(self, strong: bool = False) -> int:
        """The event of an access by this warp now."""
        return event(self.component, self.clock, strong)

    def learn(self, views: Events) -> None:
        """After an acquire."""
        np.maximum(self.views[:SHARED_ROWS], views[:SHARED_ROWS], out=self.views[:SHARED_ROWS])

    def proxy_fence(self, rows: Sequence[int] = (ASYNC_GLOBAL, ASYNC_SHARED)) -> None:
        """fence.proxy.async: what ordinary accesses know, asynchronous ones know from here on."""
        for row in rows:
            np.maximum(self.views[row], self.views[ORDINARY[row]], out=self.views[row])
        self.tick()

    def put(self, register: str, value: NDArray[Any], mask: Mask) -> None:
        """Write a register in the active lanes; other lanes keep theirs."""
        if mask is None:
            self.registers[register] = value
        elif register != "_":
            old = self.registers.get(register)
            if old is None:
                old = np.full(LANES, True) if value.dtype == bool else np.full(LANES, 0xDEADBEEF, value.dtype)
            self.registers[register] = np.where(mask, value, old)

    def place(self) -> tuple[int, int, int]:
        """(rank, cluster, CTA) for scopes."""
        return self.cta.rank, self.cta.cluster, self.cta.index


class Cta:
    """One CTA of one virtual GPU."""

    def __init__(self, machine: Machine, rank: int, index: int, cluster_rank: int, num_warps: int) -> None:
        self.machine, self.rank, self.index, self.cluster_rank = machine, rank, index, cluster_rank
        self.cluster = index // machine.cluster_size
        self.name = f"CTA {index}" if len(machine.arguments) == 1 else f"CTA {index} of rank {rank}"
        self.shared = SharedMemory(self.name)
        self.tmem = TensorMemory(self.name)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.shared_flags: dict[int, Flag] = {}
        self.tensor_core = machine.components.new(f"tensor core of {self.name}", asynchronous=True, tensor=True)
        self.scale_copies = machine.components.new(f"scale copies of {self.name}", asynchronous=True, tensor=True)
        self.tensor_number = 0
        self.copy_number = 0
        vector = machine.components.vector
        self.warps = [Warp(self, i, vector(), machine.components) for i in range(num_warps)]

    def peers(self) -> list[Cta]:
        """The CTAs of this cluster, in rank order."""
        first = self.cluster * self.machine.cluster_size
        return self.machine.by_rank[self.rank][first : first + self.machine.cluster_size]

    def pair(self) -> list[Cta]:
        """The CTAs that a tcgen05 instruction of cta_group::2 works on."""
        return self.peers()[self.cluster_rank & ~1 : (self.cluster_rank | 1) + 1]

    @property
    def has_left(self) -> bool:
        """Whether nobody keeps its memories alive."""
        return not any(warp.running for warp in self.warps)

    def at(self, address: int, user: Warp | None = None) -> Cta:
        """The CTA whose shared memory a shared::cluster address lies in.

        Raises:
            SimError: outside the cluster, or a thread's access to a CTA that need not have started, or has left.
        """
        if address >> CTA_SHIFT >= self.machine.cluster_size:
            raise SimError(f"shared::cluster address {address:#x} lies outside the cluster")
        owner = self.peers()[address >> CTA_SHIFT]
        if user is not None and owner is not self:
            if not user.cluster_met:
                raise SimError(f"access to {owner.name} before a cluster barrier has shown that it runs")
            if owner.has_left:
                raise SimError(f"access to {owner.name} after it has left")
        return owner

    def mbarrier(self, address: int, *, user: Warp | None = None, views: Events | None = None) -> Mbarrier:
        """The barrier at a shared::cluster address, used by a thread, or by asynchronous work issued with `views`.

        Raises:
            BarrierError: not initialised, or its initialisation is not visible to the user.
        """
        owner = self.at(address, user)
        offset = address & ((1 << CTA_SHIFT) - 1)
        found = owner.mbarriers.get(offset)
        if found is None:
            raise BarrierError(f"no mbarrier was initialised at {offset:#x} of {owner.name}")
        if user is None and owner.has_left:
            raise BarrierError(f"{found.name}: asynchronous work arrives after its CTA has left")
        if not self.machine.order.enabled:
            return found
        if user is None:
            if found.fence is None or (views is not None and views[LOCAL][found.fence[0]] < found.fence[1]):
                raise BarrierError(f"{found.name}: asynchronous use before fence.mbarrier_init is visible there")
        elif user is not found.owner:
            component, clock = found.set_up
            if user.views[LOCAL][component] < clock:
                raise BarrierError(f"{found.name}: used by {user.name} before its initialisation is visible there")
        return found


@dataclass
class AsyncWork:
    """One piece of asynchronous work: `steps` run one after the other, each at a random later time."""

    name: str
    steps: list[Callable[[], None]]

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return not self.steps


class Machine:
    """All CTAs of a launch over all ranks, with one global memory."""

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        arguments: Sequence[Sequence[int | TensorMap]],
        grid: int,
        cluster_size: int,
        seed: int,
        check_order: bool,
    ) -> None:
        if program.threads % LANES or grid % cluster_size:
            raise SimError("threads must come in whole warps and CTAs in whole clusters")
        for rank, values in enumerate(arguments):
            if len(values) != program.num_params:
                raise SimError(f"rank {rank}: {len(values)} arguments, the kernel has {program.num_params}")
        self.program, self.memory, self.arguments = program, memory, arguments
        self.grid, self.cluster_size = grid, cluster_size
        self.rng = np.random.default_rng(seed)
        warps = len(arguments) * grid * program.threads // LANES
        self.components = Components(2 + 5 * warps + len(arguments) * grid * 162)
        self.order = Order(self.components, check_order)
        self.flags: dict[int, Flag] = {}
        self.async_work: list[AsyncWork] = []
        self.cluster_state: dict[tuple[int, int], NamedBarrier] = {}
        self.clock_ns = 0
        self.progress = False
        self.counts: dict[str, int] = {}
        self.tensor_group = ""
        self.by_rank = [
            [Cta(self, rank, i, i % cluster_size, program.threads // LANES) for i in range(grid)]
            for rank in range(len(arguments))
        ]
        self.ctas = [cta for ctas in self.by_rank for cta in ctas]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.tensor_queues: dict[int, list[tuple[Callable[[], None], bool]]] = {
            cta.tensor_core: [] for cta in self.ctas
        }
        memory.begin_launch()

    def flag(self, address: int) -> Flag:
        """The synchronisation state of one global word."""
        found = self.flags.get(address)
        if found is None:
            found = self.flags[address] = Flag()
        return found

    def count(self, what: str) -> None:
        """Statistics of a run."""
        self.counts[what] = self.counts.get(what, 0) + 1
