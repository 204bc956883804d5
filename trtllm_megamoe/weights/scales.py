# SPDX-License-Identifier: Apache-2.0
"""Global scales of a module: which of them a delivery replaces, which it keeps, and what alphas follow from them.

The rules of R23 live in :func:`resolve_scales` alone; the arithmetic is docs/numerics.md sections 2.1 and 4.
Used by the one-shot build and by the store.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace

import torch

from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.weights.faults import FaultKind, FaultLog
from trtllm_megamoe.weights.spec import AuxFamily, Projection
from trtllm_megamoe.weights.staging import ExpertStaging

_ALL_OR_NOTHING = "a scale family is delivered whole or not at all"


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Host copy of one module's global scales, float32 on the CPU; None where the checkpoint has no input scales."""

    gate_global: torch.Tensor
    up_global: torch.Tensor
    down_global: torch.Tensor
    input_global: float | None
    down_input_global: torch.Tensor | None

    @property
    def families(self) -> frozenset[AuxFamily]:
        """The families that are present."""
        present = {AuxFamily.GLOBAL}
        if self.input_global is not None:
            present.add(AuxFamily.FC1_INPUT)
        if self.down_input_global is not None:
            present.add(AuxFamily.FC2_INPUT)
        return frozenset(present)

    @property
    def has_input_scales(self) -> bool:
        """Whether activation mode nvfp4 is possible."""
        return self.families == frozenset(AuxFamily)


def resolve_scales(
    staging: ExpertStaging, previous: LayerScales | None, delivered: Set[AuxFamily] = frozenset()
) -> tuple[LayerScales | None, FaultLog]:
    """Scales after a delivery, or the faults that forbid it.

    Args:
        staging: what has come.
        previous: scales in use; None for a first load, which must stand on its own.
        delivered: families already applied in the same load window; an aux tail may build on them.

    Returns:
        (scales, empty log), or (None, faults).
    """
    log = FaultLog()
    came = {family for family in AuxFamily if staging.is_complete(family)}
    for family in AuxFamily:
        if family not in came and not staging.is_absent(family):
            log.extend(staging.missing_scalars(family, FaultKind.FAMILY, _ALL_OR_NOTHING))
    if previous is None:
        log.extend(_first_load_faults(staging, came))
    elif not staging.faults:
        log.extend(_reload_faults(came, previous, delivered))
    if log or staging.faults:
        return None, log
    if previous is None or AuxFamily.GLOBAL in came:
        fields = {f"{p.name.lower()}_global": staging.global_scale(p) for p in Projection}
    else:
        fields = {f"{p.name.lower()}_global": getattr(previous, f"{p.name.lower()}_global") for p in Projection}
    kept = previous or LayerScales(**fields, input_global=None, down_input_global=None)
    return (
        replace(
            kept,
            **fields,
            input_global=staging.input_global() if AuxFamily.FC1_INPUT in came else kept.input_global,
            down_input_global=staging.down_input_global() if AuxFamily.FC2_INPUT in came else kept.down_input_global,
        ),
        log,
    )


def _first_load_faults(staging: ExpertStaging, came: Set[AuxFamily]) -> FaultLog:
    """`weight_scale_2` is needed. No input scales is a weight-only checkpoint; w2's alone is legal (bf16 mode)."""
    log = FaultLog()
    if staging.is_absent(AuxFamily.GLOBAL):
        log.extend(staging.missing_scalars(AuxFamily.GLOBAL))
    if AuxFamily.FC1_INPUT in came and staging.is_absent(AuxFamily.FC2_INPUT):
        log.extend(staging.missing_scalars(AuxFamily.FC2_INPUT, FaultKind.FAMILY, "w1 and w3 have theirs"))
    return log


def _reload_faults(came: Set[AuxFamily], previous: LayerScales, delivered: Set[AuxFamily]) -> FaultLog:
    """Alphas derive from `weight_scale_2` and `input_scale` together, so neither is replaced alone (R23)."""
    log = FaultLog()
    now = came | delivered
    inputs = came & {AuxFamily.FC1_INPUT, AuxFamily.FC2_INPUT}
    if inputs and AuxFamily.GLOBAL not in now:
        log.add(
            FaultKind.FAMILY, "weight_scale_2", None, "input_scale was delivered without it; alphas derive from both"
        )
    has_static = previous.down_input_global is not None
    if AuxFamily.GLOBAL in came and has_static and AuxFamily.FC2_INPUT not in now:
        log.add(
            FaultKind.FAMILY, "w2.input_scale", None, "weight_scale_2 was delivered without it; alphas derive from both"
        )
    for family in inputs - previous.families:
        log.add(FaultKind.UNEXPECTED, family.value, None, "the layer was first loaded without it; build a new layer")
    return log


def expert_exponent(a2: float) -> int:
    """q[e] = 10 - ceil(log2(2688 a2)) within [-14, 30], exactly (docs/numerics.md 4.2)."""
    mantissa, exponent = math.frexp(2688.0 * a2)  # exact: 12 + 24 bits
    ceil_log2 = exponent - 1 if mantissa == 0.5 else exponent
    return min(30, max(-14, 10 - ceil_log2))


def derive_alphas(scales: LayerScales, mode: ActivationMode) -> dict[str, torch.Tensor]:
    """Per-expert factors of the kernels, float32 on the CPU.

    Returns:
        `fc1_alpha` (L, 2): gate's and up's factor; `fc2_alpha` (L,); `fc1_norm_const` (L,): what fc1 output is
        multiplied by before its encoding, `RN32(1 / a2)` in nvfp4 mode and `2^q` in bf16 mode.

    Raises:
        MegaMoeWeightError: nvfp4 mode without input scales, with the advice to use bf16.
    """
    fc1 = torch.stack((scales.gate_global, scales.up_global), dim=1)
    a2 = scales.down_input_global
    if mode is ActivationMode.NVFP4:
        if scales.input_global is None or a2 is None:
            raise MegaMoeWeightError(
                "the checkpoint has no input scales (weight-only), which activation mode 'nvfp4' needs; "
                "use activations='bf16' (or 'auto'), or calibrate"
            )
        fc1 = fc1 * torch.tensor(scales.input_global, dtype=torch.float32, device="cpu")
        return {"fc1_alpha": fc1, "fc2_alpha": scales.down_global * a2, "fc1_norm_const": torch.reciprocal(a2)}
    exponents = [0] * len(scales.down_global) if a2 is None else [expert_exponent(float(value)) for value in a2]
    norm = torch.tensor([math.ldexp(1.0, q) for q in exponents], dtype=torch.float32, device="cpu")
    return {"fc1_alpha": fc1, "fc2_alpha": scales.down_global / norm, "fc1_norm_const": norm}
