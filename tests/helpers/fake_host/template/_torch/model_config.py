# SPDX-License-Identifier: Apache-2.0
"""Model configuration, frozen after construction like the host's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensorrt_llm.mapping import Mapping


@dataclass
class QuantConfig:
    quant_algo: Any = None


@dataclass
class ModelConfig:
    pretrained_config: Any = None
    mapping: Mapping = field(default_factory=Mapping)
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    quant_config_dict: dict | None = None
    skip_create_weights_in_init: bool = False
    moe_backend: str = "CUTLASS"
    moe_load_balancer: Any = None
    moe_max_num_tokens: int | None = None
    max_num_tokens: int = 8192
    lora_config: Any = None
    torch_dtype: torch.dtype = torch.bfloat16
    extra_attrs: dict = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "_frozen", True)

    def __setattr__(self, name, value):
        if getattr(self, "_frozen", False):
            raise AttributeError(f"ModelConfig is frozen: {name}")
        object.__setattr__(self, name, value)

    def set_unfrozen(self, name, value):
        object.__setattr__(self, name, value)
