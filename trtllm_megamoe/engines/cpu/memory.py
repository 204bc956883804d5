# SPDX-License-Identifier: Apache-2.0
"""Typed views of the region table over raw bytes: a rank's local workspace and every rank's shared one."""

from __future__ import annotations

import torch

from trtllm_megamoe.comm.base import Communicator, SharedBytes
from trtllm_megamoe.regions import RegionTable, Space

# torch has no arithmetic on unsigned words; the protocol keeps every u64 and u32 below the sign bit
_TORCH_DTYPE = {
    "u8": torch.uint8,
    "i32": torch.int32,
    "u32": torch.int32,
    "f32": torch.float32,
    "f16": torch.float16,
    "u64": torch.int64,
}


class RegionViews:
    """One rank's regions of one space as tensors, by name."""

    def __init__(self, table: RegionTable, space: Space, memory: torch.Tensor) -> None:
        self._views = {}
        for region in table.regions(space):
            raw = memory[region.offset_bytes : region.end_bytes]
            self._views[region.name] = raw.view(_TORCH_DTYPE[region.dtype]).view(region.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]


def allocate(
    table: RegionTable, comm: Communicator, timeout_s: float
) -> tuple[RegionViews, list[RegionViews], SharedBytes]:
    """Allocate both spaces, zero what must start at zero, and map all peers' shared regions. Collective.

    Returns:
        This rank's local views, every rank's shared views (index = rank), and the allocation behind the latter.
    """
    local = RegionViews(table, "local", torch.empty(table.total_bytes("local"), dtype=torch.uint8))
    allocation = comm.allocate_shared(table.total_bytes("shared"), timeout_s)
    shared = [RegionViews(table, "shared", memory) for memory in allocation.views]
    for region in table.regions():
        if region.zero_at_start:
            views = local if region.space == "local" else shared[comm.rank]
            views[region.name].zero_()
    comm.fence()
    comm.barrier(timeout_s)
    return local, shared, allocation
