# SPDX-License-Identifier: Apache-2.0
"""Hopper (sm_90a) layout: contiguous records, one bulk copy each, with codes ready for register-A wgmma.

Two uint8 buffers per module: `fc1_records` (L, ceil(2I/128), ceil(H/128), 9216) and `fc2_records`
(L, ceil(H/128), ceil(I/128), 9216). One record is 128 matrix rows x 128 reduction values. Byte by byte
(also in docs/weights.md section 4.2; the kernel states the same on its own and shares no code):

- Matrix rows. fc1: row 2c is gate of channel c, row 2c+1 is up of channel c. fc2: row r is output r.
  Rows past the end and reduction values past the end hold code 0 and scale byte 0.
- Rows in a record: row = 64*tile + 16*warp + 2*g + side, tile 0..1, warp 0..3, g 0..7, side 0..1. It is physical
  row 16*warp + g + 8*side of m64 tile `tile` in the wgmma fragment, so g and g+8 are gate and up of one channel (fc1,
  for an in-thread SwiGLU) or two neighbouring outputs (fc2, for paired stores).
- Reduction in a record: k = 64*half + 16*j + 8*side_k + 2*t + e, half 0..1, j 0..3, side_k 0..1, t 0..3, e 0..1.
- Codes, bytes 0..8191: little-endian u32 words [tile][half][thread = 32*warp + 4*g + t][j]. One word q holds the
  8 codes (i, e) of that thread's m64k16 fragment, A register i = side + 2*side_k, f16 half e, in code layout 2:
      register i = f_i(q) & 0x8E008E00,  f_0 = q << 6, f_1 = q << 9, f_2 = q ^ (q >> 3), f_3 = q ^ (q << 2)
  and code bits s, e1, e0, m of half e lie at bits 15, 11, 10, 9 (+ 16 e): the f16 there is the value times 2^-14.
- Scales, bytes 8192..9215: e4m3 bytes [tile][warp][g][k16 = 4*half + j][side].

The map q -> codes is linear over GF(2) and invertible; packing applies its inverse through two tables of 65536 words.
"""

from __future__ import annotations

import functools

import torch

from trtllm_megamoe.formats import round_up
from trtllm_megamoe.weights.layout_base import Buffers, ExpertBulk, deinterleave_rows, interleave_rows, pad_matrix
from trtllm_megamoe.weights.spec import BLOCK_SIZE, CODES_PER_BYTE, LayerShape

RECORD_ROWS = 128
RECORD_K = 128
CODE_BYTES = RECORD_ROWS * RECORD_K // CODES_PER_BYTE
SCALE_BYTES = RECORD_ROWS * RECORD_K // BLOCK_SIZE
RECORD_BYTES = CODE_BYTES + SCALE_BYTES

_CODE_BIT_POSITIONS = (9, 10, 11, 15)  # m, e0, e1, s inside an f16 half


def decode_word(q: torch.Tensor) -> torch.Tensor:
    """int64 words q in [0, 2^32) -> int64 words whose nibble 2i+e is code (i, e) of layout 2."""
    registers = (q << 6, q << 9, q ^ (q >> 3), q ^ (q << 2))
    out = torch.zeros_like(q)
    for i, register in enumerate(registers):
        for e in range(2):
            for bit, position in enumerate(_CODE_BIT_POSITIONS):
                out |= ((register >> (16 * e + position)) & 1) << (4 * (2 * i + e) + bit)
    return out


@functools.cache
def _inverse_basis() -> tuple[int, ...]:
    """For each bit of a code word, the q whose codes have that bit alone (Gauss-Jordan over GF(2))."""
    images = decode_word(torch.ones(32, dtype=torch.int64) << torch.arange(32)).tolist()
    rows = [(image, 1 << bit) for bit, image in enumerate(images)]
    for bit in range(32):
        pivot = next(r for r in range(bit, 32) if rows[r][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        for r in range(32):
            if r != bit and rows[r][0] >> bit & 1:
                rows[r] = (rows[r][0] ^ rows[bit][0], rows[r][1] ^ rows[bit][1])
    return tuple(source for _, source in rows)


@functools.cache
def _encode_tables(device: torch.device) -> torch.Tensor:
    """int32 (2, 65536): q of the low and of the high half of a code word; q of a word is the xor of both."""
    basis = torch.tensor(_inverse_basis(), dtype=torch.int64).view(2, 16)
    tables = torch.zeros(2, 1, dtype=torch.int64)
    for bit in range(16):
        tables = torch.cat((tables, tables ^ basis[:, bit : bit + 1]), dim=1)
    return _to_int32(tables).to(device)


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    """Words in [0, 2^32) as the int32 with the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_records(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Pack matrices (n, rows, K/2) and (n, rows, K/16) into `out` (n, ceil(rows/128), ceil(K/128), 9216)."""
    n, row_blocks, k_blocks, _ = out.shape
    rows = row_blocks * RECORD_ROWS
    # (n, R, tile, warp, g, side, KT, half, j, side_k, t), one byte = codes e 0 and 1.
    source = pad_matrix(codes, rows, k_blocks * RECORD_K // CODES_PER_BYTE)
    source = source.view(n, row_blocks, 2, 4, 8, 2, k_blocks, 2, 4, 2, 4).permute(0, 1, 6, 2, 7, 3, 4, 10, 8, 9, 5)
    halves = source.contiguous().view(torch.int16).view(-1, 2).to(torch.int32).bitwise_and_(0xFFFF)
    del source
    tables = _encode_tables(out.device)
    words = tables[0].index_select(0, halves[:, 0])
    words ^= tables[1].index_select(0, halves[:, 1])
    del halves
    out[..., :CODE_BYTES] = words.view(torch.uint8).view(n, row_blocks, k_blocks, CODE_BYTES)
    del words
    scale_source = pad_matrix(scales, rows, k_blocks * RECORD_K // BLOCK_SIZE)
    scale_source = scale_source.view(n, row_blocks, 2, 4, 8, 2, k_blocks, 8).permute(0, 1, 6, 2, 3, 4, 7, 5)
    out[..., CODE_BYTES:] = scale_source.reshape(n, row_blocks, k_blocks, SCALE_BYTES)


def unpack_records(records: torch.Tensor, rows: int, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact inverse of :func:`pack_records`: codes (n, rows, K/2) and scales (n, rows, K/16)."""
    n, row_blocks, k_blocks, _ = records.shape
    words = records[..., :CODE_BYTES].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    source = _to_int32(decode_word(words)).contiguous().view(torch.uint8)
    source = source.view(n, row_blocks, k_blocks, 2, 2, 4, 8, 4, 4, 2, 2).permute(0, 1, 3, 5, 6, 10, 2, 4, 8, 9, 7)
    codes = source.reshape(n, row_blocks * RECORD_ROWS, k_blocks * RECORD_K // CODES_PER_BYTE)
    scales = records[..., CODE_BYTES:].reshape(n, row_blocks, k_blocks, 2, 4, 8, 8, 2).permute(0, 1, 3, 4, 5, 7, 2, 6)
    scales = scales.reshape(n, row_blocks * RECORD_ROWS, k_blocks * RECORD_K // BLOCK_SIZE)
    return (
        codes[:, :rows, : reduction // CODES_PER_BYTE].contiguous(),
        scales[:, :rows, : reduction // BLOCK_SIZE].contiguous(),
    )


class Sm90Layout:
    """Records of 128 rows x 128 K for Hopper."""

    name = "sm90"

    def buffer_shapes(self, shape: LayerShape) -> dict[str, tuple[int, ...]]:
        """Per-expert shapes of `fc1_records` and `fc2_records`."""

        def blocks(size: int) -> int:
            return round_up(size, RECORD_ROWS) // RECORD_ROWS

        hidden, inter = blocks(shape.hidden_size), blocks(shape.intermediate_size)
        return {
            "fc1_records": (blocks(2 * shape.intermediate_size), hidden, RECORD_BYTES),
            "fc2_records": (hidden, inter, RECORD_BYTES),
        }

    def pack(self, bulk: ExpertBulk, out: Buffers) -> None:
        """fc1 from interleaved gate and up, then fc2."""
        codes = interleave_rows(bulk.gate_codes, bulk.up_codes, 1)
        scales = interleave_rows(bulk.gate_scales, bulk.up_scales, 1)
        pack_records(codes, scales, out["fc1_records"])
        del codes, scales
        pack_records(bulk.down_codes, bulk.down_scales, out["fc2_records"])

    def unpack(self, packed: Buffers, shape: LayerShape) -> ExpertBulk:
        """Checkpoint order again, padding dropped."""
        codes, scales = unpack_records(packed["fc1_records"], 2 * shape.intermediate_size, shape.hidden_size)
        gate_codes, up_codes = deinterleave_rows(codes, 1)
        gate_scales, up_scales = deinterleave_rows(scales, 1)
        down_codes, down_scales = unpack_records(packed["fc2_records"], shape.hidden_size, shape.intermediate_size)
        return ExpertBulk(gate_codes, gate_scales, up_codes, up_scales, down_codes, down_scales)
