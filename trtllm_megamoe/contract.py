# SPDX-License-Identifier: Apache-2.0
"""Eligibility: which layers this backend takes, as a pure function with a closed set of reasons (R9).

Used by the layer's constructor, `explain` and the host adapter. Nothing here looks at a machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.regions import Geometry, check_limits

MAX_TOP_K = 16
"""Routes per token the kernels keep in registers; upstream's limit too."""


class RejectReason(enum.Enum):
    """Why a layer is refused."""

    TOPOLOGY = "topology"
    SHAPE = "shape"
    CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Verdict over one layer: eligible, or every reason with its detail."""

    rejections: tuple[tuple[RejectReason, str], ...] = ()

    @property
    def is_eligible(self) -> bool:
        """Whether no rule refused."""
        return not self.rejections

    def describe(self) -> str:
        """One line naming every reason."""
        if self.is_eligible:
            return "eligible"
        return "; ".join(f"{reason.value}: {detail}" for reason, detail in self.rejections)


def judge(config: MegaMoeConfig, ep_size: int) -> Eligibility:
    """Judge a layer's configuration for `ep_size` ranks. Pure and rank-identical."""
    found: list[tuple[RejectReason, str]] = []
    if ep_size < 1:
        found.append((RejectReason.TOPOLOGY, f"ep_size {ep_size} must be at least 1"))
        return Eligibility(tuple(found))
    if config.num_experts % ep_size:
        found.append(
            (
                RejectReason.TOPOLOGY,
                f"num_experts {config.num_experts} is not divisible by ep_size {ep_size}; "
                f"legal sizes: {', '.join(str(r) for r in range(1, 65) if config.num_experts % r == 0)}",
            )
        )
    if config.hidden_size % 32:
        found.append((RejectReason.SHAPE, f"hidden_size {config.hidden_size} must be a multiple of 32"))
    if config.intermediate_size % 16:
        found.append((RejectReason.SHAPE, f"intermediate_size {config.intermediate_size} must be a multiple of 16"))
    if config.top_k > min(MAX_TOP_K, config.num_experts):
        found.append(
            (
                RejectReason.SHAPE,
                f"top_k {config.top_k} must not exceed min({MAX_TOP_K}, num_experts {config.num_experts})",
            )
        )
    if not found:
        try:
            check_limits(Geometry.from_config(config, ep_size))
        except MegaMoeConfigError as err:
            found.append((RejectReason.CAPACITY, str(err)))
    return Eligibility(tuple(found))
