# SPDX-License-Identifier: Apache-2.0
"""Faults: data-dependent shapes."""
import torch
import torch.nn.functional as F
from torch import Tensor


# snippet: nonzero_method
def step(hits: Tensor) -> Tensor:
    rows = hits.nonzero(as_tuple=True)[0]  # expect: GR301
    return rows


# snippet: unique_experts
def step(topk_ids: Tensor) -> Tensor:
    return torch.unique(topk_ids, return_counts=True)[1]  # expect: GR301


# snippet: one_argument_where
def step(x: Tensor, expert: int) -> Tensor:
    token, slot = torch.where(x == expert)  # expect: GR301
    return token


# snippet: tokens_per_expert_by_bincount
def step(topk_ids: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(topk_ids.flatten(), minlength=num_experts)  # expect: GR301


# snippet: repeat_without_output_size
def step(x: Tensor, counts: Tensor) -> Tensor:
    return x.repeat_interleave(counts, dim=0)  # expect: GR301


# snippet: one_hot_without_classes
def step(topk_ids: Tensor) -> Tensor:
    return F.one_hot(topk_ids)  # expect: GR301


# snippet: masked_select
def step(x: Tensor, keep: Tensor) -> Tensor:
    return torch.masked_select(x, keep)  # expect: GR301


# snippet: named_mask
def step(x: Tensor, expert_mask: Tensor) -> Tensor:
    return x[expert_mask]  # expect: GR302


# snippet: inverted_mask
def step(x: Tensor, live: Tensor) -> Tensor:
    dead = ~(live > 0)
    return x[dead, :].sum(0)  # expect: GR302


# snippet: masked_add
def step(x: Tensor, ids: Tensor) -> Tensor:
    x[ids < 0] += 1  # expect: GR302
    return x


# snippet: masked_store_of_tensor
def step(x: Tensor, ids: Tensor, fresh: Tensor) -> Tensor:
    x[ids >= 0] = fresh  # expect: GR302
    return x


# snippet: slice_by_device_length
def step(cache: Tensor, length: Tensor) -> Tensor:
    end = length + 1
    return cache[:, :end]  # expect: GR303


# snippet: view_by_device_count
def step(x: Tensor, counts: Tensor) -> Tensor:
    groups = counts.count_nonzero()
    return x.view(groups, -1)  # expect: GR303


# snippet: split_by_device_sizes
def step(x: Tensor, sizes: Tensor) -> Tensor:
    return torch.tensor_split(x, sizes)[0]  # expect: GR303


# snippet: arange_to_device_value
def step(lengths: Tensor, grid: Tensor) -> Tensor:
    longest = lengths.amax()
    return torch.arange(longest, out=grid) if grid is None else grid.narrow(0, 0, longest)  # expect: GR303


# snippet: rearranged_mask
def step(x: Tensor, ids: Tensor) -> Tensor:
    foreign = (ids < 0).unsqueeze(-1).expand_as(x).logical_not()
    return x[foreign]  # expect: GR302


# snippet: attribute_narrowed_to_a_tensor
class Window:
    def __init__(self, length: int | Tensor):
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.length, int):
            return x[: self.length]
        return x[: self.length]  # expect: GR303
