# SPDX-License-Identifier: Apache-2.0
"""Which layers the backend takes, and what is said of those it refuses (R9, pitfall B30)."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fake_host.install import installed_host
from tests.helpers.golden import golden_layer
from tests.helpers.host_layer import make_moe, model_config
from trtllm_megamoe.contract import RejectReason
from trtllm_megamoe.errors import MegaMoeConfigError

QWEN = golden_layer("modelopt_nvfp4_qwen3_moe", 0)


pytestmark = pytest.mark.usefixtures("cpu_host")


REFUSALS = [
    ({"quant": "fp8_block_scales"}, {}, "QUANT_UNSUPPORTED", "experts are fp8_block_scales"),
    ({"quant": None}, {}, "QUANT_UNSUPPORTED", "not quantised"),
    ({"dtype_act": torch.float16}, {}, "DTYPE_UNSUPPORTED", "float16, must be bfloat16"),
    ({"hidden_size": 4112}, {}, "SHAPE_UNALIGNED", "hidden_size 4112 must be a multiple of 32"),
    ({"intermediate_size": 1000}, {}, "SHAPE_UNALIGNED", "intermediate_size 1000 must be a multiple of 16"),
    ({"top_k": 17}, {}, "SHAPE_UNALIGNED", "top_k 17"),
    ({"activation": "Relu2"}, {}, "ACTIVATION_UNSUPPORTED", "activation Relu2"),
    ({"activation": "SiTu"}, {}, "ACTIVATION_UNSUPPORTED", "activation SiTu"),
    ({"bias": True}, {}, "ACTIVATION_UNSUPPORTED", "experts have biases"),
    ({"swiglu_gptoss_style": True}, {}, "ACTIVATION_UNSUPPORTED", "experts have biases"),
    ({}, {"num_slots": 30}, "SLOTS_NOT_DIVISIBLE_BY_EP", "30 expert slots are not divisible by ep_size 8"),
    ({}, {"use_dp": False}, "TOPOLOGY_UNSUPPORTED", "set enable_attention_dp: true"),
    ({}, {"ep_size": 4}, "TOPOLOGY_UNSUPPORTED", "ep_size 4 must equal the parallel size 8"),
    ({}, {"tp_size": 2}, "TOPOLOGY_UNSUPPORTED", "MoE tensor parallelism is 2"),
    ({}, {"cluster_size": 2}, "TOPOLOGY_UNSUPPORTED", "cluster size is 2"),
    ({}, {"moe_lora_enabled": True}, "LORA_UNSUPPORTED", "LoRA"),
]


@pytest.mark.parametrize(("problem", "deployment", "reason", "detail"), REFUSALS)
def test_can_implement_refusal_has_the_hosts_reason_and_the_predicate(
    problem: dict[str, Any], deployment: dict[str, Any], reason: str, detail: str, newest: str
) -> None:
    contract = importlib.import_module(f"{newest}.impl_contract")
    backend = importlib.import_module("trtllm_megamoe.host.register").register().backend
    good_p = {"quant": "nvfp4", "dtype_act": torch.bfloat16, "hidden_size": 7168, "intermediate_size": 2048,
              "num_experts": 256, "top_k": 8}  # fmt: skip
    good_d = {"ep_size": 8, "tp_size": 1, "use_dp": True, "num_slots": 256, "parallel_size": 8,
              "env": contract.MoEEnvironment(sm=90)}  # fmt: skip
    ask = lambda p, d: backend.can_implement(contract.MoEProblem(**p), contract.MoEDeployment(**d))  # noqa: E731
    assert ask(good_p, good_d)
    # the style says SwigluBias or biases; where the host tells whether there are biases, that counts
    assert ask(good_p | {"activation": "SwigluBias", "swiglu_gptoss_style": True, "bias": False}, good_d)
    # gates must tolerate what the host does not know yet
    assert ask({"quant": "nvfp4", "dtype_act": torch.bfloat16}, good_d)
    verdict = ask(good_p | problem, good_d | deployment)
    assert not verdict and verdict.reject_reason.name == reason and detail in verdict.detail


def test_can_implement_engine_and_sm_are_judged_for_the_cuda_engine_only(
    newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eligibility = importlib.import_module("trtllm_megamoe.host.eligibility")
    contract = importlib.import_module(f"{newest}.impl_contract")
    settings_of = importlib.import_module("trtllm_megamoe.host.settings").HostSettings.from_environment
    problem = contract.MoEProblem(quant="nvfp4", dtype_act=torch.bfloat16)
    environment = contract.MoEEnvironment(sm=89)
    deployment = contract.MoEDeployment(
        ep_size=8, tp_size=1, use_dp=True, num_slots=256, parallel_size=8, env=environment
    )
    assert eligibility.judge_host(problem, deployment, settings_of()).is_eligible
    monkeypatch.delenv("TRTLLM_MEGAMOE_ENGINE")  # the default inside the host is the CUDA engine, never a silent CPU
    reasons = [r for r, _ in eligibility.judge_host(problem, deployment, settings_of()).rejections]
    assert reasons[0] is RejectReason.SM
    if not torch.cuda.is_available():
        assert RejectReason.ENGINE in reasons


def test_every_reason_has_a_word_of_the_hosts(base: str) -> None:
    reasons = importlib.import_module("trtllm_megamoe.host.eligibility").HOST_REASONS
    members = importlib.import_module(f"{base}.impl_contract").MoERejectReason.__members__
    assert set(reasons) == set(RejectReason) and set(reasons.values()) <= set(members)


def test_refused_layer_is_named_with_reason_and_successor(
    base: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bf16 draft layer beside NVFP4 layers: one message, or an error under TRTLLM_MEGAMOE_STRICT=1."""
    unquantised = importlib.import_module("tensorrt_llm._torch.model_config").QuantConfig(None)
    with caplog.at_level(logging.WARNING, logger="trtllm_megamoe.host.register"):
        moe = make_moe(base, QWEN, model_config(), override_quant_config=unquantised, layer_idx=61)
    assert type(moe.backend).__name__ == "CutlassFusedMoE"
    texts = [r.getMessage() for r in caplog.records]
    assert texts == [
        "layer 61: MEGAMOE_CUTEDSL was asked for and refused: quantisation: experts are not quantised, this "
        "backend runs NVFP4 experts only; CutlassFusedMoE runs instead"
    ]


def test_refused_layer_that_no_other_backend_takes_ends_the_start_with_our_reason(tmp_path: Path) -> None:
    """On Hopper the host has nothing else for NVFP4 experts."""

    def nothing_else(plan: Any) -> None:
        accept = '_backend("CutlassFusedMoE", _accept)'
        plan.edit(f"{plan.moe_base}.other_backends", accept, accept.replace("_accept", "_refuse"))

    for era in ("C", "D2"):
        with installed_host(tmp_path / era, era, nothing_else) as name:
            importlib.import_module("trtllm_megamoe.host")
            with pytest.raises(
                MegaMoeConfigError, match=r"layer 7: MEGAMOE_CUTEDSL .* refused: shape: hidden_size 260"
            ):
                make_moe(name, QWEN, model_config(), hidden_size=260)


def test_refused_layer_under_strict_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_STRICT", "1")
    with installed_host(tmp_path, "D2") as name:
        importlib.import_module("trtllm_megamoe.host")
        unquantised = importlib.import_module("tensorrt_llm._torch.model_config").QuantConfig(None)
        with pytest.raises(
            MegaMoeConfigError, match=r"layer 61: .*CutlassFusedMoE runs instead, which .*STRICT=1 forbids"
        ):
            make_moe(name, QWEN, model_config(), override_quant_config=unquantised, layer_idx=61)


def test_refused_layer_that_may_not_degrade_is_an_error_with_our_reason(newest: str) -> None:
    with pytest.raises(MegaMoeConfigError, match=r"layer 7: MEGAMOE_CUTEDSL .* refused: shape: hidden_size 260"):
        make_moe(newest, QWEN, model_config(), hidden_size=260, allow_backend_degradation=False)


def test_other_backends_are_left_alone(base: str, caplog: pytest.LogCaptureFixture) -> None:
    moe = make_moe(base, QWEN, model_config(moe_backend="CUTLASS"))
    assert type(moe.backend).__name__ == "CutlassFusedMoE" and not caplog.records
