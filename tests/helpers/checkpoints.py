# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoint directories for tests: any spelling, single file or shards, both dialects, with a chosen damage.

Uses the public `safetensors` package to write, so that our reader is never tested against our own writer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Layer = Mapping[str, torch.Tensor]
"""Canonical names of one layer."""

DATA = Path(__file__).resolve().parents[1] / "data"
QWEN = DATA / "modelopt_nvfp4_qwen3_moe"
DEEPSEEK = DATA / "modelopt_nvfp4_deepseek_v3"

HF_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MODELOPT_QUANT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
COMPRESSED_QUANT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}


def model_config(hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, layers: int) -> dict[str, Any]:
    """A Qwen3-MoE style `config.json`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": 4 * intermediate_size,
        "moe_intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
    }


def spell(layer: Layer, prefix: str, *, hf: bool) -> dict[str, torch.Tensor]:
    """Canonical names under a prefix, with `gate_proj` spelling or `w1` spelling."""
    named = {}
    for name, tensor in layer.items():
        expert, projection, component = name.split(".")
        named[f"{prefix}{expert}.{HF_NAMES[projection] if hf else projection}.{component}"] = tensor
    return named


def to_compressed(layer: Layer) -> dict[str, torch.Tensor]:
    """The same numbers in the compressed-tensors spelling: `weight_packed`, reciprocal global scales of shape (1,)."""
    renamed = {}
    for name, tensor in layer.items():
        stem, component = name.rsplit(".", 1)
        if component == "weight":
            renamed[f"{stem}.weight_packed"] = tensor
        elif component == "weight_scale_2":
            renamed[f"{stem}.weight_global_scale"] = (1.0 / tensor).reshape(1)
        elif component == "input_scale":
            renamed[f"{stem}.input_global_scale"] = (1.0 / tensor).reshape(1)
        else:
            renamed[name] = tensor
    return renamed


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    *,
    quant: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write a directory; `quant` goes to `hf_quant_config.json`, or into the configuration when it names a method."""
    directory.mkdir(parents=True, exist_ok=True)
    config, quant = dict(config), MODELOPT_QUANT if quant is None else quant
    if "quant_method" in quant:
        config["quantization_config"] = quant
    else:
        (directory / "hf_quant_config.json").write_text(json.dumps(quant))
    (directory / "config.json").write_text(json.dumps(config))
    # safetensors refuses tensors that share memory and non-contiguous ones.
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
