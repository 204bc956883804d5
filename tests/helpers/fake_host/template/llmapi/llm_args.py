# SPDX-License-Identifier: Apache-2.0
"""User arguments; the MoE part is generated, the rest is what this stand-in serves with."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union  # noqa: F401  (the generated fields use them)

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MoeLoadBalancerConfig(StrictBaseModel):
    num_slots: int | None = None
    initial_global_assignments: dict[int, list[int]] | None = Field(default=None, repr=False)
    layer_updates_per_iter: int = 0
    _ep_rank: int | None = PrivateAttr(default=None)
    _ep_size: int | None = PrivateAttr(default=None)

    def setup(self, ep_rank: int, ep_size: int) -> None:
        self._ep_rank, self._ep_size = ep_rank, ep_size

    def get_layer_initial_global_assignments(self, layer_idx: int) -> list[int] | None:
        if self.initial_global_assignments is None:
            return None
        assert layer_idx in self.initial_global_assignments
        return self.initial_global_assignments[layer_idx]


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
