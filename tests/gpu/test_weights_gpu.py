# SPDX-License-Identifier: Apache-2.0
"""Loading on a GPU: packing equals the CPU's, captured graphs see a reload, and the allocator's peak stays bounded."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.weight_models import SPEC, expected_store, layer_tensors, same, store_bytes
from tools.measure_load_memory import CASES, SHAPE, CudaMeter, chunk_bytes, growth
from tools.measure_load_memory import SPEC as TOOL_SPEC
from trtllm_megamoe.weights.layouts import LAYOUTS
from trtllm_megamoe.weights.loader import load_one
from trtllm_megamoe.weights.store import WeightStore

pytestmark = pytest.mark.gpu

LAYER = 3
ALLOCATOR_SLACK = 1 << 20  # blocks are rounded up to 512 bytes, small ones come from 2 MiB segments


def on_cpu(store: WeightStore) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in store_bytes(store).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_reload_aba_on_the_gpu_equals_cpu_packing_at_unchanged_addresses(layout: str) -> None:
    store = WeightStore(SPEC, layout=layout, device="cuda")
    addresses = None
    for model in "ABA":
        load_one(store, {name: tensor.cuda() for name, tensor in layer_tensors(model, LAYER).items()})
        assert same(on_cpu(store), expected_store(LAYER, layout, bulk=model, scales=model, fc1_input=model))
        now = {name: tensor.data_ptr() for name, tensor in store_bytes(store).items()}
        assert addresses in (None, now)
        addresses = now


def test_weights_captured_graph_sees_a_reload() -> None:
    store = WeightStore(SPEC, layout="sm90", device="cuda")
    load_one(store, layer_tensors("A", LAYER))
    live = store_bytes(store)
    out = {name: torch.empty_like(tensor) for name, tensor in live.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, tensor in live.items():
            out[name].copy_(tensor)
    load_one(store, layer_tensors("B", LAYER))
    graph.replay()
    torch.cuda.synchronize()
    got = {name: tensor.cpu() for name, tensor in out.items()}
    assert same(got, expected_store(LAYER, "sm90", bulk="B", scales="B", fc1_input="B"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_weights_gpu_peak_is_one_layer_and_one_chunk_in_any_order(case: object, layout: str) -> None:
    chunk = chunk_bytes(layout, "cuda", CudaMeter)
    peak = growth(case, layout, "cuda", CudaMeter)  # type: ignore[arg-type]
    assert peak <= TOOL_SPEC.source_bytes + chunk + ALLOCATOR_SLACK
    assert SHAPE.expert_bytes > ALLOCATOR_SLACK // 2
