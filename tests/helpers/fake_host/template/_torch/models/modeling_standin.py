# SPDX-License-Identifier: Apache-2.0
"""A model that is its MoE layers: enough of a modeling file to build, load and call them as the host's do."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorrt_llm._standin.paths import BASE
from tensorrt_llm._torch.model_config import QuantConfig

_RENAMED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class StandinRouting:
    """The router's logits ARE the routing: K ids, then K weights."""

    def __init__(self, top_k):
        self.top_k = top_k

    def apply(self, router_logits, input_ids=None):
        return router_logits[:, : self.top_k].to(torch.int64), router_logits[:, self.top_k :]


def read_config(directory):
    config = json.loads((Path(directory) / "config.json").read_text())
    count_names = ("num_experts", "n_routed_experts", "num_local_experts")
    return {
        "num_experts": next(config[name] for name in count_names if name in config),
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "top_k": config["num_experts_per_tok"],
    }


class StandinMoeForCausalLM:
    def __init__(self, directory, layers, model_config, draft_quant, allow_degradation):
        create_moe = importlib.import_module(f"{BASE}.create_moe").create_moe  # by value, like the host's models
        shape = read_config(directory)
        routing = StandinRouting(shape.pop("top_k"))
        common = {"dtype": torch.bfloat16, "model_config": model_config, **shape}
        import inspect

        if "allow_backend_degradation" in inspect.signature(create_moe).parameters:
            common["allow_backend_degradation"] = allow_degradation
        self.directory = directory
        self.layers = {layer: create_moe(routing_method=routing, layer_idx=layer, **common) for layer in layers}
        self.draft = None
        if draft_quant != "inherit":
            override = QuantConfig(draft_quant)
            self.draft = create_moe(
                routing_method=routing, layer_idx=max(layers) + 1, override_quant_config=override, **common
            )

    def layer_weights(self, layer):
        pattern = re.compile(rf"model\.layers\.{layer}\.mlp\.experts\.(\d+)\.(\w+)\.(\w+)")
        found = {}
        for name, tensor in load_file(Path(self.directory) / "model.safetensors").items():
            match = pattern.fullmatch(name)
            if match:
                found[f"{match[1]}.{_RENAMED[match[2]]}.{match[3]}"] = tensor
        return found

    def load_weights(self):
        for layer, moe in self.layers.items():
            moe.load_weights([self.layer_weights(layer)])
        for moe in self.layers.values():
            moe.transform_weights()
            moe.cache_derived_state()
            moe.post_load_weights()  # direct users call this too; it must be harmless
