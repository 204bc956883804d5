# SPDX-License-Identifier: Apache-2.0
"""The host's question `can_implement(problem, deployment)`, answered by :func:`trtllm_megamoe.contract.judge_facts`.

Two translations and nothing else: the host's carriers into :class:`LayerFacts`, and our closed set of reasons into the
host's. Pure: no allocation, no collective, no environment (the settings were read once at registration).
"""

from __future__ import annotations

from typing import Any

from trtllm_megamoe.contract import Eligibility, LayerFacts, RejectReason, judge_facts
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.host.settings import HostSettings

HOST_REASONS = {
    RejectReason.TOPOLOGY: "TOPOLOGY_UNSUPPORTED",
    RejectReason.SLOTS: "SLOTS_NOT_DIVISIBLE_BY_EP",
    RejectReason.SHAPE: "SHAPE_UNALIGNED",
    RejectReason.CAPACITY: "SHAPE_UNALIGNED",
    RejectReason.QUANT: "QUANT_UNSUPPORTED",
    RejectReason.DTYPE: "DTYPE_UNSUPPORTED",
    RejectReason.SM: "SM_UNSUPPORTED",
    RejectReason.ENGINE: "DEP_MISSING",
    RejectReason.ACTIVATION: "ACTIVATION_UNSUPPORTED",
    RejectReason.BIAS: "ACTIVATION_UNSUPPORTED",
    RejectReason.LORA: "LORA_UNSUPPORTED",
    RejectReason.ROUTER_WEIGHT: "ROUTING_UNSUPPORTED",
    RejectReason.EPLB: "EPLB_UNSUPPORTED",
}
"""Our reason -> name of the host's `MoERejectReason` member; total over :class:`RejectReason`."""


def facts_of(problem: Any, deployment: Any, settings: HostSettings) -> LayerFacts:
    """Translate the host's carriers; fields that an era does not have count as unknown or absent."""
    obstacle = None
    try:
        choose_engine(settings.engine, int(deployment.ep_size))
    except MegaMoeUnavailableError as err:
        obstacle = str(err)
    bias = getattr(problem, "bias", None)
    return LayerFacts(
        quant=problem.quant,
        dtype=str(problem.dtype_act).removeprefix("torch."),
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        activation=problem.activation,
        has_bias=bool(problem.swiglu_gptoss_style if bias is None else bias),  # the style says more than biases
        has_lora=bool(deployment.moe_lora_enabled),
        router_weight_on_input=False,  # not in the host's problem; the constructor refuses it
        num_slots=deployment.num_slots,
        ep_size=deployment.ep_size,
        moe_tp_size=deployment.tp_size,
        cluster_size=deployment.cluster_size,
        parallel_size=deployment.parallel_size,
        attention_dp=bool(deployment.use_dp),
        dynamic_eplb=bool(getattr(deployment, "eplb_enabled", False)),  # it does not say static or dynamic
        sm=None if settings.engine == "cpu" else deployment.env.sm,
        engine_obstacle=obstacle,
    )


def judge_host(problem: Any, deployment: Any, settings: HostSettings) -> Eligibility:
    """Our verdict over a layer the host describes."""
    return judge_facts(facts_of(problem, deployment, settings))
