# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint directory says about itself: architecture, MoE sizes, which layers have experts, quantisation.

Reads `config.json` and `hf_quant_config.json` and nothing else. Used by :mod:`trtllm_megamoe.weights.checkpoint`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.weights.spec import BLOCK_SIZE, LayerShape

_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_INTERMEDIATE_KEYS = ("moe_intermediate_size", "intermediate_size")
_NVFP4_ALGOS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of `config.json`. `expected_moe_layers` is what the configuration promises, not what the files hold."""

    architecture: str
    shape: LayerShape
    swiglu_limit: float | None
    expected_moe_layers: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object of a file; None when the file does not exist.

    Raises:
        MegaMoeWeightError: unreadable, or not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise MegaMoeWeightError(f"cannot read {path}: {err}") from None
    if not isinstance(data, dict):
        raise MegaMoeWeightError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _first_int(config: dict[str, Any], keys: tuple[str, ...], path: Path) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise MegaMoeWeightError(
        f"{path}: none of the keys {', '.join(keys)} holds an integer; it is needed and not guessed"
    )


def _moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Layers with routed experts by the rules of the DeepSeek, Kimi, Qwen and gpt-oss families."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        return ()
    dense_first = int(config.get("first_k_dense_replace") or 0)
    frequency = config.get("moe_layer_freq") or 1
    sparse_step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())

    def is_moe(layer: int) -> bool:
        if layer < dense_first or layer in dense or (layer + 1) % sparse_step:
            return False
        return bool(frequency[layer]) if isinstance(frequency, list) else layer % int(frequency) == 0

    return tuple(layer for layer in range(count) if is_moe(layer))


def read_model_facts(directory: Path) -> tuple[ModelFacts, dict[str, Any]]:
    """Facts of `config.json` plus the raw configuration (the quantisation may be inside).

    Raises:
        MegaMoeWeightError: no configuration, or a size that is not stated.
    """
    path = directory / "config.json"
    outer = read_json(path)
    if outer is None:
        raise MegaMoeWeightError(
            f"{path} does not exist; a checkpoint directory holds config.json and safetensors files"
        )
    architectures = outer.get("architectures") or []
    # Multi-modal wrappers (Kimi-K2.5 and others) keep the language model's sizes one level down.
    config = outer["text_config"] if isinstance(outer.get("text_config"), dict) else outer
    limit = config.get("swiglu_limit")
    try:
        shape = LayerShape(
            hidden_size=_first_int(config, ("hidden_size",), path),
            intermediate_size=_first_int(config, _INTERMEDIATE_KEYS, path),
            num_experts=_first_int(config, _NUM_EXPERTS_KEYS, path),
            top_k=_first_int(config, _TOP_K_KEYS, path),
        )
    except MegaMoeConfigError as err:
        raise MegaMoeWeightError(f"{path}: {err}") from None
    facts = ModelFacts(
        architecture=str(architectures[0]) if architectures else str(config.get("model_type", "unknown")),
        shape=shape,
        swiglu_limit=float(limit) if limit is not None and math.isfinite(limit) else None,
        expected_moe_layers=_moe_layers(config),
    )
    return facts, outer


def check_nvfp4(directory: Path, config: dict[str, Any]) -> str:
    """Return the name of the NVFP4 scheme that the checkpoint declares.

    ModelOpt states it in `hf_quant_config.json` or `config.json`, compressed-tensors in `config.json`. A ModelOpt
    export of mixed precision is accepted when some layer is NVFP4; the tensors of each layer are checked anyway.

    Raises:
        MegaMoeWeightError: the checkpoint is not NVFP4, or does not say what it is.
    """
    external = read_json(directory / "hf_quant_config.json")
    if external is not None:
        source, facts = "hf_quant_config.json", external.get("quantization") or {}
    else:
        text = config.get("text_config")
        inner = text.get("quantization_config") if isinstance(text, dict) else None
        source, facts = "config.json", config.get("quantization_config") or inner or {}
    if not isinstance(facts, dict) or not facts:
        raise MegaMoeWeightError(
            f"{directory}: not an NVFP4 checkpoint: neither hf_quant_config.json nor `quantization_config` in "
            "config.json states a quantisation; export the model with ModelOpt NVFP4"
        )
    if facts.get("quant_method") == "compressed-tensors":
        return _check_compressed_tensors(directory, facts)
    algorithm = str(facts.get("quant_algo") or facts.get("quant_method") or "unknown").upper()
    layers = facts.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, dict):
        found = {str(entry.get("quant_algo", "")).upper() for entry in layers.values() if isinstance(entry, dict)}
        algorithm = next((name for name in _NVFP4_ALGOS if name in found), algorithm)
    group = facts.get("group_size", BLOCK_SIZE)
    if algorithm not in _NVFP4_ALGOS or group not in (None, BLOCK_SIZE):
        raise MegaMoeWeightError(
            f"{directory}: not an NVFP4 checkpoint: {source} says {algorithm} with group size {group}; "
            f"supported: {', '.join(_NVFP4_ALGOS)} with group size {BLOCK_SIZE}, "
            "or compressed-tensors nvfp4-pack-quantized"
        )
    return f"modelopt {algorithm}"


def _check_compressed_tensors(directory: Path, facts: dict[str, Any]) -> str:
    formats = {str(facts.get("format"))}
    formats |= {str(group.get("format")) for group in (facts.get("config_groups") or {}).values() if "format" in group}
    if "nvfp4-pack-quantized" not in formats:
        raise MegaMoeWeightError(
            f"{directory}: not an NVFP4 checkpoint: compressed-tensors format is {', '.join(sorted(formats))}; "
            "supported: nvfp4-pack-quantized"
        )
    return "compressed-tensors nvfp4-pack-quantized"
