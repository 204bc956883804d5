# SPDX-License-Identifier: Apache-2.0
"""What a target layout is: pure pack and unpack functions over a few experts, plus the shapes of the packed buffers.

The modules `layout_reference`, `layout_sm90` and `layout_sm100` each hold one; `layouts` drives them expert chunk by
expert chunk. Global scales are not part of a layout: they stay separate tensors in every one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from trtllm_megamoe.weights.spec import Component, LayerShape, Projection

Buffers = dict[str, torch.Tensor]
"""Packed uint8 tensors by name; dimension 0 counts experts."""


class ExpertBulk(NamedTuple):
    """Codes and block scales of n experts in checkpoint order, uint8 (shapes as in :class:`ExpertWeights`)."""

    gate_codes: torch.Tensor
    gate_scales: torch.Tensor
    up_codes: torch.Tensor
    up_scales: torch.Tensor
    down_codes: torch.Tensor
    down_scales: torch.Tensor

    def experts(self, start: int, stop: int) -> ExpertBulk:
        """Views of experts [start, stop)."""
        return ExpertBulk(*(tensor[start:stop] for tensor in self))

    def to(self, device: torch.device) -> ExpertBulk:
        """The same on a device; no copy where it is there already."""
        return ExpertBulk(*(tensor.to(device) for tensor in self))


class Layout(Protocol):
    """One target layout. Packing and unpacking are exact inverses on legal bytes, on any device."""

    name: str

    def buffer_shapes(self, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        """Per-expert shape of every packed uint8 buffer."""

    def pack(self, bulk: ExpertBulk, out: Buffers) -> None:
        """Write n experts into n-expert slices of the packed buffers; every byte of `out` is written."""

    def unpack(self, packed: Buffers, shape: LayerShape) -> ExpertBulk:
        """Recover checkpoint order from packed buffers of n experts."""


BULK_FIELDS: dict[str, tuple[Projection, Component]] = {
    "gate_codes": (Projection.GATE, Component.CODES),
    "gate_scales": (Projection.GATE, Component.BLOCK_SCALES),
    "up_codes": (Projection.UP, Component.CODES),
    "up_scales": (Projection.UP, Component.BLOCK_SCALES),
    "down_codes": (Projection.DOWN, Component.CODES),
    "down_scales": (Projection.DOWN, Component.BLOCK_SCALES),
}
"""Field of :class:`ExpertBulk` -> what it holds."""


def interleave_rows(gate: torch.Tensor, up: torch.Tensor, group: int) -> torch.Tensor:
    """(n, I, c) twice -> (n, 2I, c): `group` rows of gate, then the same rows of up, and so on."""
    n, rows, columns = gate.shape
    pair = torch.stack(
        (gate.reshape(n, rows // group, group, columns), up.reshape(n, rows // group, group, columns)), 2
    )
    return pair.reshape(n, 2 * rows, columns)


def deinterleave_rows(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`interleave_rows`."""
    n, count, columns = rows.shape
    pair = rows.reshape(n, count // (2 * group), 2, group, columns)
    half = (n, count // 2, columns)
    return pair[:, :, 0].reshape(half), pair[:, :, 1].reshape(half)


def pad_matrix(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zero-pad (n, r, c) at the end to (n, rows, columns); contiguous."""
    _, have_rows, have_columns = matrix.shape
    if (have_rows, have_columns) == (rows, columns):
        return matrix.contiguous()
    return torch.nn.functional.pad(matrix, (0, columns - have_columns, 0, rows - have_rows))
