# SPDX-License-Identifier: Apache-2.0
"""The activation carrier of era D2; its fields are this stand-in's own, the real file was not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.utils import ActivationType


@dataclass(frozen=True)
class MoEActivation:
    kind: ActivationType = ActivationType.Swiglu
    alpha: Any = None
    beta: Any = None
    limit: Any = None


DEFAULT_MOE_ACTIVATION = MoEActivation()
