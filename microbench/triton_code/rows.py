# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Triton kernels of :mod:`microbench.rivals.row_kernels`, which says what they compute. Needs triton to be imported."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(gate_up, out, width, bound, alpha, beta, COLUMNS: tl.constexpr):
    """A program: `COLUMNS` columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, bound)
    up = tl.maximum(tl.minimum(up, bound), -bound)
    value = gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    tl.store(out + row * width + column, value.to(tl.bfloat16), mask=inside)


@triton.jit
def weighted_sum(rows, slots, weights, out, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """A program: `COLUMNS` columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(slots + token * TOP_K + slot)
        if row >= 0:
            weight = tl.load(weights + token * TOP_K + slot)
            total += weight * tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(tl.bfloat16), mask=inside)
