# SPDX-License-Identifier: Apache-2.0
"""One rank's experts on the CPU: staging of tokens, fc1 with SwiGLU and requantisation, fc2 (docs/numerics.md 4)."""

from __future__ import annotations

import torch

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.base import SaturationReport
from trtllm_megamoe.engines.cpu import numerics
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.calibration import ActivationObserver
from trtllm_megamoe.weights.store import WeightStore

_ROWS_AT_ONCE = 1024
"""Rows of one expert computed together: bounds the fp64 transient, changes no bit."""


class ExpertMath:
    """Weights and alphas of one load, and the arithmetic over rows that they fix."""

    def __init__(self, weights: WeightStore, config: MegaMoeConfig) -> None:
        assert weights.activation_mode is not None  # a loaded store has one
        self._w = weights.expert_weights()
        self._alphas = weights.alphas
        self._config = config
        self._mode = weights.activation_mode
        self.observer: ActivationObserver | None = None
        self._is_nvfp4 = self._mode is ActivationMode.NVFP4
        self._input_global = torch.tensor(self._w.input_global if self._is_nvfp4 else 0.0, dtype=torch.float32)

    def stage_tokens(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, SaturationReport]:
        """bf16 rows (T, H) -> payload bytes, payload scale bytes, saturation of the blocks."""
        if self.observer is not None:
            self.observer.observe_input(x)
        if self._is_nvfp4:
            codes, scales, saturated = numerics.quantize_nvfp4(x.float(), self._input_global)
            return codes, scales, SaturationReport(input_blocks=scales.numel(), input_saturated=saturated)
        rows, inverse = numerics.row_power_of_two(x)
        return rows.view(torch.uint8), inverse.unsqueeze(-1).view(torch.uint8), SaturationReport()

    def decode_tokens(self, payload: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Payload bytes of pulled rows -> pool rows (m, H) f16 and their row scale (m,) fp32."""
        h = self._config.hidden_size
        if self._is_nvfp4:
            rows = numerics.decode_blocks(payload[:, : h // 2], scales[:, : h // numerics.BLOCK], torch.float16)
            return rows, torch.ones(payload.shape[0])
        return payload.view(torch.float16), scales[:, :4].contiguous().view(torch.float32).flatten()

    def fc1(
        self, expert: int, pool: torch.Tensor, row_scale: torch.Tensor, route_weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, SaturationReport]:
        """Pool rows (m, H) f16 -> fc1 output (m, I) as f16 values, after SwiGLU and requantisation."""
        parts, report = [], SaturationReport()
        for rows in _chunks(pool.shape[0]):
            gate = self._project(pool[rows], self._w.gate_codes[expert], self._w.gate_scales[expert])
            up = self._project(pool[rows], self._w.up_codes[expert], self._w.up_scales[expert])
            factor = row_scale[rows].unsqueeze(-1)
            h = numerics.swiglu(
                gate * factor * self._alphas["fc1_alpha"][expert, 0],
                up * factor * self._alphas["fc1_alpha"][expert, 1],
                self._config.swiglu_limit,
                self._config.swiglu_alpha,
                self._config.swiglu_beta,
            )
            if route_weight is not None:
                h = h * route_weight[rows].unsqueeze(-1)
            if self.observer is not None:
                self.observer.observe_hidden(expert, h)
            values, part_report = self._requantize(expert, h)
            parts.append(values)
            report = report + part_report
        return torch.cat(parts), report

    def fc2(self, expert: int, fc1_out: torch.Tensor) -> torch.Tensor:
        """fc1 output (m, I) f16 -> route rows (m, H) bf16."""
        parts = []
        for rows in _chunks(fc1_out.shape[0]):
            y = self._project(fc1_out[rows], self._w.down_codes[expert], self._w.down_scales[expert])
            parts.append((y * self._alphas["fc2_alpha"][expert]).bfloat16())
        return torch.cat(parts)

    def _project(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return numerics.exact_matmul(rows, codes, scales, self._is_nvfp4).float()

    def _requantize(self, expert: int, h: torch.Tensor) -> tuple[torch.Tensor, SaturationReport]:
        if self._is_nvfp4:
            assert self._w.down_input_global is not None
            codes, scales, saturated = numerics.quantize_nvfp4(h, self._w.down_input_global[expert])
            report = SaturationReport(fc1_out_blocks=scales.numel(), fc1_out_saturated=saturated)
            return numerics.decode_blocks(codes, scales, torch.float16), report
        factor = self._alphas["fc1_norm_const"][expert]  # 2^q
        return numerics.saturating_f16(h.bfloat16().float() * factor), SaturationReport()


def _chunks(num_rows: int) -> list[slice]:
    return [slice(r, min(num_rows, r + _ROWS_AT_ONCE)) for r in range(0, num_rows, _ROWS_AT_ONCE)]
