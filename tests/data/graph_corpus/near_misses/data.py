# SPDX-License-Identifier: Apache-2.0
"""Near misses: transfers, shapes and allocation that look wrong and are fine."""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


# snippet: dictionary_items
def step(x: Tensor, options: dict[str, float]) -> Tensor:
    for _name, value in options.items():
        x = x * value
    return x


# snippet: host_arithmetic_on_shapes
def step(x: Tensor) -> Tensor:
    heads = int(x.shape[-1] / 64)
    return x.view(x.size(0), heads, -1) * math.sqrt(float(x.shape[-1]))


# snippet: read_of_host_tensor
def step(x: Tensor, lengths_cpu: Tensor) -> Tensor:
    longest = int(lengths_cpu.max().item())
    return x[:longest]


# snippet: cpu_index_metadata
class Metadata:
    seq_lens_cpu: Tensor
    seq_lens: Tensor
    max_len: int


def step(x: Tensor, meta: Metadata) -> Tensor:
    for length in meta.seq_lens_cpu.tolist():
        x = x + length
    return x[: meta.max_len] + meta.seq_lens.unsqueeze(-1)


# snippet: pinned_upload_then_advance
class Inputs:
    def __init__(self, size: int, device):
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.staging = torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def upload(self) -> None:
        self.tokens.copy_(self.staging, non_blocking=True)

    def advance(self, fresh: Tensor, live: Tensor) -> None:
        self.tokens.copy_(torch.where(live, fresh, self.tokens))


# snippet: dtype_conversion
def step(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(torch.float32).to(weight.dtype) @ weight.float().to(x)


# snippet: setup_reads_freely
class Loader:
    def __init__(self, scales: Tensor):
        self.scale = scales.max().item()
        self.table = torch.arange(16)

    def load_weights(self, weights) -> None:
        self.table = torch.tensor([float(w.max()) for w in weights])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table


# snippet: reduction_stays_on_device
def step(x: Tensor) -> Tensor:
    return x / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-6)


# snippet: index_by_index_tensor
def step(cache: Tensor, topk_ids: Tensor) -> Tensor:
    ids = topk_ids.clamp(min=0)
    picked = cache[ids]
    return picked.masked_fill((topk_ids < 0).unsqueeze(-1), 0.0)


# snippet: masked_fill_by_store
def step(scores: Tensor, ids: Tensor) -> Tensor:
    scores[ids < 0] = -1.0
    return scores


# snippet: argmax_over_a_dimension
def step(table: Tensor, logits: Tensor) -> Tensor:
    return table[logits.argmax(dim=-1)]


# snippet: where_with_three_arguments
def step(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > y, x, y)


# snippet: one_hot_with_classes
def step(topk_ids: Tensor, num_experts: int) -> Tensor:
    return F.one_hot(topk_ids, num_classes=num_experts).sum(dim=(0, 1))


# snippet: repeat_by_host_number
def step(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=0).repeat(1, groups)


# snippet: fixed_size_nonzero
def step(live: Tensor, rows: int) -> Tensor:
    return torch.nonzero_static(live, size=rows, fill_value=-1)


# snippet: histogram_by_scatter
def step(topk_ids: Tensor, counts: Tensor, ones: Tensor) -> Tensor:
    counts.zero_()
    return counts.scatter_add_(0, topk_ids.flatten(), ones)


# snippet: top_k_of_fixed_size
def step(scores: Tensor, k: int) -> Tensor:
    values, indices = scores.topk(k, dim=-1)
    return values.gather(-1, indices.argsort(dim=-1))


# snippet: factory_with_out
def step(x: Tensor, out: Tensor) -> Tensor:
    torch.zeros(4, 8, out=out)
    return torch.cat((x, out), out=out)


# snippet: local_list_of_parts
def step(x: Tensor) -> Tensor:
    parts = []
    for chunk in x.split(16, dim=-1):
        parts.append(chunk.amax(dim=-1))
    return torch.stack(parts, dim=-1)


# snippet: allocation_at_construction
class Scratch(nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.register_buffer("rows", torch.arange(rows))
        self.pool = torch.empty(rows, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.rows.unsqueeze(-1), out=self.pool)


# snippet: numpy_on_host_numbers
def step(x: Tensor, sizes: list[int]) -> Tensor:
    return x * float(np.max(sizes))


# snippet: index_computed_from_a_mask
def step(x: Tensor, live: Tensor) -> Tensor:
    mask = live > 0
    kept = torch.where(mask, live, 0)
    places = mask.cumsum(0) - 1
    return x[kept] + x[places] + x[mask.long()]
