# SPDX-License-Identifier: Apache-2.0
"""Which kernels the parts of the suite need; pure, needs no GPU."""

from __future__ import annotations

from tools.gpu_suite import bench, correctness, exchange, fixed_cost, goldens, products
from vendored_kernels.sm90.config import TILES, KernelConfig

WHOLE, HALF = ("n8", "n16", "n64", "n128"), ("h8", "h16", "h64", "n64", "n128")


def needed(parts: list[str], shapes: list[str], modes: list[str]) -> list[KernelConfig]:
    """Every kernel of these parts, once."""
    found: dict[str, KernelConfig] = {}

    def add(config: KernelConfig) -> None:
        found[repr(config)] = config

    for config in exchange.needed() if any(part.startswith("exchange") for part in parts) else ():
        add(config)
    for config in fixed_cost.needed() if "fixed-cost" in parts else ():
        add(config)
    for config in products.needed() if "products" in parts else ():
        add(config)
    others = ("bench", "products", "exchange", "fixed", "layers")
    if any(not part.startswith(others) for part in parts):
        for case in correctness.all_cases():
            for tile in case.tiles:
                add(KernelConfig(case.spec, TILES[tile]))
    if "goldens" in parts:
        for config in goldens.needed():
            add(config)
    if "bench" in parts:
        for shape in shapes:
            for mode in modes:
                for tile in HALF if shape == "qwen3-235b" else WHOLE:
                    add(KernelConfig(bench.spec_of(shape, mode), TILES[tile]))
    if "determinism" in parts:
        add(KernelConfig(bench.spec_of("v4-pro", "bf16"), TILES["n128"]))
    return list(found.values())
