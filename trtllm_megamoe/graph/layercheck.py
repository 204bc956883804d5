# SPDX-License-Identifier: Apache-2.0
"""All three methods on real MoE layers: every bucket, several layers one after another over whatever they share.

Called by the GPU suite and by users who want to know before they capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.graph.dynamic.capture import check_capture
from trtllm_megamoe.graph.dynamic.step import StepUnderTest
from trtllm_megamoe.graph.dynamic.syncs import find_syncs
from trtllm_megamoe.graph.static.findings import Level
from trtllm_megamoe.graph.static.render import as_text
from trtllm_megamoe.graph.static.scan import scan_function


def layer_step(layers: Sequence[Any], num_tokens: int, device: torch.device) -> StepUnderTest:
    """A step that sends a bucket's tokens through the layers, one after another.

    Each round draws tokens, routing and the number of live rows anew (none at all included); idle rows are masked with
    id -1, some ids of live rows too.

    Args:
        layers: Objects with `config` (H, E, K) and `forward(x, topk_ids, topk_weights, max_tokens_over_ranks)`.
        num_tokens: T of the static buffers, which selects the bucket.
        device: Where the layers run.
    """
    if not layers:
        raise MegaMoeConfigError("no layers to check; give at least one")
    config = layers[0].config
    x = torch.zeros(num_tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    topk_ids = torch.zeros(num_tokens, config.top_k, dtype=torch.int32, device=device)
    topk_weights = torch.zeros(num_tokens, config.top_k, dtype=torch.float32, device=device)
    rounds = 0

    def draw(generator: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal rounds
        rounds += 1
        live = 0 if rounds == 1 else int(torch.randint(1, num_tokens + 1, (), generator=generator))
        tokens = torch.randn(x.shape, generator=generator).to(torch.bfloat16)
        ids = torch.randint(-1, config.num_experts, topk_ids.shape, generator=generator, dtype=torch.int32)
        ids[live:] = -1
        return {"x": tokens, "topk_ids": ids, "topk_weights": torch.rand(topk_weights.shape, generator=generator)}

    def run() -> torch.Tensor:
        y = x
        for layer in layers:
            y = layer.forward(y, topk_ids, topk_weights, max_tokens_over_ranks=num_tokens)
        return y

    inputs = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    step = StepUnderTest(run, inputs, new_inputs=draw, name=f"layers: {len(layers)}, tokens: {num_tokens}")
    first = draw(torch.Generator().manual_seed(1234))
    rounds = 0
    step.write(
        first
        | {"topk_ids": torch.arange(topk_ids.numel(), dtype=torch.int32).view(topk_ids.shape) % config.num_experts}
    )
    return step


def check_layers(
    layers: Sequence[Any],
    token_counts: Sequence[int],
    device: torch.device,
    hot_path: Sequence[Callable[..., Any]] = (),
) -> dict[str, Any]:
    """Static scan, sync-debug and capture under test of layers at every token count.

    Args:
        layers: See :func:`layer_step`; alone the first one, then all together.
        token_counts: One for each bucket.
        device: Where the layers run.
        hot_path: Functions for the static scan; default: the first layer's `forward`.
    """
    failures = []
    for function in hot_path or [type(layers[0]).forward]:
        scanned = scan_function(function)
        failures += [as_text(scanned)] if scanned.at_least(Level.ERROR) else []
    stacks = [layers[:1], layers] if len(layers) > 1 else [layers]
    steps = [layer_step(stack, count, device) for count in token_counts for stack in stacks]
    for step in steps:
        reports = (find_syncs(step, device=device), check_capture(step, rounds=4, device=device))
        failures += [report.as_text() for report in reports if not report.passed]
    return {"steps": [step.name for step in steps], "failures": failures, "passed": not failures}
