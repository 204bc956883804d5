# SPDX-License-Identifier: Apache-2.0
"""Element codecs against ml_dtypes and torch: every code, every rounding boundary, the documented exceptions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.synthetic import heavy_tailed, seeded
from trtllm_megamoe.reference import codecs

NAN, INF = float("nan"), float("inf")

CODECS = {
    "e2m1": (codecs.e2m1_decode, codecs.e2m1_encode, ml_dtypes.float4_e2m1fn, 16, 6.0),
    "e4m3": (codecs.e4m3_decode, codecs.e4m3_encode, ml_dtypes.float8_e4m3fn, 256, 448.0),
}


def all_codes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32).to(torch.uint8)


def ml_decode(codes: torch.Tensor, dtype: type) -> np.ndarray:
    return codes.numpy().view(dtype).astype(np.float32)


def ml_encode(values: np.ndarray, dtype: type) -> np.ndarray:
    return values.astype(dtype).view(np.uint8)


@pytest.mark.parametrize("name", CODECS)
def test_decode_every_code_equals_ml_dtypes_bit_for_bit(name: str) -> None:
    decode, _, dtype, count, _ = CODECS[name]
    ours = decode(all_codes(count)).numpy()
    theirs = ml_decode(all_codes(count), dtype)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.int32)[~nan], theirs.view(np.int32)[~nan])  # the sign of zero counts


def test_e4m3_decode_every_code_equals_torch_float8() -> None:
    codes = all_codes(256)
    ours, theirs = codecs.e4m3_decode(codes), codes.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert codes[ours.isnan()].tolist() == [0x7F, 0xFF]


def test_e8m0_decode_every_byte_equals_ml_dtypes_and_torch() -> None:
    codes = all_codes(256)
    ours = codecs.e8m0_decode(codes)
    assert np.array_equal(ours.numpy(), ml_decode(codes, ml_dtypes.float8_e8m0fnu), equal_nan=True)
    torch.testing.assert_close(ours, codes.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)
    assert ours[0] == 2.0**-127 and codes[ours.isnan()].tolist() == [0xFF]


def test_e8m0_encode_exponent_every_exponent_decodes_to_its_power() -> None:
    exponents = torch.arange(-127, 128)
    assert codecs.e8m0_decode(codecs.e8m0_encode_exponent(exponents)).tolist() == [2.0**k for k in range(-127, 128)]


def test_power_of_two_every_float32_exponent_is_exact() -> None:
    exponents = torch.arange(-149, 128)
    assert codecs.power_of_two(exponents).double().tolist() == [2.0**k for k in range(-149, 128)]


@pytest.mark.parametrize("name", CODECS)
def test_encode_every_decoded_value_returns_its_code(name: str) -> None:
    decode, encode, _, count, _ = CODECS[name]
    codes = all_codes(count)
    values = decode(codes)
    finite = ~values.isnan()
    assert torch.equal(encode(values)[finite], codes[finite])


def finite_values(name: str) -> np.ndarray:
    decode, _, _, count, _ = CODECS[name]
    table = decode(all_codes(count // 2)).numpy()
    return table[~np.isnan(table)]


@pytest.mark.parametrize("name", CODECS)
def test_encode_midpoints_and_neighbours_equal_ml_dtypes(name: str) -> None:
    _, encode, ml_dtype, _, largest = CODECS[name]
    table = finite_values(name)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2])
    points = np.concatenate([points, np.nextafter(points, np.float32(9e9)), np.nextafter(points, np.float32(-9e9))])
    points = np.concatenate([points, -points])
    points = points[np.abs(points) <= largest]  # saturation has its own test: ml_dtypes turns e4m3 overflow into NaN
    assert points.dtype == np.float32
    assert np.array_equal(encode(torch.from_numpy(points)).numpy(), ml_encode(points, ml_dtype))


@pytest.mark.parametrize("name", CODECS)
def test_encode_float64_is_not_rounded_to_float32_first(name: str) -> None:
    """ml_dtypes goes through float32 here and turns these near-ties into ties."""
    _, encode, _, _, _ = CODECS[name]
    table = finite_values(name).astype(np.float64)
    midpoints = (table[1:] + table[:-1]) / 2
    below, above = (torch.from_numpy(np.nextafter(midpoints, direction)) for direction in (-9e9, 9e9))
    assert encode(below).tolist() == list(range(len(midpoints)))
    assert encode(above).tolist() == list(range(1, len(midpoints) + 1))


@pytest.mark.parametrize("name", CODECS)
def test_encode_heavy_tailed_values_equal_ml_dtypes(name: str) -> None:
    _, encode, ml_dtype, _, largest = CODECS[name]
    magnitudes = torch.exp2(14 * torch.rand(200_000, generator=seeded(3)) - 11)
    values = (heavy_tailed(seeded(4), (200_000,)) * magnitudes).clamp(-largest, largest)
    assert np.array_equal(encode(values).numpy(), ml_encode(values.numpy(), ml_dtype))


def test_e4m3_encode_every_bf16_value_equals_torch_float8() -> None:
    """torch saturates like us, also on infinities; it keeps the sign of a NaN, where docs/numerics.md says 0x7F."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    theirs = values.to(torch.float8_e4m3fn).view(torch.uint8)
    theirs[values.isnan()] = 0x7F
    assert torch.equal(codecs.e4m3_encode(values), theirs)


def test_e2m1_encode_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert codecs.e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert codecs.e2m1_encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_encode_out_of_range_saturates_and_nan_is_seven() -> None:
    values = torch.tensor([6.1, -7.0, 1e30, INF, -INF, NAN, -NAN, -0.0, 1e-30, -1e-30])
    assert codecs.e2m1_encode(values).tolist() == [7, 15, 7, 7, 15, 7, 7, 8, 0, 8]


def test_e4m3_encode_out_of_range_saturates_and_nan_is_7f() -> None:
    values = torch.tensor([448.0, 464.0, 464.1, 480.0, -1e30, INF, -INF, NAN, -NAN, -0.0, 2.0**-10, -(2.0**-10)])
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0x80, 0x00, 0x80]
    assert codecs.e4m3_encode(values).tolist() == expected


def test_pack_nibbles_even_index_sits_low() -> None:
    assert codecs.pack_nibbles(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


def test_unpack_nibbles_every_byte_round_trips() -> None:
    packed = all_codes(256).view(4, 64)
    unpacked = codecs.unpack_nibbles(packed)
    assert unpacked.shape == (4, 128) and int(unpacked.max()) == 15
    assert torch.equal(codecs.pack_nibbles(unpacked), packed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=64), st.sampled_from(sorted(CODECS)))
def test_encode_any_value_is_nearest_and_idempotent(values: list[float], name: str) -> None:
    decode, encode, _, count, largest = CODECS[name]
    tensor = torch.tensor(values)
    decoded = decode(encode(tensor))
    assert torch.equal(encode(decoded), encode(tensor))
    table = decode(all_codes(count)).double()
    table = table[~table.isnan()]
    saturated = tensor.clamp(-largest, largest).double()
    nearest = (saturated[:, None] - table).abs().amin(dim=1)
    assert torch.equal((decoded.double() - saturated).abs(), nearest)


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(0.0, 0), (1.0, 14), (2.0**14, 0), (32768.0 * (1 - 2**-8), 0), (32768.0, -1), (3.38e38, -113), (2.0**-133, 126)],
)
def test_row_exponent_puts_the_largest_value_into_the_top_binade(largest: float, exponent: int) -> None:
    row = torch.tensor([[largest, -largest / 2, 0.0]]).to(torch.bfloat16)
    assert codecs.row_exponent(row).tolist() == [[exponent]]


@pytest.mark.parametrize("strange", [NAN, INF, -INF])
def test_row_exponent_not_finite_row_is_zero(strange: float) -> None:
    assert codecs.row_exponent(torch.tensor([[strange, 1.0], [4.0, 1.0]])).tolist() == [[0], [12]]


def test_row_exponent_bf16_values_down_to_2_to_minus_28_survive_f16_exactly() -> None:
    """The loss that docs/numerics.md 4.2 states: none down to 2^-28 of the row's largest, below that 2^-39 of it."""
    magnitudes = torch.exp2(torch.randint(-40, 1, (64, 256), generator=seeded(5)).float())
    x = (magnitudes * (1 + torch.rand((64, 256), generator=seeded(6))) * 37.0).to(torch.bfloat16)
    p = codecs.row_exponent(x)
    back = codecs.f16_saturate(x.float() * codecs.power_of_two(p)).double() * codecs.power_of_two(-p).double()
    largest = x.double().abs().amax(dim=1, keepdim=True)
    error = (back - x.double()).abs()
    assert error[x.double().abs() >= largest * 2.0**-28].max() == 0
    assert (error / largest).max() <= 2.0**-39
    assert error.max() > 0


def test_f16_saturate_keeps_nan_and_never_gives_infinity() -> None:
    out = codecs.f16_saturate(torch.tensor([65504.0, 65519.0, 65520.0, 1e30, -INF, NAN, 2.0**-25]))
    assert out[:5].tolist() == [65504.0, 65504.0, 65504.0, 65504.0, -65504.0]
    assert out[5].isnan() and out[6] == 0  # 2^-25 is a tie, the even code is zero


@pytest.mark.parametrize(
    ("amax", "q"),
    [
        (1.0, 10),
        (1.0 + 2**-20, 9),
        (0.5, 11),
        (2.0**24, -14),
        (2.0**30, -14),
        (2.0**-20, 30),
        (2.0**-30, 30),
        (0.75, 10),
    ],
)
def test_requant_exponent_puts_the_calibrated_amax_at_1024(amax: float, q: int) -> None:
    a2 = torch.tensor(amax / 2688, dtype=torch.float64)  # float64, so that 2688 * a2 is the amax itself
    assert codecs.requant_exponent(a2).item() == q
