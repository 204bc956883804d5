# SPDX-License-Identifier: Apache-2.0
"""User-facing configuration of one layer: pydantic at the edge, frozen afterwards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, field_validator

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement

ActivationRequest = Literal["auto", "nvfp4", "bf16"]
EngineName = Literal["auto", "cpu", "cuda"]


class MegaMoeConfig(BaseModel):
    """Everything about one MoE layer that must be equal on all ranks, plus the choice of engine.

    `top_k`, `max_tokens_per_rank` and the expert counts never have defaults: a wrong guess would be silent.

    Source: docs/architecture.md; requirements R2, R4, R7, R61, design D13.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: PositiveInt = Field(description="H, width of a token row")
    intermediate_size: PositiveInt = Field(description="I, intermediate channels of one expert")
    num_experts: PositiveInt = Field(description="E, routed experts over all ranks")
    top_k: PositiveInt = Field(description="K, routes per token, masked ones included")
    max_tokens_per_rank: PositiveInt = Field(
        description="cap: most tokens one rank ever passes to forward; never divided by the DP size (R2)"
    )
    combine_format: CombineFormat = Field(default=CombineFormat.BF16, description="wire format of returning rows")
    activations: ActivationRequest = Field(default="auto", description="activation mode; auto resolves at load (R61)")
    score_placement: ScorePlacement = Field(
        default=ScorePlacement.AFTER_FC2, description="where routing weights multiply"
    )
    swiglu_limit: PositiveFloat | None = Field(
        default=None, description="clamp: gate from above, up on both sides; None or inf means no clamp"
    )
    swiglu_alpha: float = Field(default=1.0, allow_inf_nan=False, description="factor inside the sigmoid")
    swiglu_beta: float = Field(default=0.0, allow_inf_nan=False, description="added to up before the product")
    engine: EngineName = Field(default="auto", description="auto: cuda where a supported GPU is visible, else cpu")
    timeout_s: PositiveFloat = Field(default=60.0, description="longest wait for any peer, seconds")

    @field_validator("combine_format", mode="before")
    @classmethod
    def _parse_combine_format(cls, value: Any) -> Any:
        return CombineFormat.parse(value) if isinstance(value, str) else value

    @classmethod
    def create(cls, **fields: Any) -> MegaMoeConfig:
        """Build a configuration; every illegal field is named in ONE :class:`MegaMoeConfigError`."""
        try:
            return cls(**fields)
        except ValidationError as err:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']} (got {e['input']!r})" for e in err.errors()
            )
            raise MegaMoeConfigError(f"illegal layer configuration: {faults}") from None

    @property
    def activation_mode(self) -> ActivationMode | None:
        """The requested mode, or None while `auto` is unresolved."""
        return None if self.activations == "auto" else ActivationMode(self.activations)
