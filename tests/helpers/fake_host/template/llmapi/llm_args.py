# SPDX-License-Identifier: Apache-2.0
"""User arguments; the MoE part is generated, the rest is what this stand-in serves with."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union  # noqa: F401  (the generated fields use them)

from pydantic import BaseModel, ConfigDict, Field


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MoeConfig(StrictBaseModel):
    GENERATED_FIELDS: None = None


class TorchLlmArgs(StrictBaseModel):
    model: str
    tensor_parallel_size: int = 1
    moe_expert_parallel_size: int = 1
    enable_attention_dp: bool = False
    max_num_tokens: int = 8192
    cuda_graph_config: dict[str, Any] | None = None
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    draft_layer_quant: str | None = "inherit"
    allow_backend_degradation: bool = True


def update_llm_args_with_extra_dict(args, extra):
    return {**args, **extra}
