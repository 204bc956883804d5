# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from enum import Enum


class QuantAlgo(Enum):
    NVFP4 = "NVFP4"
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
