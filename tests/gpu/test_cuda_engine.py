# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine through the public layer on one Hopper GPU: oracle, graphs, reload, bounded waits.

Kernels come from the cache (`TRTLLM_MEGAMOE_CACHE_DIR`); `tools/needed_kernels.py layers --compile DIR` fills it on a
machine that has the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.layer_cases import LayerCase, bits, make_case, oracle_of
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cuda.engine import CudaEngine
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import rel_l2
from vendored_kernels.common.sites import FAULT_STAGED

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper]

# fp32 sums in the tensor cores may move a value across one rounding boundary of the requantisation or of the wire
TOLERANCE = {"bf16": 3e-3, "fp8": 5e-3, "fp4": 1e-2}
ROUTINGS = ["uniform", "zipf", "hot_expert", "all_masked", "masked_30", "duplicates"]
OPTIONS = [("nvfp4", "bf16"), ("bf16", "bf16"), ("nvfp4", "fp8"), ("nvfp4", "fp4")]


def _case(kind: str = "random", num_tokens: int = 37, seed: int = 1, **config: object) -> LayerCase:
    fields: dict[str, object] = {"engine": "cuda", "max_tokens_per_rank": 64, "swiglu_limit": 10.0}
    return make_case(kind, ep_size=1, num_tokens=num_tokens, seed=seed, **(fields | config))


def configs() -> list[MegaMoeConfig]:
    """The layers of this file."""
    return [_case(activations=mode, combine_format=fmt).config for mode, fmt in OPTIONS]


def _on_gpu(case: LayerCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.x.cuda(), case.routing.topk_ids.cuda(), case.routing.topk_weights.cuda()


def _layer(case: LayerCase) -> MegaMoELayer:
    layer = MegaMoELayer(case.config)
    layer.load_weights(case.weights)
    return layer


@pytest.mark.parametrize(("mode", "fmt"), OPTIONS)
@pytest.mark.parametrize("kind", ROUTINGS)
def test_cuda_layer_meets_the_oracle(kind: str, mode: str, fmt: str) -> None:
    case = _case(kind, activations=mode, combine_format=fmt)
    with _layer(case) as layer:
        assert layer.engine_name == "cuda"
        out = layer.forward(*_on_gpu(case)).cpu()
    assert rel_l2(out, oracle_of(case)) < TOLERANCE[fmt]


def test_cuda_layer_any_token_count_and_id_dtype_keeps_its_rows() -> None:
    """Every T up to the cap through every bucket, int32 and int64 ids: a token's row never changes."""
    case = _case(num_tokens=64, activations="nvfp4")
    x, ids, weights = _on_gpu(case)
    with _layer(case) as layer:
        whole = layer.forward(x, ids, weights)
        assert layer.forward(x[:0], ids[:0], weights[:0]).shape == (0, 256)
        for count in (1, 7, 8, 16, 17, 33, 63):
            part = layer.forward(x[:count], ids[:count].int(), weights[:count], max_tokens_over_ranks=count)
            assert torch.equal(bits(part), bits(whole[:count])), count


def test_cuda_layer_graph_replays_changed_inputs_with_the_bits_of_eager_and_sees_reloads() -> None:
    first, second = _case(activations="nvfp4"), _case(activations="nvfp4", seed=60)
    x, ids, weights = _on_gpu(first)
    other = _on_gpu(second)
    with _layer(first) as layer:
        layer.forward(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.forward(x, ids, weights)
        for source in (other, _on_gpu(first), other):
            for static, fresh in zip((x, ids, weights), source, strict=True):
                static.copy_(fresh)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(bits(out), bits(layer.forward(*source)))
        layer.load_weights(second.weights)
        graph.replay()
        with _layer(second) as fresh_layer:
            assert torch.equal(bits(out), bits(fresh_layer.forward(*other)))


def test_cuda_layer_loaded_layer_can_be_captured_in_every_bucket_before_any_forward() -> None:
    case = _case(activations="nvfp4")
    x, ids, weights = _on_gpu(case)
    with _layer(case) as layer:
        counts = (1, 9, 17, 37)
        assert tuple(map(layer.ladder.select, counts)) == layer.ladder.rungs
        for count in counts:  # a bucket each; loading the weights has loaded their code
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer.forward(x[:count], ids[:count], weights[:count], max_tokens_over_ranks=count)
            graph.replay()
            assert torch.equal(bits(out), bits(layer.forward(x, ids, weights)[:count])), count


def test_cuda_layer_forward_never_synchronises() -> None:
    case = _case(activations="nvfp4")
    x, ids, weights = _on_gpu(case)
    with _layer(case) as layer:
        layer.forward(x, ids, weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer.forward(x, ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_cuda_layer_leaves_other_tensors_alone() -> None:
    """R10: canaries alive across load of objects and first launch are unchanged."""
    canaries = [torch.full((1 << 20,), fill, dtype=torch.uint8, device="cuda") for fill in (0xA5, 0x5A, 0xFF)]
    case = _case("masked_30", activations="bf16")
    with _layer(case) as layer:
        layer.forward(*_on_gpu(case))
    for canary, fill in zip(canaries, (0xA5, 0x5A, 0xFF), strict=True):
        assert bool((canary == fill).all())


def test_cuda_layer_two_layers_take_turns_without_disturbing_each_other() -> None:
    one, two = _case(activations="nvfp4"), _case(activations="nvfp4", seed=70)
    with _layer(one) as first, _layer(two) as second:
        expected = [first.forward(*_on_gpu(one)), second.forward(*_on_gpu(two))]
        for _ in range(5):
            assert torch.equal(bits(first.forward(*_on_gpu(one))), bits(expected[0]))
            assert torch.equal(bits(second.forward(*_on_gpu(two))), bits(expected[1]))


def test_cuda_layer_wait_that_expires_ends_the_kernel_and_the_next_call_raises() -> None:
    """One CTA that never comes: the others give up after the bound; the context stays usable."""
    case = _case(activations="bf16", timeout_s=0.05)
    layer = _layer(case)
    layer.forward(*_on_gpu(case))
    engine = layer._engine
    assert isinstance(engine, CudaEngine)
    for bucket, launch in list(engine._launches.items()):
        engine._launches[bucket] = replace(launch, launch=partial(launch.launch, fault_step=FAULT_STAGED))
    layer.forward(*_on_gpu(case))
    torch.cuda.synchronize()
    # whoever misses the CTA first: its tokens, its part of an fc1 block, or its fc2 tiles
    missed = r"(staged tokens|fc1 output block|fc2 tiles) .* in launch 2: expected .* build the layer anew"
    with pytest.raises(MegaMoeTimeoutError, match=missed):
        layer.forward(*_on_gpu(case))
    with _layer(_case(activations="bf16")) as fresh:
        assert rel_l2(fresh.forward(*_on_gpu(case)).cpu(), oracle_of(case)) < TOLERANCE["bf16"]


def test_cuda_layer_cpu_tensors_are_refused() -> None:
    case = _case(activations="nvfp4")
    with _layer(case) as layer, pytest.raises(MegaMoeConfigError, match="engine 'cuda' expects cuda"):
        layer.forward(case.x, case.routing.topk_ids, case.routing.topk_weights)
