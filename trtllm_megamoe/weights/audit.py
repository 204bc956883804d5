# SPDX-License-Identifier: Apache-2.0
"""Judge the routed experts of a checkpoint without loading them: coverage from headers, values of all scales.

Reads one tensor at a time and never the codes (any code byte is legal): memory is bounded by the largest scale tensor.
The rules are those of staging and `resolve_scales`; only the wording and the warnings are this module's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.checkpoint import Checkpoint, StoredTensor
from trtllm_megamoe.weights.faults import FaultKind, FaultLog, id_ranges
from trtllm_megamoe.weights.spec import AuxFamily, Component, ModuleSpec, Projection, TensorKey
from trtllm_megamoe.weights.staging import check_header, check_scalar, check_scale_bytes, scalar_value

TOP_SCALE_BYTE = 0x7E
"""e4m3 448: a weight block that has it reached, or exceeded, what `weight_scale_2` can express."""

SATURATION_WARNING = 0.05
"""Share of weight blocks at the top scale above which a layer is worth a warning; calibration leaves one a matrix."""

Progress = Callable[[int], None]


class Verdict(str, enum.Enum):
    """Outcome of an audit, also the CLI's exit code."""

    CLEAN = "clean"
    WARNINGS = "usable with warnings"
    REFUSED = "refused"

    @property
    def exit_code(self) -> int:
        """0 clean, 3 usable with warnings, 2 refused."""
        return {"clean": 0, "usable with warnings": 3, "refused": 2}[self.value]


class MissingInputScale(str, enum.Enum):
    """What to do about absent `input_scale` tensors (R27)."""

    REFUSE = "refuse"
    CALIBRATE = "calibrate"


@dataclass(slots=True)
class LayerAudit:
    """Findings of one layer. `facts` are numbers for the report; they are partial where errors hide tensors."""

    layer: int
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Worst finding."""
        if self.errors:
            return Verdict.REFUSED
        return Verdict.WARNINGS if self.warnings else Verdict.CLEAN


def audit_bytes(checkpoint: Checkpoint, layers: Iterable[int]) -> int:
    """Bytes that auditing these layers reads; the total of a progress bar."""
    return sum(
        stored.entry.nbytes
        for layer in layers
        if layer in checkpoint.contents
        for key, stored in checkpoint.contents[layer].tensors.items()
        if key.component is not Component.CODES
    )


def audit_layer(
    checkpoint: Checkpoint,
    layer: int,
    policy: MissingInputScale = MissingInputScale.REFUSE,
    progress: Progress | None = None,
) -> LayerAudit:
    """Audit one layer.

    Args:
        checkpoint: an opened checkpoint.
        layer: model layer.
        policy: absent input scales are an error, or a warning when the user will calibrate.
        progress: called with the bytes of each tensor that was read.

    Returns:
        Every fault of the layer as errors, everything odd but usable as warnings.
    """
    audit = LayerAudit(layer)
    try:
        tensors = {stored.key: stored for stored in checkpoint.layer_tensors(layer)}
    except MegaMoeWeightError as error:
        audit.errors.append(str(error))
        return audit
    shape = checkpoint.facts.shape
    scan = _Scan(ModuleSpec(shape, 0, shape.num_experts), tensors, progress)
    scan.run()
    audit.facts = scan.facts()
    scales = _input_scale_findings(scan, policy, audit)
    log = FaultLog()
    for part in (scan.log, scan.missing(), scales):
        log.extend(part)
    audit.errors += log.lines()
    audit.warnings += scan.warnings()
    return audit


def _input_scale_findings(scan: _Scan, policy: MissingInputScale, audit: LayerAudit) -> FaultLog:
    """Absent input scales as faults or, under `calibrate`, as a warning."""
    log = FaultLog()
    absent = [key for f in (AuxFamily.FC1_INPUT, AuxFamily.FC2_INPUT) for key in scan.absent(f)]
    if not absent:
        return log
    wholly = len(absent) == 3 * scan.spec.shape.num_experts
    what = "no input scales (weight-only)" if wholly else "input scales of some experts are missing"
    if policy is MissingInputScale.CALIBRATE:
        audit.warnings.append(f"{what}: activation mode 'nvfp4' needs calibration; 'bf16' works as it is")
        return log
    advice = "load with activations='bf16', or calibrate (--on-missing-input-scale calibrate)"
    for key in absent:
        log.add(FaultKind.MISSING, key.parameter, key.expert, f"{what}; {advice}")
    return log


class _Scan:
    """One pass over a layer's tensors, in file order of the experts."""

    def __init__(self, spec: ModuleSpec, tensors: dict[TensorKey, StoredTensor], progress: Progress | None) -> None:
        self.spec = spec
        self.log = FaultLog()
        self._tensors = tensors
        self._progress = progress
        self._scalars: dict[TensorKey, float] = {}
        self._blocks = 0
        self._top_blocks = 0
        self._dead: dict[str, list[int]] = {}

    def run(self) -> None:
        """Check every tensor once."""
        for key, stored in self._tensors.items():
            if key.expert >= self.spec.shape.num_experts:
                detail = f"the configuration has {self.spec.shape.num_experts} experts"
                self.log.add(FaultKind.UNEXPECTED, key.parameter, key.expert, detail)
                continue
            dtype = stored.file.dtype(stored.name) or stored.entry.dtype
            if (
                check_header(self.spec, key, dtype, stored.entry.shape, self.log)
                and key.component is not Component.CODES
            ):
                self._check_values(key, stored)

    def _check_values(self, key: TensorKey, stored: StoredTensor) -> None:
        tensor = stored.read()
        if self._progress is not None:
            self._progress(stored.entry.nbytes)
        if key.component is not Component.BLOCK_SCALES:
            value = scalar_value(tensor, stored.reciprocal)
            if check_scalar(key, value, self.log):
                self._scalars[key] = value
            return
        scales = tensor.view(torch.uint8)
        if not check_scale_bytes(key, scales, self.log):
            return
        self._blocks += scales.numel()
        self._top_blocks += int((scales == TOP_SCALE_BYTE).sum())
        if not scales.any():
            self._dead.setdefault(key.parameter, []).append(key.expert)

    def missing(self) -> FaultLog:
        """Absent bulk tensors and absent `weight_scale_2`."""
        log = FaultLog()
        for key in (*self.spec.bulk_keys(), *self.spec.family_keys(AuxFamily.GLOBAL)):
            if key not in self._tensors:
                log.add(FaultKind.MISSING, key.parameter, key.expert, "")
        return log

    def absent(self, family: AuxFamily) -> list[TensorKey]:
        """Scalars of a family that the files do not hold."""
        return [key for key in self.spec.family_keys(family) if key not in self._tensors]

    def warnings(self) -> list[str]:
        """What is odd but loads."""
        lines = [
            f"{parameter}: all block scales of expert{'s' if len(ids) > 1 else ''} {id_ranges(ids)} are zero"
            for parameter, ids in self._dead.items()
        ]
        share = self._top_blocks / max(1, self._blocks)
        if share > SATURATION_WARNING:
            lines.append(f"{share:.1%} of weight blocks sit at the top scale 448: weight_scale_2 is too small for them")
        return lines

    def _values(self, projection: Projection, component: Component) -> dict[int, float]:
        return {k.expert: v for k, v in self._scalars.items() if (k.projection, k.component) == (projection, component)}

    def facts(self) -> dict[str, Any]:
        """Numbers of the report."""
        gate = self._values(Projection.GATE, Component.GLOBAL_SCALE)
        up = self._values(Projection.UP, Component.GLOBAL_SCALE)
        ratios = [max(gate[e] / up[e], up[e] / gate[e]) for e in gate.keys() & up.keys()]
        fc1 = [*self._values(Projection.GATE, Component.INPUT_SCALE).values()]
        fc1 += self._values(Projection.UP, Component.INPUT_SCALE).values()
        fc2 = self._values(Projection.DOWN, Component.INPUT_SCALE).values()
        return {
            "experts": len({key.expert for key in self._tensors}),
            "tensors": len(self._tensors),
            "fc1_input_scale": max(fc1, default=None),
            "fc2_input_scale_min": min(fc2, default=None),
            "fc2_input_scale_max": max(fc2, default=None),
            "gate_up_ratio_max": max(ratios, default=None),
            "unequal_gate_up": sum(ratio != 1.0 for ratio in ratios),
            "top_scale_share": self._top_blocks / max(1, self._blocks),
        }
