# SPDX-License-Identifier: Apache-2.0
"""Orders of delivery: what each needs in memory or on disk, and what is refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.weight_models import (
    LAYER,
    SPEC,
    Named,
    aux_of,
    bulk_of,
    expected_store,
    key_of,
    layer_tensors,
    load_all,
    make_loader,
    make_store,
    model_tensors,
    only,
    same,
    store_bytes,
    suffix_order,
    whole,
)
from trtllm_megamoe.errors import (
    MegaMoeUnavailableError,
    MegaMoeWeightError,
)
from trtllm_megamoe.weights import host_memory
from trtllm_megamoe.weights.delivery import DeliveryOrder
from trtllm_megamoe.weights.host_memory import available_host_bytes
from trtllm_megamoe.weights.layouts import LAYOUTS
from trtllm_megamoe.weights.loader import WeightLoader
from trtllm_megamoe.weights.spill import SpillFile
from trtllm_megamoe.weights.store import StoreState

# ---- orders and host memory ------------------------------------------------------------------------------------------


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
    for layer, store in loader.stores.items():
        assert same(store_bytes(store), whole(layer, "A"))
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_staged_on_disk_load_the_same_bytes_and_leave_no_file(layout: str, tmp_path: Path) -> None:
    loader = make_loader(layout, available_bytes=lambda: 0)  # no host memory at all
    for model in "AB":
        tensors = suffix_order(model_tensors(model))
        with loader.open(spill_directory=tmp_path) as window:
            window.deliver(tensors)
            window.deliver(aux_of(tensors))
            assert all(store.staged_bytes == 0 for store in loader.stores.values())
        for layer, store in loader.stores.items():
            assert same(store_bytes(store), whole(layer, model, layout))
    assert list(tmp_path.iterdir()) == []


def test_weights_duplicates_staged_on_disk_let_the_last_win(tmp_path: Path) -> None:
    store = make_store()
    with WeightLoader({0: store}).open(spill_directory=tmp_path) as window:
        window.deliver(only(layer_tensors("B", LAYER), "1.w1.weight"))
        window.deliver(layer_tensors("A", LAYER))
    assert same(store_bytes(store), whole(LAYER, "A"))


def test_weights_spill_directory_without_room_or_permission_is_refused(tmp_path: Path) -> None:
    loader = make_loader()
    load_all(loader, model_tensors("A"))
    with pytest.raises(MegaMoeUnavailableError, match=r"cannot stage in .*nowhere"):
        loader.open(spill_directory=tmp_path / "nowhere")
    with pytest.raises(MegaMoeUnavailableError, match=r"staging needs \d+ bytes in .*deliver layer by layer"):
        SpillFile(tmp_path, 1 << 60)
    for store in loader.stores.values():
        store.require_ready()
