# SPDX-License-Identifier: Apache-2.0
"""Scale families in loads and reloads: all or nothing, kept, refreshed by a tail; the activation mode they allow."""

from __future__ import annotations

import pytest

from tests.helpers.weight_models import (
    LAYER,
    aux_of,
    bulk_of,
    expected_store,
    layer_tensors,
    make_store,
    only,
    same,
    store_bytes,
    whole,
    without,
)
from trtllm_megamoe.errors import (
    MegaMoeStateError,
    MegaMoeWeightError,
)
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.loader import WeightLoader, load_one
from trtllm_megamoe.weights.store import StoreState

# ---- scale families and aux tails ------------------------------------------------------------------------------------


def test_weights_only_reload_keeps_the_scales() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    load_one(store, bulk_of(layer_tensors("B", LAYER)))
    assert same(store_bytes(store), expected_store(LAYER, "reference", bulk="B", scales="A", fc1_input="A"))


def test_weights_only_reload_that_says_so_commits_early_and_takes_a_late_aux_tail() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    commits: list[str] = []
    store.on_commit(lambda s: commits.append(s.state.value))
    with WeightLoader({0: store}).open(families=()) as window:
        window.deliver(bulk_of(layer_tensors("B", LAYER)))
        assert len(commits) == 1
        packed = {name: tensor.clone() for name, tensor in store.packed.items()}
        window.deliver(aux_of(layer_tensors("B", LAYER)))
    assert same(packed, store.packed) and len(commits) >= 2
    assert same(store_bytes(store), whole(LAYER, "B"))


def test_weights_aux_alone_is_no_reload_of_a_module() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    with pytest.raises(MegaMoeWeightError, match=r"missing: w1\.weight of experts 1-2"):
        load_one(store, aux_of(layer_tensors("B", LAYER)))
    assert same(store_bytes(store), whole(LAYER, "A"))


def test_weights_reload_may_omit_fc1_input_scales_as_a_family() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    load_one(store, without(layer_tensors("B", LAYER), "w1.input_scale", "w3.input_scale"))
    assert same(store_bytes(store), expected_store(LAYER, "reference", bulk="B", scales="B", fc1_input="A"))


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (("weight_scale_2",), "weight_scale_2 (input_scale was delivered without it"),
        (("w2.input_scale",), "w2.input_scale (weight_scale_2 was delivered without it"),
        (("input_scale",), "w2.input_scale (weight_scale_2 was delivered without it"),
        (("2.w3.weight_scale_2",), "incomplete family: w3.weight_scale_2 of expert 2"),
        (("1.w2.input_scale",), "incomplete family: w2.input_scale of expert 1"),
        (("0.w1.input_scale",), "incomplete family: w1.input_scale of expert 0"),
    ],
)
def test_weights_reload_with_half_a_scale_family_is_refused(dropped: tuple[str, ...], message: str) -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    with pytest.raises(MegaMoeWeightError) as caught:
        load_one(store, without(layer_tensors("B", LAYER), *dropped))
    assert message in str(caught.value)
    assert same(store_bytes(store), whole(LAYER, "A"))


def test_weights_partial_aux_tail_is_refused_and_changes_nothing() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    with (
        pytest.raises(MegaMoeWeightError, match=r"incomplete family: w3.weight_scale_2 of experts 1-2"),
        WeightLoader({0: store}).open() as window,
    ):
        window.deliver(layer_tensors("B", LAYER))
        window.deliver(only(layer_tensors("C", LAYER), "w1.weight_scale_2"))
    assert same(store_bytes(store), whole(LAYER, "B"))


def test_weights_aux_tail_after_eager_finalize_refreshes_scales_only() -> None:
    store = make_store()
    with WeightLoader({0: store}).open() as window:
        window.deliver(layer_tensors("A", LAYER))
        assert store.state is StoreState.COMMITTED
        window.deliver(aux_of(layer_tensors("B", LAYER)))
    assert same(store_bytes(store), expected_store(LAYER, "reference", bulk="A", scales="B", fc1_input="B"))


def test_weights_bulk_after_the_commit_is_too_late() -> None:
    store = make_store()
    with (
        pytest.raises(MegaMoeWeightError, match=r"too late: w1\.weight of expert 2"),
        WeightLoader({0: store}).open() as window,
    ):
        window.deliver(layer_tensors("A", LAYER))
        window.deliver({"2.w1.weight": layer_tensors("B", LAYER)["2.w1.weight"]})
    assert same(store_bytes(store), whole(LAYER, "A"))
    with pytest.raises(MegaMoeStateError, match="held"):
        store.require_ready()


def test_weights_duplicates_before_the_commit_let_the_last_win() -> None:
    store = make_store()
    with WeightLoader({0: store}).open() as window:
        window.deliver({"2.w1.weight": layer_tensors("B", LAYER)["2.w1.weight"]})
        window.deliver(layer_tensors("A", LAYER))
    assert same(store_bytes(store), whole(LAYER, "A"))


# ---- activation mode -------------------------------------------------------------------------------------------------


def test_weights_weight_only_checkpoint_is_refused_in_nvfp4_mode_with_advice() -> None:
    bare = without(layer_tensors("A", LAYER), "input_scale")
    with pytest.raises(MegaMoeWeightError, match=r"use activations='bf16'"):
        load_one(make_store(mode=ActivationMode.NVFP4), bare)
    for mode in (None, ActivationMode.BF16):
        store = make_store(mode=mode)
        load_one(store, bare)
        assert store.activation_mode is ActivationMode.BF16
        assert same(
            store_bytes(store),
            expected_store(LAYER, "reference", bulk="A", scales="A", fc1_input=None, fc2_input=False),
        )
    with pytest.raises(MegaMoeWeightError, match="first loaded without it; build a new layer"):
        load_one(store, layer_tensors("A", LAYER))


def test_weights_weight_only_reload_of_a_static_layer_is_refused() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    with pytest.raises(MegaMoeWeightError, match="alphas derive from both"):
        load_one(store, without(layer_tensors("B", LAYER), "input_scale"))
