# SPDX-License-Identifier: Apache-2.0
"""The reference layout: one rank's experts of one layer in checkpoint order, nothing permuted, nothing swizzled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """NVFP4 weights of L consecutive experts, as every engine receives them or packs them from.

    Shapes (H hidden, I intermediate, L local experts); codes and scales are uint8, two e2m1 codes a byte with the even
    index in the low nibble, scales are e4m3 bytes of 16 neighbouring values along the reduction dimension:

    ====================  ==============  =====================================================
    gate_codes, up_codes  (L, I, H/2)     rows are intermediate channels
    gate_scales, ...      (L, I, H/16)
    down_codes            (L, H, I/2)     rows are hidden channels
    down_scales           (L, H, I/16)
    gate_global, ...      (L,) float32    `weight_scale_2`; gate and up may differ
    input_global          float or None   a1: max over ALL E experts' gate and up `input_scale`
    down_input_global     (L,) or None    a2: `down.input_scale` of each local expert, float32
    ====================  ==============  =====================================================

    Source: docs/numerics.md section 2.
    """

    first_expert: int
    gate_codes: torch.Tensor
    gate_scales: torch.Tensor
    up_codes: torch.Tensor
    up_scales: torch.Tensor
    down_codes: torch.Tensor
    down_scales: torch.Tensor
    gate_global: torch.Tensor
    up_global: torch.Tensor
    down_global: torch.Tensor
    input_global: float | None
    down_input_global: torch.Tensor | None

    @property
    def num_local_experts(self) -> int:
        """L."""
        return int(self.gate_codes.shape[0])

    @property
    def has_input_scales(self) -> bool:
        """Whether the checkpoint carries static activation scales (needed by the nvfp4 activation mode)."""
        return self.input_global is not None and self.down_input_global is not None
