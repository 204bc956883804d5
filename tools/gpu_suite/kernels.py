# SPDX-License-Identifier: Apache-2.0
"""Which kernels the parts of the suite need; pure, needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu_suite import bench, correctness, exchange, fixed_cost, goldens, products, sanitized, stability
from vendored_kernels.sm90.config import TILES, KernelConfig

WHOLE, HALF = ("n8", "n16", "n64", "n128"), ("h8", "h16", "h64", "n64", "n128")


def needed(parts: list[str], shapes: list[str], modes: list[str], only: str = "") -> list[KernelConfig]:
    """Every kernel of these parts, once; `only` as in the parts `correctness` and `exchange`."""
    found: dict[str, KernelConfig] = {}
    for part in parts:
        for config in _of_part(part, shapes, modes, only):
            found[repr(config)] = config
    return list(found.values())


def _of_part(part: str, shapes: list[str], modes: list[str], only: str) -> Iterator[KernelConfig]:
    if part == "correctness":
        for case in correctness.wanted(only):
            yield from (KernelConfig(case.spec, TILES[tile]) for tile in case.tiles)
    elif part in ("graph", "faults", "determinism"):
        yield from stability.needed(part)
    elif part == "products":
        yield from products.needed()
    elif part == "goldens":
        yield from goldens.needed()
    elif part == "exchange":
        yield from exchange.needed(only)
    elif part in ("exchange-soak", "exchange-graphs", "exchange-failures"):
        yield from exchange.needed_by_soak()
    elif part == "fixed-cost":
        yield from fixed_cost.needed()
    elif part in sanitized.CASES:
        yield from (sanitized.kernel_of(part, mode) for mode in modes)
    elif part in ("bench", "once"):
        for shape in shapes:
            for mode in modes:
                for tile in HALF if shape == "qwen3-235b" else WHOLE:
                    yield KernelConfig(bench.spec_of(shape, mode), TILES[tile])
