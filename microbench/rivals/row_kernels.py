# SPDX-License-Identifier: Apache-2.0
"""The two row-wise steps of an unfused layer, a Triton kernel each, so that the chain does not lose to eager torch.

Used by :mod:`microbench.rivals.unfused`. On the CPU both are plain torch, which is also what says what they compute.
Compiled at first use, which must be before any capture.
"""

from __future__ import annotations

import torch

_COLUMNS = 1024


def swiglu(gate_up: torch.Tensor, limit: float | None, alpha: float, beta: float) -> torch.Tensor:
    """(R, 2 I) bf16, gates first -> (R, I) bf16: g * sigmoid(alpha g) * (u + beta), clamped by `limit` before."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not gate_up.is_cuda:
        gate, up = gate_up.float().chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(torch.bfloat16)
    from microbench.triton_code import rows as triton_rows

    out = torch.empty(rows, width, dtype=torch.bfloat16, device=gate_up.device)
    grid = (rows, -(-width // _COLUMNS))
    bound = float("inf") if limit is None else limit
    triton_rows.swiglu[grid](gate_up, out, width, bound, alpha, beta, COLUMNS=_COLUMNS)
    return out


def weighted_sum(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows.

    Args:
        rows: (N, H) bf16.
        slots: (T, K) int64, row of each route, negative for none.
        weights: (T, K) float32; where there is no row, never read into the sum.

    Returns:
        (T, H) bf16 of a float32 sum in slot order.
    """
    num_tokens, top_k = slots.shape
    width = rows.shape[1]
    if not rows.is_cuda:
        total = torch.zeros(num_tokens, width)
        for slot in range(top_k):
            live = slots[:, slot] >= 0
            total[live] += weights[live, slot, None] * rows[slots[live, slot]].float()
        return total.to(torch.bfloat16)
    out = torch.empty(num_tokens, width, dtype=torch.bfloat16, device=rows.device)
    if num_tokens:
        grid = (num_tokens, -(-width // _COLUMNS))
        from microbench.triton_code import rows as triton_rows

        triton_rows.weighted_sum[grid](rows, slots, weights, out, width, TOP_K=top_k, COLUMNS=_COLUMNS)
    return out
