# SPDX-License-Identifier: Apache-2.0
"""One or several virtual ranks of one of our kernels in one interpreted launch, dispatch and combine included.

Each rank has its own workspace, laid out by the product's region table, in the one global memory; all ranks run at the
same time, in any interleaving. Scopes count: a flag between ranks that is not `.sys` orders nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_megamoe.engines.cuda.arguments import SHARED_REGIONS, layout_numbers, local_regions
from trtllm_megamoe.formats import CombineFormat
from trtllm_megamoe.regions import Geometry, RegionTable, header_words
from trtllm_megamoe.weights.spec import LayerShape

from .families import family_of
from .layers import TIMEOUT_NS, KernelFile, LayerRun, Tensors, pack, scale_table
from .machine import TensorMap
from .memory import POISON, GlobalMemory
from .run import PATIENCE, RunReport, run_launch

LAUNCH_FACTS = 7
"""What all ranks must launch with alike; any number."""


@dataclass(frozen=True)
class RankInput:
    """One rank's call: x (T, H), ids and weights (T, K); T may be 0 and may differ between ranks."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class RanksRun:
    """Results: y (T, H) bf16, the error record and a copy of both spaces of every rank."""

    y: list[torch.Tensor]
    errors: list[list[int]]
    report: RunReport
    table: RegionTable
    spaces: list[dict[str, torch.Tensor]]

    def region(self, rank: int, name: str) -> torch.Tensor:
        """Bytes of a region after the last launch."""
        region = self.table[name]
        return self.spaces[rank][region.space][region.offset_bytes : region.end_bytes]


class _Rank:
    """One rank's buffers and arguments."""

    def __init__(self, memory: GlobalMemory, table: RegionTable, kernel: KernelFile, rank: int) -> None:
        self.memory, self.table, self.rank = memory, table, rank
        self.values: dict[str, int | TensorMap] = {}
        self.bases = {space: self._space(space) for space in ("shared", "local")}
        local = self.bases["local"]
        self.values |= {name: local + table[region].offset_bytes for name, region in local_regions(table).items()}
        one = kernel.facts["layer"]["ep_size"] == 1
        base = self.bases["shared"] if one else 0  # one rank gets addresses instead of offsets
        self.values |= {name: base + table[region].offset_bytes for name, region in SHARED_REGIONS.items()}
        self.values |= layout_numbers(table)
        self.values["error"] = local + table["error_record"].offset_bytes

    def _space(self, space: str) -> int:
        table = self.table
        contents = torch.full((table.total_bytes(space),), POISON, dtype=torch.uint8)  # type: ignore[arg-type]
        for region in table.regions(space):  # type: ignore[arg-type]
            if region.zero_at_start:
                contents[region.offset_bytes : region.end_bytes] = 0
        if space == "shared":
            words = torch.tensor(header_words(table, 1), dtype=torch.int64).view(torch.uint8)
            start = table["header"].offset_bytes
            contents[start : start + words.numel()] = words
        return self.memory.add(self.name(f"{space} space"), contents.numpy())

    def allow_races(self, region: str) -> None:
        """Tensor loads may take bytes of this region while others write them."""
        found = self.table[region]
        self.memory.allow_races(self.bases[found.space] + found.offset_bytes, found.num_bytes)

    def abort(self, word: int) -> None:
        """Some rank has given up before the launch."""
        offset = self.table["abort"].offset_bytes
        self.memory.view(self.name("shared space"))[offset : offset + 4].view("<i4")[0] = word

    def add_maps(self, kernel: KernelFile) -> None:
        """The arguments that the driver makes of addresses; last, when all of them are known."""
        numbers = {name: value for name, value in self.values.items() if isinstance(value, int)}
        make = family_of(kernel.facts["arch"]).maps
        self.values |= make(kernel.facts["layer"], kernel.facts["tile"], numbers, numbers["pool_rows"])

    def add(self, name: str, contents: torch.Tensor | int) -> None:
        """A buffer of this rank that is a launch argument."""
        raw: torch.Tensor | int = contents
        if isinstance(raw, torch.Tensor):
            data = raw.contiguous().view(-1).view(torch.uint8).numpy()
            self.values[name] = self.memory.add(self.name(name), data if data.size else 16)
        else:
            self.values[name] = self.memory.add(self.name(name), raw)

    def space(self, space: str) -> torch.Tensor:
        """A copy of a space."""
        return torch.from_numpy(self.memory.view(self.name(f"{space} space")).copy())

    def name(self, buffer: str) -> str:
        """Unique over ranks."""
        return f"{buffer} of rank {self.rank}"


def run_ranks(
    kernel: KernelFile,
    tensors: Tensors,
    inputs: Sequence[RankInput],
    *,
    max_tokens: int,
    grid: int = 2,
    seed: int = 0,
    launches: int = 1,
    check_order: bool = True,
    fault_steps: Sequence[int] = (),
    aborts: Sequence[int] = (),
    timeout_ns: int = TIMEOUT_NS,
    max_rounds: int = 20000,
    patience: int = PATIENCE,
) -> RanksRun:
    """One layer over `len(inputs)` ranks, every launch with the same inputs; `grid` CTAs per rank.

    Args:
        tensors: checkpoint tensors of all experts, by canonical names.
        max_tokens: the cap that fixes the workspace's strides.
        fault_steps: per rank, the step before which it stops (0: none), as the kernel's argument.
        aborts: per rank, what its abort word holds already.
    """
    layer = kernel.facts["layer"]
    ranks, local_experts = layer["ep_size"], layer["num_local_experts"]
    hidden, inter, top_k = layer["hidden_size"], layer["intermediate_size"], layer["top_k"]
    if len(inputs) != ranks:
        raise ValueError(f"{len(inputs)} inputs for {ranks} ranks")
    family = family_of(kernel.facts["arch"])
    geometry = Geometry(
        hidden,
        inter,
        ranks * local_experts,
        top_k,
        max_tokens,
        ranks,
        CombineFormat(layer["combine_format"]),
        layer["activation_mode"],
        family.pool_layout,
    )
    memory = GlobalMemory(1 << 23)
    table = RegionTable(geometry)
    members = [_Rank(memory, table, kernel, rank) for rank in range(ranks)]
    for member, word in zip(members, aborts, strict=False):
        member.abort(word)
    bases = [member.bases["shared"] for member in members] if ranks > 1 else [0]  # one rank has addresses
    peers = torch.tensor(bases, dtype=torch.int64)
    scales = scale_table(tensors, ranks * local_experts, layer["activation_mode"], family.accumulator_shift)
    for rank, (member, given) in enumerate(zip(members, inputs, strict=True)):
        own = slice(rank * local_experts, (rank + 1) * local_experts)
        shape = LayerShape(hidden, inter, local_experts, top_k)
        renamed = {
            f"{int(name.split('.', 1)[0]) - own.start}.{name.split('.', 1)[1]}": tensor
            for name, tensor in tensors.items()
            if own.start <= int(name.split(".", 1)[0]) < own.stop
        }
        packed = pack(renamed, local_experts, family.layout, shape)
        for argument, buffer in family.weights.items():
            member.add(argument, packed[buffer])
        for region in family.racy:
            member.allow_races(region)
        own_scales = torch.cat((scales[own], scales[-1:]))
        own_scales.view(torch.int32)[-1, 2] = LAUNCH_FACTS
        member.add("scales", own_scales)
        member.add("x", given.x.to(torch.bfloat16))
        member.add("ids", given.ids)
        member.add("route_weights", given.weights.float())
        member.add("num_tokens", torch.tensor([len(given.x)], dtype=torch.int32))
        member.add("y", max(len(given.x), 1) * hidden * 2)
        member.add("peers", peers)
        member.values |= {
            "timeout_ns": timeout_ns,
            "rank_operands": 0,
            "local_stride": 0,
            "timestamps": 0,
            "ids_are_64": int(given.ids.dtype == torch.int64),
            "fault_step": fault_steps[rank] if fault_steps else 0,
            "dry": 0,
            "lag": 2,
            "rank": rank,
            "ctas_per_rank": grid,
        }
        member.add_maps(kernel)
    program = kernel.program()
    arguments = [[member.values[name] for name in kernel.facts["arguments"]] for member in members]
    for number in range(launches):
        report = run_launch(
            program,
            memory,
            arguments,
            grid=grid,
            cluster_size=kernel.facts["tile"].get("ctas", 1),
            seed=seed + number,
            check_order=check_order,
            max_rounds=max_rounds,
            patience=patience,
        )
    outputs, spaces = [], []
    for member, given in zip(members, inputs, strict=True):
        raw = torch.from_numpy(memory.view(member.name("y")).copy()).view(torch.bfloat16)
        outputs.append(raw[: len(given.x) * hidden].reshape(len(given.x), hidden))
        spaces.append({space: member.space(space) for space in ("shared", "local")})
    run = RanksRun(outputs, [], report, table, spaces)
    run.errors.extend(run.region(rank, "error_record").view(torch.int64).tolist() for rank in range(ranks))
    return run


def run_one_rank(
    kernel: KernelFile,
    tensors: Tensors,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    fault_step: int = 0,
    **options: Any,
) -> LayerRun:
    """One layer of one rank; options as for :func:`run_ranks`."""
    layer, given = kernel.facts["layer"], RankInput(x, ids, weights)
    cap = max(len(x), 1)
    run = run_ranks(kernel, tensors, [given], max_tokens=cap, fault_steps=[fault_step], **options)
    route_rows = run.region(0, "route_rows").view(torch.int32).view(cap, layer["top_k"])[: len(x)]
    return LayerRun(run.y[0], route_rows, token_rows(run, 0), run.errors[0], run.report)


def token_rows(run: RanksRun, rank: int) -> dict[str, torch.Tensor]:
    """Pool and fc1 output of a rank: f16 values, or codes, one a byte, and their scales by row and block of 16."""
    g, out = run.table.geometry, {}
    for name, region, scales, columns in (
        ("pool", "pool", "pool_scales", g.hidden_size),
        ("h", "fc1_out", "fc1_scales", g.intermediate_size),
    ):
        raw = run.region(rank, region)
        if g.pool_layout == "f16":
            out[name] = raw.view(torch.float16).view(-1, columns)
            continue
        codes = raw.view(-1, columns // 2)
        out[name] = torch.stack((codes & 15, codes >> 4), -1).reshape(-1, columns)
        atoms = run.region(rank, scales).view(-1, -(-columns // 64), 32, 4, 4)  # block, atom, row % 32, row / 32, scale
        out[f"{name}_scales"] = atoms.permute(0, 3, 2, 1, 4).reshape(len(codes), -1)
    return out
