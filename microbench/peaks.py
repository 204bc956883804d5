# SPDX-License-Identifier: Apache-2.0
"""Peak rates of known devices, each with its source. A device that is not here has no peak: null, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_megamoe.formats import ActivationMode


@dataclass(frozen=True, slots=True)
class Peaks:
    """What one GPU can do at best, dense rates only.

    `mma_flops_per_s` is the tensor-core rate by activation mode (Hopper runs both modes on 16-bit operands);
    `link_bytes_per_s` is per direction.
    """

    device: str
    hbm_bytes_per_s: float
    mma_flops_per_s: Mapping[ActivationMode, float]
    link_bytes_per_s: float
    source: str


_PEAKS = (
    Peaks(
        device="H200",
        hbm_bytes_per_s=4.47e12,
        mma_flops_per_s={ActivationMode.NVFP4: 790e12, ActivationMode.BF16: 790e12},
        link_bytes_per_s=450e9,
        source="measured: read of HBM, bf16 8192^3 matmul in a short burst; NVLink 4 nominal",
    ),
    Peaks(
        device="B200",
        hbm_bytes_per_s=8e12,
        mma_flops_per_s={ActivationMode.NVFP4: 9e15},
        link_bytes_per_s=900e9,
        source="nominal, dense, not measured",
    ),
)


def find_peaks(device_name: str | None) -> Peaks | None:
    """Peaks of the device whose name (as the driver spells it, `NVIDIA H200`) contains a known one; else None."""
    if device_name is None:
        return None
    words = device_name.upper().replace("-", " ").split()
    return next((peaks for peaks in _PEAKS if peaks.device in words), None)
