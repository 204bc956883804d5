# SPDX-License-Identifier: Apache-2.0
"""What a layer is given while tactics are measured: random weights that cost nothing to make, tokens and routes.

Times do not depend on which expert holds which bytes, so one expert is drawn and handed out under every name. Used by
the `tune` command; results are thrown away, so no arithmetic is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.weights.spec import Component, LayerShape, Projection, TensorKey

_UNIT_SCALE = 2.0**-9
"""Global scale that keeps rows of a few thousand products near one, far from every saturation."""


def random_weights(config: MegaMoeConfig, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors of all E experts: random codes, block scales between 0.25 and 4."""
    shape = LayerShape(config.hidden_size, config.intermediate_size, config.num_experts, config.top_k)
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[tuple[Projection, Component], torch.Tensor] = {}
    for projection in Projection:
        codes = torch.empty(shape.tensor_shape(projection, Component.CODES), dtype=torch.uint8)
        drawn[projection, Component.CODES] = codes.random_(0, 256, generator=generator)
        exponents = torch.rand(shape.tensor_shape(projection, Component.BLOCK_SCALES), generator=generator)
        scales = torch.exp2(exponents.mul_(4.0).sub_(2.0)).to(torch.float8_e4m3fn)
        drawn[projection, Component.BLOCK_SCALES] = scales
        drawn[projection, Component.GLOBAL_SCALE] = torch.tensor(_UNIT_SCALE)
        drawn[projection, Component.INPUT_SCALE] = torch.tensor(_UNIT_SCALE)
    for expert in range(config.num_experts):
        for (projection, component), tensor in drawn.items():
            yield TensorKey(expert, projection, component).name, tensor


def random_step(
    config: MegaMoeConfig, num_tokens: int, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (T, H) bf16, topk_ids (T, K) int32, topk_weights (T, K) float32: distinct experts, all equally likely."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(num_tokens, config.hidden_size, generator=generator).to(torch.bfloat16)
    likes = torch.rand(num_tokens, config.num_experts, generator=generator)
    ids = likes.topk(config.top_k, dim=1).indices.to(torch.int32)
    weights = torch.full((num_tokens, config.top_k), 1.0 / math.sqrt(config.top_k))
    return x.to(device), ids.to(device), weights.to(device)
