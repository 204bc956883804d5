# SPDX-License-Identifier: Apache-2.0
"""humming-kernels (PyPI) with NVFP4 weights and bf16 activations: fc1, its own SwiGLU kernel, fc2.

Kernels are compiled by the package when they are first used, in parallel, which takes a CUDA toolkit and up to a few
minutes. The configurations are those of its own heuristic for the number of rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from microbench.rivals.base import Matrix, Nvfp4Matrix, Rival, Rows, Weights

_NVFP4 = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
_SWIGLU = "a / (1.0f + expf(-a)) * b"


def blocks_by_expert(counts: Sequence[int], block: int) -> tuple[list[int], list[int]]:
    """Rows cut into blocks of one expert each.

    Returns:
        Row numbers, every expert's padded to whole blocks with the number of rows; and the expert of each block.
    """
    total, first = sum(counts), 0
    ids: list[int] = []
    experts: list[int] = []
    for expert, count in enumerate(counts):
        num_blocks = -(-count // block)
        ids += [*range(first, first + count), *([total] * (num_blocks * block - count))]
        experts += [expert] * num_blocks
        first += count
    return ids, experts


class _Humming(Rival):
    """Common to both variants; a subclass says how the package finds an expert's rows."""

    distribution = "humming-kernels"
    gemm_type: ClassVar[str]

    @classmethod
    def why_not(cls) -> str | None:
        if importlib.util.find_spec("humming") is None:
            return "humming-kernels is not installed (pip install -e '.[rivals]')"
        if not torch.cuda.is_available():
            return "no CUDA device is visible to torch"
        return None

    def __init__(self, weights: Weights, totals: Sequence[int]) -> None:
        hidden, inter = weights.hidden_size, weights.intermediate_size
        self._gate_up = self._layer(2 * inter, hidden, weights.gate_up)
        self._down = self._layer(hidden, inter, weights.down)
        self._configs = [self._heuristics(layer, totals) for layer in (self._gate_up, self._down)]

    @staticmethod
    def _layer(rows: int, columns: int, matrix: Matrix) -> Any:
        from humming.layer import HummingLayer

        assert isinstance(matrix, Nvfp4Matrix)
        with matrix.codes.device:
            layer = HummingLayer(
                shape_n=rows,
                shape_k=columns,
                weight_config=dict(_NVFP4),
                num_experts=matrix.codes.shape[0],
                torch_dtype=torch.bfloat16,
            )
        layer.load_from_tensors(
            {
                "weight": matrix.codes,
                "weight_scale": matrix.block_scales,
                "weight_scale_2": matrix.global_scales,
            }
        )
        layer.transform()
        return layer

    def _heuristics(self, layer: Any, totals: Sequence[int]) -> list[list[Any]]:
        """(rows above which, rows up to which, configuration): an entry a total, without gaps.

        The package asks for the entry of one row in any case, and compiles all of a list at once.
        """
        from humming.tune import get_heuristics_config

        entries: list[list[Any]] = []
        for total in sorted(set(totals)):
            config = get_heuristics_config(layer.humming_config, shape_m=total, gemm_type=self.gemm_type)
            entries.append([entries[-1][1] if entries else 0, total, config])
        return entries

    def bind(self, rows: Rows) -> None:
        self._x = rows.x
        total, device = rows.x.shape[0], rows.x.device
        inter = self._down.shape_k
        self._between = torch.empty(total, 2 * inter, dtype=torch.bfloat16, device=device)
        self._hidden = torch.empty(total, inter, dtype=torch.bfloat16, device=device)
        self._out = torch.empty(total, self._down.shape_n, dtype=torch.bfloat16, device=device)
        configs = [next(c for _, most, c in found if most == total) for found in self._configs]
        self._tables = [self._table(rows, config["block_shape"][0]) for config in configs]

    def _table(self, rows: Rows, block: int) -> dict[str, torch.Tensor]:
        """Where each expert's rows are, in the words of `gemm_type`."""
        raise NotImplementedError

    def run(self) -> torch.Tensor:
        from humming.ops import process_input

        self._multiply(0, self._gate_up, self._x, self._between)
        process_input(self._between, outputs=self._hidden, activation_type="binary_split", activation_impl=_SWIGLU)
        self._multiply(1, self._down, self._hidden, self._out)
        return self._out

    def _multiply(self, index: int, layer: Any, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        layer(
            inputs,
            outputs=outputs,
            compute_config={"gemm_type": self.gemm_type},
            tuning_config=self._configs[index],
            **self._tables[index],
        )


class HummingGrouped(_Humming):
    """Experts' rows by their offsets."""

    name = "humming-kernels, NVFP4 weights, grouped"
    gemm_type = "grouped_contiguous"

    def _table(self, rows: Rows, block: int) -> dict[str, torch.Tensor]:
        return {"expert_layout": torch.tensor([0, *rows.ends], dtype=torch.int64, device=rows.x.device)}


class HummingIndexed(_Humming):
    """Experts' rows by a list of row numbers, cut into blocks."""

    name = "humming-kernels, NVFP4 weights, indexed"
    gemm_type = "indexed"

    def _table(self, rows: Rows, block: int) -> dict[str, torch.Tensor]:
        ids, experts = blocks_by_expert(rows.counts, block)

        def on_device(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=rows.x.device)

        return {
            "sorted_ids": on_device(ids),
            "expert_ids": on_device(experts),
            "num_tokens_padded": on_device(len(ids)),
        }
