# SPDX-License-Identifier: Apache-2.0
"""torch's own grouped GEMM with bf16 weights: fc1, SwiGLU, fc2 over rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microbench.rivals.base import Matrix, Rival, Rows, Weights


class TorchGrouped(Rival):
    """`torch._grouped_mm` on the decoded weights, which bf16 holds exactly."""

    name = "torch._grouped_mm, bf16 weights"
    distribution = "torch"

    @classmethod
    def why_not(cls) -> str | None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
            return "needs a GPU of compute capability 9.0 or newer"
        return None if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm"

    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        def decoded(matrix: Matrix) -> torch.Tensor:
            experts, rows, half = matrix.codes.shape
            out = torch.empty(experts, rows, 2 * half, dtype=torch.bfloat16, device=matrix.codes.device)
            for expert in range(experts):
                out[expert] = matrix.decode(expert)
            return out.transpose(1, 2)

        self._gate_up, self._down = decoded(weights.gate_up), decoded(weights.down)

    def bind(self, rows: Rows) -> None:
        self._x = rows.x
        self._ends = torch.tensor(rows.ends, dtype=torch.int32, device=rows.x.device)

    def run(self) -> torch.Tensor:
        gate_up = torch._grouped_mm(self._x, self._gate_up, offs=self._ends, out_dtype=torch.bfloat16)
        gate, up = torch.chunk(gate_up, 2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        return torch._grouped_mm(hidden, self._down, offs=self._ends, out_dtype=torch.bfloat16)
