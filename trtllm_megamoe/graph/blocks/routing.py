# SPDX-License-Identifier: Apache-2.0
"""Routing on the device: top-k with fixed shapes, and global expert ids turned into one rank's local ids."""

from __future__ import annotations

import torch


def route_top_k(logits: torch.Tensor, top_k: int, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and weights for each token; idle rows get masked routes.

    Args:
        logits: Shape (T, E), float32.
        top_k: K, routes per token.
        live: Shape (T,), bool.

    Returns:
        Ids of shape (T, K), int64, -1 for idle rows, and weights of shape (T, K), float32; a live row sums to 1.
    """
    values, ids = logits.topk(top_k, dim=-1)
    weights = values.softmax(dim=-1)
    return torch.where(live.unsqueeze(1), ids, -1), weights.masked_fill(~live.unsqueeze(1), 0.0)


def remap_to_local(topk_ids: torch.Tensor, first_expert: int, num_local_experts: int) -> torch.Tensor:
    """Global expert ids as ids of one rank's experts; every other id, -1 and out-of-range ones included, becomes -1.

    Args:
        topk_ids: Shape (T, K), int32 or int64, global.
        first_expert: Global id of this rank's first expert.
        num_local_experts: L, experts of this rank.

    Returns:
        Shape and dtype of `topk_ids`; values 0..L-1 or -1.

    Graph-safe: yes. Source: R52.
    """
    is_local = (topk_ids >= first_expert) & (topk_ids < first_expert + num_local_experts)
    return torch.where(is_local, topk_ids - first_expert, -1)
