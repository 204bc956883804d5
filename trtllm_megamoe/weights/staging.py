# SPDX-License-Identifier: Apache-2.0
"""Host staging of one module's sources: checks every tensor as it comes, keeps true copies, knows what is covered.

Used by the one-shot build and by the lifecycle. It never touches a device and never aliases a caller's tensor; bulk
memory appears with the first bulk tensor of its kind, so scalars alone stage without materialising anything (R23).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.weights.experts import ExpertWeights
from trtllm_megamoe.weights.faults import FaultKind, FaultLog
from trtllm_megamoe.weights.spec import (
    AuxFamily,
    Component,
    ModuleSpec,
    Projection,
    TensorKey,
    accepted_dtypes,
    parse_name,
)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_MAX_SCALE_BYTE = 0x7E
"""Largest legal block scale byte: 0x7F is NaN, from 0x80 the sign bit is set."""


def iter_named(named: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Items of a mapping or the iterable itself."""
    return named.items() if isinstance(named, Mapping) else named


def scalar_value(tensor: torch.Tensor, reciprocal: bool) -> float:
    """A global scale in ModelOpt's convention; a reciprocal one is inverted in fp32."""
    value = tensor.detach().reshape(()).to("cpu", torch.float32)
    return float(torch.reciprocal(value) if reciprocal else value)


def check_tensor(spec: ModuleSpec, key: TensorKey, tensor: torch.Tensor, log: FaultLog) -> bool:
    """Record a wrong dtype or shape; True when the tensor can be used."""
    before = len(log)
    if tensor.dtype not in accepted_dtypes(key.component):
        allowed = " or ".join(str(dtype) for dtype in accepted_dtypes(key.component))
        log.add(FaultKind.DTYPE, key.parameter, key.expert, f"got {tensor.dtype}, expected {allowed}")
    expected = spec.shape.tensor_shape(key.projection, key.component)
    got = tuple(tensor.shape)
    if got != expected and not (expected == () and got == (1,)):
        log.add(FaultKind.SHAPE, key.parameter, key.expert, f"got {got}, expected {expected}")
    return len(log) == before


def check_scale_bytes(key: TensorKey, scales: torch.Tensor, log: FaultLog) -> bool:
    """Record block scales that are NaN or negative; True when all are legal."""
    if int(scales.max()) <= _MAX_SCALE_BYTE:
        return True
    log.add(FaultKind.SCALE, key.parameter, key.expert, "NaN or negative e4m3 block scales")
    return False


def check_scalar(key: TensorKey, value: float, log: FaultLog) -> bool:
    """Record a global or input scale that is zero, negative or not finite; True when it is legal (R27)."""
    if math.isfinite(value) and value > 0:
        return True
    log.add(FaultKind.SCALE, key.parameter, key.expert, f"{value:g}, must be finite and positive")
    return False


class ExpertStaging:
    """Sources of one module, on the host.

    Not thread-safe. A tensor delivered again before the module is complete replaces the earlier one.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec
        self.faults = FaultLog()
        self._bulk: dict[tuple[Projection, Component], torch.Tensor] = {}
        self._covered: set[TensorKey] = set()
        self._scalars: dict[TensorKey, float] = {}
        self._num_bulk = sum(1 for _ in spec.bulk_keys())

    @property
    def staged_bytes(self) -> int:
        """Bytes of bulk memory held now."""
        return sum(tensor.nbytes for tensor in self._bulk.values())

    @property
    def bulk_complete(self) -> bool:
        """Whether codes and block scales of every projection and local expert are there."""
        return len(self._covered) == self._num_bulk

    @property
    def has_bulk(self) -> bool:
        """Whether any bulk tensor is there."""
        return bool(self._covered)

    def missing(self, family: AuxFamily) -> list[TensorKey]:
        """Scalars of a family that have not come."""
        return [key for key in self.spec.family_keys(family) if key not in self._scalars]

    def family_state(self, family: AuxFamily) -> str:
        """`none`, `partial` or `complete`."""
        missing = self.missing(family)
        if not missing:
            return "complete"
        return "none" if len(missing) == sum(1 for _ in self.spec.family_keys(family)) else "partial"

    def stage_named(self, name: str, tensor: torch.Tensor) -> None:
        """Stage a tensor by its name in any supported spelling; an unknown name is a fault."""
        parsed = parse_name(name)
        if parsed is None:
            self.faults.add(FaultKind.UNEXPECTED, name, None, "not a routed-expert tensor name of a supported dialect")
        else:
            self.stage(parsed.key, tensor, parsed.reciprocal)

    def stage(self, key: TensorKey, tensor: torch.Tensor, reciprocal: bool = False) -> None:
        """Check one tensor and copy it; a fault is recorded, not raised, and the tensor is then not used.

        A tensor that this rank does not need (another rank's expert) is checked for its expert id only.
        """
        if key.expert >= self.spec.shape.num_experts:
            self.faults.add(
                FaultKind.UNEXPECTED, key.parameter, key.expert, f"the layer has {self.spec.shape.num_experts} experts"
            )
            return
        if not self.spec.needs(key) or not check_tensor(self.spec, key, tensor, self.faults):
            return
        if key.component.is_bulk:
            self._stage_bulk(key, tensor)
        else:
            value = scalar_value(tensor, reciprocal)
            if check_scalar(key, value, self.faults):
                self._scalars[key] = value

    def _stage_bulk(self, key: TensorKey, tensor: torch.Tensor) -> None:
        slot = (key.projection, key.component)
        data = tensor.detach().contiguous().view(torch.uint8)
        buffer = self._bulk.get(slot)
        if buffer is None:
            buffer = torch.empty((self.spec.num_local_experts, *data.shape), dtype=torch.uint8)
            self._bulk[slot] = buffer
        row = buffer[key.expert - self.spec.first_expert]
        row.copy_(data)
        if key.component is Component.BLOCK_SCALES and not check_scale_bytes(key, row, self.faults):
            return
        self._covered.add(key)

    def missing_bulk(self) -> FaultLog:
        """Every uncovered bulk tensor as a fault, per component and expert."""
        log = FaultLog()
        for key in self.spec.bulk_keys():
            if key not in self._covered:
                log.add(FaultKind.MISSING, key.parameter, key.expert, "")
        return log

    def missing_scalars(self, family: AuxFamily, kind: FaultKind = FaultKind.MISSING) -> FaultLog:
        """Every absent scalar of a family as a fault."""
        log = FaultLog()
        for key in self.missing(family):
            detail = f"{family.value} is all or nothing" if kind is FaultKind.FAMILY else ""
            log.add(kind, key.parameter, key.expert, detail)
        return log

    def bulk(self, projection: Projection, component: Component) -> torch.Tensor:
        """Staged bytes (L, rows, columns) of one bulk kind.

        Raises:
            MegaMoeStateError: some row of some bulk tensor is uncovered; such memory is never handed out (R21).
        """
        if not self.bulk_complete:
            raise MegaMoeStateError("sources are not complete; uncovered rows are never packed")
        return self._bulk[projection, component]

    def global_scale(self, projection: Projection) -> torch.Tensor:
        """`weight_scale_2` (L,) float32 of one projection; the family must be complete."""
        keys = (TensorKey(e, projection, Component.GLOBAL_SCALE) for e in self.spec.local_experts)
        return torch.tensor([self._scalars[key] for key in keys], dtype=torch.float32)

    def input_global(self) -> float | None:
        """a1: the maximum over all E experts' gate and up `input_scale`; None when the family is absent."""
        if self.missing(AuxFamily.FC1_INPUT):
            return None
        return max(self._scalars[key] for key in self.spec.family_keys(AuxFamily.FC1_INPUT))

    def down_input_global(self) -> torch.Tensor | None:
        """a2 (L,) float32; None when the family is absent."""
        if self.missing(AuxFamily.FC2_INPUT):
            return None
        values = [self._scalars[key] for key in self.spec.family_keys(AuxFamily.FC2_INPUT)]
        return torch.tensor(values, dtype=torch.float32)

    def clear(self) -> None:
        """Drop everything staged (the faults stay)."""
        self._bulk.clear()
        self._covered.clear()
        self._scalars.clear()


def one_shot_faults(staging: ExpertStaging) -> FaultLog:
    """Faults of a delivery that must stand on its own: all bulk, `weight_scale_2`, and whole input-scale families.

    A checkpoint without any `input_scale` is weight-only and legal here (the activation mode decides, R61); so is one
    with w2's alone. w1/w3's without w2's is refused, because alphas derive from both (R23).
    """
    log = FaultLog()
    log.extend(staging.faults)
    log.extend(staging.missing_bulk())
    log.extend(staging.missing_scalars(AuxFamily.GLOBAL))
    fc1, fc2 = staging.family_state(AuxFamily.FC1_INPUT), staging.family_state(AuxFamily.FC2_INPUT)
    if fc1 == "partial":
        log.extend(staging.missing_scalars(AuxFamily.FC1_INPUT, FaultKind.FAMILY))
    if fc2 == "partial" or (fc2 == "none" and fc1 != "none"):
        log.extend(staging.missing_scalars(AuxFamily.FC2_INPUT, FaultKind.FAMILY))
    return log


def staged_expert_weights(staging: ExpertStaging) -> ExpertWeights:
    """The reference layout over a complete staging's own memory (no copy)."""
    bulk = staging.bulk
    return ExpertWeights(
        first_expert=staging.spec.first_expert,
        gate_codes=bulk(Projection.GATE, Component.CODES),
        gate_scales=bulk(Projection.GATE, Component.BLOCK_SCALES),
        up_codes=bulk(Projection.UP, Component.CODES),
        up_scales=bulk(Projection.UP, Component.BLOCK_SCALES),
        down_codes=bulk(Projection.DOWN, Component.CODES),
        down_scales=bulk(Projection.DOWN, Component.BLOCK_SCALES),
        gate_global=staging.global_scale(Projection.GATE),
        up_global=staging.global_scale(Projection.UP),
        down_global=staging.global_scale(Projection.DOWN),
        input_global=staging.input_global(),
        down_input_global=staging.down_input_global(),
    )
