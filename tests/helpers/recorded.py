# SPDX-License-Identifier: Apache-2.0
"""Calls of the kept Hopper kernels that a GPU and the interpreter both make, and what of a result is compared.

Shared by `tools/record_gpu_results.py`, which writes tests/data/recorded, and by the test that reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.synthetic import RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim.approx import Table
from tools.ptxsim.kept import KEPT
from tools.ptxsim.layers import KernelFile
from tools.ptxsim.ranks import RankInput, run_ranks
from vendored_kernels.common.layer import LayerSpec


def ptx_digest(text: str) -> str:
    """What says that two compilations are the same kernel, whatever the comments of its sources; of `plain` PTX."""
    return hashlib.sha256(text.encode()).hexdigest()


RECORDED = Path(__file__).parent.parent / "data" / "recorded" / "h200.safetensors"


@dataclass(frozen=True)
class RecordedCase:
    """One call: a kept kernel, a routing, T of every rank, CTAs of a rank, launches in a row, a seed."""

    kernel: str
    kind: RoutingKind
    counts: tuple[int, ...]
    grid: int
    launches: int = 1
    seed: int = 3
    stored: Mapping[str, torch.Tensor] | None = None

    @property
    def spec(self) -> LayerSpec:
        """The layer."""
        return KEPT[self.kernel].layer

    @property
    def cap(self) -> int:
        """Tokens per rank that the workspace holds."""
        return max(self.counts) + 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensors of all experts."""
        if self.stored is not None:
            return {name[2:]: part for name, part in self.stored.items() if name.startswith("w:")}
        spec = self.spec
        return make_layer_tensors(seeded(self.seed), spec.hidden_size, spec.intermediate_size, spec.num_experts)

    def inputs(self) -> list[RankInput]:
        """Every rank's tokens."""
        if self.stored is not None:
            ranks = range(len(self.counts))
            return [RankInput(*(self.stored[f"{part}{r}"] for part in ("x", "ids", "weights"))) for r in ranks]
        spec, g, made = self.spec, seeded(self.seed + 1), []
        for count in self.counts:
            routing = make_routing(g, self.kind, count, spec.num_experts, spec.top_k, ep_size=spec.ep_size)
            x = make_tokens(g, count, spec.hidden_size)
            made.append(RankInput(x, routing.topk_ids, routing.topk_weights))
        return made

    def drawn(self) -> dict[str, torch.Tensor]:
        """All inputs under the names that `stored` has: kept with the results, because the same seeds give other
        numbers on a CPU with other vector instructions."""
        flat = {f"w:{name}": tensor.contiguous() for name, tensor in self.tensors().items()}
        for rank, one in enumerate(self.inputs()):
            flat |= {f"x{rank}": one.x, f"ids{rank}": one.ids, f"weights{rank}": one.weights}
        return flat


CASES: dict[str, RecordedCase] = {
    "nvfp4": RecordedCase("sm90_nvfp4", RoutingKind.MASKED_30, (11,), grid=2),
    "nvfp4-duplicates": RecordedCase("sm90_nvfp4", RoutingKind.DUPLICATES, (3,), grid=1, launches=2),
    "bf16": RecordedCase("sm90_bf16", RoutingKind.HOT_EXPERT, (9,), grid=2),
    "bf16-random": RecordedCase("sm90_bf16", RoutingKind.RANDOM, (6,), grid=1, seed=7),
    "two-ranks-bf16": RecordedCase("sm90_ranks2", RoutingKind.RANDOM, (3, 2), grid=1),
    "two-ranks-bf16-hot": RecordedCase("sm90_ranks2", RoutingKind.HOT_RANK, (0, 4), grid=2),
    "three-ranks-nvfp4": RecordedCase("sm90_ranks3", RoutingKind.MASKED_30, (5, 0, 3), grid=2),
}


def comparable(
    case: RecordedCase, outputs: list[torch.Tensor], region: Callable[[int, str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Bytes that must be equal: outputs, and pool, fc1 output and returned rows of every live route.

    A route's place in the pool depends on timing, so rows are taken in the order of (source rank, route).

    Args:
        outputs: y (T, H) of every rank.
        region: (rank, name) -> bytes of a region.
    """
    spec, found = case.spec, {}
    inputs = case.inputs()
    owners: list[list[tuple[int, int]]] = []
    for rank in range(spec.ep_size):
        found[f"y{rank}"] = _bytes(outputs[rank][: case.counts[rank]])
        meta = region(rank, "pool_meta").view(torch.int32).view(-1, 2).tolist()
        live = {(source, route): row for row, (source, route) in enumerate(meta) if source >= 0 and route >= 0}
        order = sorted(live)
        owners.append(order)
        rows = torch.tensor([live[key] for key in order], dtype=torch.long)
        for name, columns in (("pool", spec.hidden_size), ("fc1_out", spec.intermediate_size)):
            found[f"{name}{rank}"] = _bytes(region(rank, name).view(-1, 2 * columns)[rows])
        ids = inputs[rank].ids.reshape(-1)
        routes = ((ids >= 0) & (ids < spec.num_experts)).nonzero().reshape(-1)
        found[f"result_data{rank}"] = _bytes(region(rank, "result_data").view(-1, spec.data_row_bytes)[routes])
    found["routes"] = _bytes(torch.tensor([[r, *key] for r, keys in enumerate(owners) for key in keys]))
    return found


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8).cpu()


def differing(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Number of unequal bytes of every buffer that is not equal; a buffer of another size counts whole."""
    bad = {}
    for name in sorted({*got, *want}):
        if name not in got or name not in want or got[name].shape != want[name].shape:
            bad[name] = -1
        elif not torch.equal(got[name], want[name]):
            bad[name] = int((got[name] != want[name]).sum())
    return bad


def interpreted(case: RecordedCase, kernel: KernelFile, *, check_order: bool = False) -> dict[str, torch.Tensor]:
    """The same call in the interpreter."""
    run = run_ranks(
        kernel,
        case.tensors(),
        case.inputs(),
        max_tokens=case.cap,
        grid=case.grid,
        launches=case.launches,
        check_order=check_order,
    )
    failed = [error for error in run.errors if error[0]]
    if failed:
        raise RuntimeError(f"the interpreted launch reported {failed}")
    return comparable(case, run.y, run.region)


@dataclass(frozen=True)
class Recording:
    """A file of results: facts of the machine and the cases, inputs and resulting bytes by case, approximations that
    occurred."""

    facts: dict[str, Any]
    inputs: dict[str, dict[str, torch.Tensor]]
    results: dict[str, dict[str, torch.Tensor]]
    tables: dict[str, Table]

    def save(self, path: Path) -> None:
        """Write it."""
        flat = {f"{case}/{name}": value for case, found in self.results.items() for name, value in found.items()}
        flat |= {f"{case}/in/{name}": part for case, drawn in self.inputs.items() for name, part in drawn.items()}
        for name, table in self.tables.items():
            for part, values in (("inputs", table.inputs), ("results", table.results)):
                flat[f"approx/{name}/{part}"] = torch.from_numpy(values.view(np.int32).copy())
        save_file(flat, path, metadata={"facts": json.dumps(self.facts)})

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read it."""
        results: dict[str, dict[str, torch.Tensor]] = {}
        inputs: dict[str, dict[str, torch.Tensor]] = {}
        parts: dict[str, dict[str, Any]] = {}
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key.startswith("approx/"):
                    _, name, part = key.split("/")
                    parts.setdefault(name, {})[part] = file.get_tensor(key).numpy().view(np.uint32)
                elif "/in/" in key:
                    case, name = key.split("/in/")
                    inputs.setdefault(case, {})[name] = file.get_tensor(key)
                else:
                    case, name = key.split("/")
                    results.setdefault(case, {})[name] = file.get_tensor(key)
        tables = {name: Table(name, found["inputs"], found["results"]) for name, found in parts.items()}
        return cls(facts, inputs, results, tables)
