# SPDX-License-Identifier: Apache-2.0
"""Choose a target layout and pack one module expert chunk by expert chunk, so that the transient stays small.

Called by the lifecycle and by engines that receive :class:`ExpertWeights`. Pure: nothing is kept between calls.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.weights.experts import ExpertWeights
from trtllm_megamoe.weights.feed import ExpertFeed
from trtllm_megamoe.weights.host_memory import host_bytes
from trtllm_megamoe.weights.layout_base import Buffers, ExpertBulk, Layout
from trtllm_megamoe.weights.layout_reference import ReferenceLayout
from trtllm_megamoe.weights.layout_sm90 import Sm90Layout
from trtllm_megamoe.weights.layout_sm100 import Sm100Layout
from trtllm_megamoe.weights.spec import LayerShape
from trtllm_megamoe.weights.staging import ExpertStaging

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (ReferenceLayout(), Sm90Layout(), Sm100Layout())}

CHUNK_BYTES = 64 << 20
"""Source bytes packed at a time; at least one expert. The transient of a chunk is `TRANSIENT_FACTOR` times this."""


def get_layout(name: str) -> Layout:
    """Look a layout up by name; an unknown name is an error that lists the known ones."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise MegaMoeConfigError(f"weight layout {name!r} is unknown; allowed: {', '.join(LAYOUTS)}") from None


def experts_per_chunk(shape: LayerShape, chunk_bytes: int = CHUNK_BYTES) -> int:
    """How many experts one packing step takes."""
    return max(1, chunk_bytes // shape.expert_bytes)


def allocate_packed(layout: Layout, shape: LayerShape, num_experts: int, device: torch.device) -> Buffers:
    """Uninitialised packed buffers of a whole module."""
    sizes = {name: (num_experts, *size) for name, size in layout.buffer_shapes(shape).items()}
    if device.type == "cpu":
        return {name: host_bytes(size) for name, size in sizes.items()}
    return {name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}


def pack_bulk(
    layout: Layout, bulk: ExpertBulk, shape: LayerShape, out: Buffers, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Pack all experts of `bulk` (any device) into `out`, a chunk at a time on `out`'s device."""
    step = experts_per_chunk(shape, chunk_bytes)
    device = next(iter(out.values())).device
    for start in range(0, bulk.gate_codes.shape[0], step):
        chunk = bulk.experts(start, start + step).to(device)
        layout.pack(chunk, {name: tensor[start : start + step] for name, tensor in out.items()})


def expert_rows(buffers: Buffers, num_experts: int) -> list[Buffers]:
    """Views of packed buffers, one set per expert with dimension 0 of length one."""
    return [{name: tensor[row : row + 1] for name, tensor in buffers.items()} for row in range(num_experts)]


def pack_staged(
    layout: Layout, staging: ExpertStaging, device: torch.device, out: list[Buffers] | None
) -> list[Buffers]:
    """Pack a complete staging expert by expert, freeing each expert's sources behind it.

    Args:
        layout: target layout.
        staging: complete sources; empty afterwards.
        device: where packing runs; it needs one expert's sources and that expert's transient there.
        out: one set of buffers per local expert to write to; None allocates each set when its turn comes, so that
            memory moves from sources to packed expert by expert.

    Returns:
        The sets written.
    """
    packed: list[Buffers] = []
    feed = ExpertFeed(device)
    for row, expert in enumerate(staging.spec.local_experts):
        bulk = feed.put(staging.take_expert(expert))
        if out is None and isinstance(layout, ReferenceLayout):
            packed.append(bulk._asdict())  # checkpoint order already
            continue
        target = allocate_packed(layout, staging.spec.shape, 1, device) if out is None else out[row]
        layout.pack(bulk, target)
        packed.append(target)
    return packed


def bulk_of(weights: ExpertWeights) -> ExpertBulk:
    """The bulk tensors of a reference-layout module, not copied."""
    return ExpertBulk(*(getattr(weights, field) for field in ExpertBulk._fields))


def shape_of(weights: ExpertWeights, num_experts: int, top_k: int) -> LayerShape:
    """Layer shape from a module's own tensors plus the two facts they do not carry."""
    _, intermediate_size, row_bytes = weights.gate_codes.shape
    return LayerShape(2 * row_bytes, intermediate_size, num_experts, top_k)


def pack_weights(layout_name: str, weights: ExpertWeights, device: torch.device | str = "cpu") -> Buffers:
    """Pack one rank's experts for an engine.

    Args:
        layout_name: `reference`, `sm90` or `sm100`.
        weights: one rank's experts in the reference layout.
        device: where the packed buffers go.

    Returns:
        uint8 tensors by name, dimension 0 counting local experts.
    """
    layout = get_layout(layout_name)
    shape = shape_of(weights, weights.num_local_experts, 1)
    out = allocate_packed(layout, shape, weights.num_local_experts, torch.device(device))
    pack_bulk(layout, bulk_of(weights), shape, out)
    return out
