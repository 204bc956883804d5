# SPDX-License-Identifier: Apache-2.0
"""Load windows over stores: reload, atomic replacement, scale families, aux tails, placeholders, refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.weight_models import (
    LAYERS,
    SHAPE,
    SPEC,
    Named,
    expected_store,
    full_name,
    key_of,
    layer_of,
    layer_tensors,
    model_tensors,
    same,
    store_bytes,
)
from trtllm_megamoe.errors import (
    MegaMoeConfigError,
    MegaMoeStateError,
    MegaMoeUnavailableError,
    MegaMoeWeightError,
)
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights import host_memory
from trtllm_megamoe.weights.delivery import DeliveryOrder, MixLedger
from trtllm_megamoe.weights.host_memory import available_host_bytes
from trtllm_megamoe.weights.layout_base import Buffers, ExpertBulk
from trtllm_megamoe.weights.layouts import LAYOUTS
from trtllm_megamoe.weights.loader import WeightLoader, load_one
from trtllm_megamoe.weights.staging import ExpertStaging
from trtllm_megamoe.weights.store import StoreState, WeightStore

LAYER = 3


def make_store(layout: str = "reference", **options: object) -> WeightStore:
    return WeightStore(SPEC, layout=layout, **options)  # type: ignore[arg-type]


def make_loader(layout: str = "reference", **options: object) -> WeightLoader:
    stores = {layer: WeightStore(SPEC, layout=layout, layer=layer) for layer in LAYERS}
    return WeightLoader(stores, **options)  # type: ignore[arg-type]


def load_all(loader: WeightLoader, tensors: Named, **options: object) -> None:
    with loader.open(**options) as window:  # type: ignore[arg-type]
        window.deliver(tensors)


def whole(layer: int, model: str, layout: str = "reference") -> Named:
    return expected_store(layer, layout, bulk=model, scales=model, fc1_input=model)


def without(tensors: Named, *parts: str) -> Named:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


def only(tensors: Named, *parts: str) -> Named:
    return {name: tensor for name, tensor in tensors.items() if any(part in name for part in parts)}


def bulk_of(tensors: Named) -> Named:
    return {name: tensor for name, tensor in tensors.items() if key_of(name).family is None}


def aux_of(tensors: Named) -> Named:
    return {name: tensor for name, tensor in tensors.items() if key_of(name).family is not None}


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


# ---- orders and host memory ------------------------------------------------------------------------------------------


def suffix_order(tensors: Named) -> Named:
    return dict(sorted(tensors.items(), key=lambda item: (key_of(item[0]).parameter, layer_of(item[0]))))


def test_weights_reload_without_host_memory_is_refused_before_anything_changes() -> None:
    room = [10**9]
    loader = make_loader(available_bytes=lambda: room[0])
    load_all(loader, model_tensors("A"))
    room[0] = 2 * SPEC.source_bytes
    with pytest.raises(MegaMoeUnavailableError) as caught:
        loader.open()
    text = str(caught.value)
    assert str(3 * SPEC.source_bytes) in text and str(room[0]) in text
    assert f"order='layer'), which needs {SPEC.source_bytes} bytes" in text
    for store in loader.stores.values():
        store.require_ready()
    # The same room is enough when the order is promised, or known by name to need no more.
    load_all(loader, model_tensors("B"), order="layer")
    load_all(loader, model_tensors("A"), names=list(model_tensors("A")))
    assert_contents(loader, n3="A", n5="A", n8="A")
    with pytest.raises(MegaMoeUnavailableError):
        loader.open(names=list(suffix_order(model_tensors("B"))))


@pytest.mark.parametrize("arrange", [lambda t: t, suffix_order, lambda t: dict(reversed(t.items()))])
def test_weights_computed_staging_need_is_exact(arrange: Callable[[Named], Named]) -> None:
    loader = make_loader()
    tensors = arrange(model_tensors("A"))
    loader._available_bytes = lambda: 10**15
    peak = 0
    with loader.open(names=list(tensors)) as window:
        for name, tensor in tensors.items():
            # A tensor is held for a moment before its module commits; ask right before the commit frees it.
            before = sum(store.staged_bytes for store in loader.stores.values())
            local = key_of(name).family is None and key_of(name).expert in SPEC.local_experts
            peak = max(peak, before + (tensor.nbytes if local else 0))
            window.deliver({name: tensor})
    loader._available_bytes = lambda: peak
    loader.open(names=list(tensors)).abort("only the check was wanted")
    loader._available_bytes = lambda: peak - 1
    with pytest.raises(MegaMoeUnavailableError):
        loader.open(names=list(tensors))


def test_weights_layer_order_decides_each_layer_when_the_next_begins() -> None:
    loader = make_loader()
    load_all(loader, model_tensors("A"))
    with loader.open(order=DeliveryOrder.LAYER) as window:
        window.deliver(bulk_of(model_tensors("B", (3,))))
        assert loader.stores[3].state is StoreState.LOADING  # its scales may still come
        window.deliver(dict([next(iter(bulk_of(model_tensors("B", (5,))).items()))]))
        assert loader.stores[3].state is StoreState.COMMITTED
        window.deliver(model_tensors("B", (5,)))
        window.deliver(model_tensors("B", (8,)))
    assert same(store_bytes(loader.stores[3]), expected_store(3, "reference", bulk="B", scales="A", fc1_input="A"))


def test_weights_layer_order_that_is_not_kept_is_an_error_and_stays_bounded() -> None:
    loader = make_loader()
    tensors = suffix_order(model_tensors("A"))
    window = loader.open(order=DeliveryOrder.LAYER)
    for name, tensor in tensors.items():
        window.deliver({name: tensor})
        assert sum(store.staged_bytes for store in loader.stores.values()) <= SPEC.source_bytes
    with pytest.raises(MegaMoeWeightError, match=r"too late: .*order='layer' was promised"):
        window.close()
    assert all(store.state is StoreState.EMPTY for store in loader.stores.values())


def test_weights_host_memory_is_the_smaller_of_machine_and_control_group(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert available_host_bytes(tmp_path) == 64 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("50000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 10000\n")
    (group / "memory.max").write_text("max\n")
    assert available_host_bytes(tmp_path) == 64 * 1024
    (group / "memory.max").write_text("60000\n")
    assert available_host_bytes(tmp_path) == 60000 - 50000 + 10000
    assert (available_host_bytes() or 0) > 0


def test_weights_pages_are_reused_only_after_their_tensor_died(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = host_memory.PageCache()
    monkeypatch.setattr(host_memory, "PAGES", cache)
    cache.limit_bytes = 2 << 20
    first = host_memory.host_bytes((1 << 20,))
    view = first[4:].view(-1, 3)
    address = first.data_ptr()
    del first
    second = host_memory.host_bytes((1 << 20,))
    assert second.data_ptr() != address  # a view still lives
    del view
    third = host_memory.host_bytes((1 << 20,))
    assert third.data_ptr() == address
    fourth, fifth = (host_memory.host_bytes((1 << 20,)) for _ in range(2))
    for tensor in (second, third, fourth, fifth):
        tensor.fill_(7)
    del second, third, fourth, fifth, tensor
    assert cache._held_bytes == cache.limit_bytes  # the rest went to the system
    cache.close()
    assert cache._held_bytes == 0 and host_memory.host_bytes((0, 3)).shape == (0, 3)


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
