# SPDX-License-Identifier: Apache-2.0
"""Number formats and roundings on arrays of 32 lanes, written from the PTX manual; used by the instruction modules.

Shares no code with the package's own codecs, so that agreement between the two means something.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
"""A numpy array of 32 lanes; numpy's stubs cannot follow the dtypes of lane arithmetic."""

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table() -> Array:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(byte >> 7, -value, value)
    value[[0x7F, 0xFF]] = np.nan
    return value.astype(np.float32)


E4M3_VALUES = _e4m3_table()


def _nearest_even(x: Array, grid: Array) -> Array:
    """Index of the nearest value of an ascending non-negative grid; ties to the even index, above the end saturated."""
    a = np.minimum(np.abs(x.astype(np.float64)), grid[-1])
    i = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    below, above = a - grid[i - 1], grid[i] - a
    up = (below > above) | ((below == above) & (i % 2 == 0))
    return np.where(up, i, i - 1).astype(np.uint32)


_POSITIVE_E4M3 = E4M3_VALUES[:127].astype(np.float64)
_POSITIVE_FP4 = FP4_VALUES[:8].astype(np.float64)


def e4m3_code(x: Array) -> Array:
    """cvt.rn.satfinite.e4m3: NaN of either sign becomes 0x7F."""
    code = _nearest_even(np.nan_to_num(x, nan=0.0, posinf=448.0, neginf=-448.0), _POSITIVE_E4M3)
    code = code | np.where(np.signbit(x), np.uint32(0x80), np.uint32(0))
    return np.where(np.isnan(x), np.uint32(0x7F), code)


def e2m1_code(x: Array) -> Array:
    """cvt.rn.satfinite.e2m1: NaN becomes 7."""
    code = _nearest_even(np.nan_to_num(x, nan=0.0, posinf=6.0, neginf=-6.0), _POSITIVE_FP4)
    code = code | np.where(np.signbit(x), np.uint32(8), np.uint32(0))
    return np.where(np.isnan(x), np.uint32(7), code)


def bits(x: Array) -> Array:
    """fp32 values as their 32 bits."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def bf16_bits(x: Array) -> Array:
    """cvt.rn.bf16.f32; NaN becomes the canonical 0x7FFF."""
    u = bits(x)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def f16_bits(x: Array) -> Array:
    """cvt.rn.f16.f32."""
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def f16_value(low_bits: Array) -> Array:
    """fp32 value of the low 16 bits read as f16."""
    return (low_bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32, rounded once: the exact product, a sum in float64 made odd where inexact, then fp32."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    raw = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (raw & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, (raw + toward).view(np.float64), total).astype(np.float32)


def flush(x: Array) -> Array:
    """Subnormal fp32 numbers to zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
