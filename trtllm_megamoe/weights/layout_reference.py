# SPDX-License-Identifier: Apache-2.0
"""The reference layout: checkpoint order, byte for byte; what the CPU engine and :class:`ExpertWeights` use."""

from __future__ import annotations

from trtllm_megamoe.weights.layout_base import BULK_FIELDS, Buffers, ExpertBulk
from trtllm_megamoe.weights.spec import LayerShape


class ReferenceLayout:
    """Six buffers named like the fields of :class:`ExpertBulk`; packing is a copy."""

    name = "reference"

    def buffer_shapes(self, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        """Per-expert shapes of the six buffers."""
        return {field: shape.tensor_shape(*what) for field, what in BULK_FIELDS.items()}

    def pack(self, bulk: ExpertBulk, out: Buffers) -> None:
        """Copy each field."""
        for field, tensor in bulk._asdict().items():
            out[field].copy_(tensor)

    def unpack(self, packed: Buffers, shape: LayerShape) -> ExpertBulk:
        """The buffers themselves (no copy)."""
        return ExpertBulk(**packed)
