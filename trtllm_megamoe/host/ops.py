# SPDX-License-Identifier: Apache-2.0
"""The one operator of the plug-in, in its own namespace: torch.compile sees a single opaque call per layer.

`trtllm_megamoe::moe_forward(x, topk_ids, topk_weights, max_tokens_over_ranks, layer) -> Tensor`; `layer` is a handle
from :func:`register_layer`, because an operator takes no Python objects. Its fake implementation only knows the shape.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.layer import MegaMoELayer

_layers: weakref.WeakValueDictionary[int, MegaMoELayer] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register_layer(layer: MegaMoELayer) -> int:
    """Handle of a layer; the table does not keep the layer alive."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def _forward(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens_over_ranks: int, layer: int
) -> torch.Tensor:
    found = _layers.get(layer)
    if found is None:
        raise MegaMoeStateError(f"MoE layer handle {layer} is gone; the model that owned it was released")
    device = found.device  # differs from x's only when the CPU engine checks results on a GPU machine
    out = found.forward(x.to(device), topk_ids.to(device), topk_weights.to(device), max_tokens_over_ranks or None)
    return out.to(x.device)


def _fake(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens_over_ranks: int, layer: int
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# The plain registration: the decorator of torch.library costs seconds of imports at the first call of every process.
_library = torch.library.Library("trtllm_megamoe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "moe_forward(Tensor x, Tensor topk_ids, Tensor topk_weights, int max_tokens_over_ranks, int layer) -> Tensor"
)
_library.impl("moe_forward", _forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("trtllm_megamoe::moe_forward", _fake, lib=_library)


def moe_forward(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens_over_ranks: int, layer: int
) -> torch.Tensor:
    """Run one layer; see `MegaMoELayer.forward`. `max_tokens_over_ranks` 0 means unknown."""
    out: torch.Tensor = torch.ops.trtllm_megamoe.moe_forward(x, topk_ids, topk_weights, max_tokens_over_ranks, layer)
    return out
