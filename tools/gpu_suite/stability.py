# SPDX-License-Identifier: Apache-2.0
"""Checks that need many launches: bitwise determinism, graph replay against eager, a wait that can never end."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import bench, cases
from tools.gpu_suite.correctness import all_cases, routing
from tools.gpu_suite.layer import GpuLayer
from vendored_kernels.common.sites import FAULT_STAGED, SITE_FC1, SITE_FC2, SITE_STAGED
from vendored_kernels.sm90.config import TILES, KernelConfig

LARGEST, LARGEST_ROWS, LARGEST_TILE = "v4-pro", 1024, "n128"
"""The largest benchmark size: shape, rows an expert, tile configuration."""

MODES = ("bf16", "nvfp4")


def needed(part: str) -> Iterator[KernelConfig]:
    """Kernels of the parts `determinism`, `graph` and `faults`."""
    small = all_cases()[0]
    yield from (KernelConfig(small.spec, TILES[tile]) for tile in small.tiles)
    if part == "determinism":
        yield from (KernelConfig(bench.spec_of(LARGEST, mode), TILES[LARGEST_TILE]) for mode in MODES)


def determinism(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """2000 launches at the largest benchmark size, both modes, and 2000 poisoned ones of a small shape: no bit differs.

    The two modes have the same weights.
    """
    packed = bench.random_records(bench.spec_of(LARGEST, MODES[0]))
    for mode in MODES:
        spec = bench.spec_of(LARGEST, mode)
        ids = bench.route_ids(spec, "random", LARGEST_ROWS)
        layer = GpuLayer(spec, {}, ids.shape[0], cache_dir, packed=packed, scales=bench.random_scales(spec))
        name = f"{LARGEST}, {mode}, {LARGEST_ROWS} rows an expert"
        yield _repeat(layer, LARGEST_TILE, ids, 2000, name, poison=False)
        del layer
        torch.cuda.empty_cache()
    del packed
    torch.cuda.empty_cache()
    small = all_cases()[0]
    tensors = cases.random_tensors(small.spec, 5)
    for tile in small.tiles:
        layer = GpuLayer(small.spec, tensors, 1024, cache_dir)
        yield _repeat(layer, tile, routing("edge", small.spec, 0), 2000, small.name, poison=True)


def _repeat(layer: GpuLayer, tile: str, ids: torch.Tensor, launches: int, name: str, *, poison: bool) -> dict[str, Any]:
    x, w = cases.tokens(layer.spec, ids.shape[0], 1), cases.weights(layer.spec, ids, 2)
    first = layer.forward(tile, x, ids, w).clone()
    y = torch.empty_like(first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    started = time.time()
    for _ in range(launches):
        if poison:
            layer.poison()
        y.fill_(float("nan"))
        layer.enqueue(tile, x, ids, w, y)
        differing += (y.view(torch.int16) != first.view(torch.int16)).any()
    bad = int(differing)
    finite = bool(torch.isfinite(first.float()).all())
    result = {"check": "determinism", "case": name, "tile": tile, "launches": launches, "differing": bad}
    return result | {"seconds": round(time.time() - started, 1), "finite": finite, "ok": bad == 0 and finite}


def graph(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """Each tile captured once, replayed in turns with changed tokens, ids, weights and T; equal to eager."""
    case = all_cases()[0]
    spec, cap = case.spec, 256
    tensors = cases.random_tensors(spec, 6)
    layer = GpuLayer(spec, tensors, cap, cache_dir)
    eager = GpuLayer(spec, tensors, cap, cache_dir, packed=layer.packed)
    x = torch.zeros(cap, spec.hidden_size, dtype=torch.bfloat16, device="cuda")
    ids = torch.full((cap, spec.top_k), -1, dtype=torch.int64, device="cuda")
    w = torch.zeros(cap, spec.top_k, device="cuda")
    y = torch.zeros_like(x)
    graphs = {}
    for tile in case.tiles:
        layer.set_tokens(0)
        layer.enqueue(tile, x, ids, w, y)  # loads the code
        torch.cuda.synchronize()
        graphs[tile] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[tile]):
            layer.enqueue(tile, x, ids, w, y)
    rng = torch.Generator().manual_seed(9)
    bad = 0
    replays = 200
    for step in range(replays):
        tile = case.tiles[step % len(case.tiles)]
        count = int(torch.randint(0, cap + 1, (), generator=rng)) if step % 5 else 0
        new_ids = torch.randint(-1, spec.num_local_experts + 1, (count, spec.top_k), generator=rng).cuda()
        x[:count] = cases.tokens(spec, count, step)
        ids[:count] = new_ids
        w[:count] = cases.weights(spec, new_ids, step)
        layer.set_tokens(count)
        y.fill_(float("nan"))
        graphs[tile].replay()
        expected = eager.forward(tile, x[:count], ids[:count], w[:count])
        bad += not torch.equal(y[:count].view(torch.int16), expected.view(torch.int16))
        bad += not bool(torch.isnan(y[count:]).all())  # rows beyond T stay untouched
    yield {"check": "graph", "tiles": case.tiles, "replays": replays, "differing": bad, "ok": bad == 0}


def faults(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """A wait for a CTA that never comes: the kernel ends, names the site, refuses further launches; reset heals it."""
    case = all_cases()[0]
    layer = GpuLayer(case.spec, cases.random_tensors(case.spec, 7), 256, cache_dir)
    ids = routing("masked", case.spec, 3)
    x, w = cases.tokens(case.spec, ids.shape[0], 1), cases.weights(case.spec, ids, 2)
    good = layer.forward(case.tiles[0], x, ids, w).clone()
    y = torch.empty_like(good)
    torch.cuda.synchronize()
    started = time.time()
    layer.enqueue(case.tiles[0], x, ids, w, y, fault_step=FAULT_STAGED, timeout_ns=50_000_000)
    torch.cuda.synchronize()
    seconds = time.time() - started
    record = layer.error_record()
    epoch = int(layer.region("epoch").view(torch.int64)[0])
    y.fill_(7)
    layer.enqueue(case.tiles[0], x, ids, w, y)
    torch.cuda.synchronize()
    refused = bool((y == 7).all())
    layer.reset()
    healed = torch.equal(layer.forward(case.tiles[0], x, ids, w), good)
    # whoever misses the CTA first: its tokens, its part of an fc1 block, or its fc2 tiles
    named = record["site"] in (SITE_STAGED, SITE_FC1, SITE_FC2) and record["set"] == 1
    yield {
        "check": "timeout",
        "record": record,
        "seconds": round(seconds, 3),
        "epoch_kept": epoch == 1,
        "refused": refused,
        "healed": healed,
        "ok": named and refused and healed and epoch == 1 and seconds < 5,
    }


LAYER_TESTS_S = 120.0
LAYER_TESTS = {
    "layers-graph": ("tests/gpu/test_graph_dynamic.py", "tests/gpu/test_graph_layers.py"),
    "layers-fences": ("tests/gpu/test_fences_cuda.py",),
    "layers-ranks": (
        "tests/gpu/test_cuda_engine.py",
        "tests/gpu/test_cuda_ranks.py",
        "tests/gpu/test_symmetric_gpu.py",
    ),
    "layers-processes": ("tests/gpu/test_cuda_processes.py",),
}
"""Parts that are tests of the public layer; their kernels come from the store, not from `--cache`."""


_COUNTS = ("passed", "failed", "skipped", "errors")


def layers(part: str) -> Iterator[dict[str, Any]]:
    """One result per test file, in a process of its own: a capture that breaks on purpose spoils its context."""
    for path in LAYER_TESTS[part]:
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--color=no", "-p", "no:cacheprovider", path]
        started = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LAYER_TESTS_S, check=False)
        except subprocess.TimeoutExpired:
            yield {"check": path, "seconds": LAYER_TESTS_S, "said": "did not end in time", "ok": False}
            continue
        seconds = round(time.time() - started, 1)
        yield {"check": path, "seconds": seconds} | pytest_result(done.returncode, done.stdout, done.stderr)


def pytest_result(status: int, output: str, errors: str = "") -> dict[str, Any]:
    """pytest's counts, why tests were skipped, and `ok`: some passed, and none failed or was skipped."""
    lines = output.splitlines()
    said = lines[-1] if lines else errors[-300:]
    counts = dict.fromkeys(_COUNTS, 0)
    for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", said):
        counts["errors" if name.startswith("error") else name] = int(number)
    ok = status == 0 and counts["passed"] > 0 and sum(counts.values()) == counts["passed"]
    skips = [line for line in lines if line.startswith("SKIPPED")]
    return {"said": said, "counts": counts, "skips": skips, "failures": [] if ok else lines[-25:], "ok": ok}
