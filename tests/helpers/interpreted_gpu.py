# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine over the PTX interpreter: its own packing, scale rows, addresses and launches drive a kept kernel.

`install` pretends that one GPU is visible (`cuda_on_cpu`) and executes each launch: bytes are taken from the addresses
that the engine gave, the kernel's PTX runs on a copy of them, and what it wrote is put back.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.helpers import cuda_on_cpu
from tools.ptxsim import GlobalMemory, run_launch
from tools.ptxsim.families import family_of
from tools.ptxsim.layers import KernelFile
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cuda.arguments import SHARED_REGIONS, WEIGHTS_OF, local_regions
from trtllm_megamoe.kernels.family import FAMILIES, Family
from trtllm_megamoe.kernels.prepared import LaunchChoice, PreparedLaunch
from trtllm_megamoe.regions import Geometry, RegionTable
from trtllm_megamoe.tuning.table import ResolvedTactic
from trtllm_megamoe.weights.layouts import get_layout
from trtllm_megamoe.weights.spec import LayerShape

GRID = 2
"""Multiprocessors of the pretended GPU for each rank."""

MEMORY_BYTES = 1 << 23


def layer_config(kernel: KernelFile, max_tokens: int) -> MegaMoeConfig:
    """The layer that a kernel was compiled for."""
    layer = kernel.facts["layer"]
    names = ("hidden_size", "intermediate_size", "top_k", "combine_format")
    return MegaMoeConfig.create(
        **{name: layer[name] for name in (*names, "swiglu_limit", "swiglu_alpha", "swiglu_beta")},
        num_experts=layer["num_local_experts"] * layer["ep_size"],
        activations=layer["activation_mode"],
        score_placement="before_requant" if layer["weigh_before_requant"] else "after_fc2",
        max_tokens_per_rank=max_tokens,
        engine="cuda",
        timeout_s=60.0,
    )


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """Host memory, not a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class InterpretedGpu:
    """Runs launches of one kernel; ranks of one layer are executed together when the last of them has launched."""

    def __init__(self, kernel: KernelFile, config: MegaMoeConfig) -> None:
        self.kernel, self.program = kernel, kernel.program()
        layer = kernel.facts["layer"]
        self.ranks = layer["ep_size"]
        self.family = FAMILIES[kernel.facts["arch"]]
        self.table = RegionTable(Geometry.from_config(config, self.ranks, self.family.pool_layout))
        self.launches = 0
        self.given: list[dict[str, int]] = []
        self._waiting: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()

    def load(
        self,
        family: Family,
        spec: Any,
        tactics: Mapping[int, ResolvedTactic],
        num_ctas: int,
        anchor: torch.Tensor,
        arguments: Mapping[str, int],
    ) -> dict[int, PreparedLaunch]:
        """Stands for `Family.load_launches`; refuses what its objects would refuse."""
        assert family is self.family and spec.ep_size == self.ranks
        numbers = {"grid": num_ctas, "ctas_per_rank": num_ctas, "lag": 2}
        fixed = {**arguments, **{name: value for name, value in numbers.items() if name in family.arguments}}
        assert set(fixed) <= set(family.arguments)

        def launch(**changing: int) -> None:
            assert set(changing) <= set(family.arguments)
            self._enqueue({**dict.fromkeys(family.arguments, 0), **fixed, **changing})

        return {
            bucket: PreparedLaunch(LaunchChoice("interpreted", "none", resolved), launch)
            for bucket, resolved in tactics.items()
        }

    def _enqueue(self, given: dict[str, int]) -> None:
        with self._lock:
            self._waiting[given["rank"]] = given
            if len(self._waiting) == self.ranks:
                members = [self._waiting[rank] for rank in range(self.ranks)]
                self._waiting.clear()
                self._run(members)

    def _run(self, members: list[dict[str, int]]) -> None:
        self.given += members
        memory = GlobalMemory(MEMORY_BYTES)
        laid = [_Member(self, memory, given) for given in members]
        bases = np.array([one.shared for one in laid] if self.ranks > 1 else [0], np.int64)
        arguments = []
        for one in laid:
            one.values["peers"] = memory.add(f"peers of rank {one.rank}", bases)
            numbers = {name: value for name, value in one.values.items() if isinstance(value, int)}
            facts, family = self.kernel.facts, family_of(self.kernel.facts["arch"])
            values = {**one.values, **family.maps(facts["layer"], facts["tile"], numbers, numbers["pool_rows"])}
            arguments.append([values[name] for name in facts["arguments"]])
        cluster = self.kernel.facts["tile"].get("ctas", 1)
        grid = members[0]["grid"]
        run_launch(self.program, memory, arguments, grid=grid, cluster_size=cluster, seed=self.launches)
        for one in laid:
            one.put_back()
        self.launches += 1


class _Member:
    """One rank's bytes in the interpreter's memory."""

    def __init__(self, gpu: InterpretedGpu, memory: GlobalMemory, given: dict[str, int]) -> None:
        self._memory, self.rank, table = memory, given["rank"], gpu.table
        self._back: list[tuple[str, int, int]] = []
        self.values: dict[str, Any] = dict(given)
        layer = gpu.kernel.facts["layer"]
        hidden, top_k, experts = layer["hidden_size"], layer["top_k"], layer["num_local_experts"]
        shape = LayerShape(hidden, layer["intermediate_size"], experts, top_k)
        packed = get_layout(gpu.family.layout).buffer_shapes(shape)
        tokens = int(_bytes_at(given["num_tokens"], 4).view(np.int32)[0])
        sizes = {
            **{name: experts * int(np.prod(packed[b])) for name, b in WEIGHTS_OF[gpu.family.pool_layout].items()},
            "scales": 16 * (experts + 1),
            "x": 2 * tokens * hidden,
            "ids": tokens * top_k * (8 if given["ids_are_64"] else 4),
            "route_weights": 4 * tokens * top_k,
            "num_tokens": 4,
        }
        for name, size in sizes.items():
            self.values[name] = self._copy(name, given[name], size)
        for name, size in (("y", 2 * tokens * hidden), ("error", 64)):
            self.values[name] = self._copy(name, given[name], size, put_back=True)
        regions = local_regions(table)
        self._space("local", table, regions, given, given["pool"] - table["pool"].offset_bytes)
        if gpu.ranks == 1:
            base = given["payload_at"] - table["payload"].offset_bytes
            self.shared = self._space("shared", table, SHARED_REGIONS, given, base)
        else:
            base = int(_bytes_at(given["peers"], 8 * gpu.ranks).view(np.int64)[self.rank])
            self.shared = self._space("shared", table, {}, given, base)
        for region in family_of(gpu.kernel.facts["arch"]).racy:
            found = table[region]
            memory.allow_races(self._local + found.offset_bytes, found.num_bytes)

    def _copy(self, name: str, address: int, size: int, *, put_back: bool = False) -> int:
        name = f"{name} of rank {self.rank}"
        at = self._memory.add(name, _bytes_at(address, size).copy() if size else 16)
        if put_back and size:
            self._back.append((name, address, size))
        return at

    def _space(
        self, space: Any, table: RegionTable, regions: Mapping[str, str], given: dict[str, int], base: int
    ) -> int:
        """Copy a space and translate the addresses that point into it; each must be its region's."""
        at = self._copy(f"{space} space", base, table.total_bytes(space), put_back=True)
        for argument, region in regions.items():
            assert given[argument] == base + table[region].offset_bytes, argument
            self.values[argument] = at + table[region].offset_bytes
        if space == "local":
            self._local = at
        return at

    def put_back(self) -> None:
        """What the kernel wrote, to where the engine will read it."""
        for name, address, size in self._back:
            _bytes_at(address, size)[:] = self._memory.view(name)[:size]


def install(
    monkeypatch: pytest.MonkeyPatch, kernel: KernelFile, max_tokens: int
) -> tuple[MegaMoeConfig, InterpretedGpu]:
    """A GPU of the kernel's architecture that executes this kernel, and the layer to build on it."""
    config = layer_config(kernel, max_tokens)
    gpu = InterpretedGpu(kernel, config)
    cuda_on_cpu.install(monkeypatch, arch=kernel.facts["arch"], sms=GRID * gpu.ranks)
    monkeypatch.setattr(Family, "load_launches", lambda *given: gpu.load(*given))
    return config, gpu
