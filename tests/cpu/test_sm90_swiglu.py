# SPDX-License-Identifier: Apache-2.0
"""The kernel's SwiGLU, interpreted instruction by instruction in fp32, against float64: 1e-6 relative everywhere."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from vendored_kernels.common.formulas import swiglu_text

# What the PTX manual allows ex2.approx and rcp.approx; both are taken at their worst, in either direction.
EX2_ERROR, RCP_ERROR = 2.0**-22, 2.0**-23


def _evaluate(operation: str, x: list[np.ndarray], ex2_sign: int, rcp_sign: int) -> np.ndarray:
    """One instruction in float64, before its rounding to fp32 (products of two fp32 values are exact there)."""
    if operation == "mul.rn.f32":
        return x[0] * x[1]
    if operation == "add.rn.f32":
        return x[0] + x[1]
    if operation == "neg.f32":
        return -x[0]
    if operation == "fma.rn.f32":
        return x[0] * x[1] + x[2]
    if operation == "min.f32":
        return np.fmin(x[0], x[1])
    if operation == "ex2.approx.ftz.f32":
        return np.exp2(x[0]) * (1 + ex2_sign * EX2_ERROR)
    if operation == "rcp.approx.ftz.f32":
        return 1 / x[0] * (1 + rcp_sign * RCP_ERROR)
    raise AssertionError(f"unknown instruction {operation}")


def _interpret(text: str, inputs: dict[str, np.ndarray], ex2_sign: int, rcp_sign: int) -> np.ndarray:
    """Run straight-line fp32 PTX; approximations are exact values pushed off by their error bound."""
    registers = dict(inputs)

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.float32(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        return registers[name]

    for statement in text.strip("{}").split(";"):
        words = re.split(r"[ ,]+", statement.strip())
        if words[0] in ("", ".reg"):
            continue
        operation, target = words[0], words[1]
        operands = [value(name).astype(np.float64) for name in words[2:]]
        with np.errstate(all="ignore"):
            registers[target] = _evaluate(operation, operands, ex2_sign, rcp_sign).astype(np.float32)
            if ".ftz" in operation:
                tiny = np.abs(registers[target]) < np.float32(2.0**-126)
                registers[target] = np.where(tiny, np.float32(0), registers[target])
    return registers["$0"]


def _reference(g: np.ndarray, u: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    g64 = g.astype(np.float64)
    with np.errstate(over="ignore"):
        return g64 / (1 + np.exp(-alpha * g64)) * (u.astype(np.float64) + beta)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (1.702, 1.0), (0.5, -0.25)])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_swiglu_whole_range_stays_within_1e_6(alpha: float, beta: float, signs: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    g = np.concatenate([np.linspace(-120, 120, 200_001), rng.normal(0, 2, 50_000), rng.normal(0, 1e-6, 1000)])
    g = (g / alpha).astype(np.float32)
    u = rng.normal(0, 3, g.size).astype(np.float32)
    got = _interpret(swiglu_text(alpha, beta), {"$1": g, "$2": u}, *signs).astype(np.float64)
    expected = _reference(g, u, alpha, beta)
    flushed = 2.0**-125 * np.abs(g * (u.astype(np.float64) + beta))  # sigmoid below the smallest normal becomes zero
    assert np.isfinite(got).all()
    assert (np.abs(got - expected) <= 1e-6 * np.abs(expected) + flushed).all()


def test_swiglu_without_the_second_half_of_the_exponent_would_fail() -> None:
    """The correction is needed: the plain form misses 1e-6, so this test can tell the two apart."""
    g = np.linspace(-80, -20, 100_001).astype(np.float32)
    u = np.ones_like(g)
    correction = r"fma\.rn\.f32 l, l, 0f3F317218, 0f3F800000;"
    plain, count = re.subn(correction, "mul.rn.f32 l, 0f3F800000, 0f3F800000;", swiglu_text(1.0, 0.0))
    assert count == 1
    got = _interpret(plain, {"$1": g, "$2": u}, 1, 1).astype(np.float64)
    expected = _reference(g, u, 1.0, 0.0)
    assert (np.abs(got - expected) / np.abs(expected)).max() > 1e-6


def test_swiglu_infinities_and_nan_follow_the_formula() -> None:
    g = np.array([np.inf, -200.0, np.nan], np.float32)
    got = _interpret(swiglu_text(1.0, 0.0), {"$1": g, "$2": np.full(3, 2, np.float32)}, 1, 1)
    assert got[0] == np.inf
    assert abs(got[1]) < 1e-35
    assert np.isnan(got[2])
