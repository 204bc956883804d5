# SPDX-License-Identifier: Apache-2.0
"""Triton's own grouped matmul (`triton_kernels`) with MXFP4 weights and bf16 activations: fc1, SwiGLU, fc2.

MXFP4 has the same codes and a power of two per 32 values, so the weights are other ones than the layer's: fewer scale
bytes to read, and coarser. The output is checked against those. Kernels compile at first use. The package's layout of
the scales fixes the number of warps, and with it which row counts it is good at; both that its authors use are here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from microbench.rivals.base import BLOCK, Matrix, Mxfp4Matrix, Nvfp4Matrix, Rival, Rows, Weights
from microbench.rivals.row_kernels import swiglu

_MX_BLOCK = 32
_BIAS = 127


def to_mxfp4(matrix: Matrix) -> Mxfp4Matrix:
    """The same codes; each scale the power of two nearest to the larger of the two that it replaces."""
    if not isinstance(matrix, Nvfp4Matrix):
        raise TypeError(f"expected an NVFP4 matrix, got {type(matrix).__name__}")
    scales = matrix.block_scales.float() * matrix.global_scales[:, None, None]
    larger = scales.view(*scales.shape[:-1], -1, _MX_BLOCK // BLOCK).amax(dim=-1)
    exponents = larger.clamp_(min=2.0**-60).log2_().round_().add_(_BIAS).to(torch.uint8)
    return Mxfp4Matrix(matrix.codes, exponents)


def _fill_in() -> None:
    """Names of a newer triton that the package asks for when it is imported; nothing of them runs on this GPU."""
    from triton.language import target_info
    from triton.runtime.jit import JITFunction, constexpr_function

    def is_hip_gfx1250() -> bool:
        return False

    if not hasattr(target_info, "is_hip_gfx1250"):
        target_info.is_hip_gfx1250 = constexpr_function(is_hip_gfx1250)
    for name in ("def_file_line_number", "def_file_col_number"):
        if not hasattr(JITFunction, name):
            setattr(JITFunction, name, 1)


class _TritonMxfp4(Rival):
    """Common to both layouts."""

    distribution = "tokenspeed-triton-kernels"
    num_warps: ClassVar[int]

    @classmethod
    def why_not(cls) -> str | None:
        if importlib.util.find_spec("triton_kernels") is None:
            return f"triton_kernels is not installed ({cls.distribution}: pip install -e '.[rivals]')"
        if not torch.cuda.is_available():
            return "no CUDA device is visible to torch"
        return None

    @classmethod
    def in_own_format(cls, weights: Weights) -> Weights:
        hidden, inter = weights.hidden_size, weights.intermediate_size
        return Weights(hidden, inter, to_mxfp4(weights.gate_up), to_mxfp4(weights.down))

    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        _fill_in()
        self._gate_up, self._down = self._operand(weights.gate_up), self._operand(weights.down)

    def _operand(self, matrix: Matrix) -> tuple[Any, Any]:
        """Weights as the package wants them, (E, K, N) with K packed, and the configuration that holds their scales."""
        from triton_kernels.matmul import PrecisionConfig
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        assert isinstance(matrix, Mxfp4Matrix)
        values = layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2)
        scales = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=self.num_warps)
        packed = convert_layout(wrap_torch_tensor(matrix.codes.mT, dtype=FP4), values)
        factors = convert_layout(wrap_torch_tensor(matrix.exponents.mT), scales)
        config = PrecisionConfig(b_mx_scale=factors, b_microblock_size=_MX_BLOCK, out_dtype=torch.bfloat16)
        return packed, config

    def bind(self, rows: Rows) -> None:
        from triton_kernels.tensor import make_ragged_tensor_metadata

        self._x = rows.x
        counts = torch.tensor(rows.counts, dtype=torch.int32, device=rows.x.device)
        self._ragged = make_ragged_tensor_metadata(counts, rows.x.shape[0])

    def run(self) -> torch.Tensor:
        return self._multiply(swiglu(self._multiply(self._x, self._gate_up), None, 1.0, 0.0), self._down)

    def _multiply(self, x: torch.Tensor, operand: tuple[Any, Any]) -> torch.Tensor:
        from triton_kernels.matmul import matmul

        weights, config = operand
        out: torch.Tensor = matmul(x, weights, None, a_ragged_metadata=self._ragged, precision_config=config)
        return out


class TritonMxfp4FourWarps(_TritonMxfp4):
    """Scales laid out for four warps."""

    name = "triton_kernels, MXFP4 weights, 4 warps"
    num_warps = 4


class TritonMxfp4EightWarps(_TritonMxfp4):
    """Scales laid out for eight warps."""

    name = "triton_kernels, MXFP4 weights, 8 warps"
    num_warps = 8
