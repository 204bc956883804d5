# SPDX-License-Identifier: Apache-2.0
"""Our own kernels in the interpreter: a layer's operands in virtual global memory, launches, results.

Used by tests and by hand; the kernel's facts (layer, tile, argument order) come from the JSON file beside its PTX.
Packing is the product's; everything that is not an input starts poisoned.
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
from trtllm_megamoe.weights.layout_sm100 import Sm100Layout
from trtllm_megamoe.weights.spec import LayerShape
from vendored_kernels.sm100.config import ADDRESSES, NUMBERS

from .machine import TensorMap
from .memory import GlobalMemory
from .parse import Program, parse
from .run import PATIENCE, RunReport, run_launch

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


class _Operands:
    """Buffers of one layer in global memory, addresses by argument name."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory = GlobalMemory(memory_bytes)
        self.values: dict[str, int | TensorMap] = {}

    def add(self, name: str, contents: torch.Tensor | int, *, racy: bool = False) -> int:
        if isinstance(contents, torch.Tensor):
            raw = contents.contiguous().view(-1).view(torch.uint8).numpy()
            at = self.memory.add(name, raw if raw.size else 16)
        else:
            at = self.memory.add(name, contents, racy=racy)
        self.values[name] = at
        return at

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A copy of a buffer's contents."""
        count = math.prod(shape)
        flat = torch.from_numpy(self.memory.view(name).copy()).view(dtype)
        return flat[:count].reshape(shape)


def run_sm100(
    kernel: KernelFile,
    tensors: Tensors,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    grid: int = 2,
    seed: int = 0,
    launches: int = 1,
    check_order: bool = True,
    fault_step: int = 0,
    timeout_ns: int = TIMEOUT_NS,
    max_rounds: int = 20000,
    patience: int = PATIENCE,
) -> LayerRun:
    """One Blackwell layer of one rank; `launches` launches in a row on the same workspace, the last one's results.

    `buffers` holds pool and fc1 output as codes, one a byte, and their scales by row and block.
    """
    layer, tile = kernel.facts["layer"], kernel.facts["tile"]
    experts, hidden, inter, top_k = (
        layer[n] for n in ("num_local_experts", "hidden_size", "intermediate_size", "top_k")
    )
    count, n = x.shape[0], tile["tokens"]
    rows = -(-(count * top_k + experts * 127) // 128) * 128
    ops = _Operands(1 << 22)
    packed = pack(tensors, experts, Sm100Layout(), LayerShape(hidden, inter, experts, top_k))
    for name, buffer in (("w1_codes", "fc1_codes"), ("w1_scales", "fc1_scales")):
        ops.add(name, packed[buffer])
    for name, buffer in (("w2_codes", "fc2_codes"), ("w2_scales", "fc2_scales")):
        ops.add(name, packed[buffer])
    ops.add("scales", scale_table(tensors, experts, "nvfp4", 0))
    _add_common(ops, layer, x, ids, weights, rows)
    ops.add("row_weight", rows * 4)
    atoms = {"pool": -(-hidden // 64), "h": -(-inter // 64)}
    for name, columns in (("pool", hidden), ("h", inter)):
        ops.add(name, rows * columns // 2, racy=name == "h")  # a box may reach into the next expert's rows
        ops.add(f"{name}_scales", rows // 128 * atoms[name] * 512, racy=True)
    words = -(-count * top_k // 8) + experts
    ops.add("ready", torch.zeros(2 * words, dtype=torch.int32))
    for name, matrix, matrix_rows, columns in (
        ("w1", "w1_codes", experts * 2 * inter, hidden),
        ("w2", "w2_codes", experts * hidden, inter),
        ("pool", "pool", rows, hidden),
        ("h", "h", rows, inter),
    ):
        box = 128 if name in ("w1", "w2") else n
        bytes_ = columns // 2
        ops.values[f"map_{name}"] = TensorMap(_at(ops, matrix), matrix_rows, bytes_, bytes_, box, 128, 4, True)
        width = -(-columns // 64) * 512
        per_expert = {"w1": 2 * inter, "w2": hidden}
        blocks = experts * -(-per_expert[name] // 128) if name in per_expert else rows // 128
        height = 1 if name in per_expert else -(-n // 128)
        at = _at(ops, f"{name}_scales")
        ops.values[f"map_{name}_scales"] = TensorMap(at, blocks, width, width, height, 2048, 64, False)
    ops.values |= {
        "mma": 0,
        "pool_rows": rows,
        "pool_blocks": rows // 128,
        "timeout_ns": timeout_ns,
        "ready_words": words,
        "ids_are_64": int(ids.dtype == torch.int64),
        "fault_step": fault_step,
        "lag": 2,
    }
    for name in (*ADDRESSES, *NUMBERS):  # one rank reads none of the others
        ops.values.setdefault(name, 0)
    report = _launch(kernel, ops, grid, 1, seed, launches, check_order, max_rounds, patience)
    buffers = {}
    for name, columns in (("pool", hidden), ("h", inter)):
        codes = ops.tensor(name, torch.uint8, rows, columns // 2)
        buffers[name] = torch.stack((codes & 15, codes >> 4), -1).reshape(rows, columns)
        raw = ops.tensor(f"{name}_scales", torch.uint8, rows // 128, atoms[name], 32, 4, 4)
        buffers[f"{name}_scales"] = raw.permute(0, 3, 2, 1, 4).reshape(rows, 4 * atoms[name])
    return _results(ops, layer, count, buffers, report)


def _at(ops: _Operands, name: str) -> int:
    found = ops.values[name]
    assert isinstance(found, int)
    return found


def _add_common(
    ops: _Operands, layer: dict[str, Any], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: int
) -> None:
    count, hidden, top_k = x.shape[0], layer["hidden_size"], layer["top_k"]
    data = {"bf16": 2 * hidden, "fp8": hidden, "fp4": hidden // 2}[layer["combine_format"]]
    scale = {"bf16": 0, "fp8": hidden // 32, "fp4": hidden // 8}[layer["combine_format"]]
    ops.add("x", x.to(torch.bfloat16))
    ops.add("ids", ids)
    ops.add("route_weights", weights.float())
    ops.add("num_tokens", torch.tensor([count], dtype=torch.int32))
    ops.add("y", max(count, 1) * hidden * 2)
    ops.add("row_meta", rows * 8)
    ops.add("route_rows", max(count, 1) * top_k * 4)
    ops.add("results", max(count, 1) * top_k * data)
    ops.add("result_scales", max(count, 1) * top_k * max(-(-scale // 16) * 16, 16))
    for name, words in (("counters", 96), ("epoch", 2), ("error", 16), ("abort", 1)):
        ops.add(name, torch.zeros(words, dtype=torch.int32))
    ops.values |= {f"{name}_at": ops.values[name] for name in ("abort", "results", "result_scales")}


def _launch(
    kernel: KernelFile,
    ops: _Operands,
    grid: int,
    cluster: int,
    seed: int,
    launches: int,
    check_order: bool,
    max_rounds: int,
    patience: int,
) -> RunReport:
    arguments = [ops.values[name] for name in kernel.facts["arguments"]]
    program = kernel.program()
    for number in range(launches):
        report = run_launch(
            program,
            ops.memory,
            [arguments],
            grid=grid,
            cluster_size=cluster,
            seed=seed + number,
            check_order=check_order,
            max_rounds=max_rounds,
            patience=patience,
        )
    return report


def _results(
    ops: _Operands, layer: dict[str, Any], count: int, buffers: dict[str, torch.Tensor], report: RunReport
) -> LayerRun:
    return LayerRun(
        y=ops.tensor("y", torch.bfloat16, count, layer["hidden_size"]),
        route_rows=ops.tensor("route_rows", torch.int32, count, layer["top_k"]),
        buffers=buffers,
        error=ops.tensor("error", torch.int64, 8).tolist(),
        report=report,
    )
