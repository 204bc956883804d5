# SPDX-License-Identifier: Apache-2.0
"""The one script for everything that needs a GPU: `python tools/run_gpu_suite.py PART... --cache DIR --out FILE.json`.

Parts: correctness, determinism, graph, faults, sanitizer, bench. `--compile` builds the kernels that the parts need (no
GPU needed), so that a machine with a GPU needs neither the DSL nor a compiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> int:
    """Run the named parts; exit code 1 when any check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--cache", type=Path, required=True, help="directory of compiled kernels")
    parser.add_argument("--out", type=Path, help="JSON report")
    parser.add_argument("--only", default="", help="correctness: cases whose name contains this")
    parser.add_argument("--shapes", default="v4-pro,dsv3,qwen3-235b", help="bench: shapes")
    parser.add_argument("--modes", default="bf16,nvfp4", help="bench: activation modes")
    parser.add_argument("--points", default="uniform:1,uniform:16,uniform:64,uniform:256,uniform:1024", help="bench")
    parser.add_argument("--tiles", default="", help="bench: tile configurations instead of the chosen one")
    arguments = parser.parse_args()
    failed = 0
    report = {"command": " ".join(sys.argv)}
    for part in arguments.parts:
        started = time.time()
        results = []
        for result in run_part(part, arguments):
            results.append(result)
            failed += not result["ok"]
            print(("ok   " if result["ok"] else "FAIL ") + json.dumps(result), flush=True)
        report[part] = {"seconds": time.time() - started, "results": results}
        print(f"{part}: {len(results)} results, {failed} failed so far, {time.time() - started:.1f} s", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def run_part(part, arguments):
    """Results of one part, as they come."""
    if part == "correctness":
        from tools.gpu_suite import correctness

        return correctness.run(arguments.cache, arguments.only)
    if part == "bench":
        from tools.gpu_suite import bench

        points = [(p.split(":")[0], int(p.split(":")[1])) for p in arguments.points.split(",")]
        return bench.run(arguments.cache, arguments.shapes.split(","), arguments.modes.split(","), points, arguments.tiles)
    raise SystemExit(f"unknown part {part!r}")


if __name__ == "__main__":
    raise SystemExit(main())
