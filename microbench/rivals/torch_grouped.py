# SPDX-License-Identifier: Apache-2.0
"""torch's own grouped GEMM with bf16 weights: fc1, SwiGLU, fc2 over rows sorted by expert.

Used by the GPU suite's benchmark; needs a CUDA GPU of compute capability 9.0 or newer.
"""

from __future__ import annotations

import torch


class TorchGroupedMlp:
    """fc1 -> SwiGLU -> fc2 in bf16 by `torch._grouped_mm`; three launches and more, all capturable."""

    name = "torch._grouped_mm bf16"

    def __init__(self, hidden_size: int, intermediate_size: int, rows_per_expert: torch.Tensor, seed: int = 0) -> None:
        """Random weights and rows.

        Args:
            hidden_size: H.
            intermediate_size: I.
            rows_per_expert: (E,) integers on the GPU.
            seed: of weights and rows.
        """
        device = rows_per_expert.device
        generator = torch.Generator(device).manual_seed(seed)
        experts = rows_per_expert.numel()
        rows = int(rows_per_expert.sum())

        def random(*shape: int) -> torch.Tensor:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
            return out.normal_(0.0, shape[-1] ** -0.5, generator=generator)

        self._fc1 = random(experts, 2 * intermediate_size, hidden_size).transpose(1, 2)
        self._fc2 = random(experts, hidden_size, intermediate_size).transpose(1, 2)
        self._rows = torch.randn((rows, hidden_size), device=device, generator=generator).to(torch.bfloat16)
        self._ends = torch.cumsum(rows_per_expert, 0).to(torch.int32)

    def run(self) -> torch.Tensor:
        """One pass over all rows: (rows, H) bf16."""
        gate_up = torch._grouped_mm(self._rows, self._fc1, offs=self._ends, out_dtype=torch.bfloat16)
        gate, up = torch.chunk(gate_up, 2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        return torch._grouped_mm(hidden, self._fc2, offs=self._ends, out_dtype=torch.bfloat16)

    def check(self) -> float:
        """rel-L2 of the first non-empty expert against float32, with the same bf16 roundings."""
        ends = self._ends.tolist()
        expert = next(e for e, end in enumerate(ends) if end > 0)
        x = self._rows[: ends[expert]].float()
        gate, up = torch.chunk((x @ self._fc1[expert].float()).to(torch.bfloat16), 2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        expected = hidden.float() @ self._fc2[expert].float()
        got = self.run()[: ends[expert]].float()
        return float((got - expected).norm() / expected.norm())
