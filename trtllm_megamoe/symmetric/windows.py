# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between MPI ranks of one node in host memory: a window per allocation. For engines on the CPU."""

from __future__ import annotations

from trtllm_megamoe.comm.mpi_ranks import MpiCommunicator
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.base import SymmetricMemory, draw_generation, initialise_shared


class WindowMemory(SymmetricMemory):
    """See the module docstring; MPI frees a window collectively, so every rank closes, in the same order."""

    def __init__(self, table: RegionTable, comm: MpiCommunicator, timeout_s: float) -> None:
        generation = comm.allgather(draw_generation(), timeout_s)[0]
        self._allocation = comm.allocate_shared(table.total_bytes("shared"), timeout_s)
        super().__init__(comm.rank, self._allocation.views, generation)
        initialise_shared(self.own, table, generation)
        comm.fence()
        comm.barrier(timeout_s)  # no rank returns, and so none touches a peer, before all have written

    def _release(self) -> None:
        self._allocation.release()
