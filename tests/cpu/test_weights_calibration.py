# SPDX-License-Identifier: Apache-2.0
"""Calibrated activation scales: measured separately for fc1 and fc2, equal on all ranks, applied without new codes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.weight_models import (
    SPEC,
    expected_alphas,
    expected_store,
    layer_tensors,
    same,
    store_bytes,
)
from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.calibration import ActivationObserver
from trtllm_megamoe.weights.loader import load_one
from trtllm_megamoe.weights.store import WeightStore


def seen(first: int, x: float, hidden: list[float]) -> ActivationObserver:
    observer = ActivationObserver(first, len(hidden))
    for value in (x / 3, x):
        observer.observe_input(torch.tensor([[0.0, -value]], dtype=torch.bfloat16))
    observer.observe_input(torch.empty(0, 2))
    for expert, value in enumerate(hidden):
        observer.observe_hidden(expert, torch.tensor([[value, -value / 2]]))
        observer.observe_hidden(expert, torch.empty(0, 2))
    return observer


def test_weights_calibration_ranks_agree_on_a1_and_own_their_a2() -> None:
    ranks = [seen(0, 2.0, [1.0, 4.0]), seen(2, 8.0, [0.5, 2.0])]
    amaxes = [rank.input_amax for rank in ranks]
    scales = [rank.input_scales(amaxes) for rank in ranks]
    assert [s.input_global for s in scales] == [float(torch.tensor(8.0 / 2688))] * 2
    assert torch.equal(scales[0].down_input_global, torch.tensor([1.0, 4.0]) / 2688)
    assert torch.equal(scales[1].down_input_global, torch.tensor([0.5, 2.0]) / 2688)
    wide = ranks[0].input_scales(amaxes, margin=2.0)
    assert wide.input_global == 2 * scales[0].input_global


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_weights_calibration_names_experts_without_a_usable_scale(bad: float) -> None:
    observer = seen(4, 1.0, [1.0, bad, bad])
    with pytest.raises(MegaMoeWeightError, match=rf"fc2 input of experts 5-6: largest magnitude is {bad:g}"):
        observer.input_scales([1.0])
    with pytest.raises(MegaMoeWeightError, match=r"fc1 input: largest magnitude over all ranks"):
        seen(4, 1.0, [1.0]).input_scales([1.0, bad] if bad else [0.0, 0.0])


def test_weights_calibration_covers_what_it_saw_without_saturating() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 7
    observer = ActivationObserver(0, 1)
    observer.observe_input(x)
    observer.observe_hidden(0, x * 3)
    scales = observer.input_scales([observer.input_amax])
    # RN32 of amax / 2688 may fall half an ulp short; no value exceeds the range by more.
    assert float(x.abs().max()) <= 2688 * scales.input_global * (1 + 2**-23)
    assert float((3 * x).abs().max()) <= 2688 * float(scales.down_input_global) * (1 + 2**-23)


def test_weights_calibrated_scales_enter_alphas_and_leave_codes_and_addresses() -> None:
    bare = {name: tensor for name, tensor in layer_tensors("A", 3).items() if "input_scale" not in name}
    store = WeightStore(SPEC, layout="sm90")
    scales = seen(1, 2.0, [1.0, 4.0]).input_scales([2.0])
    with pytest.raises(MegaMoeStateError):
        store.set_input_scales(scales)
    load_one(store, bare)
    assert store.activation_mode is ActivationMode.BF16
    before = {name: tensor.clone() for name, tensor in store.packed.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in store_bytes(store).items()}
    calls: list[ActivationMode | None] = []
    store.on_commit(lambda s: calls.append(s.activation_mode))
    store.set_input_scales(scales, ActivationMode.NVFP4)
    assert calls == [ActivationMode.NVFP4] and store.scales.has_input_scales
    assert same(before, store.packed)
    assert addresses == {name: tensor.data_ptr() for name, tensor in store_bytes(store).items()}
    assert same(store.alphas, expected_alphas(store.scales, ActivationMode.NVFP4))
    # From now on the layer has input scales: a reload with the checkpoint's own is legal and replaces them.
    load_one(store, layer_tensors("B", 3))
    assert same(store_bytes(store), expected_store(3, "sm90", bulk="B", scales="B", fc1_input="B"))
