# SPDX-License-Identifier: Apache-2.0
"""Brings one expert's sources after the other to the device that packs them. Used by :mod:`.layouts` only.

A GPU takes pageable memory through small driver buffers, waits for each and lets the host wait for the kernels before
it. Two sets of page-locked tensors keep both busy: the host fills one while the GPU copies the other and packs it.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.weights.layout_base import ExpertBulk

_SETS = 2


class ExpertFeed:
    """Host to device, one expert at a time, in order with the device's current stream.

    Args:
        device: where sources go. On a CUDA device the feed holds two experts' bytes of page-locked host memory (which
            torch keeps for its next user); elsewhere it copies directly, or not at all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets: list[tuple[ExpertBulk, torch.cuda.Event]] = []
        self._count = 0

    def put(self, bulk: ExpertBulk) -> ExpertBulk:
        """The expert on the device; the host tensors may be freed at once."""
        if self._device.type != "cuda":
            return bulk.to(self._device)
        if len(self._sets) < _SETS:
            locked = (torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in bulk)
            self._sets.append((ExpertBulk(*locked), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        pinned, taken = self._sets[self._count % _SETS]
        self._count += 1
        taken.synchronize()  # an event never recorded is no wait
        for target, source in zip(pinned, bulk, strict=True):
            target.copy_(source)
        there = ExpertBulk(*(tensor.to(self._device, non_blocking=True) for tensor in pinned))
        taken.record(torch.cuda.current_stream(self._device))
        return there
