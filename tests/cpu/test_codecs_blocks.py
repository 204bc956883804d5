# SPDX-License-Identifier: Apache-2.0
"""NVFP4 block quantisation: against a second implementation over ml_dtypes, and the edges that break engines."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.synthetic import heavy_tailed, seeded
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.reference import codecs

NAN, INF = float("nan"), float("inf")


def quantize_ml_dtypes(values: np.ndarray, a: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """docs/numerics.md section 2 for finite blocks in numpy float32 scalars' arithmetic and ml_dtypes conversions."""
    sixth = np.float32(1) / np.float32(6)
    blocks = values.astype(np.float32).reshape(values.shape[0], -1, 16)
    qs = np.float32(1) / a
    raw = np.abs(blocks).max(axis=-1) * (qs * sixth)
    scales = np.minimum(raw, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    scale = scales.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (qs / scale)[..., None]
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes[scale == 0] = 0
    return codes.reshape(values.shape), scales.view(np.uint8)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def quantize(values: list[float], a: float) -> tuple[list[int], list[int]]:
    row = torch.tensor([values + [0.0] * (-len(values) % 16)])
    result = codecs.nvfp4_quantize(row, scalar(a))
    return result.codes[0].tolist(), result.scales[0].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_quantize_random_rows_equal_ml_dtypes_bit_for_bit(seed: int) -> None:
    generator = seeded(seed)
    # Block magnitudes over 2^-15 .. 2^5 against a near 2^-8: zero, subnormal, normal and saturated scales all occur.
    magnitudes = torch.exp2(24 * torch.rand((64, 64), generator=generator) - 17).repeat_interleave(16, dim=1)
    values = heavy_tailed(generator, (64, 1024)) * magnitudes
    a = np.float32(float(torch.rand((), generator=generator)) * 0.005 + 0.002)
    codes, scales = quantize_ml_dtypes(values.numpy(), a)
    ours = codecs.nvfp4_quantize(values, torch.tensor(a))
    assert np.array_equal(ours.scales.numpy(), scales)
    assert np.array_equal(ours.codes.numpy(), codes)
    assert {0x00, 0x01, 0x7E} <= set(scales.flatten().tolist())


def ulps_around(values: np.ndarray) -> np.ndarray:
    """Each value and its three float32 neighbours on both sides, (N, 7)."""
    return (values.astype(np.float32).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32)


@pytest.mark.parametrize("a", [1.0, 0.7, 0.0123, 0.0019, 3.1e-4])
def test_nvfp4_quantize_next_to_ties_equals_ml_dtypes_bit_for_bit(a: float) -> None:
    """Here the order of the multiplications and the rounding of each decides the code or the scale."""
    a32 = np.float32(a)
    e4m3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale_ties = ulps_around(3 * (e4m3[1:] + e4m3[:-1]) * a)  # amax / 6 halfway between two scales
    amax_rows = np.repeat(scale_ties.reshape(-1, 1), 16, axis=1)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    per_scale = [np.append(6 * s * a, 0).astype(np.float32) for s in e4m3[7:]]
    code_rows = np.stack(
        [
            np.concatenate([amax, column, -column])
            for s, amax in zip(e4m3[7:], per_scale, strict=True)
            for column in ulps_around(ties * s * a).T
        ]
    )
    for rows in (amax_rows, code_rows):
        codes, scales = quantize_ml_dtypes(rows, a32)
        ours = codecs.nvfp4_quantize(torch.from_numpy(rows), torch.tensor(a32))
        assert np.array_equal(ours.scales.numpy(), scales)
        assert np.array_equal(ours.codes.numpy(), codes)


def test_nvfp4_quantize_hand_computed_blocks() -> None:
    values = [6.0, 0.5, -1.5, 5.0, 2.5, -0.25, -0.0]
    codes = [7, 1, 11, 6, 4, 8, 8] + [0] * 9
    assert quantize(values, 1.0) == (codes, [0x38])  # scale 1.0
    assert quantize(values, 0.5) == (codes, [0x40])  # scale 2.0 in units of a
    assert quantize([v / 4 for v in values], 1.0) == (codes, [0x28])  # scale 0.25


def test_nvfp4_quantize_global_scale_divides_before_the_scale_is_rounded() -> None:
    """a = 0.7: 6 / 0.7 / 6 = 1.43 rounds to 1.375, so 6 / 0.7 / 1.375 = 6.23 becomes code 7 and decodes to 5.775."""
    row = torch.full((1, 16), 6.0)
    result = codecs.nvfp4_quantize(row, scalar(0.7))
    assert result.scales.tolist() == [[0x3B]] and result.codes[0].tolist() == [7] * 16
    assert result.decode()[0, 0] * 0.7 == pytest.approx(5.775)


def test_nvfp4_quantize_zero_block_is_all_zero_bits() -> None:
    assert quantize([0.0, -0.0], 0.01) == ([0] * 16, [0])


def test_nvfp4_quantize_tiny_element_vanishes_without_nan() -> None:
    assert quantize([1e-30, -1e-30], 0.01) == ([0] * 16, [0])


def test_nvfp4_quantize_amax_at_the_underflow_tie_counts_as_zero_block() -> None:
    tie = 6 * 2.0**-10  # amax / 6 is half the smallest scale
    assert quantize([tie], 1.0) == ([0] * 16, [0])
    assert quantize([tie * (1 + 2.0**-21)], 1.0) == ([5] + [0] * 15, [1])  # scale 2^-9, value 3.0 in its units


def test_nvfp4_quantize_block_above_the_calibrated_range_saturates() -> None:
    a = 0.01
    codes, scales = quantize([3000 * a, -3000 * a, 1344 * a], a)
    assert (codes[:3], scales) == ([7, 15, 5], [0x7E])  # 3000 / 448 = 6.7, 1344 / 448 = 3
    assert codecs.nvfp4_saturated(torch.tensor([[3000 * a] + [0.0] * 15]), scalar(a)).tolist() == [[True]]
    assert codecs.nvfp4_saturated(torch.full((1, 16), 26.8), scalar(a)).tolist() == [[False]]


def test_nvfp4_quantize_infinity_saturates() -> None:
    codes, scales = quantize([INF, -INF, 4.48, 0.0], 0.01)
    assert (codes[:4], scales) == ([7, 15, 2, 0], [0x7E])


def test_nvfp4_quantize_nan_marks_its_own_block_only() -> None:
    row = torch.ones((2, 48))
    row[0, 20] = NAN
    result = codecs.nvfp4_quantize(row, scalar(0.01))
    assert result.codes[0, 16:32].tolist() == [7] * 16 and result.scales[0, 1] == 0x7F
    assert result.decode()[0, 16:32].isnan().all()
    clean = codecs.nvfp4_quantize(torch.ones((1, 16)), scalar(0.01))
    others = torch.cat([result.codes[0, :16], result.codes[0, 32:], result.codes[1]]).view(-1, 16)
    assert (others == clean.codes).all()


def test_nvfp4_quantize_row_length_not_a_multiple_of_16_raises() -> None:
    with pytest.raises(MegaMoeConfigError, match="24 values into blocks of 16"):
        codecs.nvfp4_quantize(torch.ones((1, 24)), scalar(1.0))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (2, 3, 32)])
def test_nvfp4_quantize_any_leading_shape_works(shape: tuple[int, ...]) -> None:
    result = codecs.nvfp4_quantize(torch.ones(shape), scalar(0.1))
    assert result.codes.shape == shape and result.scales.shape == (*shape[:-1], shape[-1] // 16)
    assert result.decode().shape == shape


BLOCK = st.lists(st.floats(-3e3, 3e3, width=32), min_size=16, max_size=16)


@settings(max_examples=100, deadline=None)
@given(BLOCK, st.floats(2.0**-12, 1.0, width=32))
def test_nvfp4_quantize_any_block_takes_the_nearest_value_its_scale_offers(values: list[float], a: float) -> None:
    row = torch.tensor([values])
    result = codecs.nvfp4_quantize(row, scalar(a))
    offered = codecs.e2m1_decode(torch.arange(16, dtype=torch.uint8)).double()
    scale = codecs.e4m3_decode(result.scales).double() * a
    decoded = result.decode().double() * a
    best = (row.double().unsqueeze(-1) - scale * offered).abs().amin(dim=-1)
    # The multiplier qs / scale and the product are rounded to fp32: near a tie the other neighbour may win by 2^-22.
    assert ((decoded - row.double()).abs() <= best + 2.0**-21 * row.double().abs()).all()


@settings(max_examples=100, deadline=None)
@given(BLOCK, st.floats(2.0**-12, 1.0, width=32))
def test_nvfp4_quantize_of_a_decoded_block_changes_nothing(values: list[float], a: float) -> None:
    first = codecs.nvfp4_quantize(torch.tensor([values]), scalar(a))
    if first.scales.item() < 0x08:
        return  # a subnormal scale is coarse: its largest code need not be 7, so a second pass may find a finer scale
    second = codecs.nvfp4_quantize(first.decode() * scalar(a), scalar(a))
    assert torch.equal(first.scales, second.scales) and torch.equal(first.codes, second.codes)
