# SPDX-License-Identifier: Apache-2.0
"""Host staging of one module's sources: checks every tensor as it comes, keeps true copies, knows what is covered.

Used by the one-shot build and by the lifecycle. It never touches a device and never aliases a caller's tensor. Bulk is
kept tensor by tensor, so that packing can free each expert's sources as it goes; scalars alone cost nothing (R23).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.weights.faults import FaultKind, FaultLog
from trtllm_megamoe.weights.host_memory import host_bytes
from trtllm_megamoe.weights.layout_base import BULK_FIELDS, ExpertBulk
from trtllm_megamoe.weights.spec import (
    AuxFamily,
    Component,
    ModuleSpec,
    Projection,
    TensorKey,
    accepted_dtypes,
    parse_name,
)
from trtllm_megamoe.weights.spill import SpillFile

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
    return check_header(spec, key, tensor.dtype, tuple(tensor.shape), log)


def check_header(
    spec: ModuleSpec, key: TensorKey, dtype: torch.dtype | str, got: tuple[int, ...], log: FaultLog
) -> bool:
    """The same from dtype and shape alone, for tensors that are not read; an unreadable dtype is given as text."""
    before = len(log)
    if dtype not in accepted_dtypes(key.component):
        allowed = " or ".join(str(accepted) for accepted in accepted_dtypes(key.component))
        log.add(FaultKind.DTYPE, key.parameter, key.expert, f"got {dtype}, expected {allowed}")
    expected = spec.shape.tensor_shape(key.projection, key.component)
    if got != expected and not (expected == () and got == (1,)):
        log.add(FaultKind.SHAPE, key.parameter, key.expert, f"got {got}, expected {expected}")
    return len(log) == before


def check_scale_bytes(key: TensorKey, scales: torch.Tensor, log: FaultLog) -> bool:
    """Record uint8 CPU block scales that are NaN or negative; True when all are legal."""
    if int(scales.numpy().max()) <= _MAX_SCALE_BYTE:  # vectorised, unlike torch's
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
    """Sources of one module, on the host. Not thread-safe.

    A tensor that comes again replaces the earlier one. From the first fault on nothing is kept any more: the module
    cannot be packed, so only the checking goes on.
    """

    def __init__(self, spec: ModuleSpec, spill: SpillFile | None = None) -> None:
        """`spill` keeps bulk on disk instead of in memory."""
        self.spec = spec
        self._spill = spill
        self._token = object()  # one file serves the stagings of a whole window
        self.faults = FaultLog()
        self._bulk: dict[TensorKey, torch.Tensor | None] = {}  # None: on disk
        self._covered: set[TensorKey] = set()
        self._rejected: set[TensorKey] = set()
        self._scalars: dict[TensorKey, float] = {}
        self._have: Counter[AuxFamily] = Counter()
        self._need = {family: sum(1 for _ in spec.family_keys(family)) for family in AuxFamily}
        self._num_bulk = sum(1 for _ in spec.bulk_keys())

    @property
    def staged_bytes(self) -> int:
        """Bytes of bulk memory held now; what is on disk does not count."""
        return sum(tensor.nbytes for tensor in self._bulk.values() if tensor is not None)

    @property
    def bulk_complete(self) -> bool:
        """Whether codes and block scales of every projection and local expert have come."""
        return len(self._covered) == self._num_bulk

    @property
    def has_bulk(self) -> bool:
        """Whether any usable bulk tensor has come."""
        return bool(self._covered)

    @property
    def is_empty(self) -> bool:
        """Whether nothing usable has come."""
        return not self._covered and not self._scalars

    def is_complete(self, family: AuxFamily) -> bool:
        """Whether every scalar of the family has come."""
        return self._have[family] == self._need[family]

    def is_absent(self, family: AuxFamily) -> bool:
        """Whether no scalar of the family has come."""
        return self._have[family] == 0

    def stage_named(self, name: str, tensor: torch.Tensor) -> None:
        """Stage a tensor by its name in any supported spelling; an unknown name is a fault."""
        parsed = parse_name(name)
        if parsed is None:
            self.faults.add(FaultKind.UNEXPECTED, name, None, "not a routed-expert tensor name of a supported dialect")
        else:
            self.stage(parsed.key, tensor, parsed.reciprocal)

    def stage(self, key: TensorKey, tensor: torch.Tensor, reciprocal: bool = False, *, hand_over: bool = False) -> None:
        """Check one tensor and copy it; a fault is recorded, not raised, and the tensor is then not used.

        A tensor that this rank does not need (another rank's expert) is checked for its expert id only. `hand_over`
        keeps the tensor itself where it can: the caller gives it away.
        """
        before = len(self.faults)
        if key.expert >= self.spec.shape.num_experts:
            self.faults.add(
                FaultKind.UNEXPECTED, key.parameter, key.expert, f"the layer has {self.spec.shape.num_experts} experts"
            )
        elif self.spec.needs(key) and check_tensor(self.spec, key, tensor, self.faults):
            if key.component.is_bulk:
                self._stage_bulk(key, tensor, hand_over)
            else:
                self._stage_scalar(key, scalar_value(tensor, reciprocal))
        if len(self.faults) > before:
            self._rejected.add(key)
            self._bulk.clear()

    def _stage_scalar(self, key: TensorKey, value: float) -> None:
        if not check_scalar(key, value, self.faults):
            return
        family = key.family
        if key not in self._scalars and family is not None:
            self._have[family] += 1
        self._scalars[key] = value

    def _stage_bulk(self, key: TensorKey, tensor: torch.Tensor, hand_over: bool) -> None:
        data = tensor.detach().contiguous().view(torch.uint8)
        if hand_over and data.device.type == "cpu":
            copy = data
        else:
            copy = host_bytes(tuple(data.shape))
            copy.copy_(data)
        if key.component is Component.BLOCK_SCALES and not check_scale_bytes(key, copy, self.faults):
            return
        self._covered.add(key)
        if self.faults:
            return
        if self._spill is None:
            self._bulk[key] = copy
        else:
            self._spill.write((self._token, key), copy)
            self._bulk[key] = None

    def drop_bulk(self) -> None:
        """Free the bulk held so far; what has come stays known."""
        self._bulk.clear()

    def missing_bulk(self) -> FaultLog:
        """Every uncovered bulk tensor as a fault, per component and expert (R21), unless its own fault is recorded."""
        log = FaultLog()
        for key in self.spec.bulk_keys():
            if key not in self._covered and key not in self._rejected:
                log.add(FaultKind.MISSING, key.parameter, key.expert, "")
        return log

    def missing_scalars(self, family: AuxFamily, kind: FaultKind = FaultKind.MISSING, detail: str = "") -> FaultLog:
        """Every absent scalar of a family as a fault."""
        log = FaultLog()
        for key in self.spec.family_keys(family):
            if key not in self._scalars and key not in self._rejected:
                log.add(kind, key.parameter, key.expert, detail)
        return log

    def take_expert(self, expert: int) -> ExpertBulk:
        """Hand over one local expert's bulk, shapes (1, rows, columns); staging forgets it, so it dies with its user.

        Raises:
            MegaMoeStateError: some row of some bulk tensor is uncovered or faulty; such memory is never packed (R21).
        """
        if (
            not self.bulk_complete
            or self.faults
            or TensorKey(expert, Projection.GATE, Component.CODES) not in self._bulk
        ):
            raise MegaMoeStateError("sources are not complete; uncovered rows are never packed")
        return ExpertBulk(*(self._take(TensorKey(expert, *what)).unsqueeze(0) for what in BULK_FIELDS.values()))

    def _take(self, key: TensorKey) -> torch.Tensor:
        tensor = self._bulk.pop(key)
        if tensor is None:
            assert self._spill is not None  # only a spill leaves None behind
            return self._spill.read((self._token, key))
        return tensor

    def global_scale(self, projection: Projection) -> torch.Tensor:
        """`weight_scale_2` (L,) float32 of one projection; the family must be complete."""
        keys = (TensorKey(e, projection, Component.GLOBAL_SCALE) for e in self.spec.local_experts)
        return torch.tensor([self._scalars[key] for key in keys], dtype=torch.float32, device="cpu")

    def input_global(self) -> float:
        """a1: the maximum over all E experts' gate and up `input_scale`; the family must be complete."""
        return max(self._scalars[key] for key in self.spec.family_keys(AuxFamily.FC1_INPUT))

    def down_input_global(self) -> torch.Tensor:
        """a2 (L,) float32; the family must be complete."""
        values = [self._scalars[key] for key in self.spec.family_keys(AuxFamily.FC2_INPUT)]
        return torch.tensor(values, dtype=torch.float32, device="cpu")
