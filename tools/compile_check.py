# SPDX-License-Identifier: Apache-2.0
"""Compiles shipped kernels without a GPU and fails on what a compiler can silently do to them.

    python tools/compile_check.py OUT_DIR [--all] [--jobs N]

Without `--all` a set that covers every axis once: each tile configuration, both activation modes, each wire, clamp and
score placement, each preset's shape. With it: every kernel that any preset can launch at EP 8. Objects, PTX and cubins
stay in OUT_DIR; `tools/check_kernels.py` judges them. Needs the DSL, a C compiler and cuobjdump.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.check_kernels import check_kernel, find_cuobjdump
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.presets import PRESETS, ModelShape
from vendored_kernels.compile import compile_configs
from vendored_kernels.sm90.config import KernelConfig

EP_SIZE = 8
CAP = 8192
NUM_SMS = 132


def kernels_of(model: ModelShape, wire: CombineFormat, mode: ActivationMode) -> list[KernelConfig]:
    """What a layer of this model can launch, over all buckets."""
    config = model.layer_config(max_tokens_per_rank=CAP, combine_format=wire)
    spec = hopper.layer_spec(config, EP_SIZE, mode)
    tiles = hopper.tiles_of_ladder(spec, BucketLadder.for_cap(CAP), NUM_SMS).values()
    return [KernelConfig(spec, tile) for tile in {tile.name: tile for tile in tiles}.values()]


def every_kernel() -> Iterator[KernelConfig]:
    """Every preset, wire, mode and tile."""
    for model, wire, mode in product(PRESETS.values(), CombineFormat, ActivationMode):
        yield from kernels_of(model, wire, mode)


def covering_kernels() -> Iterator[KernelConfig]:
    """A few that show every value of every axis: the first kernel that brings something new is taken."""
    seen: set[tuple[str, object]] = set()
    for kernel in every_kernel():
        layer, tile = kernel.layer, kernel.tile
        mode, wire = layer.activation_mode, layer.combine_format
        axes: set[tuple[str, object]] = {
            ("tile and mode", (tile.name, mode)),
            ("tile and wire", (tile.name, wire)),
            ("wire and mode", (wire, mode)),
            ("shape", (layer.hidden_size, layer.intermediate_size, layer.num_local_experts)),
            ("placement", layer.weigh_before_requant),
            ("clamp", layer.clamp),
            ("activation", (layer.swiglu_alpha, layer.swiglu_beta)),
        }
        if axes - seen:
            seen |= axes
            yield kernel


def main() -> int:
    """Exit code 1 when any kernel has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--all", action="store_true", help="every shipped kernel, not only a covering set")
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    arguments = parser.parse_args()
    kernels = list(every_kernel() if arguments.all else covering_kernels())
    started = time.time()
    print(f"compiling {len(kernels)} kernels for {hopper.ARCH}", flush=True)
    paths = compile_configs(
        hopper.ARCH,
        kernels,
        arguments.out_dir,
        jobs=arguments.jobs,
        keep_intermediates=True,
        progress=lambda key, state: print(f"{state} {key}", flush=True),
    )
    cuobjdump = find_cuobjdump()
    num_faulty = 0
    for kernel, path in zip(kernels, paths, strict=True):
        faults = check_kernel(path.with_suffix(".json"), cuobjdump)
        if faults:
            num_faulty += 1
            print(f"FAULT {hopper.kernel_name(kernel)}: {'; '.join(faults)}", flush=True)
    passed = len(kernels) - num_faulty
    print(f"compile-check: {passed} passed, {num_faulty} failed in {time.time() - started:.0f} s", flush=True)
    return 1 if num_faulty else 0


if __name__ == "__main__":
    raise SystemExit(main())
