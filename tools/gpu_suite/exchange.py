# SPDX-License-Identifier: Apache-2.0
"""Checks of dispatch and combine over virtual ranks: equality with one rank and the oracle, soak, graphs, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu_suite import cases
from tools.gpu_suite.correctness import oracle_options
from tools.gpu_suite.layer import GpuLayer
from tools.gpu_suite.rank_inputs import BENCH_ROUTINGS, ROUTINGS, make_inputs
from tools.gpu_suite.ranks import Inputs, RankGroup, join, one_rank_spec
from trtllm_megamoe.kernels.hopper import layer_spec
from trtllm_megamoe.reference.oracle import OracleWeights, oracle_forward
from trtllm_megamoe.selftest.cases import rank_cases
from trtllm_megamoe.selftest.checks import bits, compare, fault_of
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.common.sites import FAULT_PUBLISH, FAULT_PULL, FAULT_RETURN, FAULT_STAGED, SITE_NAMES, SITE_PEER
from vendored_kernels.sm90.config import TILES, KernelConfig, choose_tile

CAP = 300
"""max_tokens_per_rank of the equality checks."""

SOAK_CAP = 48
EPOCH_NEAR_WRAP = (1 << 32) - 2
"""Half-way of a tag's 40 bits lies nothing; the low word's wrap is where a 32-bit comparison would fail."""

TOKEN_COUNTS = [0, 1, 7, 8, 64, 256, CAP, 33]

TILES_OF = {
    "ranks-nvfp4": ("n8", "n16", "n64", "n128", "h8", "h16", "h64"),
    "ranks-bf16": ("n16", "n64", "n128", "h16", "h64"),
    "ranks-bf16-fp8-options": ("n16", "h64"),
    "ranks-nvfp4-fp4-options": ("n64", "h16"),
    "ranks-nvfp4-fp8": ("n16",),
    "two-ranks-odd-bf16-fp4": ("n16", "h16"),
    "sixteen-ranks-tiny-nvfp4": ("h8",),
}
"""Case of the self-test -> the tiles that it runs here."""

SPECS: dict[str, tuple[LayerSpec, tuple[str, ...]]] = {
    case.name: (layer_spec(case.config, case.ep_size, case.mode), TILES_OF[case.name]) for case in rank_cases()
}
SOAK_SPEC, SOAK_TILES = "ranks-nvfp4", ("h8", "n16", "n64")


def needed(only: str = "") -> Iterator[KernelConfig]:
    """Kernels of the equality checks: R launches, the launch of all ranks, and one rank for comparison."""
    for spec, tiles in wanted(only).values():
        for tile in tiles:
            yield KernelConfig(spec, TILES[tile])
        yield KernelConfig(spec, TILES[tiles[0]], all_ranks=True)
        yield KernelConfig(one_rank_spec(spec), TILES["n16"])


def wanted(only: str) -> dict[str, tuple[LayerSpec, tuple[str, ...]]]:
    """Cases whose name contains a word of a comma list."""
    return {name: case for name, case in SPECS.items() if any(word in name for word in only.split(","))}


def needed_by_soak() -> Iterator[KernelConfig]:
    """Kernels of the soak, the graphs and the failures."""
    spec, _ = SPECS[SOAK_SPEC]
    yield from (KernelConfig(spec, TILES[tile]) for tile in SOAK_TILES)
    yield KernelConfig(one_rank_spec(spec), TILES["n16"])


def _expected(one: GpuLayer, inputs: Sequence[Inputs], tile: str = "n16") -> list[torch.Tensor]:
    """The same tokens through one rank that owns all experts."""
    joined = join(inputs)
    out = one.forward(tile, joined.x, joined.ids, joined.weights)
    return list(out.split([i.tokens for i in inputs]))


def equality(cache_dir: Path, only: str = "") -> Iterator[dict[str, Any]]:
    """Every option, tile and routing: bits equal to one rank, close to the oracle, rows beyond T untouched."""
    for number, (name, (spec, tiles)) in enumerate(wanted(only).items()):
        tensors = cases.random_tensors(spec, 40 + number)
        oracle = OracleWeights.from_tensors(tensors)
        group = RankGroup(spec, tensors, CAP, cache_dir)
        one = GpuLayer(one_rank_spec(spec), tensors, CAP * spec.ep_size, cache_dir)
        group.load(tiles)
        for index, routing in enumerate((*ROUTINGS, *BENCH_ROUTINGS)):
            counts = [TOKEN_COUNTS[(r * (2 * index + 1) + index) % len(TOKEN_COUNTS)] for r in range(spec.ep_size)]
            inputs = make_inputs(spec, counts, routing, 3 + index, int32=bool(index % 2))
            counts = [i.tokens for i in inputs]
            expected = _expected(one, inputs)
            joined = join(inputs)
            truth = oracle_forward(oracle, joined.x, joined.ids.long(), joined.weights, oracle_options(spec))
            for tile in (*tiles, f"{tiles[0]} together"):
                group.poison()
                outputs = group.outputs(inputs)
                if tile.endswith("together"):
                    group.set_operands(inputs, outputs)
                    group.together(tiles[0], inputs[0].ids.dtype == torch.int64)
                else:
                    group.run(tile, inputs, outputs)
                torch.cuda.synchronize()
                rows = [y[:-1] for y in outputs]
                result: dict[str, Any] = {"case": name, "tile": tile, "routing": routing, "tokens": counts}
                result |= compare(torch.cat(rows), truth.to(torch.bfloat16))
                same = [torch.equal(bits(a), bits(b)) for a, b in zip(rows, expected, strict=True)]
                result["ranks_with_other_bits"] = [r for r, ok in enumerate(same) if not ok]
                beyond = all(bool(torch.isnan(y[-1]).all()) for y in outputs)
                errors = [record for record in group.records() if record["set"]]
                result["errors"] = errors
                result["ok"] = all(same) and beyond and not errors and not fault_of(result, spec.combine_format)
                yield result
                if errors:
                    group.reset()
        yield {"case": name, "check": "guards", "ok": group.guards_are_intact()}
        del group, one
        torch.cuda.empty_cache()


class _Soak:
    """Many different launches with known results, and how to run one of them."""

    def __init__(self, cache_dir: Path, variants: int) -> None:
        self.spec, _ = SPECS[SOAK_SPEC]
        first, second = (cases.random_tensors(self.spec, seed) for seed in (51, 52))
        self.groups = [RankGroup(self.spec, first, SOAK_CAP, cache_dir)]
        self.groups.append(RankGroup(self.spec, second, SOAK_CAP, cache_dir, self.groups[0]))
        ones = [GpuLayer(one_rank_spec(self.spec), t, SOAK_CAP * 8, cache_dir) for t in (first, second)]
        for group in self.groups:
            group.load(SOAK_TILES)
        rng = torch.Generator().manual_seed(8)
        self.inputs, self.expected = [], []
        for v in range(variants):
            counts = [int(c) for c in torch.randint(0, SOAK_CAP + 1, (8,), generator=rng)]
            counts = [0 if int(torch.randint(0, 4, (), generator=rng)) == 0 else c for c in counts]
            counts = [0] * 8 if v % 16 == 5 else [1] + [0] * 7 if v % 16 == 6 else counts
            self.inputs.append(make_inputs(self.spec, counts, ROUTINGS[v % len(ROUTINGS)], 100 + v))
            self.expected.append([_expected(one, self.inputs[-1]) for one in ones])
        self.scratch = [
            torch.empty(SOAK_CAP + 1, self.spec.hidden_size, dtype=torch.bfloat16, device="cuda") for _ in range(8)
        ]
        self.differing = torch.zeros(8, dtype=torch.int64, device="cuda")
        # What a stream allocates or loads for the first time would wait for a launch that waits for its peers.
        for rank, stream in enumerate(self.groups[0].streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
                for variant in range(variants):
                    self._check(rank, 0, variant)
        torch.cuda.synchronize()
        self.differing.zero_()

    def launch(self, rank: int, group: int, variant: int, tile: str) -> None:
        """One rank's part on its stream: poison the output, launch, compare."""
        y = self.scratch[rank]
        y.fill_(float("nan"))
        self.groups[group].enqueue(rank, tile, self.inputs[variant][rank], y)
        self._check(rank, group, variant)

    def _check(self, rank: int, group: int, variant: int) -> None:
        expected = self.expected[variant][group][rank]
        self.differing[rank] += (bits(self.scratch[rank][: expected.shape[0]]) != bits(expected)).sum()


def soak(cache_dir: Path, launches: int = 10_000) -> Iterator[dict[str, Any]]:
    """Back-to-back launches: random T, routing, tile, layer and delays; counters start near their low word's wrap."""
    soak = _Soak(cache_dir, 96)
    soak.groups[0].reset(EPOCH_NEAR_WRAP - 5000, EPOCH_NEAR_WRAP - 400_000)
    rng = torch.Generator().manual_seed(9)
    plan = torch.randint(0, 1 << 30, (launches, 11), generator=rng).tolist()
    torch.cuda.synchronize()
    started = time.time()
    for n, (which, tile, *delays) in enumerate(plan):
        for rank in range(8):
            with torch.cuda.stream(soak.groups[0].streams[rank]):
                if delays[rank] % 8 == 0:
                    torch.cuda._sleep(delays[rank] % 60_000)
                shift = rank if tile % 2 else 0  # ranks need not run the same tile configuration
                soak.launch(rank, n % 2, which % len(soak.inputs), SOAK_TILES[(tile + shift) % 3])
        if n % 500 == 499:
            torch.cuda.synchronize()
            if any(record["set"] for record in soak.groups[0].records()):
                break
    torch.cuda.synchronize()
    errors = [r for g in soak.groups for r in g.records() if r["set"]]
    epochs = [int(layer.region("epoch").view(torch.int64)[0]) for layer in soak.groups[0].layers]
    wrong = soak.differing.tolist()
    done = epochs[0] - (EPOCH_NEAR_WRAP - 5000)
    yield {
        "check": "soak",
        "launches": done,
        "seconds": round(time.time() - started, 1),
        "wrong_values_by_rank": wrong,
        "errors": errors,
        "guards": soak.groups[0].guards_are_intact(),
        "ok": not any(wrong) and not errors and len(set(epochs)) == 1 and done == launches,
    }


def graphs(cache_dir: Path, replays: int = 300) -> Iterator[dict[str, Any]]:
    """Three tiles captured as graphs of eight branches, replayed in random order with changed inputs and T."""
    soak = _Soak(cache_dir, 48)
    group, spec = soak.groups[0], soak.spec
    group.reset(EPOCH_NEAR_WRAP - 100)
    x = [torch.zeros(SOAK_CAP, spec.hidden_size, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    ids = [torch.full((SOAK_CAP, spec.top_k), -1, dtype=torch.int64, device="cuda") for _ in range(8)]
    w = [torch.zeros(SOAK_CAP, spec.top_k, device="cuda") for _ in range(8)]
    counts = torch.zeros(8, dtype=torch.int32, device="cuda")
    captured = {}
    for tile in SOAK_TILES:
        captured[tile] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured[tile]):
            main = torch.cuda.current_stream()
            for rank, stream in enumerate(group.streams):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    group.layers[rank].enqueue(
                        tile,
                        x[rank],
                        ids[rank],
                        w[rank],
                        soak.scratch[rank],
                        num_tokens=counts.data_ptr() + 4 * rank,
                        error=group.errors.data_ptr() + 64 * rank,
                    )
            for stream in group.streams:
                main.wait_stream(stream)
    rng = torch.Generator().manual_seed(10)
    wrong = 0
    replays_of = dict.fromkeys(SOAK_TILES, 0)
    for _ in range(replays):
        variant, tile = (int(torch.randint(0, n, (), generator=rng)) for n in (len(soak.inputs), 3))
        for rank, inputs in enumerate(soak.inputs[variant]):
            x[rank][: inputs.tokens], ids[rank][: inputs.tokens] = inputs.x, inputs.ids
            w[rank][: inputs.tokens] = inputs.weights
            soak.scratch[rank].fill_(float("nan"))
        counts.copy_(torch.tensor([i.tokens for i in soak.inputs[variant]], dtype=torch.int32))
        captured[SOAK_TILES[tile]].replay()
        replays_of[SOAK_TILES[tile]] += 1
        torch.cuda.synchronize()
        for rank, expected in enumerate(soak.expected[variant][0]):
            y = soak.scratch[rank]
            wrong += not torch.equal(bits(y[: expected.shape[0]]), bits(expected))
            wrong += not bool(torch.isnan(y[expected.shape[0] :]).all())
    errors = [record for record in group.records() if record["set"]]
    yield {
        "check": "exchange graphs",
        "case": SOAK_SPEC,
        "captured": [_captured(spec, group.ctas, tile) | {"replays": replays_of[tile]} for tile in SOAK_TILES],
        "replays": replays,
        "wrong": wrong,
        "errors": errors,
        "ok": not wrong and not errors,
    }


BUCKETS = tuple(1 << n for n in range(14))


def _captured(spec: LayerSpec, ctas: int, name: str) -> dict[str, Any]:
    """A tile configuration, and the buckets (tokens a rank) for which the heuristic takes it on this layer."""
    tile = TILES[name]
    buckets = [bucket for bucket in BUCKETS if choose_tile(spec, bucket, ctas).name == name]
    return {"tile": name, "token_widths": tile.token_widths, "tile_rows": tile.rows, "buckets": buckets}


def _described(record: dict[str, int]) -> str:
    if not record["set"]:
        return ""
    blamed = f" for rank {record['expected']}" if record["site"] == SITE_PEER and record["expected"] >= 0 else ""
    return f"{SITE_NAMES[record['site']]} {record['index']}{blamed}"


def failures(cache_dir: Path) -> Iterator[dict[str, Any]]:
    """A rank that never launches, or stops before a step: every other rank ends in time and says for whom it waited."""
    spec, _ = SPECS[SOAK_SPEC]
    tensors = cases.random_tensors(spec, 61)
    group = RankGroup(spec, tensors, SOAK_CAP, cache_dir)
    group.load(SOAK_TILES)
    inputs = make_inputs(spec, [9, 0, 4, 30, 1, 8, 2, 16], "random", 5)
    good = group.outputs(inputs)
    group.run("n16", inputs, good)
    torch.cuda.synchronize()
    culprit = 3

    def absent(outputs: Sequence[torch.Tensor]) -> None:
        for rank in range(8):
            if rank != culprit:
                with torch.cuda.stream(group.streams[rank]):
                    group.enqueue(rank, "n16", inputs[rank], outputs[rank], timeout_ns=50_000_000)

    def stops(step: int) -> Callable[[Sequence[torch.Tensor]], None]:
        def run(outputs: Sequence[torch.Tensor]) -> None:
            for rank in range(8):
                with torch.cuda.stream(group.streams[rank]):
                    fault = step if rank == culprit else 0
                    group.enqueue(rank, "n16", inputs[rank], outputs[rank], timeout_ns=50_000_000, fault_step=fault)

        return run

    faults = {
        "absent": absent,
        "staged": stops(FAULT_STAGED),
        "publish": stops(FAULT_PUBLISH),
        "pull": stops(FAULT_PULL),
        "return": stops(FAULT_RETURN),
    }
    for name, fault in faults.items():
        outputs = group.outputs(inputs)
        group.poison()  # what nobody pulled must not be taken for rows of some rank
        torch.cuda.synchronize()
        started = time.time()
        fault(outputs)
        torch.cuda.synchronize()
        seconds = time.time() - started
        first = group.records()
        # A rank without tokens may have had nothing to wait for; it finds the abort word at its next launch.
        group.run("n16", inputs, outputs)
        torch.cuda.synchronize()
        records = group.records()
        sites = [_described(record) for record in first]
        group.reset()
        healed = group.outputs(inputs)
        group.run("n16", inputs, healed)
        torch.cuda.synchronize()
        same = all(torch.equal(bits(a[:-1]), bits(b[:-1])) for a, b in zip(good, healed, strict=True))
        yield {
            "check": f"rank {culprit} stops: {name}",
            "seconds": round(seconds, 3),
            "sites": sites,
            "healed": same,
            "ok": all(r["set"] for r in records) and any(r["set"] for r in first) and same and seconds < 5,
        }
        group.reset()
