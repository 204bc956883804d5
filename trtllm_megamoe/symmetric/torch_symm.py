# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between processes on GPUs: torch's own, with the rules for who may form a group (R7, R8).

The one place that knows torch's interface (tried with torch 2.11; 2.13 has the same). Memory comes from the allocator
itself and not from torch's pool of symmetric memory: a pool may hand out a reused block that is not the one its peers
got, and it never gives memory back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.comm.rendezvous import ensure_process_group
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.base import SymmetricMemory, draw_generation, initialise_shared


class TorchSymmetricMemory(SymmetricMemory):
    """See the module docstring.

    Args:
        table: The regions.
        comm: All ranks of the job, as processes.
        device: This rank's GPU; see `devices.choose_device`.
        timeout_s: Longest wait for a peer in each step, seconds.

    Raises:
        MegaMoeConfigError: The group is not the whole job (before anything collective), or torch.distributed is
            initialised with other ranks.
        MegaMoeUnavailableError: Some rank could not allocate or map; the first one's reason.
        MegaMoeTimeoutError: A rank never came.
    """

    def __init__(self, table: RegionTable, comm: Communicator, device: torch.device, timeout_s: float) -> None:
        comm.require_whole_job()
        ensure_process_group(comm, timeout_s)
        generation = comm.allgather(draw_generation(), timeout_s)[0]
        num_bytes = table.total_bytes("shared")
        fault = None
        try:
            own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            initialise_shared(own, table, generation)  # before any peer learns the address
        except RuntimeError as err:
            fault = f"cannot allocate {num_bytes / 1e6:.1f} MB of symmetric memory on {device}: {err}"
        _fail_together(comm, fault, timeout_s)  # and from here on every rank is on its way into the rendezvous
        try:
            self._handle: Any = _SymmetricMemory.rendezvous(own, _group_name())
            addresses = tuple(self._handle.buffer_ptrs)
            views = [
                own if peer == comm.rank else self._handle.get_buffer(peer, (num_bytes,), torch.uint8)
                for peer in range(comm.size)
            ]
            if addresses != tuple(view.data_ptr() for view in views):
                fault = f"torch {torch.__version__} reports addresses that are not its buffers'"
        except RuntimeError as err:
            fault = f"cannot map the peers' symmetric memory on {device}: {err}"
        _fail_together(comm, fault, timeout_s)
        super().__init__(comm.rank, views, generation, addresses)

    def _release(self) -> None:
        # a peer that still maps this memory keeps it alive; nobody has to wait for anybody
        del self._handle


def _group_name() -> str:
    """Name of the default group."""
    group = dist.group.WORLD
    assert group is not None  # ensure_process_group made it
    return str(group.group_name)


def _fail_together(comm: Communicator, fault: str | None, timeout_s: float) -> None:
    faults = [(rank, text) for rank, text in enumerate(comm.allgather(fault, timeout_s)) if text is not None]
    if faults:
        rank, text = faults[0]
        raise MegaMoeUnavailableError(f"rank {rank} of {comm.size}: {text}")
