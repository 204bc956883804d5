# SPDX-License-Identifier: Apache-2.0
"""The one script for everything that needs a GPU: `python tools/run_gpu_suite.py PART... --cache DIR --out FILE.json`.

Parts: products, correctness, goldens, determinism, graph, faults, sanitizer, bench, rivals, once; over virtual ranks:
exchange, exchange-soak, exchange-graphs, exchange-failures, exchange-sanitizer, fixed-cost; tests of the public layer,
with kernels from the store: layers-graph, layers-fences, layers-ranks, layers-processes. With `--compile` it builds the
kernels that the other parts need instead (no GPU needed): a machine with a GPU then needs neither DSL nor compiler.
`--needs` lists them. A report says which commit was run: set MEGAMOE_COMMIT where there is no git.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

SANITIZERS = ("memcheck", "synccheck", "racecheck")
SANITIZER_PARTS = ("sanitizer", "exchange-sanitizer")
EXCHANGE_PARTS = (
    *("exchange", "exchange-soak", "exchange-graphs", "exchange-failures", "exchange-sanitizer"),
    "fixed-cost",
)
PARTS = (
    *("products", "correctness", "goldens", "determinism", "graph", "faults", "sanitizer", "bench", "rivals", "once"),
    *EXCHANGE_PARTS,
    *("layers-graph", "layers-fences", "layers-ranks", "layers-processes"),
)

SAVE_S = 5.0
"""The report is written so often, and after every part."""


def main() -> int:
    """Run the named parts; exit code 1 when any check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--cache", type=Path, required=True, help="directory of compiled kernels")
    parser.add_argument("--out", type=Path, help="JSON report")
    parser.add_argument("--compile", action="store_true", help="build the kernels, run nothing")
    parser.add_argument("--needs", action="store_true", help="list the kernels, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="with --compile: kernels at a time")
    parser.add_argument("--only", default="", help="correctness, exchange: cases of this name, or with it in theirs")
    parser.add_argument("--routings", default="", help="correctness: only these routings")
    parser.add_argument("--shapes", default="v4-pro,dsv3,qwen3-235b", help="bench: shapes")
    parser.add_argument("--modes", default="bf16,nvfp4", help="bench, sanitizers: activation modes")
    parser.add_argument("--points", default="uniform:1,uniform:16,uniform:64,uniform:256,uniform:1024", help="bench")
    parser.add_argument("--launches", type=int, default=10_000, help="exchange-soak: launches")
    parser.add_argument("--sanitizers", default=",".join(SANITIZERS), help="sanitizer parts: these tools only")
    parser.add_argument("--tiles", default="", help="bench, correctness: these tile configurations only")
    arguments = parser.parse_args()
    unknown = set(arguments.sanitizers.split(",")) - set(SANITIZERS)
    if unknown:
        parser.error(f"unknown sanitizers {sorted(unknown)}; allowed: {', '.join(SANITIZERS)}")
    if arguments.compile or arguments.needs:
        return compile_needed(arguments)
    failed = 0
    saved = 0.0
    command = ["python", "tools/run_gpu_suite.py", *sys.argv[1:]]
    report: dict[str, Any] = {"command": shlex.join(command), "environment": environment()}
    for part in arguments.parts:
        started = time.time()
        results: list[dict[str, Any]] = []
        for result in run_part(part, arguments):
            results.append(result)
            failed += not result["ok"]
            print(("ok   " if result["ok"] else "FAIL ") + json.dumps(result), flush=True)
            report[part] = {"seconds": round(time.time() - started, 1), "results": results}
            if arguments.out and time.time() - saved > SAVE_S:  # a run that is ended leaves what it has seen
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
                saved = time.time()
        report[part] = {"seconds": round(time.time() - started, 1), "results": results}
        print(f"{part}: {len(results)} results, {failed} failed so far, {time.time() - started:.1f} s", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def environment(has_gpu: bool = True) -> dict[str, Any]:
    """Where and with what the numbers were made; GPU facts are null where no GPU took part."""
    import torch

    import trtllm_megamoe
    from microbench.environment import commit
    from vendored_kernels import registry

    return {
        "date_utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "package": trtllm_megamoe.__version__,
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "sms": torch.cuda.get_device_properties(0).multi_processor_count if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver() if has_gpu else None,
        "python": platform.python_version(),
        "cutlass_dsl": registry.DSL_VERSION,
        "kernel_sources": registry.source_digest()[:24],
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def compile_needed(arguments: argparse.Namespace) -> int:
    """Fill the cache directory for the named parts."""
    from tools.gpu_suite.kernels import needed
    from vendored_kernels import registry
    from vendored_kernels.compile import compile_configs

    configs = needed(arguments.parts, arguments.shapes.split(","), arguments.modes.split(","), arguments.only)
    if arguments.needs:
        print("\n".join(registry.kernel_key(config, "sm_90a") for config in configs))
        print(f"{len(configs)} kernels")
        return 0
    started = time.time()
    done: list[str] = []

    def progress(key: str, state: str) -> None:
        done.append(key)
        print(f"{len(done)}/{len(configs)} {key} {state} {time.time() - started:.0f} s", flush=True)

    compile_configs("sm_90a", configs, arguments.cache, progress=progress, jobs=arguments.jobs, keep_intermediates=True)
    return 0


def run_part(part: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results of one part, as they come."""
    from tools.gpu_suite import bench, correctness, exchange, fixed_cost, goldens, products, sanitizer, stability

    if part == "correctness":
        return correctness.run(arguments.cache, arguments.only, arguments.routings, arguments.tiles)
    points = [(p.split(":")[0], int(p.split(":")[1])) for p in arguments.points.split(",")]
    shapes, modes = arguments.shapes.split(","), arguments.modes.split(",")
    if part == "once":
        return bench.launch_once(arguments.cache, shapes, modes, points)
    if part == "bench":
        return bench.run(arguments.cache, shapes, modes, points, arguments.tiles)
    if part == "rivals":
        return bench.run_rivals(shapes, points)
    if part == "goldens":
        return goldens.run(arguments.cache)
    if part == "exchange":
        return exchange.equality(arguments.cache, arguments.only)
    if part in SANITIZER_PARTS:
        return sanitizer.run(part, modes, arguments.cache, arguments.sanitizers.split(","))
    if part in stability.LAYER_TESTS:
        return stability.layers(part)
    if part == "exchange-soak":
        return exchange.soak(arguments.cache, arguments.launches)
    return {
        "exchange-graphs": exchange.graphs,
        "exchange-failures": exchange.failures,
        "fixed-cost": fixed_cost.run,
        "products": products.run,
        "determinism": stability.determinism,
        "graph": stability.graph,
        "faults": stability.faults,
    }[part](arguments.cache)


if __name__ == "__main__":
    raise SystemExit(main())
