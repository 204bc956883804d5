# SPDX-License-Identifier: Apache-2.0
"""Synthetic NVFP4 weights and tokens: any expert alone, from (seed, expert), on any rank.

A rank makes its own experts plus the input scales of all; the check makes the experts it needs. Codes and scales are
drawn directly and where they are used, on the GPU for the CUDA engine, so a full-size layer costs neither quantisation
nor a copy. Heavy-tailed block scales, unequal global and input scales:
an engine that swaps, averages or drops one of them is caught.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from microbench.cases import Case
from microbench.seeds import stream
from trtllm_megamoe.weights.spec import Component, LayerShape, Projection, TensorKey

_CPU = torch.device("cpu")
_E2M1_RMS = math.sqrt(8.5625)  # of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, equally likely
_SCALE_LOG2_MEAN, _SCALE_LOG2_SD = 4.0, 1.5  # block scales are log-normal, cut at e4m3's largest
_BLOCK_SCALE_RMS = 2.0**_SCALE_LOG2_MEAN * math.exp((_SCALE_LOG2_SD * math.log(2)) ** 2)  # of the uncut log-normal
_E4M3_MAX = 448.0
_NVFP4_MAX = 6 * _E4M3_MAX
_TOKEN_AMAX = 32.0  # calibrated range: tokens beyond it saturate, as real ones do
_FC1_OUT_AMAX = 64.0
_SPREAD_LOG2 = 1.0  # global scales lie within a factor 2 up and down, input scales within a factor 4 below the largest


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def expert_scalars(case: Case, seed: int, expert: int) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    """`weight_scale_2` and `input_scale` of one expert's three projections, float32 scalars.

    Global scales make unit tokens give gate and up of order one; gate and up differ.
    """
    generator = stream("scalars", seed, expert)
    for projection in Projection:
        reduction = case.intermediate_size if projection is Projection.DOWN else case.hidden_size
        amax = _FC1_OUT_AMAX if projection is Projection.DOWN else _TOKEN_AMAX
        unit = 1.0 / (_E2M1_RMS * _BLOCK_SCALE_RMS * math.sqrt(reduction))
        global_scale = unit * 2.0 ** _uniform(generator, -_SPREAD_LOG2, _SPREAD_LOG2)
        input_scale = amax / _NVFP4_MAX * 2.0 ** _uniform(generator, -2 * _SPREAD_LOG2, 0.0)
        yield TensorKey(expert, projection, Component.GLOBAL_SCALE), torch.tensor(global_scale, dtype=torch.float32)
        yield TensorKey(expert, projection, Component.INPUT_SCALE), torch.tensor(input_scale, dtype=torch.float32)


def expert_bulk(
    case: Case, seed: int, expert: int, device: torch.device = _CPU
) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    """Codes (uint8, two a byte) and block scales (float8_e4m3fn) of one expert's three projections."""
    shape = LayerShape(case.hidden_size, case.intermediate_size, case.num_experts, case.top_k)
    for projection in Projection:
        generator = stream("bulk", seed, expert, projection.value, device=device)
        codes = torch.empty(shape.tensor_shape(projection, Component.CODES), dtype=torch.uint8, device=device)
        yield TensorKey(expert, projection, Component.CODES), codes.random_(0, 256, generator=generator)
        scales = torch.randn(shape.tensor_shape(projection, Component.BLOCK_SCALES), generator=generator, device=device)
        scales = torch.exp2(scales.mul_(_SCALE_LOG2_SD).add_(_SCALE_LOG2_MEAN)).clamp_(max=_E4M3_MAX)
        scales.view(-1)[expert % 97 :: 97] = 0.0  # blocks that calibration found empty
        yield TensorKey(expert, projection, Component.BLOCK_SCALES), scales.to(torch.float8_e4m3fn)


def tokens(
    case: Case, num_tokens: int, *, seed: int, step: int, rank: int, device: torch.device = _CPU
) -> torch.Tensor:
    """Heavy-tailed activations (T, H) bf16, RMS about 1.7, rows of unequal size; every rank has its own stream."""
    generator = stream("tokens", seed, step, rank, device=device)
    x = torch.randn((num_tokens, case.hidden_size), generator=generator, device=device)
    x *= torch.exp(0.5 * torch.randn((num_tokens, case.hidden_size), generator=generator, device=device))
    x *= torch.exp2(torch.rand((num_tokens, 1), generator=generator, device=device) - 0.5)
    return x.to(torch.bfloat16)
