# SPDX-License-Identifier: Apache-2.0
"""Steps with one fault each, written by a reader of the guide: transfers, control flow and shapes."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


# snippet: draft_verification
def accept_draft_tokens(draft_ids: Tensor, target_logits: Tensor, num_accepted_host: Tensor) -> Tensor:
    """Greedy verification of a speculative draft; (B, S) ids against (B, S + 1, V) logits."""
    choice = target_logits.argmax(dim=-1)
    agrees = draft_ids.eq(choice[:, :-1]).to(torch.int32)
    num_accepted = agrees.cumprod(dim=-1).sum(dim=-1)
    num_accepted_host.copy_(num_accepted)  # expect: GR102
    return choice.gather(1, num_accepted.unsqueeze(1)).squeeze(1)


# snippet: block_table_upload
def paged_gather(query: Tensor, key_cache: Tensor, block_table: np.ndarray) -> Tensor:
    """Fetch the pages of each request; the scheduler hands over its NumPy table."""
    batch, num_heads, head_dim = query.shape
    pages = torch.from_numpy(block_table).to(query.device, non_blocking=True)  # expect: GR104
    keys = key_cache[pages].view(batch, -1, num_heads, head_dim)
    return torch.einsum("bhd,bshd->bhs", query, keys) * head_dim**-0.5


# snippet: long_rope_choice
def long_rope(query: Tensor, positions: Tensor, short_table: Tensor, long_table: Tensor, trained_len: int) -> Tensor:
    """Two frequency tables, the second one for contexts beyond the trained length."""
    beyond = positions.max() + 1 > trained_len
    table = long_table if beyond else short_table  # expect: GR201
    cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
    first, second = query.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# snippet: thinking_budget
def bias_end_of_thinking(last_token: Tensor, logits: Tensor, bias: Tensor, end_ids: list[int]) -> Tensor:
    """Push the end-of-thinking token while the (single) request still thinks."""
    thinking = last_token[0] not in end_ids  # expect: GR203
    if thinking:
        logits = logits.add(bias)
    return logits


# snippet: expert_load_window
class ExpertLoadWindow:
    """Sliding statistics for the expert balancer."""

    def __init__(self, window: int, num_experts: int, max_routes: int, device: torch.device) -> None:
        self.loads = torch.zeros(window, num_experts, dtype=torch.int32, device=device)
        self.ones = torch.ones(max_routes, dtype=torch.int32, device=device)
        self.window = window
        self.row = 0

    def forward(self, topk_ids: Tensor) -> Tensor:
        flat = topk_ids.reshape(-1)
        current = self.loads[self.row]
        current.zero_()
        current.scatter_add_(0, flat, self.ones[: flat.shape[0]])
        self.row = (self.row + 1) % self.window  # expect: GR204
        return self.loads.sum(dim=0)


# snippet: idle_rank_returns
def expert_parallel_block(hidden: Tensor, w_up: Tensor, w_down: Tensor, group: dist.ProcessGroup) -> Tensor:
    num_tokens = hidden.size(0)
    if num_tokens == 0:
        return hidden  # expect: GR205
    partial = F.silu(hidden @ w_up) @ w_down
    dist.all_reduce(partial, group=group)
    return partial


# snippet: token_to_request
def token_request_ids(request_ids: Tensor, query_lens: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of a ragged batch: its request and how much context that request had."""
    context = seq_lens - query_lens
    owner = request_ids.repeat_interleave(query_lens, dim=0)  # expect: GR301
    return owner, context.index_select(0, owner)


# snippet: adaptive_page_budget
def select_pages(query: Tensor, page_means: Tensor, seq_lens: Tensor, page_size: int) -> Tensor:
    """Sparse attention: look at a quarter of the pages of the longest request."""
    affinity = torch.einsum("bd,bpd->bp", query, page_means)
    budget = (seq_lens.amax() // (4 * page_size)).clamp(min=1)
    return affinity.topk(budget, dim=-1).indices  # expect: GR303
