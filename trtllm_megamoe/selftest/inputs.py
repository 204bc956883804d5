# SPDX-License-Identifier: Apache-2.0
"""Inputs of the self-test and of the GPU suite: random checkpoint tensors, heavy-tailed tokens, named routings.

A shape is anything with `hidden_size`, `intermediate_size`, `num_experts` and `top_k`. Draws come from seeds alone; a
seed gives the same numbers on every machine where `device` is the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Tensors = dict[str, torch.Tensor]
DEVICE = "cuda"
"""Default: where the GPU suite wants its inputs."""

EDGE_COUNTS = (0, 1, 7, 8, 16, 63, 64, 65, 128, 129, 600, 1024)
"""Rows of an expert around every width of a token tile."""

SHORT_EDGE_COUNTS = (0, 1, 7, 8, 16, 33, 64, 65, 130)

RANK_ROUTINGS = ("random", "hot-expert", "hot-rank", "own-rank", "masked", "all-masked", "duplicates", "zipf")
"""Names for :func:`rank_ids`."""


class Shape(Protocol):
    """What a layer's inputs depend on; `num_experts` are those of all ranks."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def intermediate_size(self) -> int:
        """I."""

    @property
    def num_experts(self) -> int:
        """E."""

    @property
    def top_k(self) -> int:
        """K."""


def generator(seed: int, device: str = DEVICE) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator(device).manual_seed(seed)


def random_tensors(shape: Shape, seed: int, *, input_scales: bool = True, device: str = DEVICE) -> Tensors:
    """Canonical tensors of all experts: random codes, log-normal block scales, empty blocks, unequal globals."""
    g = generator(seed, device)
    h, i = shape.hidden_size, shape.intermediate_size
    tensors: Tensors = {}
    for e in range(shape.num_experts):
        for k, (w, rows, columns) in enumerate((("w1", i, h), ("w3", i, h), ("w2", h, i))):
            tensors[f"{e}.{w}.weight"] = torch.randint(
                0, 256, (rows, columns // 2), generator=g, device=device, dtype=torch.uint8
            )
            scales = torch.exp2(torch.randn(rows, columns // 16, generator=g, device=device) * 1.5 + 2).clamp(max=448)
            scales.view(-1)[(e + k) % 61 :: 61] = 0
            tensors[f"{e}.{w}.weight_scale"] = scales.to(torch.float8_e4m3fn).view(torch.uint8)
            unit = 1.0 / (2.93 * 7.0 * columns**0.5)
            tensors[f"{e}.{w}.weight_scale_2"] = torch.tensor(unit * (0.6 + 0.13 * ((3 * e + 5 * k) % 7)))
            if input_scales:
                amax = 12.0 if w != "w2" else 20.0
                tensors[f"{e}.{w}.input_scale"] = torch.tensor(amax / 2688 * (0.5 + 0.07 * ((5 * e + 2 * k) % 8)))
    return tensors


def tokens(shape: Shape, count: int, seed: int, device: str = DEVICE) -> torch.Tensor:
    """(T, H) bf16, heavy tails, rows of unequal size, one zero row, one row with tiny and huge values."""
    g = generator(seed, device)
    x = torch.randn(count, shape.hidden_size, generator=g, device=device)
    x *= torch.exp(0.5 * torch.randn(count, shape.hidden_size, generator=g, device=device))
    x *= torch.exp2(2 * torch.rand(count, 1, generator=g, device=device) - 1)
    if count > 3:
        x[1] = 0
        x[2, ::7] *= 2.0**-20
        x[3, 5] = 300.0
    return x.to(torch.bfloat16)


def weights(shape: Shape, ids: torch.Tensor, seed: int) -> torch.Tensor:
    """(T, K) fp32 routing weights; NaN where the route is masked, so that reading one shows."""
    w = torch.softmax(torch.randn(ids.shape, generator=generator(seed, ids.device.type), device=ids.device), dim=1)
    masked = (ids < 0) | (ids >= shape.num_experts)
    return torch.where(masked, torch.full_like(w, float("nan")), w * 1.7).contiguous()


def ids_from_counts(counts: Sequence[int], top_k: int, seed: int, device: str = DEVICE) -> torch.Tensor:
    """(T, K) int64: exactly counts[e] routes of expert e in random places, spare slots -1 or far out of range."""
    total = sum(counts)
    count = max(-(-total // top_k), 1)
    flat = torch.full((count * top_k,), -1, dtype=torch.int64)
    flat[total::2] = 1 << 40
    flat[:total] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(count * top_k, generator=torch.Generator().manual_seed(seed))
    flat = torch.where(flat >= len(counts), torch.full_like(flat, -1), flat) if seed % 2 else flat
    return flat[order].view(count, top_k).to(device)


def zipf_counts(experts: int, mean: int, seed: int = 3) -> list[int]:
    """Rows per expert proportional to 1/rank, in a shuffled order."""
    share = [1.0 / (i + 1) for i in range(experts)]
    counts = [int(s / sum(share) * mean * experts) for s in share]
    for i in range(mean * experts - sum(counts)):
        counts[i % experts] += 1
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
    return [counts[i] for i in order]


def uniform_ids(experts: int, top_k: int, rows: int, device: str = DEVICE) -> torch.Tensor:
    """Exactly `rows` per expert: consecutive experts over the slots."""
    count = -(-experts * rows // top_k)
    flat = torch.full((count * top_k,), -1, dtype=torch.int64)
    flat[: experts * rows] = torch.arange(experts * rows) % experts
    rowwise = flat.view(count, top_k)
    return rowwise[torch.randperm(count, generator=torch.Generator().manual_seed(7))].contiguous().to(device)


def random_ids(experts: int, top_k: int, rows: int, seed: int = 5, device: str = DEVICE) -> torch.Tensor:
    """Distinct experts per token, equally likely: binomial counts with mean `rows`."""
    count = max(experts * rows // top_k, 1)
    g = torch.Generator().manual_seed(seed)
    return torch.rand(count, experts, generator=g).topk(top_k, dim=1).indices.contiguous().to(device)


def named_ids(name: str, shape: Shape, seed: int, device: str = DEVICE) -> torch.Tensor:
    """(T, K) int64 ids of a named routing; the name fixes the rows of the experts, and so T."""
    e, k = shape.num_experts, shape.top_k
    if name == "edge":
        return ids_from_counts((EDGE_COUNTS * 4)[:e], k, seed, device)
    if name == "edge-short":
        return ids_from_counts((SHORT_EDGE_COUNTS * 30)[:e], k, seed, device)
    if name == "balanced":
        return random_ids(e, k, 40, seed, device)
    if name == "zipf":
        return ids_from_counts(zipf_counts(e, 64), k, seed, device)
    if name == "hot":
        return ids_from_counts([300 if i == e // 2 else 0 for i in range(e)], k, seed, device)
    if name == "masked":
        ids = random_ids(e, k, 20, seed, device)
        drop = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.3
        return torch.where(drop.to(ids.device), torch.full_like(ids, e + 7), ids)
    if name == "all-masked":
        return torch.full((9, k), -1, dtype=torch.int64, device=device)
    if name == "none":
        return torch.empty((0, k), dtype=torch.int64, device=device)
    if name == "duplicates":
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(0, e, (20, 1), generator=rng).expand(20, k).contiguous().to(device)
    raise ValueError(name)


def rank_ids(
    shape: Shape, ep_size: int, rank: int, count: int, name: str, seed: int, device: str = DEVICE
) -> torch.Tensor:
    """(T, K) int64 ids of one of `ep_size` ranks with T = `count`; `name` is one of `RANK_ROUTINGS`."""
    rng = torch.Generator().manual_seed(1000 * seed + rank)
    experts, size = shape.num_experts, (count, shape.top_k)
    local = experts // ep_size
    if name == "hot-expert":
        ids = torch.full(size, seed % experts)
    elif name == "hot-rank":
        ids = torch.randint(0, local, size, generator=rng) + (seed % ep_size) * local
    elif name == "own-rank":
        ids = torch.randint(0, local, size, generator=rng) + rank * local
    elif name == "all-masked":
        ids = torch.full(size, -1)
    elif name == "duplicates":
        ids = torch.randint(0, experts, (count, 1), generator=rng).expand(size)
    elif name == "zipf":
        uniform = torch.rand(size, generator=rng).clamp_min(1e-9)
        ids = (-torch.log(uniform) / 0.4).long().clamp(max=experts - 1)
    elif name in ("random", "masked"):
        ids = torch.randint(0, experts, size, generator=rng)
    else:
        raise ValueError(name)
    if name == "masked":
        drop = torch.rand(size, generator=rng)
        ids = torch.where(drop < 0.15, -1, torch.where(drop < 0.3, experts + 5, ids))
    return ids.contiguous().to(device)
