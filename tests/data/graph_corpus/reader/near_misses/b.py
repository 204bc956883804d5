# SPDX-License-Identifier: Apache-2.0
"""Steps that look wrong and are fine, written by a reader of the guide: streams, host facts, caches, comments."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


# snippet: pinned_read_back
def stage_tokens(tokens: torch.Tensor, pinned_tokens: torch.Tensor, copied: torch.cuda.Event) -> None:
    """The host reads `pinned_tokens` later, behind the event."""
    pinned_tokens.copy_(tokens.to(torch.int32), non_blocking=True)
    copied.record(torch.cuda.current_stream())


# snippet: shared_expert_overlap
def shared_and_routed(
    hidden: torch.Tensor, w_shared: torch.Tensor, w_routed: torch.Tensor, side: torch.cuda.Stream
) -> torch.Tensor:
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shared = torch.relu(hidden @ w_shared)
    routed = torch.relu(hidden @ w_routed)
    main.wait_stream(side)
    return routed.add_(shared)


# snippet: eager_statistics
def route_with_statistics(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = router_logits.sigmoid().topk(top_k, dim=-1)
    if not torch.cuda.is_current_stream_capturing():
        logger.info("heaviest routes: %s", weights.amax(dim=-1).tolist())
    return weights / weights.sum(dim=-1, keepdim=True), ids


# snippet: error_message
def checked_positions(hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if positions.ndim != 1 or positions.shape[0] != hidden.shape[0]:
        raise ValueError(f"positions must be (T,) for {hidden.shape[0]} tokens, got {positions}")
    torch._assert_async((positions < table.shape[0]).all())
    logger.debug("rotary over %s, %s", tuple(hidden.shape), hidden.dtype)
    return hidden + table.index_select(0, positions.clamp_min(0))


# snippet: allowed_copy
def debug_scores(scores: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    if not wanted:
        return None
    # graph-ok[GR102]: scores leave the device only for requests that asked for them, behind the last region
    return scores.detach().cpu()


# snippet: auxiliary_states
def draft_features(
    hidden: torch.Tensor, layer_weights: list[torch.Tensor], tap_layers: frozenset[int], taps: torch.Tensor
) -> torch.Tensor:
    """States of some layers for a draft head: the list lives for one step and has a fixed length."""
    tapped: list[torch.Tensor] = []
    for index, weight in enumerate(layer_weights):
        hidden = torch.tanh(hidden @ weight)
        if index in tap_layers:
            tapped.append(hidden)
    torch.stack(tapped, out=taps)
    return hidden


# snippet: ring_write
def write_window(
    ring: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Sliding window by position; an idle row writes back what was there."""
    window = ring.shape[1]
    slot = positions.clamp_min(0) % window
    ring[rows, slot] = torch.where(live.unsqueeze(-1), key, ring[rows, slot])
    positions += live
    return ring
