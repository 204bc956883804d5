# SPDX-License-Identifier: Apache-2.0
"""Packed layouts against index arithmetic written from docs/weights.md section 4, and pack/unpack as exact inverses.

The oracles here compute a byte address for every (row, k) and never reshape or permute, unlike the code under test.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.weights.layout_base import ExpertBulk
from trtllm_megamoe.weights.layouts import LAYOUTS, allocate_packed, experts_per_chunk, get_layout, pack_bulk
from trtllm_megamoe.weights.spec import LayerShape

SHAPES = {
    "aligned": LayerShape(256, 128, 8, 2),
    "two-tiles": LayerShape(384, 192, 8, 2),
    "gpt-oss-like": LayerShape(144, 144, 8, 2),  # 2I = 288 (R6); K is not a multiple of 64 or 128
    "narrow": LayerShape(32, 16, 8, 2),
}


def random_bulk(shape: LayerShape, n: int, seed: int) -> ExpertBulk:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, rows, columns), dtype=torch.uint8, generator=generator)

    hidden, inter = shape.hidden_size, shape.intermediate_size
    return ExpertBulk(
        draw(inter, hidden // 2), draw(inter, hidden // 16),
        draw(inter, hidden // 2), draw(inter, hidden // 16),
        draw(hidden, inter // 2), draw(hidden, inter // 16),
    )  # fmt: skip


def packed(name: str, bulk: ExpertBulk, shape: LayerShape, chunk_bytes: int = 64 << 20) -> dict[str, torch.Tensor]:
    out = allocate_packed(LAYOUTS[name], shape, bulk.gate_codes.shape[0], torch.device("cpu"))
    for tensor in out.values():
        tensor.fill_(0xA5)  # poison: a byte that packing forgets shows
    pack_bulk(LAYOUTS[name], bulk, shape, out, chunk_bytes)
    return out


def nibbles(codes: torch.Tensor) -> np.ndarray:
    """(n, rows, K/2) bytes -> (n, rows, K) codes, even index in the low nibble."""
    data = codes.numpy()
    return np.stack((data & 15, data >> 4), axis=-1).reshape(*data.shape[:2], -1)


def zero_padded(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    out = np.zeros((matrix.shape[0], rows, columns), dtype=np.uint8)
    out[:, : matrix.shape[1], : matrix.shape[2]] = matrix
    return out


def fc1_rows(gate: np.ndarray, up: np.ndarray, group: int) -> np.ndarray:
    """Rows of fc1 by arithmetic: group g of gate lies at rows [2 g group, (2 g + 1) group), up's right behind."""
    out = np.zeros((gate.shape[0], 2 * gate.shape[1], gate.shape[2]), dtype=np.uint8)
    channel = np.arange(gate.shape[1])
    out[:, channel // group * 2 * group + channel % group] = gate
    out[:, channel // group * 2 * group + group + channel % group] = up
    return out


def decode_sm90(records: torch.Tensor, rows: int, reduction: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (n, rows, K) and scales (n, rows, K/16) by evaluating the register formulas at computed word addresses."""
    data = records.numpy().astype(np.uint64)
    row, k = np.meshgrid(np.arange(rows), np.arange(reduction), indexing="ij")
    r, kk = row % 128, k % 128
    tile, warp, g, side = r // 64, r % 64 // 16, r % 16 // 2, r % 2
    half, j, side_k, t, e = kk // 64, kk % 64 // 16, kk % 16 // 8, kk % 8 // 2, kk % 2
    word = ((tile * 2 + half) * 128 + 32 * warp + 4 * g + t) * 4 + j

    def byte(offset: np.ndarray) -> np.ndarray:
        return data[:, row // 128, k // 128, offset]

    q = sum(byte(4 * word + b) << np.uint64(8 * b) for b in range(4))
    register = side + 2 * side_k
    f = np.stack([q << np.uint64(6), q << np.uint64(9), q ^ (q >> np.uint64(3)), q ^ (q << np.uint64(2))])
    value = np.take_along_axis(f, np.broadcast_to(register, q.shape)[None], 0)[0] & np.uint64(0x8E008E00)
    f16 = value >> (16 * e).astype(np.uint64)
    code = ((f16 >> np.uint64(9)) & np.uint64(7)) | (((f16 >> np.uint64(15)) & np.uint64(1)) << np.uint64(3))
    scale_byte = 8192 + ((tile * 4 + warp) * 8 + g) * 16 + 2 * (4 * half + j) + side
    return code.astype(np.uint8), byte(scale_byte)[:, :, ::16].astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packing_sm90_records_decode_by_the_documented_addresses(shape: LayerShape) -> None:
    bulk = random_bulk(shape, 2, seed=1)
    out = packed("sm90", bulk, shape)
    hidden, inter = shape.hidden_size, shape.intermediate_size
    pad = lambda size: -(-size // 128) * 128  # noqa: E731
    code, scale = decode_sm90(out["fc1_records"], pad(2 * inter), pad(hidden))
    want = fc1_rows(nibbles(bulk.gate_codes), nibbles(bulk.up_codes), 1)
    assert np.array_equal(code, zero_padded(want, pad(2 * inter), pad(hidden)))
    want = fc1_rows(bulk.gate_scales.numpy(), bulk.up_scales.numpy(), 1)
    assert np.array_equal(scale, zero_padded(want, pad(2 * inter), pad(hidden) // 16))
    code, scale = decode_sm90(out["fc2_records"], pad(hidden), pad(inter))
    assert np.array_equal(code, zero_padded(nibbles(bulk.down_codes), pad(hidden), pad(inter)))
    assert np.array_equal(scale, zero_padded(bulk.down_scales.numpy(), pad(hidden), pad(inter) // 16))


def test_packing_sm90_code_bits_are_the_f16_of_the_value_times_2_to_minus_14() -> None:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    for code in range(16):
        bits = ((code & 7) << 9) | ((code >> 3) << 15)
        got = np.array([bits], dtype=np.uint16).view(np.float16)[0]
        assert float(got) == float(values[code & 7]) * (-1 if code > 7 else 1) * 2.0**-14


def decode_atoms(flat: torch.Tensor, rows: int, columns: int) -> np.ndarray:
    """Every byte of (round_up(rows, 128), round_up(columns, 4)) by its address."""
    rows, columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    address = (row // 128 * (columns // 4) + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert sorted(address.reshape(-1)) == list(range(rows * columns))
    return flat.numpy()[:, address]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packing_sm100_rows_and_atoms_decode_by_the_documented_addresses(shape: LayerShape) -> None:
    bulk = random_bulk(shape, 2, seed=2)
    out = packed("sm100", bulk, shape)
    hidden, inter = shape.hidden_size, shape.intermediate_size
    assert np.array_equal(out["fc1_codes"].numpy(), fc1_rows(bulk.gate_codes.numpy(), bulk.up_codes.numpy(), 16))
    assert torch.equal(out["fc2_codes"], bulk.down_codes)
    for name, want, columns in (
        ("fc1_scales", fc1_rows(bulk.gate_scales.numpy(), bulk.up_scales.numpy(), 16), hidden // 16),
        ("fc2_scales", bulk.down_scales.numpy(), inter // 16),
    ):
        got = decode_atoms(out[name], want.shape[1], columns)
        assert np.array_equal(got, zero_padded(want, *got.shape[1:]))


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=15)
@given(
    hidden=st.integers(1, 20),
    inter=st.integers(1, 20),
    n=st.integers(1, 5),
    chunk=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_packing_unpack_is_the_exact_inverse_for_any_shape_and_chunk(
    name: str, hidden: int, inter: int, n: int, chunk: int, seed: int
) -> None:
    shape = LayerShape(16 * hidden, 16 * inter, 8, 2)
    bulk = random_bulk(shape, n, seed)
    out = packed(name, bulk, shape, chunk * shape.expert_bytes)
    got = LAYOUTS[name].unpack(out, shape)
    assert all(torch.equal(a, b) for a, b in zip(got, bulk, strict=True))
    again = packed(name, got, shape)
    assert all(torch.equal(out[key], again[key]) for key in out)


def test_packing_buffers_have_the_sizes_of_the_contract() -> None:
    shape = LayerShape(7168, 2048, 256, 8)
    sm100 = get_layout("sm100").buffer_shapes(shape)
    sizes = {name: 32 * int(np.prod(size)) for name, size in sm100.items()}
    assert sizes == {
        "fc1_codes": 469_762_048, "fc1_scales": 58_720_256, "fc2_codes": 234_881_024, "fc2_scales": 29_360_128,
    }  # fmt: skip
    sm90 = get_layout("sm90").buffer_shapes(shape)
    assert sum(int(np.prod(size)) for size in sm90.values()) == shape.expert_bytes  # no padding at aligned shapes


def test_packing_chunk_holds_at_least_one_expert_and_unknown_layout_lists_names() -> None:
    assert experts_per_chunk(LayerShape(7168, 3072, 384, 6), chunk_bytes=1) == 1
    with pytest.raises(MegaMoeConfigError, match="reference, sm90, sm100"):
        get_layout("sm80")
