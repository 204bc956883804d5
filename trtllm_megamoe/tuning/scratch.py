# SPDX-License-Identifier: Apache-2.0
"""The profiling scratch: workspaces that exist only while tactics are measured (R32).

The tuner's measurements must not touch the serving workspaces, whose peers may be signalling. A session acquires one
shared scratch, makes a local workspace per measured tactic, and on every way out frees the scratch and the losers; the
winners' local workspaces go to whoever serves. Another engine may open another session later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.tuning.fences import FenceBook, Workspace
from trtllm_megamoe.tuning.tactic import Tactic

logger = logging.getLogger(__name__)


class ProfilingScratch:
    """Lifecycle of the workspaces of one tuning after another; holds memory only inside a session.

    Args:
        book: This rank's fence book.
        allocate_shared: Makes the shared scratch on all ranks. Collective and bounded.
        free_shared: Gives it back. Collective.
        allocate_local: Makes this rank's workspace for one tactic; it is freed by dropping it.
    """

    def __init__(
        self,
        book: FenceBook,
        allocate_shared: Callable[[], Workspace],
        free_shared: Callable[[Workspace], None],
        allocate_local: Callable[[Tactic], Workspace],
    ) -> None:
        self._book = book
        self._allocate_shared = allocate_shared
        self._free_shared = free_shared
        self._allocate_local = allocate_local
        self._shared: Workspace | None = None
        self._locals: dict[Tactic, Workspace] = {}

    @property
    def shared(self) -> Workspace:
        """The shared scratch.

        Raises:
            MegaMoeStateError: No session is open.
        """
        if self._shared is None:
            raise MegaMoeStateError("no profiling scratch is held; open a session")
        return self._shared

    @contextmanager
    def session(self, *, is_enabled: bool) -> Iterator[bool]:
        """Hold the scratch for one tuning, or nothing at all where tuning is disabled; yields `is_enabled`.

        Released on every way out. Collective, on all ranks alike.

        Raises:
            MegaMoeStateError: A session is open already.
        """
        if self._shared is not None:
            raise MegaMoeStateError("the profiling scratch is held already; sessions do not nest")
        try:
            if is_enabled:
                self._shared = self._allocate_shared()
                self._book.begin_tuning(self._shared)
            yield is_enabled
        finally:
            self._release()

    def local_of(self, tactic: Tactic) -> Workspace:
        """This rank's workspace for measuring one tactic, made at first use.

        Raises:
            MegaMoeStateError: No session is open.
        """
        if self._shared is None:
            raise MegaMoeStateError("no profiling scratch is held; open a session")
        if tactic not in self._locals:
            self._locals[tactic] = self._allocate_local(tactic)
        return self._locals[tactic]

    def keep(self, tactic: Tactic) -> Workspace:
        """Hand a winner's workspace to the caller: it survives the release.

        Raises:
            MegaMoeStateError: The tactic was not measured in this session, or was handed over before.
        """
        if tactic not in self._locals:
            raise MegaMoeStateError(f"{tactic} has no workspace in this session; it cannot be kept")
        return self._locals.pop(tactic)

    def _release(self) -> None:
        num_losers = len(self._locals)
        self._locals.clear()  # the book follows the deaths
        shared, self._shared = self._shared, None
        if shared is not None:
            self._book.end_tuning()
            self._book.forget(shared)
            logger.info("profiling scratch released, with the workspaces of %d tactics", num_losers)
            self._free_shared(shared)
