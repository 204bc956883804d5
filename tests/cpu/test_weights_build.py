# SPDX-License-Identifier: Apache-2.0
"""One-shot load of one layer: right bytes in right places, and every fault named together."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.helpers.checkpoints import to_compressed
from tests.helpers.synthetic import make_layer_tensors, seeded
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.weights.build import build_expert_weights
from trtllm_megamoe.weights.spec import LayerShape

SHAPE = LayerShape(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def layer() -> Tensors:
    return make_layer_tensors(seeded(7), SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_experts)


def u8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def stack(layer: Tensors, experts: range, suffix: str) -> torch.Tensor:
    return torch.stack([layer[f"{e}.{suffix}"] for e in experts])


def refusal(layer: Tensors, first: int = 2, count: int = 4) -> str:
    with pytest.raises(MegaMoeWeightError) as caught:
        build_expert_weights(layer, SHAPE, first, count, where="layer 3, rank 1")
    return str(caught.value)


def test_build_places_every_tensor_of_the_local_experts(layer: Tensors) -> None:
    experts = range(2, 6)
    weights = build_expert_weights(layer, SHAPE, first_expert=2, num_local_experts=4)
    for field, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        assert torch.equal(getattr(weights, f"{field}_codes"), stack(layer, experts, f"{name}.weight"))
        assert torch.equal(getattr(weights, f"{field}_scales"), u8(stack(layer, experts, f"{name}.weight_scale")))
        assert torch.equal(getattr(weights, f"{field}_global"), stack(layer, experts, f"{name}.weight_scale_2"))
    assert torch.equal(weights.down_input_global, stack(layer, experts, "w2.input_scale"))
    assert weights.first_expert == 2 and weights.num_local_experts == 4 and weights.has_input_scales
    # The synthetic gate and up scales differ, so a loader that merges them cannot pass.
    assert not torch.equal(weights.gate_global, weights.up_global)


@pytest.mark.parametrize("position", ["0.w1", "7.w3"], ids=["gate-of-first", "up-of-last"])
def test_build_a1_is_the_maximum_over_all_experts(layer: Tensors, position: str) -> None:
    layer[f"{position}.input_scale"] = torch.tensor(3.25)
    for first in (0, 2, 6):
        assert build_expert_weights(layer, SHAPE, first, 2).input_global == 3.25


def test_build_keeps_no_alias_of_the_callers_tensors(layer: Tensors) -> None:
    weights = build_expert_weights(layer, SHAPE, 0, 8)
    before = weights.gate_codes.clone(), weights.gate_scales.clone(), weights.gate_global.clone()
    for tensor in layer.values():
        u8(tensor.reshape(-1) if tensor.dim() == 0 else tensor).fill_(0xFF)
    assert torch.equal(weights.gate_codes, before[0]) and torch.equal(weights.gate_scales, before[1])
    assert torch.equal(weights.gate_global, before[2])


def test_build_accepts_order_strides_and_byte_scales(layer: Tensors) -> None:
    expected = build_expert_weights(layer, SHAPE, 0, 8)
    changed = {
        name: u8(tensor).t().contiguous().t() if tensor.dim() == 2 else tensor.reshape(1)
        for name, tensor in reversed(layer.items())
    }
    got = build_expert_weights(iter(changed.items()), SHAPE, 0, 8)
    assert torch.equal(got.down_codes, expected.down_codes) and torch.equal(got.up_scales, expected.up_scales)
    assert torch.equal(got.up_global, expected.up_global)


def test_build_without_input_scales_is_weight_only(layer: Tensors) -> None:
    bare = {name: tensor for name, tensor in layer.items() if not name.endswith("input_scale")}
    weights = build_expert_weights(bare, SHAPE, 0, 8)
    assert weights.input_global is None and weights.down_input_global is None and not weights.has_input_scales


def test_build_with_fc2_input_scales_alone_keeps_them(layer: Tensors) -> None:
    part = {name: tensor for name, tensor in layer.items() if not re.search(r"w[13]\.input_scale", name)}
    weights = build_expert_weights(part, SHAPE, 0, 8)
    assert weights.input_global is None and weights.down_input_global is not None


def test_build_compressed_tensors_inverts_global_scales_within_one_ulp(layer: Tensors) -> None:
    expected = build_expert_weights(layer, SHAPE, 0, 8)
    got = build_expert_weights(to_compressed(layer), SHAPE, 0, 8)
    assert torch.equal(got.gate_codes, expected.gate_codes) and torch.equal(got.down_scales, expected.down_scales)
    # Two fp32 reciprocals: each rounds by at most half an ulp, so the relative error stays within 2^-23.
    for field in ("gate_global", "up_global", "down_global", "down_input_global"):
        torch.testing.assert_close(getattr(got, field), getattr(expected, field), rtol=2.0**-23, atol=0)
    assert got.input_global == pytest.approx(expected.input_global, rel=2.0**-23)


def drop(*names: str) -> Callable[[Tensors], None]:
    def damage(layer: Tensors) -> None:
        for name in names:
            del layer[name]

    return damage


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def damage(layer: Tensors) -> None:
        layer[name] = make(layer[name])

    return damage


def scale_byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        data = u8(tensor).clone()
        data[3, 1] = value
        return data.view(torch.float8_e4m3fn)

    return make


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (drop("3.w1.weight"), ["missing: w1.weight of expert 3"]),
        (drop("2.w3.weight_scale", "4.w3.weight_scale"), ["missing: w3.weight_scale of experts 2, 4"]),
        (drop("5.w2.weight_scale_2"), ["incomplete family: w2.weight_scale_2 of expert 5"]),
        (drop("0.w1.input_scale"), ["incomplete family: w1.input_scale of expert 0"]),
        (drop("4.w2.input_scale"), ["incomplete family: w2.input_scale of expert 4"]),
        (drop(*(f"{e}.w2.input_scale" for e in range(8))), ["incomplete family: w2.input_scale of experts 2-5"]),
        (put("2.w1.weight", lambda t: t[:-1]), ["wrong shape: w1.weight of expert 2", "(31, 32)", "(32, 32)"]),
        (put("2.w2.weight", lambda t: t.t().contiguous()), ["wrong shape: w2.weight of expert 2"]),
        (put("2.w1.weight", lambda t: t.to(torch.int32)), ["wrong dtype: w1.weight of expert 2", "torch.int32"]),
        (put("2.w1.weight_scale", lambda t: t.float()), ["wrong dtype: w1.weight_scale of expert 2"]),
        (put("2.w1.weight_scale_2", lambda t: t.double()), ["wrong dtype: w1.weight_scale_2"]),
        (put("2.w1.weight_scale_2", lambda t: t.repeat(2)), ["wrong shape: w1.weight_scale_2"]),
        (put("2.w1.weight_scale_2", torch.zeros_like), ["degenerate scale: w1.weight_scale_2 of expert 2 (0,"]),
        (put("2.w1.weight_scale_2", lambda t: -t), ["degenerate scale: w1.weight_scale_2 of expert 2 (-"]),
        (put("5.w2.input_scale", lambda t: t * float("nan")), ["degenerate scale: w2.input_scale of expert 5 (nan"]),
        (put("7.w3.input_scale", lambda t: t + float("inf")), ["degenerate scale: w3.input_scale of expert 7 (inf"]),
        (put("2.w3.weight_scale", scale_byte(0x7F)), ["degenerate scale: w3.weight_scale of expert 2"]),
        (put("2.w3.weight_scale", scale_byte(0x80)), ["degenerate scale: w3.weight_scale of expert 2"]),
        (lambda layer: layer.update({"8.w1.weight": layer["0.w1.weight"]}), ["unexpected: w1.weight of expert 8"]),
        (lambda layer: layer.update({"0.w1.zero_point": torch.zeros(1)}), ["unexpected: 0.w1.zero_point"]),
    ],
)
def test_build_fault_is_named_with_parameter_and_expert(
    layer: Tensors, damage: Callable[[Tensors], None], parts: list[str]
) -> None:
    damage(layer)
    message = refusal(layer)
    assert "layer 3, rank 1" in message
    assert all(part in message for part in parts), message


def test_build_reports_all_faults_in_one_error(layer: Tensors) -> None:
    del layer["2.w1.weight"], layer["3.w1.weight"]
    layer["4.w2.weight"] = layer["4.w2.weight"][:3]
    layer["5.w3.weight_scale_2"] = torch.tensor(0.0)
    message = refusal(layer)
    for part in (
        "missing: w1.weight of experts 2-3",
        "wrong shape: w2.weight of expert 4",
        "w3.weight_scale_2 of expert 5",
    ):
        assert part in message


def test_build_ignores_faulty_tensors_of_other_ranks(layer: Tensors) -> None:
    layer["0.w1.weight"] = torch.zeros(1)
    build_expert_weights(layer, SHAPE, first_expert=2, num_local_experts=4)


def test_build_two_layers_at_once_is_refused(layer: Tensors) -> None:
    both = {f"model.layers.{n}.mlp.experts.{name}": tensor for n in (3, 4) for name, tensor in layer.items()}
    assert "tensors of several layers (layers [3, 4]" in refusal(both)


@pytest.mark.parametrize(("first", "count"), [(-1, 4), (6, 4), (0, 0)])
def test_build_expert_range_outside_the_layer_is_a_config_error(layer: Tensors, first: int, count: int) -> None:
    with pytest.raises(MegaMoeConfigError, match="not inside"):
        build_expert_weights(layer, SHAPE, first, count)
