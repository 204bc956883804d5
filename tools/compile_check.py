# SPDX-License-Identifier: Apache-2.0
"""Compiles shipped kernels without a GPU and fails on what a compiler can silently do to them.

    python tools/compile_check.py OUT_DIR [--all] [--jobs N]

Without `--all` a set that covers every axis once: each tile configuration with and without an exchange between ranks,
both activation modes, each wire, clamp and score placement, each preset's shape. With it: every kernel that any preset
can launch at EP 8, or one rank's experts as a layer of its own. For Blackwell both targets: each tile configuration, of
single CTAs and of pairs, with and without an exchange once, or with `--all` all. Objects, PTX and cubins stay in
OUT_DIR; `tools/check_kernels.py` judges them. Needs the DSL, a C compiler and cuobjdump.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.check_kernels import check_kernel, find_cuobjdump
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels import blackwell, hopper
from trtllm_megamoe.presets import PRESETS, ModelShape
from vendored_kernels import registry
from vendored_kernels.compile import compile_configs
from vendored_kernels.sm90.config import KernelConfig
from vendored_kernels.sm100.config import TILES as BLACKWELL_TILES
from vendored_kernels.sm100.config import KernelConfig as Sm100Config

EP_SIZE = 8
CAP = 8192
NUM_SMS = 132


def share_of(model: ModelShape) -> ModelShape:
    """One rank's experts of the model as a layer of its own."""
    return replace(model, num_experts=model.num_experts // EP_SIZE)


def kernels_of(model: ModelShape, wire: CombineFormat, mode: ActivationMode, ranks: int) -> list[KernelConfig]:
    """What a layer of this model can launch, over all buckets."""
    config = model.layer_config(max_tokens_per_rank=CAP, combine_format=wire)
    spec = hopper.layer_spec(config, ranks, mode)
    tiles = hopper.tiles_of_ladder(spec, BucketLadder.for_cap(CAP), NUM_SMS).values()
    return [KernelConfig(spec, tile) for tile in {tile.name: tile for tile in tiles}.values()]


def every_kernel() -> Iterator[KernelConfig]:
    """Every preset, wire, mode and tile; over ranks, and one rank's share alone."""
    for model, wire, mode in product(PRESETS.values(), CombineFormat, ActivationMode):
        yield from kernels_of(model, wire, mode, EP_SIZE)
        yield from kernels_of(share_of(model), wire, mode, 1)


def covering_kernels() -> Iterator[KernelConfig]:
    """A few that show every value of every axis: the first kernel that brings something new is taken."""
    seen: set[tuple[str, object]] = set()
    for kernel in every_kernel():
        layer, tile = kernel.layer, kernel.tile
        mode, wire = layer.activation_mode, layer.combine_format
        axes: set[tuple[str, object]] = {
            ("tile, mode and ranks", (tile.name, mode, layer.ep_size)),
            ("wire and mode", (wire, mode)),
            ("shape", (layer.hidden_size, layer.intermediate_size, layer.num_local_experts)),
            ("placement", layer.weigh_before_requant),
            ("clamp", layer.clamp),
            ("activation", (layer.swiglu_alpha, layer.swiglu_beta)),
        }
        if axes - seen:
            seen |= axes
            yield kernel


def every_blackwell_kernel() -> Iterator[Sm100Config]:
    """Every preset, wire and tile; over ranks, and one rank's share alone."""
    for model, wire, ranks in product(PRESETS.values(), CombineFormat, (1, EP_SIZE)):
        shape = share_of(model) if ranks == 1 else model
        config = shape.layer_config(max_tokens_per_rank=CAP, combine_format=wire)
        for tile in BLACKWELL_TILES.values():
            yield Sm100Config(blackwell.layer_spec(config, ranks), tile)


def covering_blackwell_kernels() -> Iterator[Sm100Config]:
    """Each tile alone and over ranks, one of them for each target; wires and presets take turns."""
    wires = cycle(wire.value for wire in CombineFormat)
    shapes: dict[tuple[int, int], int] = {}
    by_axes: dict[tuple[str, str, int], list[Sm100Config]] = {}
    for kernel in every_blackwell_kernel():
        by_axes.setdefault((kernel.tile.name, kernel.layer.combine_format, kernel.layer.ep_size), []).append(kernel)
    for number, tile in enumerate(BLACKWELL_TILES):
        for ranks in (1, EP_SIZE) if number % 2 == 0 else (EP_SIZE, 1):  # the target changes with every kernel
            fitting = by_axes[tile, next(wires), ranks]  # of these, the shape that has been taken least so far
            kernel = min(fitting, key=lambda k: shapes.get((k.layer.hidden_size, k.layer.intermediate_size), 0))
            shape = (kernel.layer.hidden_size, kernel.layer.intermediate_size)
            shapes[shape] = shapes.get(shape, 0) + 1
            yield kernel


def wanted_kernels(every: bool) -> list[tuple[str, registry.KernelConfig]]:
    """(target, kernel) of a run; a covering set takes the two Blackwell targets in turn."""
    out: list[tuple[str, registry.KernelConfig]] = []
    if every:
        out += [(hopper.ARCH, kernel) for kernel in every_kernel()]
        out += list(product(blackwell.ARCHS, every_blackwell_kernel()))
        return out
    out += [(hopper.ARCH, kernel) for kernel in covering_kernels()]
    return out + list(zip(cycle(blackwell.ARCHS), covering_blackwell_kernels()))


def main() -> int:
    """Exit code 1 when any kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--all", action="store_true", help="every shipped kernel, not only a covering set")
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    arguments = parser.parse_args()
    kernels = wanted_kernels(arguments.all)
    started = time.time()
    paths: list[Path] = []
    for arch in registry.ARCHITECTURES:
        configs = [kernel for target, kernel in kernels if target == arch]
        print(f"compiling {len(configs)} kernels for {arch}", flush=True)
        paths += compile_configs(
            arch,
            configs,
            arguments.out_dir,
            jobs=arguments.jobs,
            keep_intermediates=True,
            progress=lambda key, state: print(f"{state} {key}", flush=True),
        )
    cuobjdump = find_cuobjdump()
    num_faulty = 0
    for path in paths:
        faults = check_kernel(path.with_suffix(".json"), cuobjdump)
        if faults:
            num_faulty += 1
            print(f"FAULT {path.stem}: {'; '.join(faults)}", flush=True)
    passed = len(kernels) - num_faulty
    print(f"compile-check: {passed} passed, {num_faulty} failed in {time.time() - started:.0f} s", flush=True)
    return 1 if num_faulty else 0


if __name__ == "__main__":
    raise SystemExit(main())
