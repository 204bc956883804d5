# SPDX-License-Identifier: Apache-2.0
"""What communication costs a launch with few tokens: R virtual ranks against R one-rank layers fed with the same rows.

The ranks run as one launch (`together`) and as R launches on R streams of one graph (`ranks`); the one-rank layers
(`alone`) as R launches on R streams, with the same CTAs per rank, the same rows per expert and the same tiles. Every
form is reported with its empty launches, and the difference with and without them.

The design defines the fixed cost as one launch of all ranks minus the same grids fed from precomputed pools. Such grids
are not to be had without another kernel. The kernel always counts routes and stages tokens itself, so `alone` contains
both and the difference is smaller by them than the design's. And R one-rank layers cannot share a launch: the tensor
maps of pool and h then cover one rank, and route_rows, results and abort word do not move with a CTA's rank. So `alone`
pays R launches, hence the differences less the empty launches.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import bench, cases
from tools.gpu_suite.layer import GpuLayer
from tools.gpu_suite.ranks import Inputs, RankGroup
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig
from vendored_kernels.timeline import CtaTimeline, read

SPEC = LayerSpec(7168, 256, 32, 8, "nvfp4", ep_size=8)
"""Few weights, so that the fixed part is not a small difference of large times."""

ALONE = dataclasses.replace(SPEC, ep_size=1)
TILE = "h8"
REPLAYS = 60
CALLS = 10
ROUNDS = 3
TOKENS = (0, 1, 8, 32)
TIMELINE_REPLAYS = 15


def needed() -> Iterator[KernelConfig]:
    """Kernels of the measurement."""
    for timestamps in (False, True):
        yield KernelConfig(SPEC, TILES[TILE], timestamps=timestamps)
        yield KernelConfig(SPEC, TILES[TILE], all_ranks=True, timestamps=timestamps)
        yield KernelConfig(ALONE, TILES[TILE], timestamps=timestamps)


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


class Setup:
    """The ranks and, fed with what each of them receives, the one-rank layers; `timestamps` as in the kernels."""

    def __init__(self, cache_dir: Path, packed: list[dict[str, torch.Tensor]], *, timestamps: bool) -> None:
        scales = bench.random_scales(dataclasses.replace(SPEC, num_local_experts=SPEC.num_experts))
        self.group = RankGroup(SPEC, {}, max(TOKENS), cache_dir, packed=packed, scales=scales, timestamps=timestamps)
        self.group.load([TILE])
        self.cap = max(TOKENS) * SPEC.ep_size
        self.timeline = None if self.group.timeline is None else torch.zeros_like(self.group.timeline)
        ctas = self.group.ctas
        self.alone = [
            GpuLayer(
                ALONE,
                {},
                self.cap,
                cache_dir,
                packed=p,
                scales=bench.random_scales(ALONE),
                ctas=ctas,
                timeline=None if self.timeline is None else self.timeline[r * ctas : (r + 1) * ctas],
            )
            for r, p in enumerate(packed)
        ]
        self.counts = torch.arange(self.cap + 1, dtype=torch.int32, device="cuda")

    def set_tokens(self, tokens: int) -> None:
        """T of every rank for all that follows; every form has run once afterwards."""
        self.inputs = []
        for rank in range(SPEC.ep_size):
            ids = cases.random_ids(SPEC.num_experts, SPEC.top_k, SPEC.num_experts * tokens // SPEC.top_k, rank + 1)
            ids = ids[:tokens].contiguous()
            self.inputs.append(Inputs(cases.tokens(SPEC, tokens, rank), ids, cases.weights(SPEC, ids, rank)))
        self.outputs = self.group.outputs(self.inputs)
        self.group.set_operands(self.inputs, self.outputs)
        self.received = [_received(self.inputs, rank) for rank in range(SPEC.ep_size)]
        self.scratch = [torch.empty(max(i.tokens, 1), 7168, dtype=torch.bfloat16, device="cuda") for i in self.received]
        for form in self.forms().values():
            form()
        torch.cuda.synchronize()

    def forms(self) -> dict[str, Callable[[], None]]:
        """What is compared: the ranks on streams, in one launch, and the one-rank layers on streams."""
        return {
            "ranks": lambda: _fork(self.group.streams, self._rank),
            "together": lambda: self.group.together(TILE, True),
            "alone": lambda: _fork(self.group.streams, self._alone),
        }

    def empty_forms(self) -> dict[str, Callable[[], None]]:
        """Launches that return at once."""
        return {
            "ranks": lambda: _fork(self.group.streams, lambda rank: self.group.layers[rank].launch(TILE)(dry=1)),
            "together": lambda: self.group.together(TILE, True, dry=1),
            "alone": lambda: _fork(self.group.streams, lambda rank: self.alone[rank].launch(TILE)(dry=1)),
        }

    def error_records(self) -> list[dict[str, int]]:
        """Of the ranks and of the one-rank layers."""
        return [*self.group.records(), *(layer.error_record() for layer in self.alone)]

    def timeline_of(self, form: str) -> torch.Tensor | None:
        """The event buffer that a form writes."""
        return self.timeline if form == "alone" else self.group.timeline

    def _rank(self, rank: int) -> None:
        self.group.enqueue(rank, TILE, self.inputs[rank], self.outputs[rank])

    def _alone(self, rank: int) -> None:
        i = self.received[rank]
        at = self.counts.data_ptr() + 4 * i.tokens
        self.alone[rank].enqueue(TILE, i.x, i.ids, i.weights, self.scratch[rank], num_tokens=at)


def costs(full: dict[str, float], empty: dict[str, float]) -> dict[str, float]:
    """Times of the forms and of their empty launches, and what `together` and `ranks` take beyond `alone`; us."""
    found = {f"{name}_us": time for name, time in full.items()}
    found |= {f"{name}_empty_us": time for name, time in empty.items()}
    for name in ("together", "ranks"):
        plain = full[name] - full["alone"]
        found[f"{name}_minus_alone_us"] = plain
        found[f"{name}_minus_alone_without_empty_us"] = plain - (empty[name] - empty["alone"])
    return {name: round(time, 2) for name, time in found.items()}


def run(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """One row per number of tokens a rank, times in microseconds, medians of graph replays; then itemised rows."""
    packed = [bench.random_records(SPEC) for _ in range(SPEC.ep_size)]
    setup = Setup(cache_dir, packed, timestamps=False)
    for tokens in TOKENS:
        setup.set_tokens(tokens)
        measured: dict[str, list[float]] = {name: [] for name in setup.forms()}
        for _ in range(ROUNDS):  # in turns: what a card does over time hits all alike
            for name, form in setup.forms().items():
                measured[name].append(_median_us(form))
        empty: dict[str, list[float]] = {name: [] for name in setup.empty_forms()}
        for _ in range(ROUNDS):
            for name, form in setup.empty_forms().items():
                empty[name].append(_median_us(form))
        medians = {name: statistics.median(times) for name, times in measured.items()}
        empty_medians = {name: statistics.median(times) for name, times in empty.items()}
        yield {
            "tokens_per_rank": tokens,
            **costs(medians, empty_medians),
            "rounds_us": {name: [round(t, 1) for t in times] for name, times in measured.items()},
            "ok": not any(record["set"] for record in setup.error_records()),
        }
    yield from itemise(Setup(cache_dir, packed, timestamps=True))


def itemise(setup: Setup) -> Iterator[dict[str, Any]]:
    """When each event happens, by kernels with timestamps: us since the first CTA entered, medians over replays.

    Of an event: its earliest, middle and latest CTA. `tile_us`: median duration of fc1 and fc2 tiles; `fetch_us`: from
    the end of a tile to the begin of the next.
    """
    for tokens in TOKENS:
        setup.set_tokens(tokens)
        for name, form in setup.forms().items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                form()
            buffer = setup.timeline_of(name)
            if buffer is None:
                raise ValueError("itemising needs kernels with timestamps")
            launches = []
            for _ in range(TIMELINE_REPLAYS):
                buffer.zero_()
                graph.replay()
                torch.cuda.synchronize()
                launches.append(read(buffer.tolist()))
            yield {"tokens_per_rank": tokens, "timeline": name, **summary(launches[3:]), "ok": True}


def summary(launches: list[list[CtaTimeline]]) -> dict[str, Any]:
    """Events and tiles of several launches, in us."""
    names = {name for launch in launches for cta in launch for name in cta.events}

    def spread(times: list[list[float]]) -> list[float]:
        each = [(min(t), statistics.median(t), max(t)) for t in times if t]
        return [round(statistics.median(column) / 1e3, 2) for column in zip(*each, strict=True)]

    events = {n: spread([[c.events[n] for c in launch if n in c.events] for launch in launches]) for n in names}
    events["entered"] = spread([[c.entered for c in launch] for launch in launches])
    ctas = [cta for launch in launches for cta in launch]
    tiles = {
        kind: [end - begin for cta in ctas for begin, end, is_fc2 in cta.tiles if is_fc2 == (kind == "fc2")]
        for kind in ("fc1", "fc2")
    }
    gaps = [b[0] - a[1] for cta in ctas for a, b in itertools.pairwise(cta.tiles)]
    return {
        "events_us": dict(sorted(events.items(), key=lambda item: item[1][1])),
        "tile_us": {kind: round(statistics.median(times) / 1e3, 2) for kind, times in tiles.items() if times},
        "first_tile_us": spread([[c.tiles[0][1] for c in launch if c.tiles] for launch in launches]),
        "fetch_us": round(statistics.median(gaps) / 1e3, 2) if gaps else 0.0,
        "tiles_of_a_cta": spread([[1e3 * c.num_tiles for c in launch] for launch in launches]),
    }
