# SPDX-License-Identifier: Apache-2.0
"""The oracle against ModelOpt's own results and against a second, scalar implementation of docs/numerics.md."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.golden import GOLDEN_LAYERS, GoldenLayer, golden_layer
from tests.helpers.scalar_layer import scalar_layer
from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference.metrics import cosine, mismatch_report, rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward, oracle_trace

NVFP4, BF16 = ActivationMode.NVFP4, ActivationMode.BF16
AFTER, BEFORE = ScorePlacement.AFTER_FC2, ScorePlacement.BEFORE_REQUANT


def golden_forward(golden: GoldenLayer, options: OracleOptions) -> torch.Tensor:
    weights = OracleWeights.from_tensors(golden.tensors)
    return oracle_forward(weights, golden.x, golden.topk_ids, golden.topk_weights, options)


@pytest.mark.parametrize(("checkpoint", "layer"), GOLDEN_LAYERS)
def test_oracle_exact_meets_modelopt_to_1e_6(checkpoint: str, layer: int) -> None:
    golden = golden_layer(checkpoint, layer)
    # Both sides are float64; the file's float32 leaves 2^-25, about 6e-8 in the mean.
    assert rel_l2(golden_forward(golden, OracleOptions.exact()), golden.out_w4a16) < 1e-6


@pytest.mark.parametrize(("checkpoint", "layer"), GOLDEN_LAYERS)
def test_oracle_exact_with_rounded_x_differs_by_bf16_rounding(checkpoint: str, layer: int) -> None:
    golden = golden_layer(checkpoint, layer)
    gap = rel_l2(golden_forward(golden, replace(OracleOptions.exact(), round_x=True)), golden.out_w4a16)
    assert 2e-3 < gap < 3e-3  # 2^-9 uniform rounding error of x, the figure of tests/data/README.md


@pytest.mark.parametrize(("checkpoint", "layer"), GOLDEN_LAYERS)
@pytest.mark.parametrize("placement", list(ScorePlacement))
def test_oracle_nvfp4_differs_by_activation_quantisation(
    checkpoint: str, layer: int, placement: ScorePlacement
) -> None:
    golden = golden_layer(checkpoint, layer)
    out = golden_forward(golden, OracleOptions.product(NVFP4, score_placement=placement))
    # Two 4-bit quantisations of random activations: about 0.1 each. Less would mean that one is missing.
    assert 0.15 < rel_l2(out, golden.out_w4a16) < 0.19
    assert cosine(out, golden.out_w4a16) > 0.98


@pytest.mark.parametrize(("checkpoint", "layer"), GOLDEN_LAYERS)
@pytest.mark.parametrize("placement", list(ScorePlacement))
def test_oracle_bf16_meets_modelopt_within_5e_3(checkpoint: str, layer: int, placement: ScorePlacement) -> None:
    golden = golden_layer(checkpoint, layer)
    out = golden_forward(golden, OracleOptions.product(BF16, score_placement=placement))
    # x, fc1 output, route and output are rounded to bf16 once each: sqrt(4) * 2^-9 / sqrt(3) or so.
    assert rel_l2(out, golden.out_w4a16) < 5e-3


@pytest.mark.parametrize(("checkpoint", "layer"), GOLDEN_LAYERS)
def test_oracle_wire_formats_cost_what_their_bits_say(checkpoint: str, layer: int) -> None:
    golden = golden_layer(checkpoint, layer)
    plain = golden_forward(golden, OracleOptions.product(BF16))
    gaps = [
        rel_l2(golden_forward(golden, OracleOptions.product(BF16, combine_format=wire)), plain)
        for wire in (CombineFormat.FP8, CombineFormat.FP4)
    ]
    assert 0.02 < gaps[0] < 0.035 and 0.07 < gaps[1] < 0.12  # 3 and 1 mantissa bits


@pytest.mark.parametrize("kind", [RoutingKind.RANDOM, RoutingKind.MASKED_30, RoutingKind.DUPLICATES])
@pytest.mark.parametrize("combine_format", list(CombineFormat))
@pytest.mark.parametrize("placement", list(ScorePlacement))
@pytest.mark.parametrize("activations", list(ActivationMode))
def test_oracle_equals_the_scalar_layer_bit_for_bit(
    activations: ActivationMode, placement: ScorePlacement, combine_format: CombineFormat, kind: RoutingKind
) -> None:
    generator = seeded(11)
    tensors = make_layer_tensors(generator, 96, 64, 6)
    x = make_tokens(generator, 10, 96)
    routing = make_routing(generator, kind, 10, 6, 3)
    options = OracleOptions.product(
        activations, combine_format=combine_format, score_placement=placement,
        swiglu_limit=3.0, swiglu_alpha=1.3, swiglu_beta=0.25,
    )  # fmt: skip
    ours = oracle_forward(OracleWeights.from_tensors(tensors), x, routing.topk_ids, routing.topk_weights, options)
    theirs = scalar_layer(
        tensors, 6, x, routing.topk_ids, routing.topk_weights, activations=activations.value,
        combine_format=combine_format.value, before_requant=placement is BEFORE, limit=3.0, alpha=1.3, beta=0.25,
    )  # fmt: skip
    assert theirs.float().abs().max() > 0.1
    report = mismatch_report(ours.view(torch.int16), theirs.view(torch.int16), names=("token", "column"))
    assert report is None, report


def test_oracle_weight_only_bf16_equals_the_scalar_layer() -> None:
    generator = seeded(12)
    tensors = make_layer_tensors(generator, 64, 32, 4, input_scales=False)
    x, routing = make_tokens(generator, 9, 64), make_routing(generator, "zipf", 9, 4, 2)
    weights = OracleWeights.from_tensors(tensors)
    ours = oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, OracleOptions.product(BF16))
    theirs = scalar_layer(tensors, 4, x, routing.topk_ids, routing.topk_weights, activations="bf16")
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_oracle_reduction_longer_than_one_exact_piece_equals_the_scalar_layer() -> None:
    generator = seeded(13)
    tensors = make_layer_tensors(generator, 2080, 1040, 2)
    x, routing = make_tokens(generator, 3, 2080), make_routing(generator, "random", 3, 2, 1)
    weights = OracleWeights.from_tensors(tensors)
    for mode in ActivationMode:
        ours = oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, OracleOptions.product(mode))
        theirs = scalar_layer(tensors, 2, x, routing.topk_ids, routing.topk_weights, activations=mode.value)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("kind", list(RoutingKind))
@pytest.mark.parametrize("activations", list(ActivationMode))
def test_oracle_row_alone_equals_row_in_a_batch(activations: ActivationMode, kind: RoutingKind) -> None:
    generator = seeded(14)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 64, 32, 8))
    x, routing = make_tokens(generator, 12, 64), make_routing(generator, kind, 12, 8, 3, ep_size=4)
    options = OracleOptions.product(activations, combine_format=CombineFormat.FP8)
    batch = oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, options)
    for t in range(12):
        one = slice(t, t + 1)
        alone = oracle_forward(weights, x[one], routing.topk_ids[one], routing.topk_weights[one], options)
        assert torch.equal(alone.view(torch.int16), batch[one].view(torch.int16))


def test_oracle_every_switch_changes_the_result() -> None:
    """A rounding point that changes nothing is not wired up."""
    generator = seeded(15)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 128, 64, 4))
    x = make_tokens(generator, 16, 128).float() * 1.001  # no longer exact in bf16
    routing = make_routing(generator, "random", 16, 4, 2)
    exact = OracleOptions.exact()
    product = replace(OracleOptions.product(BF16), round_output=False)

    def run(options: OracleOptions) -> torch.Tensor:
        return oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, options).double()

    for base, change in [
        (exact, {"round_x": True}),
        (exact, {"fc1_activations": NVFP4}),
        (exact, {"fc1_activations": BF16, "round_x": True}),
        (exact, {"fc2_activations": NVFP4}),
        (exact, {"fc2_activations": BF16}),
        (exact, {"fp32_epilogues": True}),
        (exact, {"round_routes": True}),
        (exact, {"round_routes": True, "combine_format": CombineFormat.FP8}),
        (exact, {"round_routes": True, "combine_format": CombineFormat.FP4}),
        (exact, {"swiglu_limit": 0.5}),
        (exact, {"swiglu_alpha": 1.702}),
        (exact, {"swiglu_beta": 1.0}),
        (exact, {"top_k_sum": torch.float32}),
        (exact, {"round_output": True}),
        (product, {"score_placement": BEFORE}),
        (product, {"fp32_epilogues": False, "round_routes": False, "combine_format": None}),
    ]:
        assert 0 < rel_l2(run(replace(base, **change)), run(base)) < 2, change  # type: ignore[arg-type]


def test_oracle_forward_and_trace_agree() -> None:
    golden = golden_layer(*GOLDEN_LAYERS[0])
    weights = OracleWeights.from_tensors(golden.tensors)
    options = OracleOptions.product(NVFP4, combine_format=CombineFormat.FP4)
    trace = oracle_trace(weights, golden.x, golden.topk_ids, golden.topk_weights, options)
    assert torch.equal(trace.out, golden_forward(golden, options))
