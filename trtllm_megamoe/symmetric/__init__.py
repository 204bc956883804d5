# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share: one interface, and the provider that fits how the ranks were started (R6, R7, D9)."""

from __future__ import annotations

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.base import SymmetricMemory, require_same_header
from trtllm_megamoe.symmetric.local import LocalMemory, VirtualRankMemory

__all__ = ["SymmetricMemory", "allocate_symmetric"]


def allocate_symmetric(
    table: RegionTable, comm: Communicator, device: torch.device, timeout_s: float
) -> SymmetricMemory:
    """Allocate the `shared` space on every rank, zero what must start at zero, map all of it here.

    Nobody can touch a rank's bytes before they are zeroed and their header is written; when this returns, every rank's
    header has been read through the address in `peer_addresses`.

    Args:
        table: The regions; equal on all ranks.
        comm: Its kind chooses the provider: one rank, threads, MPI, torch.distributed.
        device: This rank's device; on GPUs the one that `devices.choose_device` names.
        timeout_s: Longest wait for a peer in each step, seconds.

    Raises:
        MegaMoeConfigError, MegaMoeUnavailableError: The ranks, GPUs or streams do not allow it; says which and why.
        MegaMoeRankDivergenceError: A peer's memory is not the one that was allocated together with this one.
        MegaMoeTimeoutError: A rank never came.

    Collective: yes, in the same order on all ranks. Graph-safe: no; construction only.
    """
    memory = _provide(table, comm, device, timeout_s)
    require_same_header(memory, table, comm)
    comm.barrier(timeout_s)  # nobody changes its header while a peer still reads it
    return memory


def _provide(table: RegionTable, comm: Communicator, device: torch.device, timeout_s: float) -> SymmetricMemory:
    if comm.size == 1:
        return LocalMemory(table, device)
    if comm.transport == "threads":
        return VirtualRankMemory(table, comm, device, timeout_s)
    if device.type == "cuda":
        from trtllm_megamoe.symmetric.torch_symm import TorchSymmetricMemory

        return TorchSymmetricMemory(table, comm, device, timeout_s)
    from trtllm_megamoe.comm.mpi_ranks import MpiCommunicator
    from trtllm_megamoe.symmetric.windows import WindowMemory

    if isinstance(comm, MpiCommunicator):
        return WindowMemory(table, comm, timeout_s)
    raise MegaMoeUnavailableError(
        f"rank {comm.rank}: no shared host memory between {comm.size} ranks of transport '{comm.transport}'; start "
        "them as MPI ranks or threads, or use GPUs"
    )
