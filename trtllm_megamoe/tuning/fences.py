# SPDX-License-Identifier: Apache-2.0
"""Fence bookkeeping: which (local, shared) workspace pairs a launch may use (R31). Knows no device and no communicator.

Both sides of a pair count launches, and a launch is right only while they count alike. A fence resets both sides on all
ranks together; from then on they stay in step for as long as neither is launched or reset with another partner. So at
any time a workspace has at most one partner, and fencing a pair forgets every other pair that shares a side: a warm-up
on the real workspaces, tuning on the scratch, and the real ones again needs a third fence, not none (ABA).

A replayed graph launches without asking. While a graph lives, the workspaces it captured are kept alive and nothing may
reset them.

One book per rank; ranks make the same calls in the same order, because a fence is collective.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_megamoe.errors import MegaMoeStateError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """One whole allocation whose counters take part in launches.

    Attributes:
        name: For messages, e.g. `local of bucket 256`.
        address: First byte.
        owner: Whose death frees the memory. A book refers to it weakly, except while a graph uses it.
    """

    name: str
    address: int
    owner: object

    def __str__(self) -> str:
        return f"{self.name} at {self.address:#x}"


@dataclass(frozen=True, slots=True)
class _Side:
    """A workspace as the book remembers it. A new owner at an old address is another workspace."""

    name: str
    address: int
    owner: weakref.ref[object]

    def is_(self, workspace: Workspace) -> bool:
        return self.address == workspace.address and self.owner() is workspace.owner

    def shares_memory_with(self, workspace: Workspace) -> bool:
        return self.address == workspace.address or self.owner() is workspace.owner


@dataclass(frozen=True, slots=True)
class _Pair:
    local: _Side
    shared: _Side

    def __str__(self) -> str:
        return f"{self.local.name}, {self.shared.name}"

    @property
    def is_alive(self) -> bool:
        return self.local.owner() is not None and self.shared.owner() is not None

    def is_(self, local: Workspace, shared: Workspace) -> bool:
        return self.local.is_(local) and self.shared.is_(shared)

    def touches(self, workspace: Workspace) -> bool:
        return self.local.shares_memory_with(workspace) or self.shared.shares_memory_with(workspace)


@dataclass(frozen=True, slots=True)
class _Capture:
    """A pair that a graph launches at every replay; the very record that was fenced when it was captured."""

    graph: weakref.ref[object]
    pair: _Pair


def _side(workspace: Workspace) -> _Side:
    return _Side(str(workspace), workspace.address, weakref.ref(workspace.owner))


def _pair(local: Workspace, shared: Workspace) -> _Pair:
    return _Pair(_side(local), _side(shared))


def _pin(graph: object, *workspaces: Workspace) -> None:
    """Keep workspaces alive for as long as the graph: their memory must outlive its last replay."""
    weakref.finalize(graph, _unpin, *workspaces).atexit = False


def _unpin(*workspaces: Workspace) -> None:
    """Dropping the arguments is the work."""


class FenceBook:
    """See the module docstring.

    Args:
        ep_size: Ranks. With more than one, a profiling launch must use the scratch: peers would take its signals on the
            real workspace for those of a serving launch.
    """

    def __init__(self, ep_size: int) -> None:
        self._ep_size = ep_size
        self._fenced: list[_Pair] = []
        self._captures: list[_Capture] = []
        self._is_tuning = False
        self._scratch: _Side | None = None

    @property
    def num_pairs(self) -> int:
        """Pairs that may be launched without a fence; freed workspaces leave none behind."""
        self._forget_the_dead()
        return len(self._fenced)

    @property
    def is_tuning(self) -> bool:
        """Whether profiling launches are allowed now."""
        return self._is_tuning

    # -- launches

    def admit(
        self, local: Workspace, shared: Workspace, *, graph: object | None = None, is_profiling: bool = False
    ) -> bool:
        """Judge a launch before it is made.

        Args:
            local: This rank's own side.
            shared: The side that peers write.
            graph: The graph being captured, or None for an eager launch. The pair stays pinned until this object dies;
                where the graph is not at hand, pass one that lives as long, and that owns no workspace.
            is_profiling: The launch is a tuner's measurement.

        Returns:
            True: launch. False: fence the pair first (`begin_fence`, the reset, `finish_fence`).

        Raises:
            MegaMoeStateError: The launch must not happen; names the pair and the reason. Nothing has changed.
        """
        self._forget_the_dead()
        self._check_purpose(local, shared, graph, is_profiling)
        fenced = next((pair for pair in self._fenced if pair.is_(local, shared)), None)
        if graph is not None:
            if fenced is None:
                raise _refusal(
                    "capture",
                    _describe(local, shared),
                    "it was never fenced, or one side was fenced with another partner since",
                    "launch once eagerly on this pair, then capture",
                )
            if not any(capture.graph() is graph and capture.pair is fenced for capture in self._captures):
                self._captures.append(_Capture(weakref.ref(graph), fenced))
                _pin(graph, local, shared)
        return fenced is not None

    def admit_replay(self, graph: object) -> None:
        """Judge a replay: every pair the graph captured must still be in step.

        Raises:
            MegaMoeStateError: One is not, because a launch on it failed since.
        """
        for capture in self._captures:
            if capture.graph() is graph and not any(pair is capture.pair for pair in self._fenced):
                raise _refusal(
                    "replay",
                    str(capture.pair),
                    "a launch on it failed, so its sides are out of step",
                    "delete every graph that uses the pair, launch once eagerly, and capture again",
                )

    def invalidate(self, local: Workspace, shared: Workspace) -> None:
        """A launch on the pair failed half-way: its sides are out of step until they are fenced again."""
        self._fenced = [pair for pair in self._fenced if not (pair.touches(local) or pair.touches(shared))]

    # -- fences

    def begin_fence(self, local: Workspace, shared: Workspace) -> None:
        """Forget every pair that the reset of these two sides will put out of step; call before the reset.

        Raises:
            MegaMoeStateError: A living graph uses one side: the reset would break its next replay. Nothing has changed.
        """
        self._forget_the_dead()
        for side in (local, shared):
            user = self._capture_of(side)
            if user is not None:
                raise _refusal(
                    "fence",
                    _describe(local, shared),
                    f"a captured graph launches {side} with ({user.pair})",
                    "delete the graph first, or launch on other workspaces",
                )
        self.invalidate(local, shared)

    def finish_fence(self, local: Workspace, shared: Workspace) -> None:
        """Record the pair; call after the reset succeeded on this rank. A reset that raised leaves it unfenced."""
        self._fenced.append(_pair(local, shared))

    def forget(self, workspace: Workspace) -> None:
        """Drop every pair of a workspace that is about to be freed or lent elsewhere.

        Raises:
            MegaMoeStateError: A living graph uses it.
        """
        self._forget_the_dead()
        user = self._capture_of(workspace)
        if user is not None:
            raise _refusal(
                "eviction", str(user.pair), f"a captured graph launches {workspace}", "delete the graph first"
            )
        self._fenced = [pair for pair in self._fenced if not pair.touches(workspace)]

    # -- tuning latch

    def begin_tuning(self, scratch: Workspace | None) -> None:
        """Allow profiling launches, on `scratch` as their shared side; None means one rank without scratch.

        Raises:
            MegaMoeStateError: A tuning is open already, or there are several ranks and no scratch.
        """
        if self._is_tuning:
            raise MegaMoeStateError("a tuning is open already; end it before another one begins")
        if scratch is None and self._ep_size > 1:
            raise MegaMoeStateError(
                f"tuning over {self._ep_size} ranks needs a profiling scratch, got none: acquire one on every rank"
            )
        self._is_tuning = True
        self._scratch = None if scratch is None else _side(scratch)

    def end_tuning(self) -> None:
        """Refuse profiling launches again, and forget the scratch. Idempotent."""
        self._is_tuning = False
        self._scratch = None

    # -- rules and helpers

    def _check_purpose(self, local: Workspace, shared: Workspace, graph: object | None, is_profiling: bool) -> None:
        uses_scratch = self._scratch is not None and self._scratch.shares_memory_with(shared)
        if is_profiling and not self._is_tuning:
            what, reason, next_step = "profiling launch", "no tuning is open", "acquire the profiling scratch"
        elif is_profiling and self._scratch is not None and not uses_scratch:
            what, reason = "profiling launch", "its shared side is not the profiling scratch"
            next_step = "use the scratch"
        elif is_profiling and graph is not None:
            what, reason = "capture", "profiling workspaces are freed after tuning"
            next_step = "capture after tuning"
        elif uses_scratch and not is_profiling:
            what, reason = "launch", "its shared side is the profiling scratch"
            next_step = "use the serving workspace"
        else:
            return
        raise _refusal(what, _describe(local, shared), reason, next_step)

    def _capture_of(self, workspace: Workspace) -> _Capture | None:
        return next((capture for capture in self._captures if capture.pair.touches(workspace)), None)

    def _forget_the_dead(self) -> None:
        self._captures = [capture for capture in self._captures if capture.graph() is not None]
        self._fenced = [pair for pair in self._fenced if pair.is_alive]


class Fencer:
    """Makes a pair launchable: asks the book, and resets where it says so.

    Args:
        book: This rank's book.
        reset: Puts both sides of a pair back to their start on ALL ranks: nobody still launches on them when the first
            byte is written, and everybody has written when it returns. Collective and bounded. See `collective_reset`.
    """

    def __init__(self, book: FenceBook, reset: Callable[[Workspace, Workspace], None]) -> None:
        self.book = book
        self._reset = reset

    def make_launchable(
        self, local: Workspace, shared: Workspace, *, graph: object | None = None, is_profiling: bool = False
    ) -> None:
        """Return when a launch on the pair is safe; arguments and errors as :meth:`FenceBook.admit`.

        Collective where a fence is due. Graph-safe: yes, a capture never resets.
        """
        if self.book.admit(local, shared, graph=graph, is_profiling=is_profiling):
            return
        self.book.begin_fence(local, shared)
        logger.debug("fencing (%s, %s)", local, shared)
        self._reset(local, shared)
        self.book.finish_fence(local, shared)


def collective_reset(
    synchronize: Callable[[], None], barrier: Callable[[], None], zero: Callable[[Workspace], None]
) -> Callable[[Workspace, Workspace], None]:
    """The reset that every transport shares, from its three parts.

    Args:
        synchronize: Wait until this rank's device has finished.
        barrier: Wait for all ranks, bounded.
        zero: Write zeros over what must start at zero in a workspace of this rank.
    """

    def reset(local: Workspace, shared: Workspace) -> None:
        synchronize()
        barrier()  # no rank launches on these workspaces any more, so no peer can signal into the zeros
        zero(local)
        zero(shared)
        synchronize()
        barrier()  # every rank's zeros are written, so a peer's first signal cannot be wiped out

    return reset


def _describe(local: Workspace, shared: Workspace) -> str:
    return f"{local}, {shared}"


def _refusal(what: str, pair: str, reason: str, next_step: str) -> MegaMoeStateError:
    return MegaMoeStateError(f"{what} on the pair ({pair}) refused: {reason}; {next_step}")
