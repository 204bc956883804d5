# SPDX-License-Identifier: Apache-2.0
"""One table of bounds for the self-test, `run` and the microbench: by engine, and on a GPU by wire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microbench import check as check_module
from microbench.cases import preset_case
from microbench.check import CheckResult, Verdict, check_output
from microbench.routing import RoutingName, by_tokens, route
from microbench.sources import SyntheticSource
from trtllm_megamoe.comm import single
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.selftest.checks import fault_of, tolerance_of

CASE = preset_case("qwen3-235b", scale_experts=8, scale_channels=64)
WIRES = [wire.value for wire in CombineFormat]


@pytest.mark.parametrize(
    ("engine", "wire", "bound"),
    [
        ("cpu", "bf16", 1e-3),
        ("cpu", "fp8", 1e-3),
        ("cpu", "fp4", 1e-3),
        ("cuda", "bf16", 3e-3),
        ("cuda", "fp8", 5e-3),
        ("cuda", "fp4", 1e-2),
    ],
)
def test_tolerance_of_every_engine_and_wire(engine: str, wire: str, bound: float) -> None:
    assert tolerance_of(engine, wire) == bound
    assert wire in WIRES and len(WIRES) == 3, "a new wire needs its bound"


@pytest.mark.parametrize("wire", WIRES)
def test_selftest_fault_is_judged_by_the_gpu_bound_of_the_wire(wire: str) -> None:
    bound = tolerance_of("cuda", wire)
    right = {"rel_l2": 0.99 * bound, "worst_row": 1e-3, "equal": 0.5, "nan": 0, "zero_rows": 0}
    assert fault_of(right, wire) == ""
    assert f"is not below {bound:g}" in fault_of({**right, "rel_l2": bound}, wire)


def verdict(monkeypatch: pytest.MonkeyPatch, device: str, wire: CombineFormat, error: float) -> CheckResult:
    """The microbench's verdict on outputs on a device that are `error` off the oracle's."""
    part = check_module._RankCheck(error, 1.0, 4, 4, frozenset(range(8)), None)
    monkeypatch.setattr(check_module, "_check_rank", lambda *given: part)
    workload = by_tokens(RoutingName.RANDOM, 4, num_experts=CASE.num_experts, top_k=CASE.top_k, ep_size=1, seed=0)
    out: Any = SimpleNamespace(device=torch.device(device))  # of which only this is asked
    x, source = torch.empty(4, CASE.hidden_size), SyntheticSource(CASE, 0)
    return check_output(out, x, route(workload, 0), source, ActivationMode.NVFP4, wire, single(), 60.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wire", list(CombineFormat))
def test_microbench_holds_a_result_against_the_bound_of_its_device_and_wire(
    device: str, wire: CombineFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = tolerance_of(device, wire.value)
    inside, at = (verdict(monkeypatch, device, wire, error) for error in (0.99 * bound, bound))
    assert inside.verdict is Verdict.VERIFIED and inside.tolerance == at.tolerance == bound
    assert at.verdict is Verdict.WRONG and f"is not below {bound:g}" in str(at.reason)


def test_microbench_six_thousandths_pass_over_an_fp4_wire_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [
        (device, wire.value)
        for device in ("cpu", "cuda")
        for wire in CombineFormat
        if verdict(monkeypatch, device, wire, 6e-3).has_passed
    ]
    assert passed == [("cuda", "fp4")]
