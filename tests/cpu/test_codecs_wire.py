# SPDX-License-Identifier: Apache-2.0
"""Combine wire formats: hand-computed bytes, every bf16 amax, a second implementation, round trips."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.synthetic import heavy_tailed, seeded
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.reference import codecs

NAN, INF = float("nan"), float("inf")
BF16, FP8, FP4 = CombineFormat.BF16, CombineFormat.FP8, CombineFormat.FP4
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127


def one_row(values: list[float], hidden_size: int = 32) -> torch.Tensor:
    return torch.tensor([values + [0.0] * (hidden_size - len(values))]).to(torch.bfloat16)


def encode(values: list[float], combine_format: CombineFormat) -> tuple[list[int], list[int]]:
    wire = codecs.wire_encode(one_row(values), combine_format)
    return wire.data[0].tolist(), wire.scales[0].tolist()


def round_trip(rows: torch.Tensor, combine_format: CombineFormat) -> torch.Tensor:
    return codecs.wire_decode(codecs.wire_encode(rows, combine_format), combine_format, rows.shape[1])


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        ([448.0, -448.0, 1.0], 127, [0x7E, 0xFE, 0x38]),  # the largest amax of k = 0
        ([450.0, 1.0], 128, [0x76, 0x30]),  # the next bf16: k = 1, 225 -> 224, 0.5
        ([256.0], 127, [0x78]),  # f = 1 already takes E - 8
        ([1.0, -0.0], 119, [0x78, 0x80]),  # k = -8; the sign of zero travels in a live block
        ([1.75 * 2.0**-119], 0, [0x7E]),  # k = -127, the smallest scale
        ([2.0**-133], 0, [0x08]),  # below it: 2^-133 * 2^127 = 2^-6
        ([INF, -INF, 1.0], 254, [0x7E, 0xFE, 0x00]),  # k = 127, finite neighbours vanish
        ([0.0, -0.0], 0, [0x00, 0x00]),
    ],
)
def test_fp8_wire_hand_computed_blocks(values: list[float], scale: int, codes: list[int]) -> None:
    data, scales = encode(values, FP8)
    assert data == codes + [0] * (32 - len(codes))
    assert scales == [scale] + [0] * 15


def test_fp8_wire_nan_block_is_all_nan_bytes() -> None:
    data, scales = encode([1.0, -NAN, INF], FP8)
    assert data == [0x7F] * 32 and scales[0] == 0xFF
    assert round_trip(one_row([NAN]), FP8).isnan().all()


def test_fp8_wire_infinity_decodes_to_infinity() -> None:
    assert round_trip(one_row([INF, -INF, 3.0]), FP8)[0, :3].tolist() == [INF, -INF, 0.0]


@pytest.mark.parametrize(
    ("values", "amax_bytes", "data"),
    [
        ([6.0, 0.5, -1.5, 5.0, 2.5, -0.0], [0xC0, 0x40], [0x17, 0x6B, 0x84]),  # steps of 1
        ([-3.0, 1.5, 0.25], [0x40, 0x40], [0x5F, 0x01]),  # steps of 0.5
        ([0.0, -0.0], [0x00, 0x00], [0x00]),
        ([2.0**-125], [0x00, 0x01], [0x07]),  # 6 / amax = 1.5 * 2^127 is finite
        ([2.0**-126], [0x00, 0x00], [0x00]),  # 6 / amax is infinite: a zero block
        ([INF, 1.0, -INF, 0.0], [0x80, 0x7F], [0x07, 0x07]),  # infinity * (6 / infinity) is NaN, hence code 7
    ],
)
def test_fp4_wire_hand_computed_blocks(values: list[float], amax_bytes: list[int], data: list[int]) -> None:
    encoded, scales = encode(values, FP4)
    assert encoded == data + [0] * (16 - len(data))
    assert scales == amax_bytes + [0] * 14


def test_fp4_wire_nan_block_is_amax_7fc0_and_codes_seven() -> None:
    data, scales = encode([-NAN, 1.0], FP4)
    assert data == [0x77] * 8 + [0] * 8 and scales[:4] == [0xC0, 0x7F, 0, 0]
    decoded = round_trip(one_row([NAN]), FP4)
    assert decoded[0, :16].isnan().all() and (decoded[0, 16:] == 0).all()


@pytest.mark.parametrize("combine_format", [FP8, FP4])
@pytest.mark.parametrize("strange", [NAN, INF])
def test_wire_strange_row_spoils_itself_only(combine_format: CombineFormat, strange: float) -> None:
    rows = heavy_tailed(seeded(1), (3, 64)).to(torch.bfloat16)
    clean = round_trip(rows, combine_format)
    rows[1, 7] = strange
    spoilt = round_trip(rows, combine_format)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    assert not spoilt[1].isfinite().all()


def test_bf16_wire_every_bit_pattern_travels_unchanged() -> None:
    rows = all_bf16().view(64, 1024)
    wire = codecs.wire_encode(rows, BF16)
    assert wire.scales.shape == (64, 0)
    assert wire.data[0, :4].tolist() == [0, 0, 1, 0]  # little-endian
    assert torch.equal(wire.data.view(torch.int16), rows.view(torch.int16))
    torch.testing.assert_close(codecs.wire_decode(wire, BF16, 1024), rows.float(), rtol=0, atol=0, equal_nan=True)


def test_fp8_wire_every_bf16_amax_gets_the_smallest_scale_that_fits() -> None:
    amax = all_bf16()
    amax = amax[amax.isfinite() & (amax > 0)]
    rows = torch.zeros((len(amax), 32), dtype=torch.bfloat16)
    rows[:, 5] = -amax
    k = codecs.wire_encode(rows, FP8).scales[:, 0].double() - 127
    assert (448 * torch.exp2(k) >= amax.double()).all()
    assert ((448 * torch.exp2(k - 1) < amax.double()) | (k == -127)).all()


def test_fp8_wire_top_sixteenth_of_the_largest_binade_decodes_to_infinity() -> None:
    """The one place where decoding overflows: 255 rounds to 256 and 256 * 2^120 is no fp32 number."""
    assert round_trip(one_row([LARGEST_BF16]), FP8)[0, 0] == INF
    assert round_trip(one_row([1.9296875 * 2.0**127]), FP8)[0, 0] == 240 * 2.0**120


def fp8_wire_ml_dtypes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Section 3.2 in float64 with ml_dtypes' rounding, for finite blocks that are not zero."""
    blocks = rows.astype(np.float64).reshape(len(rows), -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    k = np.maximum(np.ceil(np.log2(amax / 448)), -127)  # exact: amax / 448 is a power of two or far from one
    scaled = (blocks * np.exp2(-k)[..., None]).astype(np.float32)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes.reshape(rows.shape), (k + 127).astype(np.uint8)


def fp4_wire_numpy(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Section 3.3 in numpy float32: codes, amax and decoded values, for finite blocks."""
    blocks = rows.astype(np.float32).reshape(len(rows), -1, 16)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        per_step = np.float32(6) / amax
        codes = (blocks * per_step[..., None]).astype(ml_dtypes.float4_e2m1fn)
    codes[np.isinf(per_step)] = 0
    amax[np.isinf(per_step)] = 0
    step = amax * (np.float32(1) / np.float32(6))
    decoded = codes.astype(np.float32) * step[..., None]
    return codes.view(np.uint8).reshape(rows.shape), amax, decoded.reshape(rows.shape)


def wide_rows(seed: int) -> torch.Tensor:
    """Heavy-tailed rows whose 16-blocks span bf16's whole exponent range."""
    generator = seeded(seed)
    exponents = torch.randint(-124, 118, (96, 32), generator=generator).repeat_interleave(16, dim=1)
    return (heavy_tailed(generator, (96, 512)) * torch.exp2(exponents.double())).to(torch.bfloat16)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_wire_random_rows_equal_ml_dtypes_bit_for_bit(seed: int) -> None:
    rows = wide_rows(seed)
    codes, scales = fp8_wire_ml_dtypes(rows.double().numpy())
    wire = codecs.wire_encode(rows, FP8)
    assert np.array_equal(wire.scales[:, :16].numpy(), scales)
    assert np.array_equal(wire.data.numpy(), codes)


@pytest.mark.parametrize("seed", range(3))
def test_fp4_wire_random_rows_equal_numpy_bit_for_bit(seed: int) -> None:
    rows = wide_rows(seed)
    codes, amax, decoded = fp4_wire_numpy(rows.float().numpy())
    wire = codecs.wire_encode(rows, FP4)
    assert np.array_equal(codecs.unpack_nibbles(wire.data).numpy(), codes)
    assert np.array_equal(wire.scales.view(torch.bfloat16).float().numpy(), amax)
    ours = codecs.wire_decode(wire, FP4, 512).numpy()
    assert np.array_equal(ours.view(np.int32), decoded.view(np.int32))


def test_fp4_wire_every_bf16_amax_divides_with_one_rounding() -> None:
    """6 * (1 / amax) instead of 6 / amax differs in the last bit for many amax and flips codes next to a tie."""
    amax = all_bf16()
    amax = amax[amax.isfinite() & (amax > 0)]
    fractions = torch.linspace(0, 1, 61)[1::4].to(torch.bfloat16)  # 15 of them
    rows = torch.cat([amax[:, None], (amax.float()[:, None] * fractions.float()).to(torch.bfloat16)], dim=1)
    codes, _, decoded = fp4_wire_numpy(rows.float().numpy())
    wire = codecs.wire_encode(rows, FP4)
    assert np.array_equal(codecs.unpack_nibbles(wire.data).numpy(), codes)
    assert np.array_equal(codecs.wire_decode(wire, FP4, 16).numpy(), decoded)


@pytest.mark.parametrize("combine_format", list(CombineFormat))
@pytest.mark.parametrize("hidden_size", [32, 2880, 4096, 7168])
def test_wire_planes_have_the_published_row_bytes(combine_format: CombineFormat, hidden_size: int) -> None:
    rows = torch.full((2, hidden_size), -1.5, dtype=torch.bfloat16)
    wire = codecs.wire_encode(rows, combine_format)
    assert wire.data.shape == (2, combine_format.data_row_bytes(hidden_size))
    assert wire.scales.shape == (2, combine_format.scale_row_bytes(hidden_size))
    assert wire.data.dtype == wire.scales.dtype == torch.uint8
    used = {BF16: 0, FP8: hidden_size // 32, FP4: hidden_size // 8}[combine_format]
    assert (wire.scales[:, used:] == 0).all() and (wire.scales[:, :used] != 0).any() == (used > 0)
    assert (codecs.wire_decode(wire, combine_format, hidden_size) == -1.5).all()


@pytest.mark.parametrize("combine_format", list(CombineFormat))
def test_wire_no_rows_give_empty_planes(combine_format: CombineFormat) -> None:
    assert round_trip(torch.empty((0, 64), dtype=torch.bfloat16), combine_format).shape == (0, 64)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros((2, 32)), "float32"),
        (torch.zeros(32, dtype=torch.bfloat16), "must be"),
        (torch.zeros((2, 48), dtype=torch.bfloat16), "48 values into blocks of 32"),
    ],
)
def test_wire_encode_wrong_rows_raise(rows: torch.Tensor, message: str) -> None:
    with pytest.raises(MegaMoeConfigError, match=message):
        codecs.wire_encode(rows, FP8)


BLOCK = st.lists(st.floats(-1e6, 1e6, width=32), min_size=32, max_size=32)


@settings(max_examples=80, deadline=None)
@given(BLOCK)
def test_fp8_wire_any_block_errs_by_half_a_step_and_is_idempotent(values: list[float]) -> None:
    rows = one_row(values)
    decoded = round_trip(rows, FP8)
    # Half a step: 2^-4 of a normal code's value, 2^-10 of the scale below; the scale is at most amax / 224.
    bound = torch.maximum(rows.float().abs() * 2.0**-4, rows.float().abs().max() / 224 * 2.0**-10)
    assert ((decoded - rows.float()).abs() <= bound).all()
    assert torch.equal(round_trip(decoded.to(torch.bfloat16), FP8), decoded)


@settings(max_examples=80, deadline=None)
@given(BLOCK)
def test_fp4_wire_any_block_errs_by_half_a_step(values: list[float]) -> None:
    rows = one_row(values)
    blocks = rows.float().view(2, 16)
    decoded = round_trip(rows, FP4).view(2, 16)
    # Half the widest step of e2m1 is 1, in units of amax / 6; fp32 rounding adds a few 2^-24.
    bound = blocks.abs().amax(dim=1, keepdim=True) / 6 * (1 + 2.0**-20) + 1e-37
    assert ((decoded - blocks).abs() <= bound).all()
    tight = blocks.abs() <= blocks.abs().amax(dim=1, keepdim=True) / 3  # codes up to 2.0: steps of 0.5
    assert ((decoded - blocks).abs()[tight] <= (bound / 4).expand_as(blocks)[tight] + 1e-37).all()


@settings(max_examples=80, deadline=None)
@given(BLOCK)
def test_fp4_wire_of_decoded_rows_gives_the_same_bytes(values: list[float]) -> None:
    first = codecs.wire_encode(one_row(values), FP4)
    again = codecs.wire_encode(codecs.wire_decode(first, FP4, 32).to(torch.bfloat16), FP4)
    assert torch.equal(first.scales, again.scales)
    assert torch.equal(first.data & 0x77, again.data & 0x77)  # -0 in a zero block is the one thing that may change
