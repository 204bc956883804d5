# SPDX-License-Identifier: Apache-2.0
"""What communication costs a launch with few tokens: R virtual ranks against R one-rank layers fed with the same rows.

Both run as R launches on R streams of one graph (and the ranks also as one launch), with the same CTAs per rank, the
same rows per expert and the same tiles, so the difference is dispatch, waits between ranks, and returns.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import bench, cases
from tools.gpu_suite.layer import GpuLayer
from tools.gpu_suite.ranks import Inputs, RankGroup
from vendored_kernels.sm90.config import TILES, KernelConfig, LayerSpec

SPEC = LayerSpec(7168, 256, 32, 8, "nvfp4", ep_size=8)
"""Few weights, so that the fixed part is not a small difference of large times."""

ALONE = dataclasses.replace(SPEC, ep_size=1)
TILE = "h8"
REPLAYS = 60
CALLS = 10
ROUNDS = 3
TOKENS = (0, 1, 8, 32)


def needed() -> Iterator[KernelConfig]:
    """Kernels of the measurement."""
    yield KernelConfig(SPEC, TILES[TILE])
    yield KernelConfig(SPEC, TILES[TILE], all_ranks=True)
    yield KernelConfig(ALONE, TILES[TILE])


def _median_us(enqueue: Callable[[], None]) -> float:
    graph = bench.capture(lambda _: enqueue(), CALLS)
    return statistics.median(bench.replay_times(graph, CALLS, REPLAYS, 0.0)[5:]) * 1e3


def _fork(streams: list[torch.cuda.Stream], launch: Callable[[int], None]) -> None:
    main = torch.cuda.current_stream()
    for rank, stream in enumerate(streams):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            launch(rank)
    for stream in streams:
        main.wait_stream(stream)


def _received(inputs: list[Inputs], rank: int) -> Inputs:
    """The tokens that have a route to `rank`, their ids as that rank's local ones, everything else masked."""
    local = SPEC.num_local_experts
    ids = torch.cat([i.ids for i in inputs])
    own = (ids >= rank * local) & (ids < (rank + 1) * local)
    chosen = own.any(dim=1)
    mine = torch.where(own, ids - rank * local, -1)[chosen].contiguous()
    x = torch.cat([i.x for i in inputs])[chosen].contiguous()
    return Inputs(x, mine, torch.cat([i.weights for i in inputs])[chosen].contiguous())


def run(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """One row per number of tokens a rank; times in microseconds, medians of graph replays."""
    packed = [bench.random_records(SPEC) for _ in range(SPEC.ep_size)]
    scales = bench.random_scales(dataclasses.replace(SPEC, num_local_experts=SPEC.num_experts))
    group = RankGroup(SPEC, {}, max(TOKENS), cache_dir, packed=packed, scales=scales)
    group.load([TILE])
    cap = max(TOKENS) * SPEC.ep_size
    alone = [
        GpuLayer(ALONE, {}, cap, cache_dir, packed=p, scales=bench.random_scales(ALONE), ctas=group.ctas)
        for p in packed
    ]
    counts = torch.arange(cap + 1, dtype=torch.int32, device="cuda")
    for tokens in TOKENS:
        inputs = []
        for rank in range(SPEC.ep_size):
            ids = cases.random_ids(SPEC.num_experts, SPEC.top_k, SPEC.num_experts * tokens // SPEC.top_k, rank + 1)
            ids = ids[:tokens].contiguous()
            inputs.append(Inputs(cases.tokens(SPEC, tokens, rank), ids, cases.weights(SPEC, ids, rank)))
        outputs = group.outputs(inputs)
        group.set_operands(inputs, outputs)
        received = [_received(inputs, rank) for rank in range(SPEC.ep_size)]
        scratch = [torch.empty(max(i.tokens, 1), 7168, dtype=torch.bfloat16, device="cuda") for i in received]

        def launch_alone(rank: int, received: list[Inputs] = received, scratch: list[Any] = scratch) -> None:
            i = received[rank]
            at = counts.data_ptr() + 4 * i.tokens
            alone[rank].enqueue(TILE, i.x, i.ids, i.weights, scratch[rank], num_tokens=at)

        def launch_rank(rank: int, inputs: list[Inputs] = inputs, outputs: list[Any] = outputs) -> None:
            group.enqueue(rank, TILE, inputs[rank], outputs[rank])

        def launch_dry(rank: int) -> None:
            group.layers[rank].launch(TILE)(dry=1)

        for rank in range(SPEC.ep_size):
            launch_alone(rank)
        torch.cuda.synchronize()
        measured: dict[str, list[float]] = {"ranks": [], "alone": [], "together": []}
        for _ in range(ROUNDS):  # in turns: what a card does over time hits all alike
            measured["ranks"].append(_median_us(lambda: _fork(group.streams, launch_rank)))
            measured["alone"].append(_median_us(lambda: _fork(group.streams, launch_alone)))
            measured["together"].append(_median_us(lambda: group.together(TILE, True)))
        full, local, together = (statistics.median(times) for times in measured.values())
        yield {
            "tokens_per_rank": tokens,
            "ranks_us": round(full, 2),
            "alone_us": round(local, 2),
            "communication_us": round(full - local, 2),
            "together_us": round(together, 2),
            "rounds_us": {name: [round(t, 1) for t in times] for name, times in measured.items()},
            "empty_launches_us": round(_median_us(lambda: _fork(group.streams, launch_dry)), 2),
            "empty_together_us": round(_median_us(lambda: group.together(TILE, True, dry=1)), 2),
            "ok": not any(record["set"] for record in group.records()),
        }
