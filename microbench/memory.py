# SPDX-License-Identifier: Apache-2.0
"""What a layer holds on rank 0: packed weights, workspace, and what timed forwards take on top. Used by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from trtllm_megamoe.layer import MegaMoELayer


class MemoryWatch:
    """Context manager around timed forwards; `summary` afterwards.

    What the allocator holds before (weights, inputs, drawn sources) does not count, so the peak is the layer's own.

    Args:
        layers: Loaded, on one workspace.
    """

    def __init__(self, layers: Sequence[MegaMoELayer]) -> None:
        self._layers = layers
        self._held = 0
        self._transient: int | None = None

    @property
    def _is_gpu(self) -> bool:
        return self._layers[0].device.type == "cuda"

    def __enter__(self) -> MemoryWatch:
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self._layers[0].device)
            self._held = torch.cuda.memory_allocated(self._layers[0].device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_gpu:
            self._transient = max(0, torch.cuda.max_memory_allocated(self._layers[0].device) - self._held)

    def summary(self) -> dict[str, int | None]:
        """Bytes: packed weights of one layer, both spaces of its workspace, and the allocator's peak above those.

        The last one is the whole process's, with the outputs of every forward in a graph; None on the CPU engine.
        """
        layer = self._layers[0]
        return {
            "weights_bytes": sum(buffer.nbytes for buffer in layer.weights.packed.values()),
            "workspace_bytes": layer.table.total_bytes("shared") + layer.table.total_bytes("local"),
            "transient_bytes": self._transient,
        }
