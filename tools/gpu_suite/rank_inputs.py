# SPDX-License-Identifier: Apache-2.0
"""Inputs of several ranks: the self-test's routings with any token counts, and every routing of the microbench."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbench.routing import RoutingName, by_tokens, route
from tools.gpu_suite import cases
from tools.gpu_suite.ranks import Inputs
from trtllm_megamoe.selftest.inputs import RANK_ROUTINGS, rank_ids
from vendored_kernels.common.layer import LayerSpec

BENCH_ROUTINGS: dict[str, tuple[RoutingName, float | None]] = {
    **{f"bench {name.value}": (name, None) for name in RoutingName},
    "bench hot-rank, imbalance 1.5": (RoutingName.HOT_RANK, 1.5),
}
"""Name here -> routing of the microbench and its imbalance."""

BENCH_TOKENS = 24
"""Tokens of a rank there; `ragged` and `zero-rank` give some ranks fewer."""

ROUTINGS = RANK_ROUTINGS
"""Those that take any token counts."""


def make_inputs(
    spec: LayerSpec,
    counts: Sequence[int],
    name: str,
    seed: int,
    *,
    int32: bool = False,
    device: str = cases.DEVICE,
) -> list[Inputs]:
    """One launch's inputs of all ranks; a routing of the microbench chooses its own token counts."""
    if name in BENCH_ROUTINGS:
        routed = _bench_routes(spec, name, seed)
    else:
        routed = []
        for rank, count in enumerate(counts):
            ids = rank_ids(spec, spec.ep_size, rank, count, name, seed, device)
            routed.append((ids, cases.weights(spec, ids, seed + rank)))
    made = []
    for rank, (ids, weights) in enumerate(routed):
        x = cases.tokens(spec, ids.shape[0], seed * 31 + rank, device)
        made.append(Inputs(x, (ids.int() if int32 else ids).to(device), weights.to(device)))
    return made


def _bench_routes(spec: LayerSpec, name: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    routing, imbalance = BENCH_ROUTINGS[name]
    shape = {"num_experts": spec.num_experts, "top_k": spec.top_k, "ep_size": spec.ep_size}
    workload = by_tokens(routing, BENCH_TOKENS, **shape, seed=seed, imbalance=imbalance)
    batches = [route(workload, rank) for rank in range(spec.ep_size)]
    return [(batch.topk_ids.contiguous(), batch.topk_weights.contiguous()) for batch in batches]
