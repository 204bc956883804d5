# SPDX-License-Identifier: Apache-2.0
"""PTX of formulas whose accuracy is argued and tested without a GPU or the DSL: text only."""

from __future__ import annotations

import struct

_LOG2_E = 1.4426950408889634


def f32_literal(value: float) -> str:
    """PTX literal of an fp32 constant."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


def _round_to_f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def swiglu_text(alpha: float, beta: float) -> str:
    """PTX of $0 = $1 * sigmoid(alpha * $1) * ($2 + beta), relative error below 1e-6; sigmoids below 2^-126 count as 0.

    e^(-alpha*g) = 2^hi * (1 + lo*ln2) with hi + lo = -alpha*log2(e)*g to twice the precision, because rounding hi alone
    costs |hi| * 4e-8 of the result. `ex2.approx` and `rcp.approx` are good to 2^-22 and 2^-23.
    """
    slope = -alpha * _LOG2_E
    high = f32_literal(slope)
    low = f32_literal(slope - _round_to_f32(slope))
    return (
        "{.reg .f32 t, l, e; "
        f"mul.rn.f32 t, $1, {high}; neg.f32 l, t; fma.rn.f32 l, $1, {high}, l; fma.rn.f32 l, $1, {low}, l; "
        "fma.rn.f32 l, l, 0f3F317218, 0f3F800000; "
        "min.f32 l, l, 0f40000000; "  # an infinite g makes l NaN: min drops it
        "ex2.approx.ftz.f32 e, t; mul.rn.f32 e, e, l; add.rn.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; "
        "mul.rn.f32 e, $1, e; "
        + (
            f"add.rn.f32 t, $2, {f32_literal(beta)}; mul.rn.f32 $0, e, t;}}"
            if beta != 0.0
            else "mul.rn.f32 $0, e, $2;}"
        )
    )
