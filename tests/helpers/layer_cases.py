# SPDX-License-Identifier: Apache-2.0
"""One layer run over R ranks, and what the oracle says of it; shared by thread tests and the MPI test program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tests.helpers.synthetic import Routing, make_layer_tensors, make_routing, make_tokens, seeded
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward

WATCHDOG_S = 60.0


@dataclass(frozen=True)
class LayerCase:
    """A layer, its tokens and its routing; `splits` are the tokens of each rank."""

    config: MegaMoeConfig
    weights: Mapping[str, torch.Tensor]
    x: torch.Tensor
    routing: Routing
    splits: Sequence[int]

    def rank_slice(self, rank: int) -> slice:
        first = sum(self.splits[:rank])
        return slice(first, first + self.splits[rank])


def even_splits(num_tokens: int, ep_size: int) -> list[int]:
    return [(num_tokens * (r + 1)) // ep_size - (num_tokens * r) // ep_size for r in range(ep_size)]


def make_case(
    kind: str,
    *,
    ep_size: int,
    num_tokens: int = 37,
    hidden_size: int = 256,
    intermediate_size: int = 144,
    num_experts: int = 16,
    top_k: int = 4,
    input_scales: bool = True,
    seed: int = 1,
    **config: object,
) -> LayerCase:
    """A small odd-sized layer; the routing does not depend on `ep_size` (hot-rank heats the last eighth of experts)."""
    x = make_tokens(seeded(seed + 1), num_tokens, hidden_size)
    routing = make_routing(seeded(seed + 2), kind, num_tokens, num_experts, top_k, ep_size=8)
    fields: dict[str, object] = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": top_k,
        "max_tokens_per_rank": max(num_tokens, 1),
        "timeout_s": 30.0,
    }
    weights = make_layer_tensors(seeded(seed), hidden_size, intermediate_size, num_experts, input_scales=input_scales)
    return LayerCase(MegaMoeConfig.create(**(fields | config)), weights, x, routing, even_splits(num_tokens, ep_size))


def with_splits(case: LayerCase, splits: Sequence[int]) -> LayerCase:
    return replace(case, splits=splits)


def forward_rank(layer: MegaMoELayer, case: LayerCase, rank: int) -> torch.Tensor:
    rows = case.rank_slice(rank)
    return layer.forward(case.x[rows], case.routing.topk_ids[rows], case.routing.topk_weights[rows])


def run_over_threads(case: LayerCase) -> torch.Tensor:
    """Build, load and run once on one thread per rank; the ranks' outputs in token order."""

    def body(comm: Communicator) -> torch.Tensor:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            return forward_rank(layer, case, comm.rank)

    return torch.cat(run_threads(len(case.splits), body, WATCHDOG_S))


def oracle_of(case: LayerCase) -> torch.Tensor:
    """The oracle's bf16 output with the product's numerics."""
    cfg = case.config
    weights = OracleWeights.from_tensors(case.weights)
    mode = cfg.activation_mode
    if mode is None:
        mode = ActivationMode.NVFP4 if "0.w1.input_scale" in case.weights else ActivationMode.BF16
    options = OracleOptions.product(
        mode,
        combine_format=cfg.combine_format,
        score_placement=cfg.score_placement,
        swiglu_limit=cfg.swiglu_limit,
        swiglu_alpha=cfg.swiglu_alpha,
        swiglu_beta=cfg.swiglu_beta,
    )
    return oracle_forward(weights, case.x, case.routing.topk_ids, case.routing.topk_weights, options)


def bits(values: torch.Tensor) -> torch.Tensor:
    """bf16 values as integers: NaN equals NaN, -0 differs from +0."""
    return values.contiguous().view(torch.int16)
