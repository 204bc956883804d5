# SPDX-License-Identifier: Apache-2.0
"""One MoE layer built through a stand-in host in this process, and what the oracle says of it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.helpers.golden import GoldenLayer
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward

# Both sides round at the same points; the only freedom is the order of a sum, which can flip a requantised code lying
# within 1e-7 of a tie.
REL_L2 = 1e-3


def model_config(**changes: Any) -> Any:
    """A frozen ModelConfig of one rank that asks for the backend; `mapping` entries go into its Mapping."""
    module = importlib.import_module("tensorrt_llm._torch.model_config")
    algo = importlib.import_module("tensorrt_llm.quantization.mode").QuantAlgo
    mapping = importlib.import_module("tensorrt_llm.mapping").Mapping(**changes.pop("mapping", {}))
    fields = {
        "mapping": mapping,
        "quant_config": module.QuantConfig(algo.NVFP4),
        "moe_backend": "MEGAMOE_CUTEDSL",
        "max_num_tokens": 64,
    }
    return module.ModelConfig(**(fields | changes))


def routing(top_k: int) -> Any:
    return importlib.import_module("tensorrt_llm._torch.models.modeling_standin").StandinRouting(top_k)


def make_moe(base: str, golden: GoldenLayer, config: Any, **changes: Any) -> Any:
    """What a model's code does to get its MoE module."""
    hidden_size = golden.x.shape[1]
    fields = {
        "routing_method": routing(golden.topk_ids.shape[1]),
        "num_experts": len({int(name.split(".")[0]) for name in golden.tensors}),
        "hidden_size": hidden_size,
        "intermediate_size": golden.tensors["0.w1.weight"].shape[0],
        "dtype": torch.bfloat16,
        "model_config": config,
        "layer_idx": 7,
    }
    return importlib.import_module(f"{base}.create_moe").create_moe(**(fields | changes))


def logits_of(golden: GoldenLayer, rows: slice) -> torch.Tensor:
    return torch.cat((golden.topk_ids[rows].float(), golden.topk_weights[rows].float()), dim=1)


def oracle_of(
    golden: GoldenLayer, rows: slice, mode: ActivationMode = ActivationMode.NVFP4, **options: Any
) -> torch.Tensor:
    combine = options.pop("combine_format", CombineFormat.BF16)
    return oracle_forward(
        OracleWeights.from_tensors(golden.tensors),
        golden.x[rows].bfloat16(),
        golden.topk_ids[rows],
        golden.topk_weights[rows].float(),
        OracleOptions.product(mode, combine_format=combine, **options),
    )


def load(moe: Any, golden: GoldenLayer) -> None:
    """Everything a loader does, each hook more than once."""
    moe.load_weights([golden.tensors])
    for _ in range(2):
        moe.process_weights_after_loading()
        moe.transform_weights()
        moe.cache_derived_state()
        moe.post_load_weights()


def forward(moe: Any, golden: GoldenLayer, rows: slice, **kwargs: Any) -> torch.Tensor:
    """The layer over these golden rows, through the wrapper."""
    out: torch.Tensor = moe.forward(golden.x[rows].bfloat16(), logits_of(golden, rows), **kwargs)
    return out


def run_context(base: str, **fields: Any) -> Any:
    return importlib.import_module(f"{base}.impl_contract").MoERunContext(**fields)


@contextlib.contextmanager
def load_balancer(
    base: str, num_slots: int, placement: Sequence[int] | None = None, *, updates: int = 0
) -> Iterator[tuple[Any, Any]]:
    """The host's load balancer while a model is built: (its configuration for `model_config`, itself)."""
    balancing = importlib.import_module(f"{base}.moe_load_balancer")
    config = importlib.import_module("tensorrt_llm.llmapi.llm_args").MoeLoadBalancerConfig(
        num_slots=num_slots,
        initial_global_assignments=None if placement is None else {7: list(placement)},
        layer_updates_per_iter=updates,
    )
    asking = model_config(moe_load_balancer=config)
    with balancing.maybe_create_moe_load_balancer(asking, asking.mapping) as balancer:
        yield config, balancer


def finish_balancing(balancer: Any) -> None:
    """What the host's model loader does with its load balancer after the weights."""
    balancer.register_weight_slots_after_to_cuda()
    balancer.finalize_model()
