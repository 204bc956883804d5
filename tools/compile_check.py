# SPDX-License-Identifier: Apache-2.0
"""Compiles shipped kernels without a GPU and fails on what a compiler can silently do to them.

    python tools/compile_check.py OUT_DIR [--all] [--jobs N] [--json FILE]

Without `--all` a set that covers every axis once: each tile configuration with and without an exchange between ranks,
both activation modes, each wire, clamp and score placement, each preset's shape. With it: every kernel that any preset
can launch at EP 8, or one rank's experts as a layer of its own. For Blackwell both targets: each tile configuration, of
single CTAs and of pairs, with and without an exchange once, or with `--all` all. Objects, PTX and cubins stay in
OUT_DIR; `tools/check_kernels.py` judges them. `--json` writes every kernel's registers, spills, shared memory, seconds
and verdict. Needs the DSL, a C compiler and cuobjdump.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import cycle, product
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent.parent))

import trtllm_megamoe
from tools.check_kernels import Resources, find_cuobjdump, inspect
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels import blackwell, hopper
from trtllm_megamoe.presets import PRESETS, ModelShape
from vendored_kernels import registry
from vendored_kernels.compile import KernelCompileError, check_compiler, compile_configs
from vendored_kernels.sm90.config import KernelConfig
from vendored_kernels.sm100.config import TILES as BLACKWELL_TILES
from vendored_kernels.sm100.config import KernelConfig as Sm100Config

Kernel: TypeAlias = KernelConfig | Sm100Config

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


def wanted_kernels(every: bool) -> list[tuple[str, Kernel]]:
    """(target, kernel) of a run; a covering set takes the two Blackwell targets in turn."""
    out: list[tuple[str, Kernel]] = []
    if every:
        out += [(hopper.ARCH, kernel) for kernel in every_kernel()]
        out += list(product(blackwell.ARCHS, every_blackwell_kernel()))
        return out
    out += [(hopper.ARCH, kernel) for kernel in covering_kernels()]
    return out + list(zip(cycle(blackwell.ARCHS), covering_blackwell_kernels()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One kernel. `seconds` is None where it was compiled before; `faults` is empty where it passed."""

    arch: str
    kernel: Kernel
    seconds: float | None
    faults: Sequence[str]
    resources: Resources | None

    def row(self) -> dict[str, Any]:
        """JSON-ready; `shared_bytes` is what a launch asks for."""
        return {
            "kernel": registry.kernel_key(self.kernel, self.arch),
            "arch": self.arch,
            **self.kernel.facts(),
            "verdict": "fault" if self.faults else "ok",
            "faults": list(self.faults),
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "shared_bytes": self.kernel.shared_bytes,
            **(asdict(self.resources) if self.resources is not None else {}),
        }


def build(arch: str, kernel: Kernel, out_dir: Path, cuobjdump: str) -> Outcome:
    """Compile one kernel, if it is not there, and inspect it; one that does not compile has that as its fault."""
    states: list[str] = []
    started = time.perf_counter()
    try:
        (path,) = compile_configs(
            arch, [kernel], out_dir, keep_intermediates=True, progress=lambda _, state: states.append(state)
        )
    except KernelCompileError as err:
        return Outcome(arch, kernel, time.perf_counter() - started, [str(err)], None)
    seconds = time.perf_counter() - started if states == ["compiled"] else None
    return Outcome(arch, kernel, seconds, *inspect(path.with_suffix(".json"), cuobjdump))


def report(outcomes: Sequence[Outcome], command: str, seconds: float) -> dict[str, Any]:
    """What a run found, JSON-ready."""
    targets = {outcome.arch for outcome in outcomes}
    return {
        "command": command,
        "environment": {
            "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "package": trtllm_megamoe.__version__,
            "cutlass_dsl": registry.DSL_VERSION,
            "kernel_sources": {arch: registry.source_digest(arch)[:24] for arch in sorted(targets)},
        },
        "passed": sum(not outcome.faults for outcome in outcomes),
        "failed": sum(bool(outcome.faults) for outcome in outcomes),
        "seconds": round(seconds, 1),
        "kernels": [outcome.row() for outcome in outcomes],
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when any kernel has a fault."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--all", action="store_true", help="every shipped kernel, not only a covering set")
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a report of every kernel")
    options = parser.parse_args(arguments)
    check_compiler()
    kernels, cuobjdump, started = wanted_kernels(options.all), find_cuobjdump(), time.perf_counter()
    print(f"compiling {len(kernels)} kernels", flush=True)

    def run(wanted: tuple[str, Kernel]) -> Outcome:
        outcome = build(*wanted, options.out_dir, cuobjdump)
        took = "cached" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
        verdict = f"FAULT {'; '.join(outcome.faults)}" if outcome.faults else "ok"
        print(f"{registry.kernel_key(outcome.kernel, outcome.arch)} {took} {verdict}", flush=True)
        return outcome

    with ThreadPoolExecutor(max_workers=max(options.jobs, 1)) as pool:
        outcomes = list(pool.map(run, kernels))
    found = report(outcomes, shlex.join(["tools/compile_check.py", *arguments]), time.perf_counter() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"compile-check: {found['passed']} passed, {found['failed']} failed in {found['seconds']:.0f} s", flush=True)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
