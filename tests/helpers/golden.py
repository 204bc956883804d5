# SPDX-License-Identifier: Apache-2.0
"""The test checkpoints under canonical names, read without the product's own reader."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN_LAYERS = (("modelopt_nvfp4_qwen3_moe", 0), ("modelopt_nvfp4_qwen3_moe", 1), ("modelopt_nvfp4_deepseek_v3", 1))
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_load = functools.lru_cache(load_file)


@dataclass(frozen=True, slots=True)
class GoldenLayer:
    """One layer's canonical tensors, its inputs (x float32, not exact in bf16) and ModelOpt's fp64-computed output."""

    tensors: dict[str, torch.Tensor]
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out_w4a16: torch.Tensor


def golden_layer(checkpoint: str, layer: int) -> GoldenLayer:
    """Read one of `GOLDEN_LAYERS`."""
    tensors = {}
    for name, tensor in _load(DATA / checkpoint / "model.safetensors").items():
        match = re.fullmatch(rf"model\.layers\.{layer}\.mlp\.experts\.(\d+)\.(\w+)\.(\w+)", name)
        if match:
            tensors[f"{match[1]}.{_PROJECTIONS[match[2]]}.{match[3]}"] = tensor
    golden = _load(DATA / checkpoint / "golden.safetensors")
    fields = ("x", "topk_ids", "topk_weights", "out_w4a16")
    return GoldenLayer(tensors, *(golden[f"layers.{layer}.{field}"] for field in fields))
