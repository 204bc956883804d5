# SPDX-License-Identifier: Apache-2.0
"""Our own kernels as files, a layer's scale table and packed weights, results: what `ranks.py` runs kernels with.

The kernel's facts (layer, tile, argument order) come from the JSON file beside its PTX. Packing is the product's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_megamoe.weights.layout_base import ExpertBulk
from trtllm_megamoe.weights.spec import LayerShape

from .parse import Program, parse
from .run import RunReport

TIMEOUT_NS = 1 << 40

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class KernelFile:
    """PTX of one compiled kernel and its facts: layer and tile options, `arguments` in the order of its parameters."""

    text: str
    facts: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> KernelFile:
        """From `path` (PTX) and the JSON file beside it."""
        return cls(path.read_text(), json.loads(path.with_suffix(".json").read_text()))

    def program(self) -> Program:
        """Parsed."""
        return parse(self.text)


@dataclass(frozen=True)
class LayerRun:
    """Results of a launch: y (T, H) bf16, the pool rows of all routes (T, K), fc1 output rows, the error record."""

    y: torch.Tensor
    route_rows: torch.Tensor
    buffers: dict[str, torch.Tensor]
    error: list[int]
    report: RunReport


def _one(tensors: Tensors, name: str) -> torch.Tensor:
    return tensors[name].float().reshape(())


def scale_table(tensors: Tensors, num_experts: int, mode: str, accumulator_shift: int) -> torch.Tensor:
    """(E + 1, 4) fp32 of docs/numerics.md 4.1 and 4.2: alphas (times 2^shift) and qs2 or 2^q per expert, then {qs1}."""
    table = torch.zeros(num_experts + 1, 4)
    unit = torch.tensor(2.0**accumulator_shift)
    a1 = torch.ones(())
    if "0.w2.input_scale" in tensors:
        names = [f"{e}.{w}.input_scale" for e in range(num_experts) for w in ("w1", "w3")]
        a1 = torch.stack([_one(tensors, name) for name in names]).max()
    for e in range(num_experts):
        gate, up, down = (_one(tensors, f"{e}.{w}.weight_scale_2") for w in ("w1", "w3", "w2"))
        a2 = _one(tensors, f"{e}.w2.input_scale") if "0.w2.input_scale" in tensors else None
        if mode == "nvfp4":
            assert a2 is not None
            table[e] = torch.stack([gate * a1 * unit, up * a1 * unit, down * a2 * unit, 1.0 / a2])
            continue
        q = 0
        if a2 is not None:
            mantissa, exponent = math.frexp(2688.0 * float(a2))
            q = min(max(10 - (exponent if mantissa > 0.5 else exponent - 1), -14), 30)
        table[e] = torch.stack([gate * unit, up * unit, down * 2.0**-q * unit, torch.tensor(2.0**q)])
    table[num_experts, 0] = 1.0 / a1
    return table


def pack(tensors: Tensors, num_experts: int, layout: Any, shape: LayerShape) -> dict[str, torch.Tensor]:
    """Checkpoint tensors in a target layout, one uint8 tensor per buffer."""
    out = {n: torch.zeros(num_experts, *dims, dtype=torch.uint8) for n, dims in layout.buffer_shapes(shape).items()}
    for e in range(num_experts):
        fields = [
            tensors[f"{e}.{w}.{part}"].view(torch.uint8).unsqueeze(0)
            for w in ("w1", "w3", "w2")
            for part in ("weight", "weight_scale")
        ]
        layout.pack(ExpertBulk(*fields), {n: b[e : e + 1] for n, b in out.items()})
    return out
