# SPDX-License-Identifier: Apache-2.0
"""What the layer asks of an engine. Engines validate nothing that the layer has validated."""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels.prepared import LaunchChoice
from trtllm_megamoe.tuning.tactic import Tactic
from trtllm_megamoe.weights.calibration import ActivationObserver
from trtllm_megamoe.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class SaturationReport:
    """Blocks of 16 whose largest value exceeds what their static global scale can express (docs/numerics.md 2).

    Counts are of this rank and cumulative since the last load: staged token blocks, and fc1 output blocks of the
    routes this rank computed. Always zero in bf16 activation mode.
    """

    input_blocks: int = 0
    input_saturated: int = 0
    fc1_out_blocks: int = 0
    fc1_out_saturated: int = 0

    def __add__(self, other: SaturationReport) -> SaturationReport:
        return SaturationReport(
            self.input_blocks + other.input_blocks,
            self.input_saturated + other.input_saturated,
            self.fc1_out_blocks + other.fc1_out_blocks,
            self.fc1_out_saturated + other.fc1_out_saturated,
        )


def shared_weight_facts(weights: WeightStore) -> int:
    """32-bit digest of what all ranks must have loaded alike: activation mode, and fc1's input scale where it counts.

    A rank that quantises with another scale than the owner undoes would be silently wrong; see `regions.launch_facts`.
    """
    mode = weights.activation_mode
    assert mode is not None  # a loaded store has one
    scale = weights.scales.input_global if mode is ActivationMode.NVFP4 else None
    return zlib.crc32(mode.value.encode() + struct.pack("<f", scale or 0.0))


class Engine(ABC):
    """Executes one layer on one rank.

    `layout` and `device` say how and where this engine wants the weights (see `trtllm_megamoe.weights.layouts`).
    """

    name: str
    layout: str
    device: torch.device

    auto_mode: ActivationMode | None = None
    """What `activations='auto'` means here (R61); None: nvfp4 where the checkpoint has input scales, else bf16."""

    last_bucket: int | None = None
    """Bucket of the latest launch."""

    @abstractmethod
    def bind(self, weights: WeightStore) -> None:
        """Use this store's weights from the next forward on; called after each load. Not collective."""

    @abstractmethod
    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, bucket: int) -> torch.Tensor:
        """Run one launch on every rank: x (T, H) bf16, topk_ids (T, K) int32 or int64, topk_weights (T, K) fp32.

        Returns (T, H) bf16.

        `bucket` is the capacity from the layer's ladder that holds every rank's T; it may choose a configuration, never
        the work.
        """

    @abstractmethod
    def observe(self, observer: ActivationObserver | None) -> None:
        """Show fc1 and fc2 inputs of the next forwards to `observer`; None ends it.

        Raises:
            MegaMoeUnavailableError: This engine keeps its intermediates to itself.
        """

    def launch_choice(self, bucket: int) -> LaunchChoice | None:
        """What a bucket launches; None before weights are bound, and on an engine that has no kernels."""
        return None

    def pin_tactic(self, bucket: int, tactic: Tactic) -> None:
        """Run one bucket with this tactic from the next launch on. Not collective; every rank must pin the same.

        Raises:
            MegaMoeUnavailableError: This engine has no tactics, or the kernel cannot be had here.
            MegaMoeConfigError: The tactic is not legal; names the rule.
            MegaMoeStateError: No weights are bound.
        """
        raise MegaMoeUnavailableError(f"engine '{self.name}' has no tactics to choose from")

    def raise_if_failed(self) -> None:
        """Raise what an earlier launch reported; all of it is known once the device has finished.

        Raises:
            MegaMoeTimeoutError, MegaMoeAbortedError, MegaMoeRankDivergenceError: As for a forward.
        """
        return  # an engine that raises while it runs has nothing left to report

    def stop_before(self, step: str) -> None:
        """Make every later launch of this rank end before a step: how self-tests see waits expire.

        Args:
            step: "staged tokens" (one CTA never stages), "publish", "pull" or "return".

        Raises:
            MegaMoeUnavailableError: This engine cannot.
            MegaMoeConfigError: No such step.
        """
        raise MegaMoeUnavailableError(f"engine '{self.name}' cannot stop before '{step}'")

    def record_timeline(self, bucket: int) -> AbstractContextManager[torch.Tensor]:
        """Inside the context, launches of a bucket run the same kernel with time stamps; for measuring.

        Returns:
            Of the context: the event buffer (CTAs, words) int64 of `vendored_kernels.timeline`, to be zeroed before a
            launch and read behind it.

        Raises:
            MegaMoeUnavailableError: This engine has no time stamps, or the kernel cannot be had here.
            MegaMoeStateError: No weights are bound.
        """
        raise MegaMoeUnavailableError(f"engine '{self.name}' writes no time stamps")

    @abstractmethod
    def slot_tensors(self, weights: WeightStore) -> dict[str, torch.Tensor]:
        """All that a launch reads of each expert of a loaded store of this engine's layout, whole allocations by name.

        Dimension 0 counts the store's experts; rows behind those belong to none. Of the bound store these are the live
        tensors, so whoever writes a row puts another expert into that slot.
        """

    @abstractmethod
    def adopt_slot_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read these from the next launch on: the live slot tensors, moved. No graph may have captured a launch yet."""

    @abstractmethod
    def saturation(self) -> SaturationReport | None:
        """Saturated blocks since the last load, or None where this engine does not count them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything but the workspace, which the layer gives back. Idempotent."""
