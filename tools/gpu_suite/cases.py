# SPDX-License-Identifier: Apache-2.0
"""Inputs of the suite: random checkpoint tensors on the GPU, heavy-tailed tokens, routings of exact counts."""

from __future__ import annotations

import torch

from vendored_kernels.sm90.config import LayerSpec

Tensors = dict[str, torch.Tensor]
DEVICE = "cuda"


def generator(seed: int) -> torch.Generator:
    """A seeded generator on the GPU."""
    return torch.Generator(DEVICE).manual_seed(seed)


def random_tensors(spec: LayerSpec, seed: int, *, input_scales: bool = True) -> Tensors:
    """Canonical tensors of all experts: random codes, log-normal block scales, empty blocks, unequal globals."""
    g = generator(seed)
    h, i = spec.hidden_size, spec.intermediate_size
    tensors: Tensors = {}
    for e in range(spec.num_experts):
        for k, (w, rows, columns) in enumerate((("w1", i, h), ("w3", i, h), ("w2", h, i))):
            tensors[f"{e}.{w}.weight"] = torch.randint(
                0, 256, (rows, columns // 2), generator=g, device=DEVICE, dtype=torch.uint8
            )
            scales = torch.exp2(torch.randn(rows, columns // 16, generator=g, device=DEVICE) * 1.5 + 2).clamp(max=448)
            scales.view(-1)[(e + k) % 61 :: 61] = 0
            tensors[f"{e}.{w}.weight_scale"] = scales.to(torch.float8_e4m3fn).view(torch.uint8)
            unit = 1.0 / (2.93 * 7.0 * columns**0.5)
            tensors[f"{e}.{w}.weight_scale_2"] = torch.tensor(unit * (0.6 + 0.13 * ((3 * e + 5 * k) % 7)))
            if input_scales:
                amax = 12.0 if w != "w2" else 20.0
                tensors[f"{e}.{w}.input_scale"] = torch.tensor(amax / 2688 * (0.5 + 0.07 * ((5 * e + 2 * k) % 8)))
    return tensors


def tokens(spec: LayerSpec, count: int, seed: int) -> torch.Tensor:
    """(T, H) bf16, heavy tails, rows of unequal size, one zero row, one row with tiny and huge values."""
    g = generator(seed)
    x = torch.randn(count, spec.hidden_size, generator=g, device=DEVICE)
    x *= torch.exp(0.5 * torch.randn(count, spec.hidden_size, generator=g, device=DEVICE))
    x *= torch.exp2(2 * torch.rand(count, 1, generator=g, device=DEVICE) - 1)
    if count > 3:
        x[1] = 0
        x[2, ::7] *= 2.0**-20
        x[3, 5] = 300.0
    return x.to(torch.bfloat16)


def weights(spec: LayerSpec, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """(T, K) fp32 routing weights; NaN where the route is masked, so that reading one shows."""
    w = torch.softmax(torch.randn(ids.shape, generator=generator(seed), device=DEVICE), dim=1) * 1.7
    masked = (ids < 0) | (ids >= spec.num_experts)
    return torch.where(masked, torch.full_like(w, float("nan")), w).contiguous()


def ids_from_counts(counts: list[int], top_k: int, seed: int) -> torch.Tensor:
    """(T, K) int64: exactly counts[e] routes of expert e in random places, spare slots -1 or far out of range."""
    total = sum(counts)
    count = max(-(-total // top_k), 1)
    flat = torch.full((count * top_k,), -1, dtype=torch.int64)
    flat[total::2] = 1 << 40
    flat[:total] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(count * top_k, generator=torch.Generator().manual_seed(seed))
    flat = torch.where(flat >= len(counts), torch.full_like(flat, -1), flat) if seed % 2 else flat
    return flat[order].view(count, top_k).to(DEVICE)


def zipf_counts(experts: int, mean: int, seed: int = 3) -> list[int]:
    """Rows per expert proportional to 1/rank, in a shuffled order."""
    share = [1.0 / (i + 1) for i in range(experts)]
    counts = [int(s / sum(share) * mean * experts) for s in share]
    for i in range(mean * experts - sum(counts)):
        counts[i % experts] += 1
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
    return [counts[i] for i in order]


def uniform_ids(experts: int, top_k: int, rows: int) -> torch.Tensor:
    """Exactly `rows` per expert: consecutive experts over the slots."""
    count = -(-experts * rows // top_k)
    flat = torch.full((count * top_k,), -1, dtype=torch.int64)
    flat[: experts * rows] = torch.arange(experts * rows) % experts
    rowwise = flat.view(count, top_k)
    return rowwise[torch.randperm(count, generator=torch.Generator().manual_seed(7))].contiguous().to(DEVICE)


def random_ids(experts: int, top_k: int, rows: int, seed: int = 5) -> torch.Tensor:
    """Distinct experts per token, equally likely: binomial counts with mean `rows`."""
    count = max(experts * rows // top_k, 1)
    g = torch.Generator().manual_seed(seed)
    return torch.rand(count, experts, generator=g).topk(top_k, dim=1).indices.contiguous().to(DEVICE)
