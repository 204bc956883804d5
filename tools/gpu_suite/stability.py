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

from tools.check_kernels import find_cuobjdump, sass_lines
from tools.gpu_suite import bench, cases, exchange
from tools.gpu_suite.correctness import all_cases, routing
from tools.gpu_suite.layer import GpuLayer
from vendored_kernels.common.sites import FAULT_STAGED, SITE_FC1, SITE_FC2, SITE_STAGED
from vendored_kernels.registry import object_path
from vendored_kernels.sm90.config import TILES, KernelConfig


def determinism(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """2000 launches at the largest benchmark size and 2000 poisoned ones of a small shape: outputs differ in no bit."""
    spec = bench.spec_of("v4-pro", "bf16")
    ids = bench.route_ids(spec, "random", 1024)
    layer = GpuLayer(
        spec, {}, ids.shape[0], cache_dir, packed=bench.random_records(spec), scales=bench.random_scales(spec)
    )
    yield _repeat(layer, "n128", ids, 2000, "v4-pro, 1024 rows an expert", poison=False)
    del layer
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


def layers(part: str) -> Iterator[dict[str, Any]]:
    """One result per test file, in a process of its own: a capture that breaks on purpose spoils its context."""
    for path in LAYER_TESTS[part]:
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", path]
        started = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LAYER_TESTS_S, check=False)
        except subprocess.TimeoutExpired:
            yield {"check": path, "seconds": LAYER_TESTS_S, "said": "did not end in time", "ok": False}
            continue
        lines = done.stdout.splitlines()
        said = lines[-1] if lines else done.stderr[-300:]
        result = {"check": path, "seconds": round(time.time() - started, 1), "said": said}
        failed = [] if done.returncode == 0 else lines[-25:]
        yield result | {"failures": failed, "ok": done.returncode == 0 and " passed" in said and "skipped" not in said}


SANITIZER_S = 150.0
SANITIZED_CASE, SANITIZED_TILE = "odd-nvfp4", "h16"


def sanitizer(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """compute-sanitizer's tools over one small case.

    racecheck does not follow mbarrier phases, so it reports every hand-over from the producer warps W and T to their
    readers through shared memory (ring entries, per-row words). Those are expected; a hazard whose writer is any other
    warp is not.
    """
    spec = next(case.spec for case in all_cases() if case.name == SANITIZED_CASE)
    arguments = ["correctness", "--only", SANITIZED_CASE, "--tiles", SANITIZED_TILE]
    arguments += ["--routings", "masked,all-masked,none"]
    return _sanitize(cache_dir, arguments, KernelConfig(spec, TILES[SANITIZED_TILE]))


SANITIZED_RANKS = "two-ranks-odd-bf16-fp4"


def exchange_sanitizer(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """The same over the single launch of all ranks of a layer with dispatch and combine."""
    spec, tiles = exchange.SPECS[SANITIZED_RANKS]
    arguments = ["exchange", "--only", SANITIZED_RANKS, "--tiles", "together"]
    return _sanitize(cache_dir, arguments, KernelConfig(spec, TILES[tiles[0]], all_ranks=True))


def _sanitize(cache_dir: Path, arguments: list[str], kernel: KernelConfig) -> Iterator[dict[str, Any]]:
    for tool in ("memcheck", "synccheck", "racecheck"):
        started = time.time()
        command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=kernel", "--error-exitcode", "99"]
        command += [sys.executable, "tools/run_gpu_suite.py", *arguments, "--cache", str(cache_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_S, check=False)
        except subprocess.TimeoutExpired:
            yield {"check": tool, "seconds": SANITIZER_S, "error": "did not end in time", "ok": False}
            continue
        lines = [
            re.sub(r"kernel_cutlass\S*_0\+", "kernel+", line) for line in done.stdout.splitlines() if "===" in line
        ]
        result: dict[str, Any] = {
            "check": tool,
            "seconds": round(time.time() - started, 1),
            "exit": done.returncode,
            "report": lines[-80:],
        }
        if tool == "racecheck":
            writers = {
                int(found, 16) for found in re.findall(r"Write access at kernel\+0x([0-9a-f]+)", "\n".join(lines))
            }
            result["writers"] = sorted(writers)
            result["unexplained"] = sorted(writers - _producer_stores(cache_dir, kernel))
            failed = "FAIL" in done.stdout or not result["writers"]
            yield result | {"ok": not result["unexplained"] and not failed}
        else:
            yield result | {"ok": done.returncode == 0}


def _producer_stores(cache_dir: Path, kernel: KernelConfig) -> set[int]:
    """Addresses of the shared stores between the two setmaxnreg instructions: the branch of W, T, R, Z and D."""
    cubin = object_path(kernel, "sm_90a", cache_dir).with_suffix(".cubin")
    lines, _ = sass_lines(cubin, find_cuobjdump())
    start = next(i for i, line in enumerate(lines) if "USETMAXREG.DEALLOC" in line)
    stop = next(i for i, line in enumerate(lines) if "USETMAXREG.TRY_ALLOC" in line)
    stores = [line for line in lines[start:stop] if " STS" in line]
    return {int(re.match(r"\s+/\*([0-9a-f]+)\*/", line)[1], 16) for line in stores}  # type: ignore[index]
