# SPDX-License-Identifier: Apache-2.0
"""Says that a launch failed while the host replays captured graphs, when no Python runs that could raise it.

Used by the workspace pool. Looks at host memory only, from a thread of its own; the next forward that is no replay
raises the same failure.
"""

from __future__ import annotations

import logging
import threading

from trtllm_megamoe.engines.cuda.failure import failure_of
from trtllm_megamoe.symmetric.workspace import Workspace

logger = logging.getLogger(__name__)

POLL_S = 0.5


class FailureWatch:
    """Logs the first failure on each workspace, once, at ERROR. The thread lives as long as there is a workspace.

    Args:
        poll_s: Seconds between two looks; a record found set is read at the next one, when it is complete.
    """

    def __init__(self, poll_s: float = POLL_S) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._limits: dict[Workspace, float] = {}
        self._found: set[Workspace] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_watching(self) -> bool:
        """Whether the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def add(self, workspace: Workspace, timeout_s: float) -> None:
        """Watch a workspace whose launches wait this long."""
        with self._lock:
            self._limits[workspace] = timeout_s
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._stop,), name="megamoe-watch", daemon=True)
                self._thread.start()

    def remove(self, workspace: Workspace) -> None:
        """Watch it no longer."""
        with self._lock:
            self._limits.pop(workspace, None)
            self._found.discard(workspace)
            if not self._limits:
                self._stop.set()
                self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._poll_s):
            with self._lock:
                failed = [(w, limit) for w, limit in self._limits.items() if int(w.error_record[0]) != 0]
                complete = [(w, limit) for w, limit in failed if w in self._found]
                self._found |= {w for w, _ in failed}
                for workspace, _ in complete:
                    del self._limits[workspace]
            for workspace, limit in complete:
                failure = failure_of(workspace.error_record.tolist(), workspace.table.geometry.num_local_experts, limit)
                logger.error("results of graphs replayed since are not valid either: %s", failure)
