# SPDX-License-Identifier: Apache-2.0
"""The worker's life in the order of the contract: build, load, warm up, serve steps, reload, shut down."""

from __future__ import annotations

import gc
import importlib

import torch
from safetensors.torch import load_file, save_file
from tensorrt_llm._standin.paths import BASE
from tensorrt_llm._torch.autotuner import AutoTuner, autotune
from tensorrt_llm._torch.model_config import ModelConfig, QuantConfig
from tensorrt_llm._torch.models.modeling_standin import StandinMoeForCausalLM
from tensorrt_llm.llmapi.llm_args import MoeLoadBalancerConfig
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.quantization.mode import QuantAlgo
from torch.utils._python_dispatch import TorchDispatchMode

MB = importlib.import_module(f"{BASE}.moe_load_balancer")


def make_config(llm_args, rank):
    world = llm_args.tensor_parallel_size
    moe = llm_args.moe_config
    mapping = Mapping(
        world_size=world,
        rank=rank,
        tp_size=world,
        moe_ep_size=llm_args.moe_expert_parallel_size,
        enable_attention_dp=llm_args.enable_attention_dp,
    )
    return ModelConfig(
        mapping=mapping,
        quant_config=QuantConfig(QuantAlgo.NVFP4),
        moe_backend=moe.backend,
        moe_max_num_tokens=moe.max_num_tokens,
        max_num_tokens=llm_args.max_num_tokens,
        moe_load_balancer=None if moe.load_balancer is None else MoeLoadBalancerConfig(**moe.load_balancer),
    )


class MetaInitMode(TorchDispatchMode):
    """New empty tensors have no memory; an operation on one of those is an error, and the loader starts over."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            return func(*args, **(kwargs | {"device": "meta"}))
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
            raise RuntimeError(f"meta tensor used with {func}")
        return func(*args, **kwargs)


def load_model(llm_args, layers, rank):
    """What the host's model loader does, in its order; returns the model and the load balancer, if any."""
    config = make_config(llm_args, rank)
    with MB.maybe_create_moe_load_balancer(config, config.mapping) as balancer:
        with MetaInitMode():
            model = StandinMoeForCausalLM(
                llm_args.model, layers, config, llm_args.draft_layer_quant, llm_args.allow_backend_degradation
            )
        model.load_weights()
        if balancer is not None:
            balancer.register_weight_slots_after_to_cuda()
            balancer.finalize_model()
    return model, balancer


class Inputs:
    """Golden rows, dealt out to ranks; padding rows (of attention DP) are NaN and must never be seen."""

    def __init__(self, path, layer, rank):
        golden = load_file(path)
        self.x = golden[f"layers.{layer}.x"].bfloat16()
        self.logits = torch.cat(
            (golden[f"layers.{layer}.topk_ids"].float(), golden[f"layers.{layer}.topk_weights"].float()), dim=1
        )
        self.rank = rank

    def rows(self, counts, padding):
        first = sum(counts[: self.rank])
        index = torch.arange(first, first + counts[self.rank]) % self.x.shape[0]
        x, logits = self.x[index], self.logits[index]
        if padding:
            x = torch.cat((x, torch.full((padding, x.shape[1]), float("nan")).bfloat16()))
            logits = torch.cat((logits, torch.full((padding, logits.shape[1]), -1.0)))
        return x, logits


def run_scenario(llm_args, scenario, out_dir, rank):
    torch.set_num_threads(1)
    layers = scenario["layers"]
    model, balancer = load_model(llm_args, layers, rank)
    inputs = {layer: Inputs(scenario["golden"], layer, rank) for layer in layers}
    outputs = {}

    def step(name, counts, padding=0, with_meta=True):
        with MB.MoeLoadBalancerIterContext(balancer):
            for layer, moe in model.layers.items():
                x, logits = inputs[layer].rows(counts, padding)
                outputs[f"{name}.{layer}"] = moe.forward(
                    x, logits, all_rank_num_tokens=counts if with_meta else None, use_dp_padding=bool(padding)
                )

    world = llm_args.tensor_parallel_size
    step("warm-up general", [llm_args.max_num_tokens] * world)
    with autotune():
        step("warm-up tuning", [llm_args.max_num_tokens] * world)
    assert AutoTuner.get().questions == []  # scratch for profiling would be accounted to nobody
    step("warm-up no metadata", [1] * world, with_meta=False)
    for index, counts in enumerate(scenario["steps"]):
        step(f"step{index}", counts, padding=scenario.get("padding", 0))
    if scenario.get("reload"):
        for moe in model.layers.values():
            moe.pre_reload_weights()
        # suffix-ordered buckets over all layers: every w2 first, as training loops send them
        for projection in ("w2", "w3", "w1"):
            for layer, moe in model.layers.items():
                part = {n: t for n, t in model.layer_weights(layer).items() if n.split(".")[1] == projection}
                moe.load_weights([part], allow_partial_loading=True)
        for moe in model.layers.values():
            moe.process_weights_after_loading()
            moe.post_load_weights()
        step("reloaded", scenario["steps"][0])
    save_file(outputs, out_dir / f"rank{rank}.safetensors")
    report = {
        "classes": {str(layer): type(moe.backend).__name__ for layer, moe in model.layers.items()},
        "draft": None if model.draft is None else type(model.draft.backend).__name__,
    }
    for moe in model.layers.values():
        shutdown = getattr(moe.backend, "shutdown", None)
        if shutdown is not None:
            shutdown()
    model.layers.clear()
    gc.collect()
    return report
