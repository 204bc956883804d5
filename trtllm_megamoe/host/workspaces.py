# SPDX-License-Identifier: Apache-2.0
"""One workspace for all layers of a shape (R53): the backends of a model run one after another, so they take turns.

Used by the backend, which gets a workspace when it builds its layer and gives it back when the host shuts it down.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.host.watch import FailureWatch
from trtllm_megamoe.layer import build_workspace
from trtllm_megamoe.regions import Geometry
from trtllm_megamoe.symmetric.workspace import Workspace


class WorkspacePool:
    """Workspaces by communicator and geometry, each built by its first user, watched, and closed by its last.

    Collective: both calls, in the same order on all ranks; the layers' own order gives that.
    """

    def __init__(self) -> None:
        self._users: dict[Workspace, int] = {}
        self._watch = FailureWatch()

    def acquire(self, config: MegaMoeConfig, comm: Communicator) -> Workspace:
        """The workspace for a layer; errors as :func:`~trtllm_megamoe.layer.build_workspace`."""
        geometry = Geometry.from_config(config, comm.size)
        workspace = next((w for w in self._users if _serves(w, geometry, comm)), None)
        if workspace is None:
            workspace = build_workspace(config, comm)
            self._watch.add(workspace, config.timeout_s)
        self._users[workspace] = self._users.get(workspace, 0) + 1
        return workspace

    def release(self, workspace: Workspace) -> None:
        """One user fewer."""
        self._users[workspace] -= 1
        if self._users[workspace] == 0:
            del self._users[workspace]
            self._watch.remove(workspace)
            workspace.close()


def _serves(workspace: Workspace, geometry: Geometry, comm: Communicator) -> bool:
    """Whether a layer can use it; one on which a launch failed serves nobody any more."""
    try:
        workspace.require_launchable()
    except MegaMoeStateError:
        return False
    theirs = workspace.table.geometry
    return workspace.comm is comm and theirs == replace(geometry, pool_layout=theirs.pool_layout)  # one engine a job
