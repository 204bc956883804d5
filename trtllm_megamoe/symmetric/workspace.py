# SPDX-License-Identifier: Apache-2.0
"""One layer's worth of scratch on one rank: its local space, the group's shared space, and who may launch on them.

A layer allocates one for itself, or several layers of one shape take turns on one that was built for them (R53): all
protocol state lives in the regions, so the next launch continues where the last one ended, whichever layer it is of.
Must not know what a launch does.
"""

from __future__ import annotations

import logging

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeStateError
from trtllm_megamoe.regions import Geometry, RegionTable
from trtllm_megamoe.symmetric import allocate_symmetric
from trtllm_megamoe.symmetric.base import initialise_shared, zero_at_start
from trtllm_megamoe.tuning.fences import FenceBook, Fencer, collective_reset
from trtllm_megamoe.tuning.fences import Workspace as Side

logger = logging.getLogger(__name__)

_records: list[torch.Tensor] = []
"""Every workspace's error record: a launch may still write to it when nobody holds the workspace any more."""


class Workspace:
    """Local and shared space of one region table on one rank; see the module docstring.

    Layers that share one launch one after another on each rank (one stream), in the same order on all ranks; every
    launch checks that all ranks run the same layer.

    Args:
        table: The regions; equal on all ranks.
        comm: This rank's communicator.
        device: Where both spaces lie.
        timeout_s: Longest wait for a peer in each step of construction, seconds.

    Attributes:
        local: This rank's own space, uint8.
        shared: The group's :class:`~trtllm_megamoe.symmetric.SymmetricMemory`.
        error_record: Host memory, int64 words as in the region of this name: where the launches of all its layers leave
            what went wrong, for the host to look at without waiting for the device.
        fences: This rank's book; the pair (local, shared) stands in it from construction until a launch fails or the
            workspace is closed. A profiling scratch beside this workspace must use the same book.

    Raises:
        As :func:`~trtllm_megamoe.symmetric.allocate_symmetric`.

    Collective: construction and :meth:`close`. Source: requirements R6, R31, R53; design D5, D6.
    """

    def __init__(self, table: RegionTable, comm: Communicator, device: torch.device, timeout_s: float) -> None:
        self.table, self.comm, self.device = table, comm, device
        self._num_layers = 0
        self._is_closed = False
        self.local = torch.empty(table.total_bytes("local"), dtype=torch.uint8, device=device)
        self.shared = allocate_symmetric(table, comm, device, timeout_s)
        words = table["error_record"].num_bytes // 8
        self.error_record = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        _records.append(self.error_record)
        self.fences = FenceBook(comm.size)
        self._sides = (
            Side("local workspace", self.local.data_ptr(), self.local),
            Side("shared workspace", self.shared.own.data_ptr(), self.shared),
        )
        reset = collective_reset(self._synchronize, lambda: comm.barrier(timeout_s), self._zero)
        Fencer(self.fences, reset).make_launchable(*self._sides)
        logger.info(
            "rank %d/%d: workspace on %s, %.1f MB shared, %.1f MB local",
            *(comm.rank, comm.size, device),
            *(table.total_bytes(space) / 1e6 for space in ("shared", "local")),
        )

    @property
    def generation(self) -> int:
        """Which allocation this is: the same on all ranks, another one for every workspace."""
        return self.shared.generation

    def require_fits(self, geometry: Geometry, comm: Communicator, device_type: str) -> None:
        """Refuse a layer for which this workspace was not built.

        Raises:
            MegaMoeConfigError: Another geometry, communicator or kind of device; names each differing number.
            MegaMoeStateError: It is closed, or a launch on it failed.
        """
        own = self.table.geometry
        faults = [
            f"{name} {getattr(geometry, name)}, the workspace has {getattr(own, name)}"
            for name in Geometry.__slots__
            if getattr(geometry, name) != getattr(own, name)
        ]
        if comm is not self.comm:
            faults.append(
                f"the communicator is another one (rank {comm.rank} of {comm.size}), the workspace belongs to rank "
                f"{self.comm.rank} of {self.comm.size}"
            )
        if device_type != self.device.type:
            faults.append(f"the engine works on {device_type}, the workspace lies on {self.device}")
        if faults:
            raise MegaMoeConfigError(
                f"rank {comm.rank}: the layer does not fit the given workspace: {'; '.join(faults)}. Layers share a "
                "workspace only where all of these are equal; build another workspace for this one"
            )
        self.require_launchable()

    def add_layer(self) -> int:
        """Index of one more layer on this workspace, by order of construction; the same on all ranks."""
        self._num_layers += 1
        return self._num_layers - 1

    def require_open(self) -> None:
        """Refuse any access to a closed workspace, whose memory is gone.

        Raises:
            MegaMoeStateError: It is closed.
        """
        if self._is_closed:
            raise MegaMoeStateError(f"rank {self.comm.rank}: the workspace is closed; build a new one on all ranks")

    def require_launchable(self) -> None:
        """Judge a launch before it is made; a capture like an eager one.

        Raises:
            MegaMoeStateError: The workspace is closed, or a launch on it failed.

        Collective: no. Graph-safe: yes, host only.
        """
        self.require_open()
        if not self.fences.admit(*self._sides):
            raise MegaMoeStateError(
                f"rank {self.comm.rank}: a launch on this workspace failed, so its counters are out of step; build the "
                "workspace and its layers anew on all ranks"
            )

    def invalidate(self) -> None:
        """A launch on it failed half-way: refuse further ones."""
        if not self._is_closed:
            self.fences.invalidate(*self._sides)

    def close(self) -> None:
        """Give both spaces back. Layers on it cannot launch afterwards. Idempotent.

        Collective: yes, in the same order on all ranks.
        """
        if self._is_closed:
            return
        for side in self._sides:
            self.fences.forget(side)
        self._is_closed = True
        del self._sides, self.local
        self.shared.close()

    def _zero(self, side: Side) -> None:
        if side.owner is self.local:
            zero_at_start(self.local, self.table, "local")
        else:
            initialise_shared(self.shared.own, self.table, self.generation)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        else:
            self.comm.fence()
