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

MAX_HIDDEN_SIZE = 16384
"""What the registers of a Hopper CTA hold of a token while it is staged; one rule for all engines."""


SUPPORTED_SM = (90, 100, 103)
"""Compute capabilities the kernels are written for: Hopper (sm_90a), Blackwell (sm_100a, sm_103a)."""

SUPPORTED_ACTIVATIONS = ("Swiglu", "SwigluBias")
"""Gated activations by the host's names; the second only without expert biases (constants alpha, beta, clamp)."""


class RejectReason(enum.Enum):
    """Why a layer is refused. Closed: an adapter maps each of them to the host's own word."""

    TOPOLOGY = "topology"
    SLOTS = "slots"
    SHAPE = "shape"
    CAPACITY = "capacity"
    QUANT = "quantisation"
    DTYPE = "dtype"
    SM = "compute capability"
    ENGINE = "engine"
    ACTIVATION = "activation"
    BIAS = "bias"
    LORA = "lora"
    ROUTER_WEIGHT = "router weight on input"
    EPLB = "expert migration"


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


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a host knows of a layer and its deployment before it builds anything; None where it does not know yet.

    `num_slots` counts expert slots (E without expert-parallel load balancing); `engine_obstacle` says why the asked-for
    engine cannot run here; `sm` None skips the compute-capability rule (the CPU engine has none).
    """

    quant: str | None
    dtype: str
    hidden_size: int | None
    intermediate_size: int | None
    num_experts: int | None
    top_k: int | None
    activation: str
    has_bias: bool
    has_lora: bool
    router_weight_on_input: bool
    num_slots: int | None
    ep_size: int
    moe_tp_size: int
    cluster_size: int
    parallel_size: int
    attention_dp: bool
    dynamic_eplb: bool
    sm: int | None
    engine_obstacle: str | None


def judge_facts(facts: LayerFacts) -> Eligibility:
    """Judge a layer by what a host says of it. Pure and rank-identical; the first reason is the most telling one."""
    found: list[tuple[RejectReason, str]] = []

    def refuse(reason: RejectReason, detail: str) -> None:
        found.append((reason, detail))

    if facts.quant is None or facts.quant.lower() != "nvfp4":
        refuse(
            RejectReason.QUANT, f"experts are {facts.quant or 'not quantised'}, this backend runs NVFP4 experts only"
        )
    if facts.dtype != "bfloat16":
        refuse(RejectReason.DTYPE, f"activations are {facts.dtype}, must be bfloat16")
    if facts.sm is not None and facts.sm not in SUPPORTED_SM:
        refuse(RejectReason.SM, f"sm_{facts.sm} is not one of {', '.join(f'sm_{sm}' for sm in SUPPORTED_SM)}")
    if facts.engine_obstacle is not None:
        refuse(RejectReason.ENGINE, facts.engine_obstacle)
    found.extend(_topology_rejections(facts))
    found.extend(_shape_rejections(facts.hidden_size, facts.intermediate_size, facts.num_experts, facts.top_k))
    if facts.has_bias:
        refuse(RejectReason.BIAS, "experts have biases, which the launch does not add")
    if facts.activation not in SUPPORTED_ACTIVATIONS:
        refuse(RejectReason.ACTIVATION, f"activation {facts.activation}, must be {' or '.join(SUPPORTED_ACTIVATIONS)}")
    if facts.has_lora:
        refuse(RejectReason.LORA, "MoE LoRA is not supported")
    if facts.router_weight_on_input:
        refuse(RejectReason.ROUTER_WEIGHT, "apply_router_weight_on_input is not supported")
    if facts.dynamic_eplb and facts.has_bias:
        refuse(RejectReason.EPLB, "expert biases do not move with experts that migrate at run time")
    return Eligibility(tuple(found))


def _topology_rejections(facts: LayerFacts) -> list[tuple[RejectReason, str]]:
    found: list[tuple[RejectReason, str]] = []
    if facts.moe_tp_size != 1:
        found.append((RejectReason.TOPOLOGY, f"MoE tensor parallelism is {facts.moe_tp_size}, must be 1"))
    if facts.cluster_size != 1:
        found.append((RejectReason.TOPOLOGY, f"MoE cluster size is {facts.cluster_size}, must be 1"))
    if facts.parallel_size > 1 and not facts.attention_dp:
        # the result is already summed over all ranks; without attention DP the model would sum it again
        found.append((RejectReason.TOPOLOGY, "attention data parallelism is off; set enable_attention_dp: true"))
    if facts.ep_size != facts.parallel_size:
        detail = f"ep_size {facts.ep_size} must equal the parallel size {facts.parallel_size} (pure DEP)"
        found.append((RejectReason.TOPOLOGY, detail))
    if facts.num_slots is not None and facts.num_slots % facts.ep_size:
        detail = f"{facts.num_slots} expert slots are not divisible by ep_size {facts.ep_size}"
        found.append((RejectReason.SLOTS, detail))
    return found


def _shape_rejections(
    hidden_size: int | None, intermediate_size: int | None, num_experts: int | None, top_k: int | None
) -> list[tuple[RejectReason, str]]:
    found: list[tuple[RejectReason, str]] = []
    if hidden_size is not None and (hidden_size % 32 or hidden_size > MAX_HIDDEN_SIZE):
        detail = f"hidden_size {hidden_size} must be a multiple of 32, at most {MAX_HIDDEN_SIZE}"
        found.append((RejectReason.SHAPE, detail))
    if intermediate_size is not None and intermediate_size % 16:
        found.append((RejectReason.SHAPE, f"intermediate_size {intermediate_size} must be a multiple of 16"))
    if top_k is not None and top_k > min(MAX_TOP_K, num_experts if num_experts is not None else MAX_TOP_K):
        detail = f"top_k {top_k} must not exceed min({MAX_TOP_K}, num_experts {num_experts})"
        found.append((RejectReason.SHAPE, detail))
    return found


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
    found.extend(_shape_rejections(config.hidden_size, config.intermediate_size, config.num_experts, config.top_k))
    if not found:
        try:
            check_limits(Geometry.from_config(config, ep_size))
        except MegaMoeConfigError as err:
            found.append((RejectReason.CAPACITY, str(err)))
    return Eligibility(tuple(found))


def require_eligible(config: MegaMoeConfig, ep_size: int, what: str) -> None:
    """Raise unless `what` (a model, a layer of a checkpoint) can run on `ep_size` ranks.

    Raises:
        MegaMoeConfigError: Every reason is named.
    """
    verdict = judge(config, ep_size)
    if not verdict.is_eligible:
        raise MegaMoeConfigError(f"{what} cannot run on {ep_size} ranks: {verdict.describe()}")
