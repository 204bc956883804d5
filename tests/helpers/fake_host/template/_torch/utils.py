# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from enum import IntEnum


class ActivationType(IntEnum):
    Swiglu = 0
    SwigluBias = 1
    SiTu = 2
    Relu2 = 3
