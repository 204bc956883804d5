# SPDX-License-Identifier: Apache-2.0
"""Names that the contract mentions without heads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class ActivationParamShape(Enum):
    UNIFORM_SCALAR = "uniform_scalar"


@dataclass(frozen=True)
class MoEActivationSupport:
    kinds: Any
    alpha_beta: Any = None
    limit: Any = None


@dataclass(frozen=True)
class MoEActivation:
    """Era D1's heads name a carrier; its values are loose, so this one only has the defaults."""

    kind: Any = None


DEFAULT_MOE_ACTIVATION = MoEActivation()


class MoEScheduler:
    def __init__(self, moe):
        self.moe = moe
