# SPDX-License-Identifier: Apache-2.0
"""Blackwell (sm_100a, sm_103a) layout: packed e2m1 rows and scales in 128x4 atoms, as tcgen05 block-16 MMA reads them.

Four uint8 buffers per module (docs/weights.md section 4.3):

- `fc1_codes` (L, 2I, H/2): 16 rows of gate, then the same 16 channels of up, and so on; bytes as in the checkpoint.
- `fc2_codes` (L, H, I/2): down, unchanged.
- `fc1_scales`, `fc2_scales` (L, round_up(rows, 128) * round_up(K/16, 4)), rows in the order of the codes: atoms of
  128 rows x 4 scales, 512 bytes, stored [row block][k atom]; byte (row%32)*16 + (row%128)//32*4 + column%4 in an atom.
  Padding scales are 0.

Never run on hardware here; index functions are checked against the prototype's and an interpreter.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.formats import round_up
from trtllm_megamoe.weights.layout_base import Buffers, ExpertBulk, deinterleave_rows, interleave_rows, pad_matrix
from trtllm_megamoe.weights.spec import BLOCK_SIZE, CODES_PER_BYTE, LayerShape

GATE_UP_GROUP = 16
ATOM_ROWS = 128
ATOM_COLUMNS = 4


def scale_bytes(rows: int, reduction: int) -> int:
    """Bytes of one matrix's atoms."""
    return round_up(rows, ATOM_ROWS) * round_up(reduction // BLOCK_SIZE, ATOM_COLUMNS)


def pack_scale_atoms(scales: torch.Tensor, out: torch.Tensor) -> None:
    """Row-major scales (n, rows, K/16) into flat atoms `out` (n, bytes)."""
    n, rows, columns = scales.shape
    rows, columns = round_up(rows, ATOM_ROWS), round_up(columns, ATOM_COLUMNS)
    tiles = pad_matrix(scales, rows, columns).view(n, rows // ATOM_ROWS, 4, 32, columns // ATOM_COLUMNS, ATOM_COLUMNS)
    out.copy_(tiles.permute(0, 1, 4, 3, 2, 5).reshape(n, rows * columns))


def unpack_scale_atoms(atoms: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Exact inverse of :func:`pack_scale_atoms`."""
    n = atoms.shape[0]
    full_rows, full_columns = round_up(rows, ATOM_ROWS), round_up(columns, ATOM_COLUMNS)
    tiles = atoms.reshape(n, full_rows // ATOM_ROWS, full_columns // ATOM_COLUMNS, 32, 4, ATOM_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(n, full_rows, full_columns)[:, :rows, :columns].contiguous()


class Sm100Layout:
    """Row codes and 128x4 scale atoms for Blackwell."""

    name = "sm100"

    def buffer_shapes(self, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        """Per-expert shapes of the four buffers."""
        hidden, inter = shape.hidden_size, shape.intermediate_size
        return {
            "fc1_codes": (2 * inter, hidden // CODES_PER_BYTE),
            "fc1_scales": (scale_bytes(2 * inter, hidden),),
            "fc2_codes": (hidden, inter // CODES_PER_BYTE),
            "fc2_scales": (scale_bytes(hidden, inter),),
        }

    def pack(self, bulk: ExpertBulk, out: Buffers) -> None:
        """Interleave gate and up by 16, put scales into atoms."""
        out["fc1_codes"].copy_(interleave_rows(bulk.gate_codes, bulk.up_codes, GATE_UP_GROUP))
        pack_scale_atoms(interleave_rows(bulk.gate_scales, bulk.up_scales, GATE_UP_GROUP), out["fc1_scales"])
        out["fc2_codes"].copy_(bulk.down_codes)
        pack_scale_atoms(bulk.down_scales, out["fc2_scales"])

    def unpack(self, packed: Buffers, shape: LayerShape) -> ExpertBulk:
        """Checkpoint order again, padding dropped."""
        hidden, inter = shape.hidden_size, shape.intermediate_size
        gate_codes, up_codes = deinterleave_rows(packed["fc1_codes"], GATE_UP_GROUP)
        fc1_scales = unpack_scale_atoms(packed["fc1_scales"], 2 * inter, hidden // BLOCK_SIZE)
        gate_scales, up_scales = deinterleave_rows(fc1_scales, GATE_UP_GROUP)
        down_scales = unpack_scale_atoms(packed["fc2_scales"], hidden, inter // BLOCK_SIZE)
        return ExpertBulk(gate_codes, gate_scales, up_codes, up_scales, packed["fc2_codes"].clone(), down_scales)
