# SPDX-License-Identifier: Apache-2.0
"""All three graph methods on real layers: every bucket, alone and several layers on one workspace, one and eight ranks.

Kernels come from the cache (`TRTLLM_MEGAMOE_CACHE_DIR`); they are those of `test_cuda_engine.py` and
`test_cuda_ranks.py`, which fill it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.layer_cases import LayerCase, make_case
from tests.helpers.rank_layers import build_over_ranks
from trtllm_megamoe.engines.cuda.engine import CudaEngine
from trtllm_megamoe.graph.layercheck import check_layers
from trtllm_megamoe.layer import MegaMoELayer, build_workspace

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper, pytest.mark.timeout(120)]

NUM_LAYERS = 3
RANKS = 8
HOT_PATH = [MegaMoELayer.forward, CudaEngine.forward]
OPTIONS = [("nvfp4", "bf16"), ("bf16", "bf16")]


def _cases(**config: object) -> list[LayerCase]:
    """The same layer with other weights; shapes and options as in the files that fill the cache."""
    fields: dict[str, object] = {"engine": "cuda", "max_tokens_per_rank": 64}
    return [make_case("random", ep_size=1, seed=seed, **(fields | config)) for seed in (1, 30, 60)]


@pytest.mark.parametrize(("mode", "fmt"), OPTIONS)
def test_layers_on_one_workspace_pass_all_three_methods_at_every_bucket(mode: str, fmt: str) -> None:
    cases = _cases(activations=mode, combine_format=fmt, swiglu_limit=10.0)
    workspace = build_workspace(cases[0].config)
    layers = [MegaMoELayer(case.config, workspace=workspace) for case in cases]
    for layer, case in zip(layers, cases, strict=True):
        layer.load_weights(case.weights)
        layer.prepare()
    rungs = layers[0].ladder.rungs
    _require_passed(check_layers(layers, rungs, layers[0].device, HOT_PATH), 2 * len(rungs))
    workspace.close()


@pytest.mark.parametrize(("mode", "fmt"), [("nvfp4", "bf16"), ("bf16", "fp8")])
def test_virtual_ranks_pass_all_three_methods_at_every_bucket(mode: str, fmt: str) -> None:
    """A captured step holds every rank's launches as branches of one graph."""
    cases = _cases(activations=mode, combine_format=fmt, timeout_s=10.0)
    layers = build_over_ranks(cases[0].config, [dict(case.weights) for case in cases], RANKS, 60.0)
    rungs = layers[0].layers[0].ladder.rungs
    device = torch.device("cuda", torch.cuda.current_device())
    counts = [RANKS * rung for rung in rungs]
    _require_passed(check_layers(layers, counts, device, HOT_PATH), 2 * len(rungs))


def test_layer_that_reads_the_device_in_its_forward_fails_at_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check, so that its silence above means something."""
    case = _cases(activations="nvfp4", swiglu_limit=10.0)[0]
    honest = CudaEngine.forward

    def forward(self: CudaEngine, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bucket: int) -> Any:
        int(ids.max())
        return honest(self, x, ids, weights, bucket)

    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        monkeypatch.setattr(CudaEngine, "forward", forward)
        found = check_layers([layer], [16], layer.device, HOT_PATH[:1])
    assert not found["passed"] and len(found["failures"]) == 2, found
    assert all("test_graph_layers.py" in text and "int(ids.max())" in text for text in found["failures"]), found


def _require_passed(found: dict[str, Any], num_steps: int) -> None:
    assert len(found["steps"]) == num_steps
    assert found["passed"], "\n".join(found["failures"])
