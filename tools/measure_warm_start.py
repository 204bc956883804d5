# SPDX-License-Identifier: Apache-2.0
"""Warm start: how long a fresh process takes from its first import to its first launch when all kernels are stored.

    python tools/measure_warm_start.py [--preset NAME] [--share-of-ep N] [--num-experts N] [--out FILE.json]
    python tools/measure_warm_start.py --needs            the kernels, one a line
    python tools/measure_warm_start.py --fill DIR         compile them into a store (needs the compiler, no GPU)

Each round starts two processes in turn: a bare one (`import torch; torch.zeros(1, device="cuda")`) and a warm one that
imports the package, builds a layer, loads weights and kernels, launches every bucket and one token. The first round
only warms the disk cache. A process that outlasts its limit is ended, and what it had reached is reported; so is one
that fails, that loads the kernel compiler, or that changes memory which is not its own (R10): canaries of several sizes
lie on the device from before the import until after the first token. The report says where and with what it was made,
and whether the warm processes could have imported the DSL.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT_S = 2.0
"""What a warm start may take above the bare process."""

NOT_COUNTED = ("canaries", "draw weights")
"""Phases of the measurement, not of a start-up."""

CANARY_BYTES = (1 << 10, 1 << 20, 3_000_001, 64 << 20)


class Phases:
    """Time of each step since the one before, printed as it ends, so that a killed process has said how far it came."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def done(self, name: str, **facts: object) -> None:
        """End a phase."""
        now = time.perf_counter()
        print(json.dumps({"phase": name, "s": now - self._last, **facts}), flush=True)
        self._last = time.perf_counter()


def start_torch(engine: str) -> Any:
    """What the bare process does, and all; returns torch."""
    import torch

    torch.zeros(1, device="cuda" if engine == "cuda" else "cpu")
    if engine == "cuda":
        torch.cuda.synchronize()
    return torch


def config_of(options: argparse.Namespace) -> Any:
    """The layer's configuration."""
    from trtllm_megamoe.cli.explain import find_model, share_of

    model = share_of(find_model(options.preset), options.share_of_ep)
    config = model.layer_config(
        max_tokens_per_rank=options.max_tokens_per_rank, activations=options.activations, engine=options.engine
    )
    return config if options.num_experts is None else config.model_copy(update={"num_experts": options.num_experts})


def run_child(options: argparse.Namespace) -> None:
    """Bare or warm start, in this process."""
    phases = Phases()
    torch = start_torch(options.engine)
    phases.done("torch")
    if options.child == "bare":
        return
    device = "cuda" if options.engine == "cuda" else "cpu"
    canaries = [torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for size in CANARY_BYTES]
    _synchronize(torch, device)
    phases.done("canaries")
    from trtllm_megamoe.layer import MegaMoELayer

    phases.done("import")
    from trtllm_megamoe.tuning.workload import random_step, random_weights

    config = config_of(options)
    weights = list(random_weights(config))
    phases.done("draw weights")
    layer = MegaMoELayer(config)
    _synchronize(torch, device)
    phases.done("layer and workspace")
    layer.load_weights(weights)
    _synchronize(torch, device)
    phases.done("load weights and kernels")
    layer.prepare()
    phases.done("launch every bucket")
    layer.forward(*random_step(config, 1, 0, layer.device), 1)
    _synchronize(torch, device)
    phases.done("first token")
    intact = all(bool((canary == 0xA5).all()) for canary in canaries)
    loaded = "cutlass" in sys.modules
    has_dsl = loaded or importlib.util.find_spec("cutlass") is not None  # finds it without importing it
    phases.done("check", canaries_intact=intact, compiler_loaded=loaded, dsl_installed=has_dsl)
    layer.load_weights(weights)
    _synchronize(torch, device)
    phases.done("reload weights")


def _synchronize(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def read_child(output: str) -> dict[str, Any]:
    """What a child printed: its phases, other facts, and `fault`: None or why it does not count."""
    found: dict[str, Any] = {"phases_s": {}, "fault": None}
    for line in output.splitlines():
        facts = json.loads(line)
        found["phases_s"][facts.pop("phase")] = facts.pop("s")
        found |= facts
    if found.get("compiler_loaded"):
        found["fault"] = "the kernel compiler was loaded: no warm start; fill the store first"
    if not found.get("canaries_intact", True):
        found["fault"] = "memory of other tensors was changed"
    return found


def start(kind: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Run a child to its end or its limit; as :func:`read_child`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return read_child(output) | {"fault": f"ended after its limit of {limit_s:g} s"}
    found = read_child(output)
    if process.returncode != 0:
        found["fault"] = f"exit code {process.returncode}: {errors.strip()[-2000:]}"
    return found


def total_of(child: dict[str, Any]) -> float:
    """Seconds of a start-up, from the first import to the first token."""
    phases: dict[str, float] = child["phases_s"]
    return sum(s for name, s in phases.items() if name not in (*NOT_COUNTED, "check", "reload weights"))


def measure(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """All rounds, and their medians."""
    from tools.run_gpu_suite import environment

    rounds: list[dict[str, Any]] = []
    deadline = time.perf_counter() + options.total_limit_s
    for number in range(options.warm_ups + options.rounds):
        if number > options.warm_ups and time.perf_counter() > deadline:
            break
        pair = {kind: start(kind, arguments, options.process_limit_s) for kind in ("bare", "warm")}
        for kind, child in pair.items():
            shown = {name: round(s, 3) for name, s in child["phases_s"].items()}
            print(json.dumps({"round": number, "kind": kind, "fault": child["fault"], **shown}), file=sys.stderr)
        rounds.append(pair)
        if pair["bare"]["fault"] or pair["warm"]["fault"]:
            break
    names = ("preset", "share_of_ep", "num_experts", "max_tokens_per_rank", "activations", "engine")
    told = {child["dsl_installed"] for pair in rounds for child in pair.values() if "dsl_installed" in child}
    facts: dict[str, Any] = {
        "command": shlex.join(["tools/measure_warm_start.py", *arguments]),
        "environment": environment(options.engine == "cuda"),  # after the rounds: it imports torch and looks at the GPU
        **{name: getattr(options, name) for name in names},
        "dsl_installed": told.pop() if len(told) == 1 else None,  # null: no warm process came so far
    }
    faults = [child["fault"] for pair in rounds for child in pair.values() if child["fault"]]
    counted = rounds[options.warm_ups :]
    if faults or not counted:
        return {**facts, "fault": faults[0] if faults else "no round was counted", "rounds": rounds}
    bare, warm = ([total_of(pair[kind]) for pair in counted] for kind in ("bare", "warm"))
    phases = {
        name: statistics.median(pair["warm"]["phases_s"][name] for pair in counted)
        for name in counted[0]["warm"]["phases_s"]
    }
    above = statistics.median(warm) - statistics.median(bare)
    return {
        **facts,
        "fault": None,
        "rounds": len(counted),
        "cpus": os.cpu_count(),
        "bare_s": statistics.median(bare),
        "warm_s": statistics.median(warm),
        "above_bare_s": above,
        "limit_s": LIMIT_S,
        "within_limit": above <= LIMIT_S,
        "reload_weights_s": phases["reload weights"],  # what of it was the weights and not the start
        "canaries_intact": all(pair["warm"]["canaries_intact"] for pair in counted),
        "phases_s": phases,
        "all_warm_s": warm,
        "all_bare_s": bare,
    }


def needed(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Layer and tile configurations that the warm process loads on an H200."""
    from trtllm_megamoe.buckets import BucketLadder
    from trtllm_megamoe.formats import ActivationMode
    from trtllm_megamoe.kernels import hopper

    config = config_of(options)
    spec = hopper.layer_spec(config, 1, ActivationMode(options.activations))
    tiles = hopper.tiles_of_ladder(spec, BucketLadder.for_cap(options.max_tokens_per_rank), 132)
    return spec, list({tile.name: tile for tile in tiles.values()}.values())


def fill(options: argparse.Namespace) -> None:
    """Compile what is needed into a store."""
    from trtllm_megamoe.cache.store import ObjectCache
    from trtllm_megamoe.kernels import hopper

    spec, tiles = needed(options)
    hopper.obtain(spec, tiles, ObjectCache(options.fill), lambda name, state: print(state, name, flush=True))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 within the limit, 1 above it or after a fault."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deepseek-v3")
    parser.add_argument("--share-of-ep", type=int, default=8)
    parser.add_argument("--num-experts", type=int, help="fewer experts than the share has: less of the time is weights")
    parser.add_argument("--max-tokens-per-rank", type=int, default=8192)
    parser.add_argument("--activations", choices=["nvfp4", "bf16"], default="bf16")
    parser.add_argument("--engine", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds before, not counted")
    parser.add_argument("--process-limit-s", type=float, default=60.0)
    parser.add_argument("--total-limit-s", type=float, default=120.0, help="no round is begun later")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--needs", action="store_true", help="list the kernels and end")
    parser.add_argument("--fill", type=Path, metavar="DIR", help="compile the kernels into this store and end")
    parser.add_argument("--child", choices=["bare", "warm"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(options)
        return 0
    if options.needs:
        spec, tiles = needed(options)
        print("\n".join(f"{spec} {tile.name}" for tile in tiles))
        return 0
    if options.fill:
        fill(options)
        return 0
    result = measure(options, arguments)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result.get("within_limit") else 1


if __name__ == "__main__":
    raise SystemExit(main())
