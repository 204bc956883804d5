# SPDX-License-Identifier: Apache-2.0
"""The ModelOpt checkpoints of tests/data: kernel against the exporter's own result and against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.helpers.golden import GOLDEN_LAYERS, GoldenLayer, golden_layer
from tools.gpu_suite.correctness import oracle_options
from tools.gpu_suite.layer import GpuLayer
from trtllm_megamoe.reference.oracle import OracleWeights, oracle_forward
from trtllm_megamoe.selftest.checks import compare
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig

TILE_NAMES = ("h8", "n16")
# docs/numerics.md 4.2: bf16 mode differs from unquantised activations by bf16 roundings only; nvfp4 by quantisation.
GOLDEN_TOLERANCE = {"bf16": 5e-3, "nvfp4": 0.2}


def _spec(golden: GoldenLayer, mode: str) -> LayerSpec:
    weights = OracleWeights.from_tensors(golden.tensors)
    top_k = golden.topk_ids.shape[1]
    return LayerSpec(weights.hidden_size, weights.intermediate_size, weights.num_experts, top_k, mode)


def needed() -> list[KernelConfig]:
    """Kernels of this part."""
    goldens = [golden_layer(*key) for key in GOLDEN_LAYERS]
    return [KernelConfig(_spec(g, m), TILES[t]) for g in goldens for m in ("bf16", "nvfp4") for t in TILE_NAMES]


def run(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """Every layer, mode and tile of both checkpoints."""
    for name, number in GOLDEN_LAYERS:
        golden = golden_layer(name, number)
        tensors = {key: value.cuda() for key, value in golden.tensors.items()}
        # x is not exact in bf16: against the exporter the unrounded input is unfair, so its bf16 value is what counts
        x = golden.x.cuda().to(torch.bfloat16)
        ids = golden.topk_ids.cuda().contiguous()
        w = golden.topk_weights.cuda().float().contiguous()
        for mode in ("bf16", "nvfp4"):
            spec = _spec(golden, mode)
            layer = GpuLayer(spec, tensors, x.shape[0], cache_dir)
            expected = oracle_forward(OracleWeights.from_tensors(tensors), x, ids, w, oracle_options(spec))
            for tile in TILE_NAMES:
                out = layer.forward(tile, x, ids, w)
                result: dict[str, Any] = {"checkpoint": name, "layer": number, "mode": mode, "tile": tile}
                result |= compare(out, expected.to(torch.bfloat16))
                exported = golden.out_w4a16.cuda().double()
                result["exporter_rel_l2"] = float((out.double() - exported).norm() / exported.norm())
                close = result["exporter_rel_l2"] < GOLDEN_TOLERANCE[mode] and result["rel_l2"] < 3e-3
                yield result | {"ok": close and result["nan"] == 0}
