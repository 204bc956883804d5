# SPDX-License-Identifier: Apache-2.0
"""Where a layer's weights come from, for the layer under test and, on its own path, for the oracle.

Used by the runner (`for_rank`) and the check (`for_oracle`). Reads or makes tensors; judges nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from microbench.cases import Case
from microbench.synthetic import expert_bulk, expert_scalars
from trtllm_megamoe.reference.oracle import OracleWeights
from trtllm_megamoe.weights.checkpoint import Checkpoint
from trtllm_megamoe.weights.spec import AuxFamily, Component, Projection, TensorKey


class WeightSource(ABC):
    """Named tensors of one layer, by expert."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @abstractmethod
    def for_rank(self, experts: range) -> Iterator[tuple[str, torch.Tensor]]:
        """What `MegaMoELayer.load_weights` needs on the rank that owns `experts`, lazily, expert by expert."""

    @abstractmethod
    def read(self, key: TensorKey) -> torch.Tensor:
        """One tensor, scalars as plain (not reciprocal) float32 scales.

        Raises:
            KeyError: the layer has no such tensor.
        """

    @abstractmethod
    def has(self, key: TensorKey) -> bool:
        """Whether the layer has this tensor; reads nothing."""

    def for_oracle(self) -> OracleWeights:
        """The whole layer for the oracle; an expert's bulk tensors are read when it is computed."""
        case = self.case
        everything = range(case.num_experts)
        fc1 = [TensorKey(e, p, Component.INPUT_SCALE) for e in everything for p in (Projection.GATE, Projection.UP)]
        fc2 = [TensorKey(e, Projection.DOWN, Component.INPUT_SCALE) for e in everything]
        has_scales = all(self.has(key) for key in (*fc1, *fc2))
        return OracleWeights(
            tensors=_LazyTensors(self),
            num_experts=case.num_experts,
            hidden_size=case.hidden_size,
            intermediate_size=case.intermediate_size,
            input_scale=torch.stack([self.read(key).reshape(()) for key in fc1]).max() if has_scales else None,
            down_input_scales=torch.stack([self.read(key).reshape(()) for key in fc2]) if has_scales else None,
        )


class _LazyTensors(Mapping[str, torch.Tensor]):
    """Canonical names to tensors, made on access."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> torch.Tensor:
        expert, projection, component = name.split(".")
        return self._source.read(TensorKey(int(expert), Projection(projection), Component(component)))

    def __iter__(self) -> Iterator[str]:
        for expert in range(self._source.case.num_experts):
            for projection in Projection:
                for component in Component:
                    key = TensorKey(expert, projection, component)
                    if self._source.has(key):
                        yield key.name

    def __len__(self) -> int:
        return sum(1 for _ in self)


_KEPT_BYTES = 4 << 30
"""Drawn experts that stay in memory, so that a share's experts are drawn once for the layer and for every check."""


class SyntheticSource(WeightSource):
    """Weights from :mod:`microbench.synthetic`, drawn on `device`; scalars lie on the CPU."""

    def __init__(self, case: Case, seed: int, device: torch.device | None = None) -> None:
        super().__init__(case)
        self._seed, self._device = seed, device if device is not None else torch.device("cpu")
        self._kept: dict[int, dict[TensorKey, torch.Tensor]] = {}

    def for_rank(self, experts: range) -> Iterator[tuple[str, torch.Tensor]]:
        for expert in range(self.case.num_experts):
            for key, tensor in expert_scalars(self.case, self._seed, expert):
                if expert in experts or key.family is AuxFamily.FC1_INPUT:
                    yield key.name, tensor
            if expert in experts:
                for key, tensor in self._bulk(expert).items():
                    yield key.name, tensor.clone()  # what the layer does to its tensors must not reach the oracle

    def has(self, key: TensorKey) -> bool:
        return 0 <= key.expert < self.case.num_experts

    def read(self, key: TensorKey) -> torch.Tensor:
        if not self.has(key):
            raise KeyError(key.name)
        if not key.component.is_bulk:
            return dict(expert_scalars(self.case, self._seed, key.expert))[key]
        return self._bulk(key.expert)[key]

    def _bulk(self, expert: int) -> dict[TensorKey, torch.Tensor]:
        if expert not in self._kept:
            drawn = dict(expert_bulk(self.case, self._seed, expert, self._device))
            size = sum(tensor.numel() for tensor in drawn.values())  # codes and scales are bytes
            while self._kept and (len(self._kept) + 1) * size > _KEPT_BYTES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[expert] = drawn
        return self._kept[expert]


class CheckpointSource(WeightSource):
    """Weights of one layer of a checkpoint; with a share, its first experts."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if case.checkpoint is None or case.layer is None:
            raise ValueError("this case names no checkpoint layer")
        self._checkpoint = Checkpoint.open(case.checkpoint)
        self._layer = case.layer
        everything = self._checkpoint.layer_tensors(case.layer)
        self._stored = {stored.key: stored for stored in everything if stored.key.expert < case.num_experts}

    def for_rank(self, experts: range) -> Iterator[tuple[str, torch.Tensor]]:
        for stored in self._checkpoint.layer_tensors(self._layer, experts):
            if stored.key in self._stored:
                yield stored.name, stored.read()

    def has(self, key: TensorKey) -> bool:
        return key in self._stored

    def read(self, key: TensorKey) -> torch.Tensor:
        stored = self._stored[key]
        tensor = stored.read()
        return 1.0 / tensor.float() if stored.reciprocal else tensor


def open_source(case: Case, seed: int, device: torch.device | None = None) -> WeightSource:
    """The case's weights; `seed` and `device` matter to synthetic ones only."""
    return SyntheticSource(case, seed, device) if case.checkpoint is None else CheckpointSource(case)
