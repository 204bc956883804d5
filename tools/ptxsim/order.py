# SPDX-License-Identifier: Apache-2.0
"""Happens-before between warps, asynchronous copies and tensor cores: vector clocks and the checks of every access.

Components: one clock per warp, per mbarrier (bytes landed in its phases), per warp's bulk-store groups, wgmma groups
and TMEM loads, per CTA's tensor core. Every warp holds one vector per VIEW of memory:

- GENERIC, LOCAL: what ordinary accesses of global memory, and of shared memory, by this warp are ordered after; they
  differ only behind a fence that is restricted to shared memory;
- ASYNC_GLOBAL, ASYNC_SHARED: what its asynchronous copies and tensor-core reads are ordered after. Generic writes enter
  here only through fence.proxy.async, by the writer or by the reader, somewhere on the way;
- TENSOR: what its tcgen05 instructions are ordered after on TMEM; filled by tcgen05.fence::after_thread_sync.

An access is an event (component, clock). A read must be ordered after the last write, a write after the last write and
the last reads. Of a byte's readers two are kept that nothing orders, and a warp counts as one thread: its lanes are not
checked against each other. A release and an acquire meet only if each one's scope contains the other's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import OrderError

Events = NDArray[np.int64]

GENERIC, ASYNC_GLOBAL, LOCAL, ASYNC_SHARED, TENSOR = range(5)
ORDINARY = {GENERIC: GENERIC, LOCAL: LOCAL, ASYNC_GLOBAL: GENERIC, ASYNC_SHARED: LOCAL, TENSOR: TENSOR}
"""View -> that of ordinary accesses of the same memory."""
SHARED_ROWS = 4
"""The views that synchronisation passes on; TENSOR is filled by a fence only."""

_AGENT_SHIFT = 40
_CLOCK_MASK = (1 << 38) - 1


def event(component: int, clock: int, strong: bool = False) -> int:
    """An access as one number; 0 stands for none. Strong accesses (atomics, acquire, release) never race each other."""
    return component << _AGENT_SHIFT | clock << 1 | int(strong)


class Components:
    """Numbers and names of the clocks of one launch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names: list[str] = ["nobody"]
        self.asynchronous = np.zeros(capacity, bool)
        self.tensor = np.zeros(capacity, bool)

    def new(self, name: str, *, asynchronous: bool = False, tensor: bool = False) -> int:
        """A fresh component; `asynchronous` marks the clocks of copies and tensor cores, `tensor` those of tcgen05."""
        if len(self.names) == self.capacity:
            raise OrderError("too many clocks: raise the capacity")
        self.asynchronous[len(self.names)] = asynchronous
        self.tensor[len(self.names)] = tensor
        self.names.append(name)
        return len(self.names) - 1

    def vector(self) -> Events:
        """The empty views."""
        return np.zeros((5, self.capacity), np.int64)


class Record:
    """Last write and last reads of every byte (or TMEM column) of one memory."""

    def __init__(self, size: int, locate: Callable[[int], str]) -> None:
        self.locate = locate
        self.writes = np.zeros(size, np.int64)
        self.reads = np.zeros(size, np.int64)
        self.other_reads = np.zeros(size, np.int64)
        self._repeats: dict[int, list[int]] = {}

    def repeat(self, index: Any, mark: int) -> None:
        """Unordered writes of the value that is there already: being ordered after any one of the writers is enough."""
        for byte in index.reshape(-1).tolist():
            self._repeats.setdefault(byte, []).append(mark)

    def overwrite(self, index: Any) -> None:
        """A write of its own: earlier repeats no longer matter."""
        if self._repeats:
            for byte in np.arange(self.writes.size)[index].reshape(-1).tolist():
                self._repeats.pop(byte, None)

    def repeats(self, byte: int) -> list[int]:
        """Other writers of a byte's present value."""
        return self._repeats.get(byte, [])


class Order:
    """The checks. `enabled=False` turns them off."""

    def __init__(self, components: Components, enabled: bool = True) -> None:
        self.components, self.enabled = components, enabled

    def read(self, record: Record, index: Any, views: Events, view: int, mark: int) -> None:
        """A read of the bytes at `index`; `mark` is its event."""
        if self.enabled:
            self._check(record, index, record.writes[index], views, view, mark, "read", "write")
            before = record.reads[index]
            apart = views[view][before >> _AGENT_SHIFT] < (before >> 1) & _CLOCK_MASK
            if apart.any():
                record.other_reads[index] = np.where(apart, before, record.other_reads[index])
            record.reads[index] = mark

    def write(self, record: Record, index: Any, views: Events, view: int, mark: int) -> None:
        """A write, ordered after earlier writes in `view` and after earlier reads in any view."""
        if self.enabled:
            self._check(record, index, record.writes[index], views, view, mark, "write", "write")
            known = ORDINARY[view]
            self._check(record, index, record.reads[index], views, known, mark, "write", "read")
            self._check(record, index, record.other_reads[index], views, known, mark, "write", "read")
            record.writes[index] = mark
            record.overwrite(index)

    @staticmethod
    def _repeated(record: Record, byte: int, known: Events) -> bool:
        """Whether another writer of the same value is ordered before."""
        return any(known[e >> _AGENT_SHIFT] >= (e >> 1) & _CLOCK_MASK for e in record.repeats(byte))

    def unordered(self, record: Record, index: Any, views: Events, view: int) -> Any:
        """Which of the bytes at `index` were written by something that nothing orders before."""
        events = record.writes[index]
        return (views[view][events >> _AGENT_SHIFT] < (events >> 1) & _CLOCK_MASK) & self.enabled

    def _check(
        self, record: Record, index: Any, events: Events, views: Events, view: int, mark: int, now: str, before: str
    ) -> None:
        agents, clocks = events >> _AGENT_SHIFT, (events >> 1) & _CLOCK_MASK
        bad = views[view][agents] < clocks
        if mark & 1:
            bad &= (events & 1) == 0
        if not bad.any():
            return
        places = np.arange(record.writes.size)[index]
        faulty = np.argwhere(bad).tolist()
        if before == "write":
            known = views[view]
            faulty = [at for at in faulty if not self._repeated(record, int(places[tuple(at)]), known)]
        if not faulty:
            return
        first = tuple(faulty[0])
        agent = int(agents[first])
        byte = int(places[first])
        fence_missing = view != ORDINARY[view] and bool(views[ORDINARY[view]][agent] >= int(clocks[first]))
        if fence_missing:
            what = "no fence.proxy.async lies between"
        elif view == TENSOR and views[GENERIC][agent] >= int(clocks[first]):
            what = "no tcgen05.fence::after_thread_sync lies between"
        else:
            what = "nothing orders the two"
        raise OrderError(f"{now} of {record.locate(byte)} after a {before} by {self.components.names[agent]}: {what}")


class Flag:
    """Releases stored at one word of memory, by scope and by the CTA that released."""

    def __init__(self) -> None:
        self.releases: dict[tuple[str, int, int, int], Events] = {}

    def release(self, scope: str, rank: int, cluster: int, cta: int, views: Events, *, keep: bool) -> None:
        """A release by a thread of that place; `keep` for read-modify-writes, which continue the release sequence."""
        if not keep:
            self.releases.clear()
        key = (scope, rank, cluster, cta)
        old = self.releases.get(key)
        now = views[:SHARED_ROWS]
        self.releases[key] = now.copy() if old is None else np.maximum(old, now)

    def overwrite(self) -> None:
        """A store without release ends the release sequence."""
        self.releases.clear()

    def acquire(self, scope: str, rank: int, cluster: int, cta: int) -> list[Events]:
        """What an acquire of this scope by a thread of that place is ordered after."""
        here = (rank, cluster, cta)
        out = []
        for (other_scope, *there), views in self.releases.items():
            if _covers(scope, here, tuple(there)) and _covers(other_scope, tuple(there), here):
                out.append(views)
        return out


def _covers(scope: str, mine: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a scope seen from `mine` (rank, cluster, CTA) contains `other`."""
    depth = {"sys": 0, "gpu": 1, "cluster": 2, "cta": 3}[scope]
    return mine[:depth] == other[:depth]
