# SPDX-License-Identifier: Apache-2.0
"""Random NVFP4 layers, tokens and routings for tests and benchmarks of every engine.

Weights are drawn directly as codes and scales, so that a full-size layer costs no quantisation. All draws come from the
caller's `torch.Generator`: one seed gives one layer. This module knows no engine and no packing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

INT32_MAX = 2**31 - 1
_E2M1_RMS = 2.93  # root mean square of the sixteen e2m1 values
_AMAX_TO_GLOBAL = 1.0 / (6 * 448)


class RoutingKind(str, enum.Enum):
    """Named routings; each has a failure that the others do not show."""

    UNIFORM = "uniform"  # every expert gets the same number of routes, up to one
    RANDOM = "random"  # distinct experts per token, all equally likely
    ZIPF = "zipf"  # distinct experts per token, popularity 1 / rank
    HOT_EXPERT = "hot_expert"  # expert E-1 is in every token's row
    HOT_RANK = "hot_rank"  # all routes go to the last rank's experts: the worst case of the receive pool
    ALL_MASKED = "all_masked"  # nothing is live
    MASKED_30 = "masked_30"  # about 30 % of the slots carry -1, E, a huge or a very negative id
    DUPLICATES = "duplicates"  # a token may name one expert several times


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router hands to the layer: `topk_ids` (T, K) int64 and `topk_weights` (T, K) float32.

    Weights of masked slots are NaN: an engine that reads one shows it.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def seeded(seed: int) -> torch.Generator:
    """A CPU generator with this seed."""
    return torch.Generator().manual_seed(seed)


def heavy_tailed(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Student-t samples with three degrees of freedom, float32: outliers of 20 sigma are common."""
    normal = torch.randn(shape, generator=generator)
    chi2 = torch.randn((3, *shape), generator=generator).square().mean(dim=0)
    return normal / chi2.sqrt().clamp_min(0.02)


def make_tokens(generator: torch.Generator, num_tokens: int, hidden_size: int) -> torch.Tensor:
    """Heavy-tailed activations (T, H) bf16: rows differ up to 16x in magnitude, every eighth has a zero block."""
    x = heavy_tailed(generator, (num_tokens, hidden_size))
    x *= torch.exp2(4 * torch.rand((num_tokens, 1), generator=generator) - 3)
    x[::8, :16] = 0
    return x.to(torch.bfloat16)


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _make_projection(
    generator: torch.Generator, rows: int, columns: int, output_rms: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and the global scale under which unit inputs give outputs of about `output_rms`."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.exp2(1.5 * torch.randn((rows, columns // 16), generator=generator) + 4).clamp(2**-9, 448)
    scales.view(-1)[::97] = 0.0  # blocks that calibration found empty
    scales.view(-1)[5::101] = 448.0
    scales.view(-1)[7::103] = 2.0**-9  # smallest subnormal
    scales = scales.to(torch.float8_e4m3fn)
    rms = float(scales.float().square().mean().sqrt()) * _E2M1_RMS * columns**0.5
    return codes, scales, torch.tensor(output_rms / rms, dtype=torch.float32)


def make_layer_tensors(
    generator: torch.Generator,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    *,
    input_scales: bool = True,
    max_global_ratio: float = 10.0,
    input_scale_spread: float = 4.0,
) -> dict[str, torch.Tensor]:
    """One NVFP4 layer under canonical names `{e}.{w1|w2|w3}.{weight|weight_scale|weight_scale_2|input_scale}`.

    w1 is gate (I, H/2), w3 up (I, H/2), w2 down (H, I/2); `weight` uint8, `weight_scale` float8_e4m3fn with one value
    per 16, `weight_scale_2` and `input_scale` float32 scalars.

    Args:
        input_scales: False gives a weight-only checkpoint.
        max_global_ratio: gate's over up's magnitude lies log-uniformly within 1/ratio..ratio; 1 makes them alike.
        input_scale_spread: largest over smallest input scale that any two experts or projections may have; 1 gives
            one input scale for fc1 and one for fc2, as calibration tools often write.
    """
    tensors: dict[str, torch.Tensor] = {}
    log_ratio = torch.log2(torch.tensor(max_global_ratio)).item()
    log_spread = torch.log2(torch.tensor(input_scale_spread)).item()
    for expert in range(num_experts):
        skew = 2.0 ** (_uniform(generator, -log_ratio, log_ratio) / 2)
        for name, rows, columns, rms, input_amax in (
            ("w1", intermediate_size, hidden_size, skew, 16.0),
            ("w2", hidden_size, intermediate_size, 1.0, 8.0),
            ("w3", intermediate_size, hidden_size, 1.0 / skew, 16.0),
        ):
            codes, scales, global_scale = _make_projection(generator, rows, columns, rms)
            tensors[f"{expert}.{name}.weight"] = codes
            tensors[f"{expert}.{name}.weight_scale"] = scales
            tensors[f"{expert}.{name}.weight_scale_2"] = global_scale
            spread = 2.0 ** _uniform(generator, -log_spread, 0.0)
            if input_scales:
                tensors[f"{expert}.{name}.input_scale"] = torch.tensor(input_amax * spread * _AMAX_TO_GLOBAL)
    return tensors


def _draw_distinct(generator: torch.Generator, num_tokens: int, top_k: int, popularity: torch.Tensor) -> torch.Tensor:
    """`top_k` distinct experts a token, by popularity (Gumbel top-k)."""
    uniform = torch.rand((num_tokens, popularity.numel()), generator=generator).clamp(1e-9, 1 - 1e-7)
    return (popularity.log() - torch.log(-torch.log(uniform))).topk(top_k, dim=1).indices


def make_routing(
    generator: torch.Generator,
    kind: RoutingKind | str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    ep_size: int = 1,
) -> Routing:
    """Draw ids and weights; `ep_size` only says which experts the last rank of `HOT_RANK` owns.

    Weights are softmax values scaled by 2.5, spread over about three decades. `HOT_RANK` repeats experts in a row when
    the rank owns fewer than `top_k`; all kinds but this and `DUPLICATES` keep live ids of a row distinct.
    """
    kind = RoutingKind(kind)
    equal = torch.ones(num_experts)
    if kind is RoutingKind.UNIFORM:
        slots = torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts
        ids = torch.randperm(num_experts, generator=generator)[slots]
    elif kind is RoutingKind.ZIPF:
        order = torch.randperm(num_experts, generator=generator)
        ids = order[_draw_distinct(generator, num_tokens, top_k, 1.0 / torch.arange(1, num_experts + 1))]
    elif kind is RoutingKind.HOT_RANK:
        num_local = num_experts // ep_size
        order = torch.rand((num_tokens, num_local), generator=generator).argsort(dim=1)
        ids = num_experts - num_local + order[:, torch.arange(top_k) % num_local]
    elif kind is RoutingKind.DUPLICATES:
        ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
        ids[:, -1] = ids[:, 0]
    elif kind is RoutingKind.ALL_MASKED:
        ids = torch.full((num_tokens, top_k), -1, dtype=torch.int64)
    else:
        ids = _draw_distinct(generator, num_tokens, top_k, equal)
        if kind is RoutingKind.HOT_EXPERT:
            present = (ids == num_experts - 1).any(dim=1)
            ids[~present, 0] = num_experts - 1
        elif kind is RoutingKind.MASKED_30:
            strange = torch.tensor([-1, -1, num_experts, num_experts + 7, INT32_MAX, -INT32_MAX - 1])
            pick = strange[torch.randint(0, strange.numel(), ids.shape, generator=generator)]
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, pick, ids)
    weights = 2.5 * torch.softmax(2 * torch.randn(ids.shape, generator=generator), dim=1)
    weights[(ids < 0) | (ids >= num_experts)] = float("nan")
    return Routing(topk_ids=ids, topk_weights=weights)
