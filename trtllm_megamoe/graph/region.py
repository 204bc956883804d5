# SPDX-License-Identifier: Apache-2.0
"""A captured part of a step: eager until captured, replayed afterwards; one region for each bucket shares a pool.

The pattern: bucket by shape, break at attention, keep the dense parts captured (docs/cuda-graphs.md). On the CPU a
region re-executes its function over the same static buffers, or replays an emulated recording where one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError, MegaMoeStateError
from trtllm_megamoe.graph.dynamic.backends import Backend, CudaBackend, Recording


class Region:
    """One function over static buffers that may be captured.

    Args:
        function: Takes nothing, reads and writes static buffers; what it returns stays at one address once captured.
        device: Where its tensors live.
        backend: How to record. Default: CUDA graphs on a GPU, none on the CPU.
        name: For messages.

    Graph-safe: `run` is, once captured. Not collective by itself; every rank captures and runs the same regions.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device | str,
        *,
        backend: Backend | None = None,
        name: str = "region",
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self._function = function
        self._backend = backend or (CudaBackend(self.device) if self.device.type == "cuda" else None)
        self._recording: Recording | None = None

    @property
    def is_captured(self) -> bool:
        """Whether `run` replays a recording."""
        return self._recording is not None

    @property
    def pool(self) -> Any:
        """Memory pool of the recording, to be shared with regions that never run at the same time."""
        return self._recording.pool if self._recording is not None else None

    def capture(self, *, warm_up: int = 2, pool: Any = None) -> None:
        """Warm up and record. Without a backend (plain CPU) only the warm-up happens.

        The function runs: restore state that it advances (positions, caches) afterwards.

        Raises:
            MegaMoeStateError: captured already, or capture failed (the message names the operator).
        """
        if self._recording is not None:
            raise MegaMoeStateError(f"region {self.name!r} is captured already; make a new one to capture again")
        with torch.no_grad():
            if self._backend is None:
                for _ in range(warm_up):
                    self._function()
                return
            self._backend.warm_up(self._function, warm_up)
            self._recording = self._backend.capture(self._function, pool)

    def run(self) -> Any:
        """Replay, or run eagerly while not captured; returns what the function returns."""
        if self._recording is None:
            with torch.no_grad():
                return self._function()
        self._recording.replay()
        return self._recording.outputs


class BucketedRegions:
    """One region for each bucket, captured largest first into one memory pool.

    Args:
        buckets: Sizes, in any order.
        make_region: Builds the region of one bucket.
    """

    def __init__(self, buckets: Sequence[int], make_region: Callable[[int], Region]) -> None:
        if not buckets or min(buckets) < 1 or len(set(buckets)) != len(buckets):
            raise MegaMoeConfigError(f"buckets must be distinct positive sizes, got {list(buckets)}")
        self.buckets = tuple(sorted(buckets))
        self._regions = {bucket: make_region(bucket) for bucket in self.buckets}

    def capture(self) -> None:
        """Capture all, largest first: smaller graphs then fit into the memory of the largest."""
        pool = None
        for bucket in reversed(self.buckets):
            self._regions[bucket].capture(pool=pool)
            pool = pool if pool is not None else self._regions[bucket].pool

    def select(self, rows: int) -> int:
        """Smallest bucket with room for `rows` (0 rows take the smallest: every rank takes part).

        Raises:
            MegaMoeCapacityError: more rows than the largest bucket.
        """
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise MegaMoeCapacityError(
            f"{rows} rows exceed the largest bucket, {self.buckets[-1]}; run eagerly or add a bucket"
        )

    def region(self, bucket: int) -> Region:
        """The region of one bucket."""
        return self._regions[bucket]
