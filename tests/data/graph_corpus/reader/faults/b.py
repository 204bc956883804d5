# SPDX-License-Identifier: Apache-2.0
"""Steps with one fault each, written by a reader of the guide: memory, randomness, waiting, hidden reads, comments."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F


# snippet: concatenating_cache
class ConcatCache:
    """Key and value lists by layer, as small research code keeps them."""

    def __init__(self, num_layers: int, batch: int, num_heads: int, head_dim: int, device: str) -> None:
        self.keys: list[torch.Tensor] = [
            torch.empty(batch, num_heads, 0, head_dim, device=device) for _ in range(num_layers)
        ]

    def update(self, key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.keys[layer_idx] = torch.cat([self.keys[layer_idx], key_states], dim=-2)  # expect: GR402
        return self.keys[layer_idx]


# snippet: compile_on_miss
def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_activation(gate_up: torch.Tensor, kernels: dict[int, Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    rows = gate_up.shape[0]
    kernel = kernels.get(rows)
    if kernel is None:
        kernel = torch.compile(_gated, fullgraph=True, dynamic=False)  # expect: GR404
        kernels[rows] = kernel
    return kernel(gate_up)


# snippet: stochastic_rounding
def round_to_cache(value: torch.Tensor, lattice: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store FP8 values with a per-step dither taken from a fixed lattice of offsets."""
    shift = random.randrange(lattice.shape[0])  # expect: GR501
    dithered = value + lattice.roll(shift, dims=0)[: value.shape[0]]
    cache.index_copy_(0, slot_mapping, dithered.to(cache.dtype))


# snippet: prefetch_poll
def attend_with_prefetch(
    query: torch.Tensor, pages: torch.Tensor, loaded: torch.cuda.Event, compute: torch.cuda.Stream
) -> torch.Tensor:
    """Offloaded pages: wait on the device only when the copy has not landed yet."""
    landed = loaded.query()  # expect: GR601
    if not landed:
        compute.wait_event(loaded)
    return torch.softmax(query @ pages.transpose(-1, -2), dim=-1) @ pages


# snippet: quantiser_by_outlier
def rescale_by_class(
    hidden: torch.Tensor, outlier_votes: torch.Tensor, scale_tables: list[torch.Tensor]
) -> torch.Tensor:
    """One of several static scale tables, elected by the tokens of the batch."""
    winner = outlier_votes.sum(dim=0).argmax()
    scales = scale_tables[winner]  # expect: GR706
    return hidden * scales.unsqueeze(0)


# snippet: whitened_router
def whitened_router_logits(hidden: torch.Tensor, gram: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    factor = torch.linalg.cholesky(gram)  # expect: GR707
    white = torch.cholesky_solve(hidden.mT, factor)
    return white.mT @ router


# snippet: outdated_comment
def mean_pool(hidden: torch.Tensor, live: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    weights = live.to(hidden.dtype).unsqueeze(-1)
    count = weights.sum(dim=1).clamp_min(1.0)  # graph-ok[GR101]: length is read once per request  # expect: GR002
    torch.div((hidden * weights).sum(dim=1), count, out=pooled)
    return pooled
