# SPDX-License-Identifier: Apache-2.0
"""A device for the fence tests: memory that remembers in which phase each workspace's counters are."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

from trtllm_megamoe.tuning.fences import Workspace

_serials = itertools.count(1)


class Owner:
    """Whatever holds an allocation; the serial tells two owners apart where `id` is reused."""

    def __init__(self) -> None:
        self.serial = next(_serials)


class Graph:
    """A captured graph: replays what it saw at the addresses it saw."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.recordings: list[object] = []  # of a real device, one for each launch


@dataclass(frozen=True)
class Words:
    """The counters of one workspace: which reset they come from, and launches since."""

    reset: int
    launches: int = 0


class OutOfPhaseError(AssertionError):
    """A launch ran on two sides that do not count alike: on a GPU a hang, or another launch's rows."""


class Device:
    """Addresses, the words at each, and who lives there. An address goes back to the pool when its owner dies."""

    def __init__(self, **pools: list[int]) -> None:
        self._nonces = itertools.count(1)
        self.free = {kind: set(addresses) for kind, addresses in pools.items()}
        self.words = {address: Words(next(self._nonces)) for pool in pools.values() for address in pool}
        self.owners: dict[int, weakref.ref[Owner]] = {}
        self.reset_for: dict[int, int] = {}
        self.num_resets = 0

    def allocate(self, kind: str, *, keeps_old_words: bool) -> Workspace:
        """The lowest free address, so that addresses are reused at once; with what the last tenant left, or garbage."""
        address = min(self.free[kind])
        self.free[kind].remove(address)
        owner = Owner()
        weakref.finalize(owner, self.free[kind].add, address)
        self.owners[address] = weakref.ref(owner)
        if not keeps_old_words:
            self.words[address] = Words(next(self._nonces))
        return Workspace(f"{kind} {owner.serial}", address, owner)

    def reset(self, local: Workspace, shared: Workspace, *, dies_half_way: bool = False) -> None:
        """Zero both sides together; one that dies half-way leaves neither in a known phase."""
        words = Words(next(self._nonces))
        self.words[local.address] = words
        if dies_half_way:
            self.words[shared.address] = Words(next(self._nonces))
            raise TimeoutError("a peer did not come")
        self.words[shared.address] = words
        for side in (local, shared):
            self.reset_for[side.address] = serial_of(side)
        self.num_resets += 1

    def launch(self, local: int, shared: int) -> None:
        """One launch on two addresses.

        Raises:
            OutOfPhaseError: They do not count alike.
        """
        if self.words[local] != self.words[shared]:
            raise OutOfPhaseError(f"launched on {local:#x} {self.words[local]} and {shared:#x} {self.words[shared]}")
        for address in (local, shared):
            self.words[address] = Words(self.words[address].reset, self.words[address].launches + 1)

    def capture(self, graph: Graph, local: int, shared: int) -> None:
        """Record a launch; nothing runs."""
        graph.launches.append((local, shared))

    def replay(self, graph: Graph) -> None:
        """Run what a graph recorded."""
        for pair in graph.launches:
            self.launch(*pair)

    def die_in_launch(self, local: int, shared: int) -> None:
        """A launch that counted on this rank and not on its peers."""
        self.words[local] = Words(self.words[local].reset, self.words[local].launches + 1)

    def is_in_step(self, local: int, shared: int) -> bool:
        """Whether both words are equal and were reset for those who live there now."""
        return self.words[local] == self.words[shared] and all(
            address in self.owners
            and (owner := self.owners[address]()) is not None
            and self.reset_for.get(address) == owner.serial
            for address in (local, shared)
        )


def serial_of(workspace: Workspace) -> int:
    """The serial of a workspace's owner."""
    assert isinstance(workspace.owner, Owner)
    return workspace.owner.serial
