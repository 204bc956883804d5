# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models people serve, as published in their configuration files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ScorePlacement


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model's routed-expert shape and the options its architecture fixes.

    `num_moe_layers` counts layers with routed experts; it scales memory plans only.
    """

    name: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0

    @property
    def score_placement(self) -> ScorePlacement:
        """Where this architecture multiplies routing weights."""
        return ScorePlacement.for_architecture(self.architecture)

    def layer_config(self, **options: Any) -> MegaMoeConfig:
        """Configuration of one of its layers; `options` are the fields that a model does not fix."""
        return MegaMoeConfig.create(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            score_placement=self.score_placement,
            swiglu_limit=self.swiglu_limit,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_beta=self.swiglu_beta,
            **options,
        )


PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("deepseek-v3", "DeepseekV3ForCausalLM", 7168, 2048, 256, 8, 58),
        ModelShape("deepseek-v4-pro", "DeepseekV4ForCausalLM", 7168, 3072, 384, 6, 61, swiglu_limit=10.0),
        ModelShape("deepseek-v4-flash", "DeepseekV4ForCausalLM", 4096, 2048, 256, 6, 43, swiglu_limit=10.0),
        ModelShape("kimi-k2", "DeepseekV3ForCausalLM", 7168, 2048, 384, 8, 60),
        ModelShape("qwen3-235b", "Qwen3MoeForCausalLM", 4096, 1536, 128, 8, 94),
        ModelShape(
            "gpt-oss-120b",
            "GptOssForCausalLM",
            2880,
            2880,
            128,
            4,
            36,
            swiglu_limit=7.0,
            swiglu_alpha=1.702,
            swiglu_beta=1.0,
        ),
    )
}


def get_preset(name: str) -> ModelShape:
    """Look a preset up by name; an unknown name is an error that lists the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise MegaMoeConfigError(f"preset {name!r} is unknown; allowed: {', '.join(PRESETS)}") from None
