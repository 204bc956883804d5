# SPDX-License-Identifier: Apache-2.0
"""Steps that look wrong and are fine, written by a reader of the guide: masks, sizes, routing, sampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


# snippet: grammar_mask
def apply_grammar(logits: Tensor, allowed: Tensor) -> Tensor:
    """A number, not a tensor, written through a boolean mask: no row count is needed."""
    logits[~allowed] = float("-inf")
    return logits


# snippet: sized_repeat
def expand_block_scales(scales: Tensor, rows_per_expert: Tensor, total_rows: int) -> Tensor:
    return torch.repeat_interleave(scales, rows_per_expert, dim=0, output_size=total_rows)


# snippet: empty_batch_norm
def rms_norm(hidden: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    if not hidden.numel() or len(hidden) == 0:
        return hidden
    variance = hidden.float().pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(weight.dtype) * weight


# snippet: host_lengths
def split_kv_decode(
    query: Tensor, keys: Tensor, columns: Tensor, seq_lens: Tensor, seq_lens_cpu: Tensor, buckets: list[int]
) -> Tensor:
    """The scheduler keeps a host copy of the lengths; the bucket follows from it."""
    longest = int(seq_lens_cpu.max())
    bucket = min(size for size in buckets if size >= longest)
    scores = torch.einsum("bhd,bshd->bhs", query, keys[:, :bucket])
    unused = columns[:bucket] >= seq_lens.unsqueeze(-1)
    return scores.masked_fill(unused.unsqueeze(1), float("-inf"))


# snippet: head_split
def split_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, tp_size: int) -> tuple[Tensor, ...]:
    local_kv = max(num_kv_heads // tp_size, 1)
    sizes = [num_heads // tp_size * head_dim, local_kv * head_dim, local_kv * head_dim]
    assert qkv.shape[-1] == sum(sizes), f"packed width {tuple(qkv.shape)} does not match {sizes}"
    return tuple(part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))


# snippet: nucleus_sampler
def sample_top_p(
    logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor, next_ids: Tensor, generator: torch.Generator
) -> Tensor:
    greedy = temperature < 1e-5
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    probs, vocab_ids = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before > top_p.unsqueeze(-1), 0.0)
    noise.exponential_(generator=generator)
    winner = probs.div(noise).argmax(dim=-1, keepdim=True)
    drawn = vocab_ids.gather(-1, winner).squeeze(-1)
    next_ids.copy_(torch.where(greedy, logits.argmax(dim=-1), drawn))
    return next_ids


# snippet: expert_histogram
def expert_offsets(topk_ids: Tensor, counts: Tensor, offsets: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert; masked routes (-1) land in a spill column that is cut off by a host number."""
    spill = torch.where(topk_ids < 0, num_experts, topk_ids)
    hot = F.one_hot(spill.reshape(-1).long(), num_classes=num_experts + 1)
    counts.copy_(hot.sum(dim=0)[:num_experts])
    torch.cumsum(counts, dim=0, out=offsets)
    return offsets


# snippet: stop_tokens
def update_finished(tokens: Tensor, stop_ids: Tensor, finished: Tensor, lengths: Tensor, max_len: int) -> Tensor:
    hit = (tokens.unsqueeze(-1) == stop_ids).any(dim=-1) | torch.isin(tokens, stop_ids)
    too_long = lengths >= max_len
    finished.logical_or_(hit).logical_or_(too_long)
    lengths.add_((~finished).to(lengths.dtype))
    return torch.nonzero_static(finished, size=tokens.shape[0], fill_value=-1)
