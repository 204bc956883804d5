# SPDX-License-Identifier: Apache-2.0
"""The ONE specification of routed-expert weights: names, shapes, dtypes, scale conventions, and who needs which tensor.

Reader, staging, packing, coverage, audit and tests all ask here; nothing else spells a tensor name or a shape.
Pure data and pure functions: no file access, no tensor arithmetic. docs/weights.md section 1 says the same in prose.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trtllm_megamoe.errors import MegaMoeConfigError

BLOCK_SIZE = 16
"""Neighbouring values along the reduction dimension that share one e4m3 scale."""

CODES_PER_BYTE = 2


class Projection(str, enum.Enum):
    """The three matrices of one expert; the value is the canonical spelling."""

    GATE = "w1"
    UP = "w3"
    DOWN = "w2"


class Component(str, enum.Enum):
    """The four tensors of one projection; the value is the canonical (ModelOpt) spelling."""

    CODES = "weight"
    BLOCK_SCALES = "weight_scale"
    GLOBAL_SCALE = "weight_scale_2"
    INPUT_SCALE = "input_scale"

    @property
    def is_bulk(self) -> bool:
        """Codes and block scales are bulk: rows of every local expert. The two others are scalars (aux)."""
        return self in (Component.CODES, Component.BLOCK_SCALES)


class AuxFamily(str, enum.Enum):
    """Scalars that are delivered all or not at all (R23)."""

    GLOBAL = "weight_scale_2"
    FC1_INPUT = "w1+w3 input_scale"
    FC2_INPUT = "w2 input_scale"


PROJECTION_SPELLINGS: dict[str, Projection] = {
    "w1": Projection.GATE,
    "w3": Projection.UP,
    "w2": Projection.DOWN,
    "gate_proj": Projection.GATE,
    "up_proj": Projection.UP,
    "down_proj": Projection.DOWN,
}

COMPONENT_SPELLINGS: dict[str, tuple[Component, bool]] = {
    "weight": (Component.CODES, False),
    "weight_scale": (Component.BLOCK_SCALES, False),
    "weight_scale_2": (Component.GLOBAL_SCALE, False),
    "input_scale": (Component.INPUT_SCALE, False),
    # compressed-tensors `nvfp4-pack-quantized`: same bytes, reciprocal global scales.
    "weight_packed": (Component.CODES, False),
    "weight_global_scale": (Component.GLOBAL_SCALE, True),
    "input_global_scale": (Component.INPUT_SCALE, True),
}
"""Spelling -> (component, whether the file stores the reciprocal)."""

_BLOCK_NAMES = "mlp|block_sparse_moe|ffn|feed_forward|moe"
_EXPERTS_PREFIX = re.compile(
    r"^(?:model\.|language_model\.|model\.language_model\.|language_model\.model\.)?"
    rf"layers\.(?P<layer>\d+)\.(?:{_BLOCK_NAMES})\.experts\.(?P<rest>.+)$"
)
_EXPERT_TENSOR = re.compile(
    rf"^(?P<expert>\d+)\.(?P<projection>{'|'.join(PROJECTION_SPELLINGS)})\.(?P<component>{'|'.join(COMPONENT_SPELLINGS)})$"
)


class TensorKey(NamedTuple):
    """Identity of one tensor inside a layer."""

    expert: int
    projection: Projection
    component: Component

    @property
    def name(self) -> str:
        """Canonical name, `{e}.{w1|w2|w3}.{weight|weight_scale|weight_scale_2|input_scale}`."""
        return f"{self.expert}.{self.projection.value}.{self.component.value}"

    @property
    def parameter(self) -> str:
        """The name without the expert id, as error texts use it."""
        return f"{self.projection.value}.{self.component.value}"

    @property
    def family(self) -> AuxFamily | None:
        """The aux family of a scalar; None for bulk."""
        if self.component is Component.GLOBAL_SCALE:
            return AuxFamily.GLOBAL
        if self.component is Component.INPUT_SCALE:
            return AuxFamily.FC2_INPUT if self.projection is Projection.DOWN else AuxFamily.FC1_INPUT
        return None


class ParsedName(NamedTuple):
    """What a checkpoint's tensor name says."""

    layer: int | None
    """None for a bare canonical name."""
    key: TensorKey
    reciprocal: bool
    """Whether the stored scalar is 1 / scale."""


@functools.lru_cache(maxsize=1 << 15)  # reader and loader both ask, layer by layer
def parse_name(name: str) -> ParsedName | None:
    """Understand a routed-expert tensor name in any supported spelling; None when it is not one."""
    layer, rest = split_layer(name)
    match = _EXPERT_TENSOR.match(rest)
    if match is None:
        return None
    component, reciprocal = COMPONENT_SPELLINGS[match["component"]]
    key = TensorKey(int(match["expert"]), PROJECTION_SPELLINGS[match["projection"]], component)
    return ParsedName(layer, key, reciprocal)


def split_layer(name: str) -> tuple[int | None, str]:
    """Split `...layers.N.<block>.experts.REST` into (N, REST); any other name gives (None, name)."""
    match = _EXPERTS_PREFIX.match(name)
    return (None, name) if match is None else (int(match["layer"]), match["rest"])


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Size facts of one MoE layer.

    Raises:
        MegaMoeConfigError: a size is not positive, or H or I is not a multiple of the NVFP4 block.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        faults = [f"{name}={getattr(self, name)} is not positive" for name in self.__slots__ if getattr(self, name) < 1]
        faults += [
            f"{name}={getattr(self, name)} is not a multiple of {BLOCK_SIZE}"
            for name in ("hidden_size", "intermediate_size")
            if getattr(self, name) % BLOCK_SIZE
        ]
        if faults:
            raise MegaMoeConfigError(f"illegal MoE layer shape: {'; '.join(faults)}")

    def matrix(self, projection: Projection) -> tuple[int, int]:
        """(rows, reduction length) of one projection."""
        if projection is Projection.DOWN:
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size, self.hidden_size

    def tensor_shape(self, projection: Projection, component: Component) -> tuple[int, ...]:
        """Shape of one tensor in the checkpoint; `()` for scalars."""
        rows, reduction = self.matrix(projection)
        if component is Component.CODES:
            return rows, reduction // CODES_PER_BYTE
        if component is Component.BLOCK_SCALES:
            return rows, reduction // BLOCK_SIZE
        return ()

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's bulk tensors (4.5 bits a weight)."""
        total = 0
        for projection in Projection:
            for component in (Component.CODES, Component.BLOCK_SCALES):
                rows, columns = self.tensor_shape(projection, component)
                total += rows * columns
        return total


def accepted_dtypes(component: Component) -> tuple[torch.dtype, ...]:
    """Dtypes a tensor may have. Codes and scales may also come as the raw bytes that :class:`ExpertWeights` holds."""
    if component is Component.CODES:
        packed = getattr(torch, "float4_e2m1fn_x2", None)
        return (torch.uint8,) if packed is None else (torch.uint8, packed)
    if component is Component.BLOCK_SCALES:
        return (torch.float8_e4m3fn, torch.uint8)
    return (torch.float32,)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One rank's part of one layer: L consecutive experts starting at `first_expert` (never defaulted, R27).

    Raises:
        MegaMoeConfigError: the expert range leaves [0, E).
    """

    shape: LayerShape
    first_expert: int
    num_local_experts: int

    def __post_init__(self) -> None:
        if self.num_local_experts < 1 or self.first_expert < 0 or self.stop_expert > self.shape.num_experts:
            raise MegaMoeConfigError(
                f"local experts [{self.first_expert}, {self.stop_expert}) are not inside [0, {self.shape.num_experts})"
            )

    @property
    def stop_expert(self) -> int:
        """One past the last local expert."""
        return self.first_expert + self.num_local_experts

    @property
    def local_experts(self) -> range:
        """Global ids of the local experts."""
        return range(self.first_expert, self.stop_expert)

    @property
    def source_bytes(self) -> int:
        """Bytes of one layer of sources: all bulk tensors of the local experts."""
        return self.num_local_experts * self.shape.expert_bytes

    def needs(self, key: TensorKey) -> bool:
        """Whether this rank uses the tensor: everything of a local expert, gate and up `input_scale` of all (R27)."""
        return key.expert in self.local_experts or key.family is AuxFamily.FC1_INPUT

    def bulk_keys(self) -> Iterator[TensorKey]:
        """Every bulk tensor that must arrive."""
        for expert in self.local_experts:
            for projection in Projection:
                yield TensorKey(expert, projection, Component.CODES)
                yield TensorKey(expert, projection, Component.BLOCK_SCALES)

    def family_keys(self, family: AuxFamily) -> Iterator[TensorKey]:
        """Every scalar of one aux family that this rank needs."""
        if family is AuxFamily.FC1_INPUT:
            for expert in range(self.shape.num_experts):
                yield TensorKey(expert, Projection.GATE, Component.INPUT_SCALE)
                yield TensorKey(expert, Projection.UP, Component.INPUT_SCALE)
        else:
            for expert in self.local_experts:
                if family is AuxFamily.FC2_INPUT:
                    yield TensorKey(expert, Projection.DOWN, Component.INPUT_SCALE)
                else:
                    for projection in Projection:
                        yield TensorKey(expert, projection, Component.GLOBAL_SCALE)
