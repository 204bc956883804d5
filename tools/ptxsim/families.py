# SPDX-License-Identifier: Apache-2.0
"""What differs between our kernels of two architectures when their operands are laid out in virtual memory.

Called by `ranks.py`; packing and layouts are the product's, tensor maps are restated here from the kernels' headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_megamoe.regions import PoolLayout
from trtllm_megamoe.weights.layout_sm90 import Sm90Layout
from trtllm_megamoe.weights.layout_sm100 import Sm100Layout

from .machine import TensorMap

Layer = Mapping[str, Any]
Values = Mapping[str, int]


@dataclass(frozen=True)
class Family:
    """One kernel family.

    Attributes:
        layout: how it wants weights packed.
        weights: launch argument -> packed buffer.
        pool_layout: what its workspace holds token rows as.
        accumulator_shift: its alphas are multiplied by this power of two.
        racy: regions of which a tensor load may take bytes that others are writing.
        maps: (layer, tile, addresses by argument, pool rows) -> arguments made from tensor maps.
    """

    layout: Any
    weights: Mapping[str, str]
    pool_layout: PoolLayout
    accumulator_shift: int
    racy: tuple[str, ...]
    maps: Callable[[Layer, Layer, Values, int], dict[str, int | TensorMap]]


def _hopper_maps(layer: Layer, tile: Layer, at: Values, rows: int) -> dict[str, int | TensorMap]:
    """One map per token width and buffer of f16 rows."""
    maps: dict[str, int | TensorMap] = {}
    for i, width in enumerate(tile["token_widths"]):
        for name, columns in (("pool", layer["hidden_size"]), ("h", layer["intermediate_size"])):
            maps[f"map{i}_{name}"] = TensorMap(at[name], rows, 2 * columns, 2 * columns, width, 128, 16, True)
            maps[f"map{i}_{name}_rows"] = rows
    return maps


def _blackwell_maps(layer: Layer, tile: Layer, at: Values, rows: int) -> dict[str, int | TensorMap]:
    """Codes of 4 bits and scale atoms as u64, of both weights and both token buffers."""
    hidden, inter, experts = layer["hidden_size"], layer["intermediate_size"], layer["num_local_experts"]
    tokens = tile["tokens"]
    maps: dict[str, int | TensorMap] = {"mma": 0, "pool_blocks": rows // 128}
    for name, codes, per_expert, columns in (
        ("w1", "w1_codes", 2 * inter, hidden),
        ("w2", "w2_codes", hidden, inter),
        ("pool", "pool", 0, hidden),
        ("h", "h", 0, inter),
    ):
        count, box = (experts * per_expert, 128) if per_expert else (rows, tokens // tile.get("ctas", 1))
        blocks, height = (experts * -(-per_expert // 128), 1) if per_expert else (rows // 128, -(-tokens // 128))
        width = -(-columns // 64) * 512
        maps[f"map_{name}"] = TensorMap(at[codes], count, columns // 2, columns // 2, box, 128, 4, True)
        maps[f"map_{name}_scales"] = TensorMap(at[f"{name}_scales"], blocks, width, width, height, 2048, 64, False)
    return maps


HOPPER = Family(Sm90Layout(), {"w1": "fc1_records", "w2": "fc2_records"}, "f16", 14, (), _hopper_maps)
BLACKWELL = Family(
    Sm100Layout(),
    {"w1_codes": "fc1_codes", "w1_scales": "fc1_scales", "w2_codes": "fc2_codes", "w2_scales": "fc2_scales"},
    "sm_100",
    0,
    ("pool", "pool_scales", "fc1_out", "fc1_scales"),
    _blackwell_maps,
)


def family_of(arch: str) -> Family:
    """The family of a target."""
    return HOPPER if arch == "sm_90a" else BLACKWELL
