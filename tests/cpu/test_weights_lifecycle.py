# SPDX-License-Identifier: Apache-2.0
"""Load windows over stores: reload, coverage, atomic replacement, placeholders, states, migration."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.weight_models import (
    LAYER,
    LAYERS,
    SHAPE,
    SPEC,
    aux_of,
    bulk_of,
    full_name,
    layer_tensors,
    load_all,
    make_loader,
    make_store,
    model_tensors,
    only,
    same,
    store_bytes,
    whole,
    without,
)
from trtllm_megamoe.errors import (
    MegaMoeConfigError,
    MegaMoeStateError,
    MegaMoeWeightError,
)
from trtllm_megamoe.weights.delivery import MixLedger
from trtllm_megamoe.weights.layout_base import Buffers, ExpertBulk
from trtllm_megamoe.weights.layouts import LAYOUTS
from trtllm_megamoe.weights.loader import WeightLoader, load_one
from trtllm_megamoe.weights.staging import ExpertStaging
from trtllm_megamoe.weights.store import StoreState, WeightStore

# ---- equality with the one-shot load ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_reload_aba_equals_fresh_loads_at_unchanged_addresses(layout: str) -> None:
    store = make_store(layout)
    addresses = None
    for model in "ABAA":
        load_one(store, layer_tensors(model, LAYER))
        assert same(store_bytes(store), whole(LAYER, model, layout))
        now = {name: tensor.data_ptr() for name, tensor in store_bytes(store).items()}
        assert addresses in (None, now)
        addresses = now
        store.require_ready()


def test_weights_view_of_reference_layout_shows_a_reload() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    held = store.expert_weights()
    load_one(store, layer_tensors("B", LAYER))
    assert torch.equal(held.up_codes, torch.stack([layer_tensors("B", LAYER)[f"{e}.w3.weight"] for e in (1, 2)]))
    assert torch.equal(store.expert_weights().gate_global, store.scales.gate_global)
    with pytest.raises(MegaMoeStateError, match="layout sm90 cannot be viewed"):
        make_store("sm90").expert_weights()


def test_weights_store_without_index_takes_file_names_of_any_one_layer() -> None:
    store = make_store()
    load_one(store, model_tensors("A", (5,)))
    assert same(store_bytes(store), whole(5, "A"))
    with pytest.raises(MegaMoeWeightError, match="tensors of layers 3 and 5"):
        load_one(store, model_tensors("A", (3, 5)))


# ---- sources are gone, nothing is aliased ----------------------------------------------------------------------------


def test_weights_sources_die_and_alias_nothing() -> None:
    tensors = {name: tensor.clone() for name, tensor in layer_tensors("A", LAYER).items()}
    references = [weakref.ref(tensor) for tensor in tensors.values()]
    store = make_store()
    load_one(store, tensors)
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in store_bytes(store).values()]
    for tensor in tensors.values():
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert all(stop <= low or start >= high for low, high in ranges)
        tensor.view(-1).view(torch.uint8).fill_(0xEE)  # a caller that reuses its buffers
    assert same(store_bytes(store), whole(LAYER, "A"))
    del tensors, tensor
    gc.collect()
    assert all(reference() is None for reference in references)
    assert store.staged_bytes == 0


def test_weights_partial_sources_survive_a_caller_that_reuses_one_buffer() -> None:
    """Partial deliveries stage true copies: the caller overwrites its buffer after each one."""
    store = make_store()
    loader = WeightLoader({0: store})
    buffer = torch.empty(SHAPE.expert_bytes, dtype=torch.uint8)
    with loader.open() as window:
        for name, tensor in layer_tensors("A", LAYER).items():
            if tensor.dim() == 0:
                window.deliver({name: tensor})
                continue
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            window.deliver({name: view})
            buffer.fill_(0xEE)
    assert same(store_bytes(store), whole(LAYER, "A"))


def test_weights_source_parameters_are_placeholders_before_during_and_after() -> None:
    store = make_store()
    loader = WeightLoader({0: store})

    def sizes() -> set[int]:
        return {tensor.numel() for tensor in store.sources.values()}

    assert set(store.sources) == {"w3_w1_weight", "w3_w1_weight_scale", "w2_weight", "w2_weight_scale"}
    assert sizes() == {0}
    with loader.open() as window:
        window.deliver(aux_of(layer_tensors("A", LAYER)))
        assert store.staged_bytes == 0  # scalars stash without materialising anything
        window.deliver(bulk_of(layer_tensors("A", LAYER)))
        assert sizes() == {0} and store.staged_bytes == 0 and store.state is StoreState.COMMITTED
    assert sizes() == {0}


def test_weights_creation_allocates_nothing_under_a_meta_device() -> None:
    with torch.device("meta"):
        store = WeightStore(SPEC, layer=1, device="cpu")
        assert store.packed == {} and store.alphas == {}
        load_one(store, {full_name(1, n): t for n, t in layer_tensors("A", LAYER).items()})
    assert all(tensor.device.type == "cpu" for tensor in store_bytes(store).values())
    assert same(store_bytes(store), whole(LAYER, "A"))


def test_weights_module_is_packed_as_soon_as_it_is_complete() -> None:
    loader = make_loader()
    seen: list[tuple[int, int]] = []
    for layer, store in loader.stores.items():
        store.on_commit(lambda s, n=layer: seen.append((n, s.staged_bytes)))  # type: ignore[misc]
    with loader.open() as window:
        for layer in reversed(LAYERS):
            window.deliver(model_tensors("A", (layer,)))
            assert [n for n, _ in seen] == list(reversed(LAYERS))[: len(seen)] and len(seen) >= 1
    assert [n for n, _ in seen] == list(reversed(LAYERS))
    assert all(staged == 0 for _, staged in seen)  # sources are freed before anybody rebinds


# ---- coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", [f"{w}.{c}" for w in ("w1", "w3", "w2") for c in ("weight", "weight_scale")])
def test_weights_coverage_is_per_component_and_expert(parameter: str) -> None:
    loader = make_loader()
    tensors = model_tensors("A")
    del tensors[full_name(5, f"2.{parameter}")]
    with pytest.raises(MegaMoeWeightError) as caught:
        load_all(loader, tensors)
    text = str(caught.value)
    assert f"layer 5: 1 fault: missing: {parameter} of expert 2" in text
    assert "Layers wholly old: 5; wholly new: 3, 8" in text
    assert not loader.stores[5].has_weights and loader.stores[5].packed == {}


def test_weights_shard_of_w1_alone_covers_nothing_else() -> None:
    with pytest.raises(MegaMoeWeightError) as caught:
        load_one(make_store(), only(layer_tensors("A", LAYER), ".w1."))
    for parameter in ("w3.weight", "w3.weight_scale", "w2.weight", "w2.weight_scale"):
        assert f"missing: {parameter} of experts 1-2" in str(caught.value)


def test_weights_staging_refuses_to_hand_out_uncovered_rows() -> None:
    staging = ExpertStaging(SPEC)
    for name, tensor in without(layer_tensors("A", LAYER), "1.w2.weight_scale").items():
        staging.stage_named(name, tensor)
    for expert in SPEC.local_experts:
        with pytest.raises(MegaMoeStateError, match="not complete"):
            staging.take_expert(expert)


def test_weights_all_faults_of_all_layers_come_in_one_error() -> None:
    loader = make_loader(rank=6)
    tensors = model_tensors("A")
    tensors[full_name(3, "1.w1.weight")] = torch.zeros(3, 3, dtype=torch.uint8)
    tensors[full_name(5, "2.w2.weight_scale_2")] = torch.tensor(float("nan"))
    tensors["model.layers.9.mlp.experts.0.w1.weight"] = torch.zeros(1)
    tensors["0.w1.weight"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(1)
    with pytest.raises(MegaMoeWeightError) as caught:
        load_all(loader, tensors)
    text = str(caught.value)
    for part in (
        "rank 6: ", "layer 3: 1 fault: wrong shape: w1.weight of expert 1",
        "layer 5: 1 fault: degenerate scale: w2.weight_scale_2 of expert 2",
        "model.layers.9.mlp.experts.0.w1.weight (this window loads layers 3, 5, 8)", "no layer given", "lm_head.weight",
        "Layers wholly old: 3, 5; wholly new: 8",
    ):  # fmt: skip
        assert part in text, part


# ---- atomic replacement ----------------------------------------------------------------------------------------------


def test_weights_failed_reload_leaves_the_old_weights_usable() -> None:
    store = make_store()
    load_one(store, layer_tensors("A", LAYER))
    bad = {**layer_tensors("B", LAYER), "1.w1.weight": torch.zeros(2, 2, dtype=torch.uint8)}
    with pytest.raises(MegaMoeWeightError, match="earlier weights, where loaded, stay in use"):
        load_one(store, bad)
    store.require_ready()
    assert same(store_bytes(store), whole(LAYER, "A"))


def mixed_loader() -> WeightLoader:
    """Model A everywhere, then a reload of B that fails in layer 5."""
    loader = make_loader()
    load_all(loader, model_tensors("A"))
    with pytest.raises(MegaMoeWeightError, match=r"Layers wholly old: 5; wholly new: 3, 8; forward refuses"):
        load_all(loader, without(model_tensors("B"), "layers.5.mlp.experts.1.w3.weight"))
    return loader


def assert_contents(loader: WeightLoader, **models: str) -> None:
    for name, model in models.items():
        layer = int(name[1:])
        assert same(store_bytes(loader.stores[layer]), whole(layer, model)), (layer, model)


def assert_all_refuse(loader: WeightLoader) -> None:
    for store in loader.stores.values():
        with pytest.raises(MegaMoeStateError, match=r"held.*accept the mix"):
            store.require_ready()


def test_weights_mix_after_a_failed_reload_is_refused_until_accepted() -> None:
    loader = mixed_loader()
    assert loader.mixed_layers == ([5], [3, 8])
    assert_contents(loader, n3="B", n5="A", n8="B")
    assert_all_refuse(loader)
    loader.accept_mix()
    for store in loader.stores.values():
        store.require_ready()


@pytest.mark.parametrize(
    ("model", "layers", "after"),
    [("B", (5,), "BBB"), ("A", (3, 8), "AAA"), ("C", LAYERS, "CCC")],
    ids=["finish-new", "back-to-old", "all-anew"],
)
def test_weights_mix_ends_with_a_completing_retry(model: str, layers: tuple[int, ...], after: str) -> None:
    loader = mixed_loader()
    load_all(loader, model_tensors(model, layers), layers=layers)
    assert_contents(loader, n3=after[0], n5=after[1], n8=after[2])
    assert loader.mixed_layers == ([], [])
    for store in loader.stores.values():
        store.require_ready()


def test_weights_mix_stays_through_a_partial_retry_and_a_failed_one() -> None:
    loader = mixed_loader()
    load_all(loader, model_tensors("A", (3,)), layers=(3,))
    assert loader.mixed_layers == ([3, 5], [8])
    assert_all_refuse(loader)
    with pytest.raises(MegaMoeWeightError):
        load_all(loader, {}, layers=(8,))
    assert loader.mixed_layers == ([3, 5, 8], [3, 5, 8])  # nobody can tell any more which layers agree
    load_all(loader, model_tensors("B"))
    for store in loader.stores.values():
        store.require_ready()


def test_weights_mix_ledger_covers_both_sides_and_strays() -> None:
    ledger = MixLedger()
    ledger.failed({1}, set())
    assert not ledger.layers  # nothing was replaced: no mix
    ledger.failed({1, 2}, {3, 4})
    ledger.succeeded({1, 3})  # part of both sides: only a full reload helps
    assert ledger.old == ledger.new == {1, 2, 3, 4}
    ledger.succeeded({1, 2, 3, 4})
    assert not ledger.layers


class FailingLayout:
    """A layout whose n-th call fails like an allocator would."""

    def __init__(self, inner: object, fail_at: int) -> None:
        self.inner, self.left, self.name = inner, fail_at, "reference"

    def buffer_shapes(self, shape: object) -> object:
        return self.inner.buffer_shapes(shape)  # type: ignore[attr-defined]

    def pack(self, bulk: ExpertBulk, out: Buffers) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("CUDA out of memory")
        self.inner.pack(bulk, out)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_weights_failure_while_packing_leaves_each_module_whole(fail_at: int) -> None:
    loader = make_loader()
    load_all(loader, model_tensors("A"))
    failing = FailingLayout(LAYOUTS["reference"], fail_at)
    for store in loader.stores.values():
        store.layout = failing  # type: ignore[assignment]
    with pytest.raises(MegaMoeWeightError, match="could not be replaced: RuntimeError: CUDA out of memory") as caught:
        load_all(loader, model_tensors("B"))
    assert isinstance(caught.value.__cause__, RuntimeError)
    done = (fail_at - 1) // SPEC.num_local_experts
    for index, layer in enumerate(LAYERS):
        assert_contents(loader, **{f"n{layer}": "B" if index < done else "A"})
    assert loader.mixed_layers == (([], []) if done == 0 else (list(LAYERS[done:]), list(LAYERS[:done])))
    load_all(loader, model_tensors("B"))
    assert_contents(loader, n3="B", n5="B", n8="B")


def test_weights_error_in_the_callers_stream_aborts_and_lists_both_sets() -> None:
    loader = make_loader()
    load_all(loader, model_tensors("A"))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model_tensors("B", (3,)).items()
        raise OSError("disk fell out")

    with pytest.raises(MegaMoeWeightError, match=r"given up: OSError: disk fell out.*old: 5, 8; wholly new: 3"):
        load_all(loader, stream())  # type: ignore[arg-type]
    assert_contents(loader, n3="B", n5="A", n8="A")


def test_weights_interrupt_is_not_swallowed_and_leaves_a_clean_state() -> None:
    loader = make_loader()
    with pytest.raises(KeyboardInterrupt), loader.open() as window:
        window.deliver(model_tensors("A", (3,)))
        raise KeyboardInterrupt
    assert loader.stores[3].state is StoreState.HELD and loader.stores[5].state is StoreState.EMPTY
    load_all(loader, model_tensors("A"))
    assert_contents(loader, n3="A", n5="A", n8="A")


# ---- states and EPLB -------------------------------------------------------------------------------------------------


def test_weights_illegal_moves_name_the_state() -> None:
    loader = make_loader()
    store = loader.stores[3]
    with pytest.raises(MegaMoeStateError, match="layer 3: weights are empty, forward needs ready: load weights first"):
        store.require_ready()
    with pytest.raises(MegaMoeStateError, match="empty"):
        _ = store.scales
    window = loader.open()
    with pytest.raises(MegaMoeStateError, match="loading"):
        store.require_ready()
    with pytest.raises(MegaMoeStateError, match="loading and cannot become loading"):
        store.begin(None)
    for call in (loader.open, loader.accept_mix):
        with pytest.raises(MegaMoeStateError, match="a load window is open"):
            call()
    window.deliver(model_tensors("A"))
    window.close()
    for call in (window.close, lambda: window.deliver({}), lambda: window.abort("x")):
        with pytest.raises(MegaMoeStateError, match="closed"):
            call()
    with pytest.raises(MegaMoeStateError, match="ready and cannot become ready"):
        store.end(hold=False)
    with pytest.raises(MegaMoeConfigError, match="allowed: any, layer"):
        loader.open(order="expert")
    with pytest.raises(MegaMoeStateError, match=r"no store for layers \[4\]; known: 3, 5, 8"):
        loader.open(layers=[4])


def test_weights_forward_refuses_while_a_window_is_open_over_loaded_weights() -> None:
    loader = make_loader()
    load_all(loader, model_tensors("A"))
    window = loader.open(layers=[3])
    with pytest.raises(MegaMoeStateError, match="loading"):
        loader.stores[3].require_ready()
    loader.stores[5].require_ready()
    assert "given up: not needed" in str(window.abort("not needed"))
    loader.stores[3].require_ready()


def test_weights_eplb_refuses_bias_at_creation_and_reload_at_once() -> None:
    with pytest.raises(MegaMoeConfigError, match="layer 7: expert biases with dynamic EPLB"):
        WeightStore(SPEC, layer=7, dynamic_eplb=True, has_bias=True)
    store = WeightStore(SPEC, layer=3, dynamic_eplb=True)
    other = WeightStore(SPEC, layer=2)
    loader = WeightLoader({2: other, 3: store})
    load_all(loader, model_tensors("A", (3,)), layers=[3])
    load_all(loader, {full_name(2, n): t for n, t in layer_tensors("A", LAYER).items()}, layers=[2])
    with pytest.raises(MegaMoeStateError, match="hot reload with dynamic EPLB is not supported"):
        loader.open()
    for each in (store, other):  # nothing was half-opened
        each.require_ready()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_migratable_tensors_are_derived_and_move_with_their_expert(layout: str) -> None:
    store = make_store(layout)
    with pytest.raises(MegaMoeStateError):
        store.migratable()
    load_one(store, layer_tensors("A", LAYER))
    tensors = store.migratable()
    assert {"fc1_alpha", "fc2_alpha", "fc1_norm_const"} <= tensors.keys()
    assert not tensors.keys() & store.sources.keys()
    assert all(tensor.shape[0] == SPEC.num_local_experts and tensor.is_contiguous() for tensor in tensors.values())
    # Row r of every tensor belongs to expert first + r: a load of expert 2 alone equals row 1.
    single = WeightStore(type(SPEC)(SHAPE, 2, 1), layout=layout)
    load_one(single, layer_tensors("A", LAYER))
    assert same({n: t[1:] for n, t in tensors.items()}, single.migratable())
