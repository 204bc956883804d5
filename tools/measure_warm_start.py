# SPDX-License-Identifier: Apache-2.0
"""Warm start: how long a fresh process takes from its first import to its first launch when all kernels are stored.

    python tools/measure_warm_start.py [--preset NAME] [--share-of-ep N] [--rounds N] [--out FILE.json]

Each round starts two processes: a bare one (`import torch; torch.zeros(1, device="cuda")`) and one that builds a layer,
loads random weights and launches every bucket. Reported are medians over the rounds, the first of which only warms the
disk cache. The kernels must be stored (`python -m trtllm_megamoe compile`); where a kernel is missing, or the compiler
is loaded all the same, the run fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 2.0
"""What a warm start may take above the bare process."""

_BARE = """
import time; started = time.perf_counter()
import torch
device = "cuda" if {engine!r} == "cuda" else "cpu"
torch.zeros(1, device=device)
if device == "cuda": torch.cuda.synchronize()
import json; print(json.dumps({{"total_s": time.perf_counter() - started}}))
"""

_WARM = """
import time; marks = [("start", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
import torch
device = "cuda" if {engine!r} == "cuda" else "cpu"
torch.zeros(1, device=device)
mark("torch")
from trtllm_megamoe.cli.explain import find_model, share_of
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.tuning.workload import random_step, random_weights
mark("import")
config = share_of(find_model({preset!r}), {share}).layer_config(
    max_tokens_per_rank={cap}, activations={activations!r}, engine={engine!r})
weights = list(random_weights(config))
mark("draw weights")
layer = MegaMoELayer(config)
mark("layer")
layer.load_weights(weights)
mark("load weights and kernels")
layer.prepare()
mark("launch every bucket")
step = random_step(config, 1, 0, layer.device)
layer.forward(*step, 1)
if device == "cuda": torch.cuda.synchronize()
mark("first token")
started = time.perf_counter()
layer.load_weights(weights)
if device == "cuda": torch.cuda.synchronize()
reload_s = time.perf_counter() - started
import json, sys
phases = {{name: at - before for (_, before), (name, at) in zip(marks, marks[1:])}}
print(json.dumps({{"phases_s": phases, "total_s": marks[-1][1] - marks[0][1], "reload_s": reload_s,
                   "compiler_loaded": "cutlass" in sys.modules}}))
"""


def run_child(code: str) -> dict[str, Any]:
    """Run a program and read the JSON it prints last; `process_s` is the whole process as its parent sees it."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"a process failed:\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": seconds}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and their medians."""
    facts = {
        "preset": options.preset,
        "share": options.share_of_ep,
        "cap": options.max_tokens_per_rank,
        "activations": options.activations,
        "engine": options.engine,
    }
    rounds = []
    for _ in range(options.rounds + 1):
        rounds.append((run_child(_BARE.format(**facts)), run_child(_WARM.format(**facts))))
    counted = rounds[1:]
    if any(warm["compiler_loaded"] for _, warm in counted):
        raise SystemExit("the kernel compiler was loaded: this was no warm start; fill the store first")
    bare = statistics.median(one["total_s"] for one, _ in counted)
    # weights are not part of a start-up's fixed cost, and drawing random ones is not part of anything
    warm = statistics.median(one["total_s"] - one["phases_s"]["draw weights"] - one["reload_s"] for _, one in counted)
    phases = {
        name: statistics.median(one["phases_s"][name] for _, one in counted) for name in counted[0][1]["phases_s"]
    }
    return {
        **facts,
        "rounds": options.rounds,
        "bare_s": bare,
        "warm_s": warm,
        "above_bare_s": warm - bare,
        "limit_s": LIMIT_S,
        "within_limit": warm - bare <= LIMIT_S,
        "weights_reload_s": statistics.median(one["reload_s"] for _, one in counted),
        "phases_s": phases,
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 within the limit, 1 above it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3-235b")
    parser.add_argument("--share-of-ep", type=int, default=8)
    parser.add_argument("--max-tokens-per-rank", type=int, default=8192)
    parser.add_argument("--activations", choices=["nvfp4", "bf16"], default="bf16")
    parser.add_argument("--engine", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    result = measure(options)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
