# SPDX-License-Identifier: Apache-2.0
"""The CPU engine's arithmetic against the reference codecs, exact integers and library functions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.helpers.synthetic import heavy_tailed, seeded
from trtllm_megamoe.engines.cpu import numerics
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.reference import codecs

NAN, INF = float("nan"), float("inf")


def _edge_values() -> torch.Tensor:
    """Every e2m1 and e4m3 midpoint, its neighbours, and the special values."""
    midpoints = torch.cat([torch.linspace(0, 8, 129), torch.arange(0, 480, 0.5), 2.0 ** torch.arange(-14.0, 10)])
    near = torch.cat([midpoints, torch.nextafter(midpoints, torch.tensor(INF)), torch.nextafter(midpoints, -midpoints)])
    return torch.cat([near, -near, torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-40, 3e38])])


def test_encode_e2m1_edges_equal_the_reference() -> None:
    values = _edge_values()
    assert torch.equal(numerics.encode_e2m1(values), codecs.e2m1_encode(values))


def test_encode_e4m3_edges_equal_the_reference() -> None:
    values = _edge_values()
    assert torch.equal(numerics.encode_e4m3(values), codecs.e4m3_encode(values))


def _rows() -> torch.Tensor:
    rows = heavy_tailed(seeded(1), (40, 64)) * torch.exp2(torch.arange(40.0).unsqueeze(1) - 20)
    rows[0, :16] = 0
    rows[1, 3] = 1e-30
    rows[2, 20] = INF
    rows[3, 40] = NAN
    rows[4] = -0.0
    rows[5, :16] = 3000.0
    rows[6, :] = 1e-42
    return rows


@pytest.mark.parametrize("global_scale", [1.0, 3.7e-4, 11.0])
def test_quantize_nvfp4_all_edges_equal_the_reference(global_scale: float) -> None:
    scale = torch.tensor(global_scale)
    codes, scales, saturated = numerics.quantize_nvfp4(_rows(), scale)
    expected = codecs.nvfp4_quantize(_rows(), scale)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(numerics.unpack_codes(codes), expected.codes)
    assert saturated == int(codecs.nvfp4_saturated(_rows(), scale).sum())


@pytest.mark.parametrize("fmt", list(CombineFormat))
def test_wire_all_edges_equal_the_reference_bytes(fmt: CombineFormat) -> None:
    rows = _rows().bfloat16()
    data, scales = numerics.encode_wire(rows, fmt)
    expected = codecs.wire_encode(rows, fmt)
    assert torch.equal(data, expected.data)
    assert torch.equal(scales, expected.scales[:, : scales.shape[1]])
    decoded = numerics.decode_wire(expected.data, expected.scales, fmt, rows.shape[1])
    wanted = codecs.wire_decode(expected, fmt, rows.shape[1])
    assert torch.equal(decoded.nan_to_num(12345.0), wanted.nan_to_num(12345.0))


def test_unpack_pack_all_bytes_round_trip() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(numerics.pack_codes(numerics.unpack_codes(packed)), packed)


@pytest.mark.parametrize("is_nvfp4", [True, False])
@pytest.mark.parametrize("num_terms", [16, 1040, 2160])
def test_exact_matmul_extremes_equal_rational_arithmetic(is_nvfp4: bool, num_terms: int) -> None:
    """Largest products beside smallest ones: any inexact partial sum would show in the last bits.

    fp64 holds the pieces exactly; adding the pieces rounds at most once each, hence the tolerance of 2^-52 per piece.
    """
    generator = seeded(num_terms)
    packed = torch.randint(0, 256, (3, num_terms // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (3, num_terms // 16), generator=generator, dtype=torch.uint8)
    scales[0] = 0x7E
    scales[0, ::2] = 0x01
    if is_nvfp4:
        a = numerics.decode_blocks(packed[:2], scales[:2], torch.float16)
    else:
        a = (heavy_tailed(generator, (2, num_terms)) * torch.exp2(torch.randint(-20, 12, (num_terms,)).float())).half()
        a[0, 0], a[0, 1], a[1, -1] = 65504.0, 2.0**-24, -65504.0
    got = numerics.exact_matmul(a, packed, scales, is_nvfp4)
    w = numerics.decode_blocks(packed, scales, torch.float64)
    pieces = -(-num_terms // 1024) * 2
    for i in range(a.shape[0]):
        for j in range(w.shape[0]):
            terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], w[j], strict=True)]
            exact = sum(terms)
            if is_nvfp4 and num_terms <= 1024:
                assert Fraction(float(got[i, j])) == exact  # one piece: nothing is rounded
            largest = max(abs(float(sum(terms[k : k + 1024]))) for k in range(0, num_terms, 1024))
            assert abs(Fraction(float(got[i, j])) - exact) <= Fraction(2.0**-52) * pieces * Fraction(max(largest, 1.0))


def test_exact_matmul_single_rows_have_the_bits_of_the_batch() -> None:
    generator = seeded(3)
    packed = torch.randint(0, 256, (48, 512), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (48, 64), generator=generator, dtype=torch.uint8)
    a = (heavy_tailed(generator, (37, 1024)) * 100).half()
    batch = numerics.exact_matmul(a, packed, scales, is_nvfp4=False)
    for i in range(37):
        assert torch.equal(numerics.exact_matmul(a[i : i + 1], packed, scales, is_nvfp4=False)[0], batch[i])


def test_swiglu_random_and_extreme_inputs_within_1e_6_of_float64() -> None:
    gate = torch.cat([heavy_tailed(seeded(5), (4096,)) * 10, torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4])])
    up = torch.cat([heavy_tailed(seeded(6), (4096,)), torch.ones(6)])
    got = numerics.swiglu(gate, up, None, 1.702, 1.0)
    g, u = gate.double(), up.double()
    expected = g * torch.sigmoid(1.702 * g) * (u + 1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(
    ("gate", "up", "gate_clamped", "up_clamped"),
    [(25.0, -25.0, 10.0, -10.0), (-25.0, 25.0, -25.0, 10.0), (9.9, 10.1, 9.9, 10.0), (3.0, 3.0, 3.0, 3.0)],
)
def test_swiglu_limit_clamps_gate_from_above_only(
    gate: float, up: float, gate_clamped: float, up_clamped: float
) -> None:
    got = numerics.swiglu(torch.tensor([gate]), torch.tensor([up]), 10.0, 1.0, 0.0)
    expected = torch.nn.functional.silu(torch.tensor([gate_clamped], dtype=torch.float64)) * up_clamped
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_row_power_of_two_lands_in_the_top_binade_and_keeps_bf16_exact() -> None:
    x = (heavy_tailed(seeded(8), (50, 64)) * torch.exp2(torch.arange(50.0).unsqueeze(1) - 25)).bfloat16()
    x[7] = 0
    rows, inverse = numerics.row_power_of_two(x)
    top = rows.float().abs().amax(1)
    live = x.abs().amax(1) > 0
    assert bool(((top >= 2.0**14) & (top < 2.0**15))[live].all())
    assert float(inverse[7]) == 1.0
    # values down to 2^-28 of the row's largest are exact (numerics 4.2); smaller ones lose at most 2^-39 of it
    error = (rows.float() * inverse.unsqueeze(1) - x.float()).abs()
    assert bool((error <= x.float().abs().amax(1, keepdim=True) * 2.0**-39).all())
    large = x.float().abs() >= x.float().abs().amax(1, keepdim=True) * 2.0**-28
    assert bool((error[large] == 0).all())
