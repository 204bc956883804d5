# SPDX-License-Identifier: Apache-2.0
"""Kernels that a prepared GPU run needs, listed or compiled where a compiler is.

    python tools/needed_kernels.py sweep                       # microbench sweep on one GPU
    python tools/needed_kernels.py ranks --ranks 2             # tools/multigpu_suite.py --ranks 2
    python tools/needed_kernels.py layers                      # the parts `layers-*` of tools/run_gpu_suite.py
    python tools/needed_kernels.py sweep ranks --compile DIR   # into the store DIR (TRTLLM_MEGAMOE_CACHE_DIR there)

A machine with GPUs and a store filled like this needs neither the DSL nor a C compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from microbench.axes import one_gpu, several_gpus
from microbench.cli import sweep_kernels
from microbench.needs import compile_into, distinct, kernels_of
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.kernels.hopper import kernel_name
from vendored_kernels.sm90.config import KernelConfig

RUNS = ("sweep", "ranks", "layers")


def kernels_for(runs: list[str], ranks: int) -> list[KernelConfig]:
    """Every kernel of these runs, once."""
    found: list[KernelConfig] = []
    if "sweep" in runs:
        found += sweep_kernels(one_gpu(), 1)
    if "ranks" in runs:
        found += [*sweep_kernels(several_gpus(ranks), ranks), *test_kernels(ranks)]
    if "layers" in runs:
        found += [*layer_kernels(), *test_kernels(2), *test_kernels(8)]  # and processes on one GPU
    return distinct(found)


def layer_kernels() -> list[KernelConfig]:
    """What tests/gpu launches through the public layer: one rank, and virtual ranks."""
    from tests.gpu import test_cuda_engine, test_cuda_ranks

    found = [kernel for config in test_cuda_engine.configs() for kernel in kernels_of(config, 1)]
    for config in test_cuda_ranks.configs():
        found += kernels_of(config, test_cuda_ranks.RANKS, share_one_gpu=True)
    return found


def test_kernels(ranks: int) -> list[KernelConfig]:
    """What tests/multigpu and the dead-rank program launch."""
    from tests.helpers.dead_rank_program import config as dead_rank_config
    from tests.helpers.rank_cases import configs

    pairs = [(config, size) for config in configs(ranks) for size in (1, ranks)]
    pairs += [(dead_rank_config(ranks), size) for size in (1, ranks)]
    return distinct(kernel for config, size in pairs for kernel in kernels_of(config, size))


def main() -> int:
    """List or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", choices=RUNS)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of the run `ranks`")
    parser.add_argument("--compile", type=Path, metavar="DIR", help="compile what the store DIR lacks")
    parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    arguments = parser.parse_args()
    kernels = kernels_for(arguments.runs, arguments.ranks)
    if arguments.compile is None:
        print("\n".join(kernel_name(kernel) for kernel in kernels))
        print(f"{len(kernels)} kernels")
        return 0
    started, done = time.monotonic(), []

    def progress(line: str) -> None:
        done.append(line)
        print(f"{len(done)}/{len(kernels)} {line} {time.monotonic() - started:.0f} s", flush=True)

    compile_into(ObjectCache(arguments.compile), kernels, arguments.jobs, progress)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
