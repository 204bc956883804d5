# SPDX-License-Identifier: Apache-2.0
"""Time of the whole layer, bf16 tokens to bf16 output, as medians of CUDA-graph replays on cold weights.

"burst": short graphs after 40 ms of idle, the clock not yet limited by power; "sustained": replays back to back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from microbench.clocks import ClockSampler, nvml_reader
from microbench.rivals import base, catalog
from tools.gpu_suite import cases
from tools.gpu_suite.layer import GpuLayer
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.registry import object_path
from vendored_kernels.sm90.config import (
    RECORD_BYTES,
    TILES,
    KernelConfig,
    choose_tile,
    fc1_records,
    fc1_steps,
    fc2_records,
    fc2_steps,
)

SHAPES = {
    # name: (hidden, intermediate, local experts, top_k, limit, weigh before requant)
    "v4-pro": (7168, 3072, 48, 6, 10.0, True),
    "dsv3": (7168, 2048, 32, 8, None, False),
    "qwen3-235b": (4096, 1536, 16, 8, None, False),
}
HBM_BYTES_PER_S, FLOP_PER_S = 4.47e12, 790e12


def spec_of(shape: str, mode: str) -> LayerSpec:
    """The layer of a benchmark shape: one rank's share of an EP8 layer."""
    hidden, inter, experts, top_k, limit, before = SHAPES[shape]
    return LayerSpec(hidden, inter, experts, top_k, mode, weigh_before_requant=before, swiglu_limit=limit)


def random_records(spec: LayerSpec) -> dict[str, torch.Tensor]:
    """Packed records of random codes with scales 0.25 .. 4: legal bytes, no packing time."""
    packed = {}
    for name, rows, steps in (
        ("fc1_records", fc1_records(spec), fc1_steps(spec)),
        ("fc2_records", fc2_records(spec), fc2_steps(spec)),
    ):
        buffer = torch.empty(spec.num_local_experts, rows, steps, RECORD_BYTES, dtype=torch.uint8, device="cuda")
        for e in range(spec.num_local_experts):
            buffer[e].random_(0, 256)
            buffer[e, :, :, 8192:] = torch.randint(0x28, 0x48, (rows, steps, 1024), dtype=torch.uint8, device="cuda")
        packed[name] = buffer
    return packed


def random_scales(spec: LayerSpec) -> torch.Tensor:
    """A scale table that keeps values of order one."""
    table = torch.zeros(spec.num_local_experts + 1, 4)
    e = torch.arange(spec.num_local_experts, dtype=torch.float32)
    alpha = 0.05 if spec.activation_mode == "nvfp4" else 1.0
    table[:-1, 0] = alpha / (3 * spec.hidden_size**0.5) * (1 + e % 3 * 0.25) * 2**14
    table[:-1, 1] = alpha / (3 * spec.hidden_size**0.5) * (1 + e % 5 * 0.125) * 2**14
    if spec.activation_mode == "nvfp4":
        table[:-1, 2], table[:-1, 3] = 0.01 / (3 * spec.intermediate_size**0.5) * 2**14, 100.0
        table[-1, 0] = 20.0
    else:
        table[:-1, 2], table[:-1, 3] = 2.0**-8 / (3 * spec.intermediate_size**0.5) * 2**14, 2.0**8
    return table


def capture(enqueue: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls."""
    for i in range(2):
        enqueue(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            enqueue(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_times(graph: torch.cuda.CUDAGraph, count: int, replays: int, idle_s: float) -> list[float]:
    """ms per call of each replay."""
    times = []
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * replays)]
    for r in range(replays):
        if idle_s:
            torch.cuda.synchronize()
            time.sleep(idle_s)
        events[2 * r].record()
        graph.replay()
        events[2 * r + 1].record()
    torch.cuda.synchronize()
    for r in range(replays):
        times.append(events[2 * r].elapsed_time(events[2 * r + 1]) / count)
    return times


def measure(enqueue: Callable[[int], object], estimate_ms: float) -> dict[str, Any]:
    """Burst and sustained medians of one call."""
    burst_count = max(1, int(3 / estimate_ms))
    graph = capture(enqueue, burst_count)
    burst = replay_times(graph, burst_count, 5, 0.04)
    sustained_count = max(2, int(8 / estimate_ms))
    graph = capture(enqueue, sustained_count)
    with ClockSampler(nvml_reader(torch.cuda.current_device())) as clocks:
        sustained = replay_times(graph, sustained_count, 9, 0.0)[1:]
    return {
        "burst_ms": round(statistics.median(burst), 5),
        "sustained_ms": round(statistics.median(sustained), 5),
        "clocks": clocks.summary(),  # of the sustained replays
    }


def floor_ms(spec: LayerSpec, counts: torch.Tensor) -> float:
    """The higher of the weight and the arithmetic floor of a routing."""
    size = 3 * spec.hidden_size * spec.intermediate_size
    live = int((counts > 0).sum())
    return max(live * size * 0.5625 / HBM_BYTES_PER_S, 2 * int(counts.sum()) * size / FLOP_PER_S) * 1e3


def expert_counts(spec: LayerSpec, ids: torch.Tensor) -> torch.Tensor:
    """(E,) rows of each expert."""
    return torch.bincount(ids[(ids >= 0) & (ids < spec.num_local_experts)], minlength=spec.num_local_experts)


def num_weight_sets(shape: str) -> int:
    """How many sets of weights are rotated: one set of the smallest shape would partly stay in L2."""
    return 2 if shape == "qwen3-235b" else 1


def route_ids(spec: LayerSpec, routing: str, rows: int) -> torch.Tensor:
    """Ids of a benchmark routing with a mean of `rows` rows per expert."""
    e, k = spec.num_local_experts, spec.top_k
    if routing == "uniform":
        return cases.uniform_ids(e, k, rows)
    if routing == "random":
        return cases.random_ids(e, k, rows)
    if routing == "masked":  # every id masked: staging without rows, no tiles
        return torch.full_like(cases.uniform_ids(e, k, rows), -1)
    return cases.ids_from_counts(cases.zipf_counts(e, rows), k, 1)


def run(
    cache_dir: Path, shapes: list[str], modes: list[str], points: list[tuple[str, int]], tiles: str = ""
) -> Iterator[dict[str, Any]]:
    """One row per shape, mode, routing and rows per expert (and tile, when `tiles` lists several)."""
    for shape in shapes:
        packed = [random_records(spec_of(shape, modes[0])) for _ in range(num_weight_sets(shape))]
        for mode in modes:
            spec = spec_of(shape, mode)
            for routing, rows in points:
                ids = route_ids(spec, routing, rows)
                names = tiles.split(",") if tiles else [choose_tile(spec, ids.shape[0]).name]
                for name in names:
                    if object_path(KernelConfig(spec, TILES[name]), "sm_90a", cache_dir).is_file():
                        row = {"shape": shape, "mode": mode, "routing": routing, "rows": rows, "tile": name}
                        yield row | _measure_point(cache_dir, spec, packed, ids, name)
        del packed
        torch.cuda.empty_cache()


def launch_once(cache_dir: Path, shapes: list[str], modes: list[str], points: list[tuple[str, int]]) -> Iterator[Any]:
    """Three eager launches per point, for a profiler around the process: `ncu --launch-skip 2 --launch-count 1`."""
    for shape in shapes:
        for mode in modes:
            spec = spec_of(shape, mode)
            packed = random_records(spec)
            for routing, rows in points:
                ids = route_ids(spec, routing, rows)
                tile = choose_tile(spec, ids.shape[0]).name
                layer = GpuLayer(spec, {}, max(ids.shape[0], 1), cache_dir, packed=packed, scales=random_scales(spec))
                x, w = cases.tokens(spec, ids.shape[0], 3), cases.weights(spec, ids, 4)
                for _ in range(3):
                    layer.forward(tile, x, ids, w)
                torch.cuda.synchronize()
                yield {"shape": shape, "mode": mode, "routing": routing, "rows": rows, "tile": tile, "ok": True}


def run_rivals(shapes: list[str], points: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """The same rows per expert through public kernels on the same card, sorted rows in, no gather and no top-k sum."""
    for shape in shapes:
        spec = spec_of(shape, "bf16")
        hidden, inter, experts = spec.hidden_size, spec.intermediate_size, spec.num_local_experts
        device = torch.device("cuda", torch.cuda.current_device())
        weights = [base.make_weights(hidden, inter, experts, device, seed) for seed in range(num_weight_sets(shape))]
        counts = [expert_counts(spec, route_ids(spec, routing, rows)) for routing, rows in points]
        floors = [floor_ms(spec, count) for count in counts]

        def timer(index: int, floors: list[float] = floors) -> catalog.Measure:
            return lambda enqueue: measure(enqueue, 2 * floors[index] + 0.05)

        for index, row in catalog.measure_all(weights, [count.tolist() for count in counts], timer):
            routing, rows = points[index]
            named = {"shape": shape, "routing": routing, "rows": rows, "floor_ms": round(floors[index], 4)}
            yield {**named, **row, "ok": row["status"] != "failed"}
        del weights
        torch.cuda.empty_cache()


def _measure_point(
    cache_dir: Path, spec: LayerSpec, packed: list[dict[str, torch.Tensor]], ids: torch.Tensor, tile: str
) -> dict[str, Any]:
    count = ids.shape[0]
    layers = [GpuLayer(spec, {}, max(count, 1), cache_dir, packed=p, scales=random_scales(spec)) for p in packed]
    for layer in layers:
        layer.set_tokens(count)
    x, w = cases.tokens(spec, count, 3), cases.weights(spec, ids, 4)
    y = torch.empty(count, spec.hidden_size, dtype=torch.bfloat16, device="cuda")
    floor = floor_ms(spec, expert_counts(spec, ids))
    result: dict[str, Any] = {"tokens": count}
    result |= measure(lambda i: layers[i % len(layers)].enqueue(tile, x, ids, w, y), floor * 1.2 + 0.01)
    result |= {"floor_ms": round(floor, 4), "pct_sol": round(100 * floor / result["sustained_ms"], 1)}
    return result | {"ok": not any(layer.error_record()["set"] for layer in layers)}
