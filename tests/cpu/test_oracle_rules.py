# SPDX-License-Identifier: Apache-2.0
"""Rules of the oracle with values that a reader can check: masks, clamp, scales, score placement, sums, traces."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode, CombineFormat, ScorePlacement
from trtllm_megamoe.reference import codecs
from trtllm_megamoe.reference.metrics import rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward, oracle_trace

NAN = float("nan")
NVFP4, BF16 = ActivationMode.NVFP4, ActivationMode.BF16
AFTER, BEFORE = ScorePlacement.AFTER_FC2, ScorePlacement.BEFORE_REQUANT
MODES = [OracleOptions.product(NVFP4), OracleOptions.product(BF16), OracleOptions.exact()]
ONE, E4M3_ONE = 2, 0x38  # codes of 1.0


def picking_layer(num_experts: int = 1, *, input_scales: bool = True) -> OracleWeights:
    """H = 32, I = 16: gate_i = x_i, up_i = x_(16 + i), out_i = 2^e * h_i for i < 16; all other scales are 1."""

    def matrix(rows: int, columns: int, shift: int) -> torch.Tensor:
        codes = torch.zeros((rows, columns), dtype=torch.uint8)
        index = torch.arange(16)
        codes[index, index + shift] = ONE
        return codecs.pack_nibbles(codes)

    tensors: dict[str, torch.Tensor] = {}
    for e in range(num_experts):
        for name, rows, columns, shift in (("w1", 16, 32, 0), ("w3", 16, 32, 16), ("w2", 32, 16, 0)):
            tensors[f"{e}.{name}.weight"] = matrix(rows, columns, shift)
            tensors[f"{e}.{name}.weight_scale"] = torch.full((rows, columns // 16), E4M3_ONE, dtype=torch.uint8)
            tensors[f"{e}.{name}.weight_scale_2"] = torch.tensor(2.0**e if name == "w2" else 1.0)
            if input_scales:
                tensors[f"{e}.{name}.input_scale"] = torch.tensor(1.0)
    return OracleWeights.from_tensors(tensors)


def layer_output(
    gate_up: list[tuple[float, float]],
    options: OracleOptions,
    topk_weights: list[float] | None = None,
    ids: list[int] | None = None,
    num_experts: int = 1,
) -> torch.Tensor:
    """One token through `picking_layer`: out_i for the given (gate, up) pairs."""
    x = torch.zeros((1, 32), dtype=torch.float64)
    for i, (gate, up) in enumerate(gate_up):
        x[0, i], x[0, 16 + i] = gate, up
    weights = torch.tensor([topk_weights or [1.0]])
    out = oracle_forward(picking_layer(num_experts), x, torch.tensor([ids or [0]]), weights, options)
    return out[0, : len(gate_up)]


def silu(g: float) -> float:
    return g / (1 + math.exp(-g))


@pytest.mark.parametrize("limit", [10.0, 1e6, math.inf, None])
def test_oracle_swiglu_clamps_gate_from_above_and_up_on_both_sides(limit: float | None) -> None:
    pairs = [(25.0, -25.0), (-25.0, 25.0), (9.9, 10.1), (3.0, 3.0)]
    clamped = [silu(10) * -10, silu(-25) * 10, silu(9.9) * 10, silu(3) * 3]
    plain = [silu(g) * u for g, u in pairs]
    out = layer_output(pairs, OracleOptions.exact(swiglu_limit=limit))
    assert out.tolist() == pytest.approx(clamped if limit == 10.0 else plain, rel=1e-12)


@pytest.mark.parametrize("limit", [0.0, -1.0, NAN])
def test_oracle_options_swiglu_limit_not_above_zero_raises(limit: float) -> None:
    with pytest.raises(MegaMoeConfigError, match="swiglu_limit must be > 0"):
        OracleOptions.product(NVFP4, swiglu_limit=limit)


def test_oracle_swiglu_alpha_and_beta_enter_as_published() -> None:
    pairs = [(2.0, -1.0), (-3.0, 0.5)]
    out = layer_output(pairs, OracleOptions.exact(swiglu_alpha=1.702, swiglu_beta=1.0))
    assert out.tolist() == pytest.approx([g / (1 + math.exp(-1.702 * g)) * (u + 1) for g, u in pairs], rel=1e-12)


@pytest.mark.parametrize("activations", list(ActivationMode))
def test_oracle_clamp_keeps_nan(activations: ActivationMode) -> None:
    """min and max that drop a NaN would turn a spoilt token into a plausible one."""
    out = layer_output([(NAN, 1.0), (1.0, NAN)], OracleOptions.product(activations, swiglu_limit=10.0))
    assert out.isnan().all()


@pytest.mark.parametrize("options", MODES)
def test_oracle_masked_ids_contribute_nothing_and_are_not_read(options: OracleOptions) -> None:
    generator = seeded(1)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 64, 32, 8))
    x = make_tokens(generator, 5, 64)
    ids = torch.tensor([[0, -1], [-1, -1], [7, 8], [3, 2147483647], [2, 5]])
    topk_weights = torch.full((5, 2), 0.5)
    poisoned = topk_weights.clone()
    poisoned[(ids < 0) | (ids >= 8)] = NAN
    out = oracle_forward(weights, x, ids, poisoned, options)
    assert torch.equal(out, oracle_forward(weights, x, ids, topk_weights, options))
    assert (out[1] == 0).all() and not torch.signbit(out[1]).any()
    for t, expert in ((0, 0), (2, 7), (3, 3)):
        single = oracle_forward(weights, x[t : t + 1], torch.tensor([[expert]]), torch.tensor([[0.5]]), options)
        assert torch.equal(out[t], single[0])
    alone = oracle_forward(weights, x[4:], ids[4:], topk_weights[4:], options)
    assert torch.equal(out[4], alone[0]) and (alone != 0).any()


@pytest.mark.parametrize("num_tokens", [1, 128])
@pytest.mark.parametrize("options", MODES)
def test_oracle_whole_batch_masked_gives_positive_zero(options: OracleOptions, num_tokens: int) -> None:
    generator = seeded(2)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 64, 32, 4))
    routing = make_routing(generator, RoutingKind.ALL_MASKED, num_tokens, 4, 2)
    x = torch.full((num_tokens, 64), NAN)
    out = oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, options)
    assert out.shape == (num_tokens, 64) and (out == 0).all() and not torch.signbit(out).any()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", MODES)
def test_oracle_no_tokens_gives_an_empty_result(options: OracleOptions, ids_dtype: torch.dtype) -> None:
    weights = picking_layer()
    out = oracle_forward(
        weights, torch.empty((0, 32)), torch.empty((0, 4), dtype=ids_dtype), torch.empty(0, 4), options
    )
    assert out.shape == (0, 32)
    trace = oracle_trace(
        weights, torch.empty((0, 32)), torch.empty((0, 4), dtype=ids_dtype), torch.empty(0, 4), options
    )
    assert trace.gate is not None and trace.gate.shape == (0, 4, 16)


@pytest.mark.parametrize("options", MODES)
def test_oracle_duplicate_ids_are_two_routes(options: OracleOptions) -> None:
    pair = [(1.5, 2.0)]
    single = layer_output(pair, options, [0.75], [0]).item()
    assert single > 1 and layer_output(pair, options, [0.25, 0.5], [0, 0]).item() == single


def test_oracle_zero_token_gives_positive_zero_and_nan_token_spoils_its_own_row() -> None:
    generator = seeded(3)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 64, 32, 4))
    x, routing = make_tokens(generator, 6, 64), make_routing(generator, "random", 6, 4, 2)
    x[2] = 0
    for activations in ActivationMode:
        options = OracleOptions.product(activations, combine_format=CombineFormat.FP8)
        clean = oracle_forward(weights, x, routing.topk_ids, routing.topk_weights, options)
        assert (clean[2] == 0).all()
        spoilt_x = x.clone()
        spoilt_x[4, 9] = NAN
        spoilt = oracle_forward(weights, spoilt_x, routing.topk_ids, routing.topk_weights, options)
        assert spoilt[4].isnan().all()
        assert torch.equal(spoilt[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])


def test_oracle_infinite_token_saturates_instead_of_nan() -> None:
    out = layer_output([(math.inf, 1.0), (1.0, 1.0)], OracleOptions.product(NVFP4))
    # Scale 448 with a1 = 1: gate 0 becomes 6 * 448, gate 1 vanishes, up's block is its own. a2 = 1 holds 2688 exactly.
    assert out.tolist() == [2688.0, 0.0]


def test_oracle_routing_weight_before_requant_differs_measurably_from_after() -> None:
    generator = seeded(4)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 128, 64, 16))
    x, routing = make_tokens(generator, 32, 128), make_routing(generator, "random", 32, 16, 8)
    skewed = torch.tensor([0.999] + [1e-4] * 7).repeat(32, 1)
    spread = 0.001 * 900 ** torch.rand((32, 8), generator=generator)  # 0.001 .. 0.9
    for topk_weights, least in ((skewed, 1e-4), (spread, 1e-2)):
        gaps = {}
        for options in (OracleOptions.product(NVFP4), OracleOptions.exact()):
            after, before = (
                oracle_forward(weights, x, routing.topk_ids, topk_weights, replace(options, score_placement=placement))
                for placement in (AFTER, BEFORE)
            )
            gaps[options.fc1_activations] = rel_l2(before, after)
        assert gaps[NVFP4] > least
        assert gaps[None] < 1e-12  # without rounding both are the same sum


def test_oracle_small_weight_before_requant_underflows_the_block_scale() -> None:
    """h * 1e-4 with a2 = 1 is below half the smallest scale: the route vanishes. After fc2 it does not."""
    pair = [(3.0, 3.0)]
    after = layer_output(pair, OracleOptions.product(NVFP4), [1e-4])
    before = layer_output(pair, OracleOptions.product(NVFP4, score_placement=BEFORE), [1e-4])
    assert after.item() == pytest.approx(1e-4 * silu(3) * 3, rel=0.1) and before.item() == 0


def test_oracle_sum_goes_in_slot_order_in_float32() -> None:
    def total(order: list[float], dtype: torch.dtype) -> float:
        options = replace(OracleOptions.product(BF16), top_k_sum=dtype)
        return layer_output([(64.0, 2.0**-6)], options, order, [0, 0, 0]).item()

    big = 2.0**25
    assert total([1.0, big, -big], torch.float32) == 0.0
    assert total([big, -big, 1.0], torch.float32) == 1.0
    assert total([1.0, big, -big], torch.float64) == 1.0


def test_oracle_fc1_scale_is_the_maximum_over_all_experts_gate_and_up() -> None:
    generator = seeded(5)
    tensors = make_layer_tensors(generator, 64, 32, 4)
    x = make_tokens(generator, 8, 64)
    ids, topk_weights = torch.zeros((8, 1), dtype=torch.int64), torch.ones((8, 1))
    options = OracleOptions.product(NVFP4)

    def run(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        return oracle_forward(OracleWeights.from_tensors(tensors | changed), x, ids, topk_weights, options)

    base = run({})
    big = torch.tensor(1.0)
    assert not torch.equal(run({"3.w3.input_scale": big}), base)  # an expert without a route
    assert not torch.equal(run({"3.w1.input_scale": big}), base)
    assert torch.equal(run({"3.w2.input_scale": big}), base)  # a2 is per expert
    assert not torch.equal(run({"0.w2.input_scale": big}), base)
    weights = OracleWeights.from_tensors(tensors | {"2.w3.input_scale": big})
    assert weights.input_scale is not None and weights.input_scale == 1.0


def test_oracle_global_scales_of_gate_up_and_down_enter_separately() -> None:
    tensors = dict(picking_layer().tensors)
    tensors |= {"0.w1.weight_scale_2": torch.tensor(0.5), "0.w3.weight_scale_2": torch.tensor(4.0)}
    tensors["0.w2.weight_scale_2"] = torch.tensor(3.0)
    x = torch.zeros((1, 32))
    x[0, 0], x[0, 16] = 2.0, 1.5
    args = (OracleWeights.from_tensors(tensors), x, torch.tensor([[0]]), torch.tensor([[1.0]]))
    assert oracle_forward(*args, OracleOptions.exact())[0, 0].item() == pytest.approx(3.0 * silu(1.0) * 6.0, rel=1e-7)


@pytest.mark.parametrize("combine_format", list(CombineFormat))
@pytest.mark.parametrize("activations", list(ActivationMode))
def test_oracle_trace_stages_fit_together(activations: ActivationMode, combine_format: CombineFormat) -> None:
    generator = seeded(6)
    weights = OracleWeights.from_tensors(make_layer_tensors(generator, 96, 64, 6))
    x, routing = make_tokens(generator, 10, 96), make_routing(generator, RoutingKind.MASKED_30, 10, 6, 4)
    options = OracleOptions.product(activations, combine_format=combine_format)
    trace = oracle_trace(weights, x, routing.topk_ids, routing.topk_weights, options)
    live = (routing.topk_ids >= 0) & (routing.topk_ids < 6)
    assert torch.equal(trace.live, live) and 0 < live.sum() < 40

    assert trace.gate is not None and trace.up is not None and trace.hidden is not None
    assert trace.gate.shape == trace.up.shape == trace.hidden.shape == (10, 4, 64)
    assert trace.gate.dtype == trace.hidden.dtype == trace.routes.dtype == torch.float32
    g, u = trace.gate.double(), trace.up.double()
    torch.testing.assert_close(trace.hidden.double(), g * torch.sigmoid(g) * u, rtol=1e-7, atol=0)
    if activations is NVFP4:
        assert trace.x_f16 is None and trace.hidden_f16 is None
        assert trace.x_codes is not None and trace.hidden_codes is not None and trace.hidden_scales is not None
        assert weights.input_scale is not None and weights.down_input_scales is not None
        assert torch.equal(trace.x_codes, codecs.nvfp4_quantize(x, weights.input_scale).codes)
        t, k = live.nonzero()[0].tolist()
        again = codecs.nvfp4_quantize(trace.hidden[t, k], weights.down_input_scales[routing.topk_ids[t, k]])
        assert torch.equal(trace.hidden_codes[t, k], again.codes)
        assert torch.equal(trace.hidden_scales[t, k], again.scales)
    else:
        assert trace.x_codes is None and trace.hidden_codes is None
        assert trace.x_f16 is not None and trace.x_exponents is not None and trace.hidden_f16 is not None
        restored = trace.x_f16.double() * codecs.power_of_two(-trace.x_exponents).double()
        torch.testing.assert_close(restored, x.double(), rtol=0, atol=1e-9)
        assert trace.hidden_f16.shape == (10, 4, 64)

    assert torch.equal(trace.routes, trace.routes.to(torch.bfloat16).float())
    assert trace.wire_data is not None and trace.wire_scales is not None
    assert trace.wire_data.shape == (10, 4, combine_format.data_row_bytes(96))
    assert trace.wire_scales.shape == (10, 4, combine_format.scale_row_bytes(96))
    wire = codecs.WireRows(trace.wire_data.flatten(0, 1), trace.wire_scales.flatten(0, 1))
    assert torch.equal(codecs.wire_decode(wire, combine_format, 96).view(10, 4, 96), trace.decoded)
    total = torch.zeros((10, 96))
    for k in range(4):
        term = routing.topk_weights[:, k : k + 1] * trace.decoded[:, k]
        total = torch.where(live[:, k : k + 1], total + term, total)
    assert torch.equal(total.to(torch.bfloat16), trace.out)
    for field in (trace.gate, trace.hidden, trace.routes, trace.wire_data, trace.decoded):
        assert (field[~live] == 0).all() and (field[live] != 0).any()


def test_oracle_nvfp4_without_input_scales_raises_and_bf16_works() -> None:
    weights = picking_layer(input_scales=False)
    args = (weights, torch.ones((1, 32)), torch.tensor([[0]]), torch.tensor([[1.0]]))
    with pytest.raises(MegaMoeWeightError, match="need input scales"):
        oracle_forward(*args, OracleOptions.product(NVFP4))
    out = oracle_forward(*args, OracleOptions.product(BF16))
    assert out[0, 0].item() == pytest.approx(silu(1.0), rel=2.0**-8)


@pytest.mark.parametrize("missing", ["0.w1.input_scale", "1.w2.input_scale"])
def test_oracle_weights_input_scales_on_some_projections_only_raise(missing: str) -> None:
    tensors = dict(picking_layer(2).tensors)
    del tensors[missing]
    with pytest.raises(MegaMoeWeightError, match=missing):
        OracleWeights.from_tensors(tensors)


def test_oracle_weights_gap_in_expert_numbers_raises() -> None:
    tensors = {name: t for name, t in picking_layer(3).tensors.items() if not name.startswith("1.")}
    with pytest.raises(MegaMoeWeightError, match=r"0\.\.E-1"):
        OracleWeights.from_tensors(tensors)


def test_oracle_weights_wrong_projection_shape_raises() -> None:
    tensors = dict(picking_layer().tensors)
    tensors["0.w2.weight_scale"] = torch.zeros((32, 2), dtype=torch.uint8)
    weights = OracleWeights.from_tensors(tensors)
    with pytest.raises(MegaMoeWeightError, match=r"0\.w2.*do not fit"):
        oracle_forward(weights, torch.ones((1, 32)), torch.tensor([[0]]), torch.ones((1, 1)), OracleOptions.exact())


@pytest.mark.parametrize(
    ("x", "ids", "topk_weights", "message"),
    [
        (torch.ones(2, 16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), r"x must be \(T, 32\)"),
        (torch.ones(2, 32).int(), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), "x must be"),
        (torch.ones(2, 32), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), "topk_ids must be"),
        (torch.ones(2, 32), torch.zeros(2, 1), torch.ones(2, 1), "topk_ids must be"),
        (torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2), "topk_weights must be"),
    ],
)
def test_oracle_wrong_inputs_raise(
    x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, message: str
) -> None:
    with pytest.raises(MegaMoeConfigError, match=message):
        oracle_forward(picking_layer(), x, ids, topk_weights, OracleOptions.exact())


def test_oracle_options_inconsistent_switches_raise() -> None:
    with pytest.raises(MegaMoeConfigError, match="round_routes"):
        replace(OracleOptions.product(NVFP4), round_routes=False)
    with pytest.raises(MegaMoeConfigError, match="top_k_sum"):
        replace(OracleOptions.exact(), top_k_sum=torch.float16)
