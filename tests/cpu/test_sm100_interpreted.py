# SPDX-License-Identifier: Apache-2.0
"""The Blackwell kernel's PTX in the interpreter: codes, scales and outputs equal to the oracle, planted faults caught.

tests/data/ptx holds four builds that cover every token block, wire format, score placement, the clamp, and shapes with
tails everywhere (H not a multiple of 64, 2I and H not of 128, K not of 256). No hardware, no compiler.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim import SimError
from tools.ptxsim.layers import KernelFile, LayerRun, run_sm100
from tools.ptxsim.mutate import mutants
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference.oracle import OracleOptions, OracleTrace, OracleWeights, oracle_trace

DATA = Path(__file__).parent.parent / "data" / "ptx"


class Case:
    """One kernel with a layer, tokens and the oracle's trace."""

    def __init__(self, build: str, kind: RoutingKind, count: int, *, special: bool = False) -> None:
        self.kernel = KernelFile.load(DATA / f"sm100_{build}.ptx")
        layer = self.layer = self.kernel.facts["layer"]
        hidden, experts = layer["hidden_size"], layer["num_local_experts"]
        generator = seeded(5)
        self.tensors = make_layer_tensors(generator, hidden, layer["intermediate_size"], experts)
        self.x = make_tokens(generator, count, hidden)
        if special:
            self.x[0] = 0.0
            self.x[1, 7] = float("nan")
            self.x[2, 33] = float("inf")
            self.x[3, 5] = -3e38
            self.x[4, 16:32] = 1e-30
        self.routing = make_routing(generator, kind, count, experts, layer["top_k"])
        placement = ScorePlacement.BEFORE_REQUANT if layer["weigh_before_requant"] else ScorePlacement.AFTER_FC2
        options = OracleOptions.product(
            ActivationMode.NVFP4,
            combine_format=CombineFormat(layer["combine_format"]),
            score_placement=placement,
            swiglu_limit=layer["swiglu_limit"],
        )
        weights = OracleWeights.from_tensors(self.tensors)
        self.expected: OracleTrace = oracle_trace(
            weights, self.x, self.routing.topk_ids, self.routing.topk_weights, options
        )

    def run(self, text: str | None = None, *, seed: int = 0, ids: torch.Tensor | None = None, **extra: int) -> LayerRun:
        """Run the kernel, or another text of it."""
        kernel = self.kernel if text is None else KernelFile(text, self.kernel.facts)
        ids = self.routing.topk_ids if ids is None else ids
        return run_sm100(kernel, self.tensors, self.x, ids, self.routing.topk_weights, seed=seed, **extra)

    def check(self, run: LayerRun) -> None:
        """Pool and fc1 output exactly, row by row; y bit for bit, NaN where the oracle has NaN."""
        want, live = self.expected, self.expected.live
        assert run.error[0] == 0
        assert torch.equal(run.route_rows >= 0, live)
        rows = run.route_rows[live].long()
        assert rows.unique().numel() == rows.numel()
        token = torch.arange(len(live))[:, None].expand(live.shape)[live]
        hidden, inter = self.layer["hidden_size"], self.layer["intermediate_size"]
        assert want.x_codes is not None and want.x_scales is not None
        assert want.hidden_codes is not None and want.hidden_scales is not None
        assert torch.equal(run.buffers["pool"][rows], want.x_codes[token])
        assert torch.equal(run.buffers["pool_scales"][rows][:, : hidden // 16], want.x_scales[token])
        assert torch.equal(run.buffers["h"][rows], want.hidden_codes[live])
        assert torch.equal(run.buffers["h_scales"][rows][:, : inter // 16], want.hidden_scales[live])
        nan = want.out.isnan()
        sound = ~nan[token].any(dim=1)  # a NaN token may leave NaN behind its last channel: nobody else reads it
        assert (run.buffers["pool_scales"][rows][:, hidden // 16 :] == 0).all()
        assert (run.buffers["h_scales"][rows][:, inter // 16 :][sound] == 0).all()
        assert torch.equal(run.y.isnan(), nan)
        assert torch.equal(run.y[~nan].view(torch.int16), want.out[~nan].view(torch.int16))


@pytest.mark.parametrize(
    ("build", "kind", "count", "grid"),
    [
        ("b32", RoutingKind.MASKED_30, 17, 2),
        ("b64", RoutingKind.HOT_EXPERT, 70, 2),
        ("b128", RoutingKind.ZIPF, 80, 2),
        ("b256", RoutingKind.HOT_EXPERT, 140, 2),
        ("b32", RoutingKind.RANDOM, 2, 3),
        ("b32", RoutingKind.ALL_MASKED, 3, 1),
        ("b128", RoutingKind.RANDOM, 0, 2),
    ],
)
def test_blackwell_kernel_ptx_equals_the_oracle(build: str, kind: RoutingKind, count: int, grid: int) -> None:
    """Bit for bit: sums of this size are exact in fp32, or round to the same bf16."""
    case = Case(build, kind, count)
    case.check(case.run(seed=count, grid=grid))


def test_blackwell_kernel_nan_infinity_and_zero_rows_follow_the_codecs() -> None:
    case = Case("b32", RoutingKind.RANDOM, 6, special=True)
    assert case.expected.out[1].isnan().all() and case.expected.out[0].isfinite().all()
    case.check(case.run())


def test_blackwell_kernel_second_launch_on_the_same_workspace_with_int32_ids_equals_the_first() -> None:
    case = Case("b32", RoutingKind.DUPLICATES, 9)
    case.check(case.run(seed=7, launches=2, ids=case.routing.topk_ids.int()))


def test_blackwell_wait_that_never_ends_is_recorded_and_the_launch_ends() -> None:
    case = Case("b32", RoutingKind.RANDOM, 3)
    run = case.run(fault_ctas=1, timeout_ns=20_000, check_order=False, patience=4000)
    assert (run.error[0], run.error[2], run.error[5], run.error[6]) == (1, 1, 3, 2)


@pytest.fixture(scope="module")
def case() -> Case:
    """The case of the planted faults: more tiles than ring slots, more stages than the pipeline holds."""
    return Case("b32", RoutingKind.RANDOM, 12)


@pytest.mark.parametrize(
    ("kind", "needle", "which"),
    [
        ("wait removed", "", 0),
        ("wait removed", "", 2),
        ("arrival removed", "", 1),
        ("announced bytes removed", "", 0),
        ("commit removed", "", 0),
        ("commit removed", "", 1),
        ("tcgen05 fence removed", "after", -2),
        ("tcgen05 fence removed", "before", 1),
        ("tcgen05 load wait removed", "", 0),
        ("dealloc removed", "", 0),
        ("release weakened", "red.release", 0),
        ("fence removed", "fence.mbarrier_init", 0),
    ],
)
def test_planted_fault_is_caught(case: Case, kind: str, needle: str, which: int) -> None:
    chosen = [m for m in mutants(case.kernel.text, (kind,)) if needle in m.before][which]
    with pytest.raises((SimError, AssertionError)):  # bytes read too early arrive as poison: then the result is wrong
        case.check(case.run(chosen.text, max_rounds=3000))
