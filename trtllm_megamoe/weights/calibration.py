# SPDX-License-Identifier: Apache-2.0
"""Calibrate the activation scales of a layer by a warm-up: measure fc1 and fc2 inputs, reduce, turn into scales (R27).

Whoever runs the warm-up (a layer or an engine, in `bf16` activation mode) calls `observe_*` on its own tensors; this
module computes and never runs a layer. The result goes to :meth:`WeightStore.set_input_scales`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtllm_megamoe.errors import MegaMoeWeightError
from trtllm_megamoe.weights.faults import id_ranges

CALIBRATED_RANGE = 6.0 * 448.0
"""Largest magnitude of an NVFP4 tensor with global scale 1: a scale is amax / 2688 (docs/numerics.md section 2)."""


@dataclass(frozen=True, slots=True)
class InputScales:
    """Calibrated scales of one rank: a1 of the layer, a2 (L,) float32 of its experts."""

    input_global: float
    down_input_global: torch.Tensor


class ActivationObserver:
    """Largest magnitudes that one rank saw: of the tokens it staged, and of the fc1 output of each local expert.

    Args:
        first_expert: global id of the first local expert, for error texts.
        num_local_experts: L.
    """

    def __init__(self, first_expert: int, num_local_experts: int) -> None:
        self.first_expert = first_expert
        self._input = 0.0
        self._hidden = [0.0] * num_local_experts

    def observe_input(self, x: torch.Tensor) -> None:
        """Tokens (T, H) as they enter the layer, any float dtype; T may be 0. Synchronises with a GPU."""
        self._input = _larger(self._input, _amax(x))

    def observe_hidden(self, local_expert: int, h: torch.Tensor) -> None:
        """fc1 output (n, I) of one local expert before its encoding, score included where it is placed there."""
        self._hidden[local_expert] = _larger(self._hidden[local_expert], _amax(h))

    @property
    def input_amax(self) -> float:
        """Largest |x| seen; NaN once any value was NaN."""
        return self._input

    def input_scales(self, input_amaxes: Sequence[float], margin: float = 1.0) -> InputScales:
        """Scales from what was seen.

        Args:
            input_amaxes: `input_amax` of EVERY rank, e.g. from an allgather; all ranks then compute the same a1.
            margin: head room above the largest value seen.

        Raises:
            MegaMoeWeightError: nothing, or something not finite, was seen; names the tensor and the experts.
        """
        faults = []
        input_amax = 0.0
        for amax in input_amaxes:
            input_amax = _larger(input_amax, amax)
        if not _is_usable(input_amax):
            faults.append(f"fc1 input: largest magnitude over all ranks is {input_amax:g}")
        bad = [self.first_expert + row for row, amax in enumerate(self._hidden) if not _is_usable(amax)]
        if bad:
            values = sorted({f"{self._hidden[expert - self.first_expert]:g}" for expert in bad})
            faults.append(f"fc2 input of experts {id_ranges(bad)}: largest magnitude is {' or '.join(values)}")
        if faults:
            raise MegaMoeWeightError(
                f"calibration gave no scale: {'; '.join(faults)}. Warm up with more, and finite, tokens (0: the expert "
                "got none), or use activations='bf16'"
            )
        a2 = [amax * margin / CALIBRATED_RANGE for amax in self._hidden]
        a1 = torch.tensor(input_amax * margin / CALIBRATED_RANGE, dtype=torch.float32, device="cpu")
        return InputScales(float(a1), torch.tensor(a2, dtype=torch.float32, device="cpu"))


def _amax(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().amax()) if tensor.numel() else 0.0


def _larger(left: float, right: float) -> float:
    """Maximum that keeps a NaN."""
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


def _is_usable(amax: float) -> bool:
    return math.isfinite(amax) and amax > 0
