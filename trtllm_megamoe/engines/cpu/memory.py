# SPDX-License-Identifier: Apache-2.0
"""Typed views of the region table over raw bytes: of a rank's local space and of every rank's shared one."""

from __future__ import annotations

import torch

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
