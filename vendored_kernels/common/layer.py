# SPDX-License-Identifier: Apache-2.0
"""The layer that a kernel of any architecture is compiled for: its facts, and which of them are legal. No DSL."""

from __future__ import annotations

from dataclasses import dataclass

from .units import RETURN_COLUMNS

MAX_LOCAL_EXPERTS = 256
MAX_TOP_K = 16
MAX_EP_SIZE = 16

ACTIVATION_MODES = ("nvfp4", "bf16")
COMBINE_FORMATS = ("bf16", "fp8", "fp4")


class KernelConfigError(ValueError):
    """A shape, option or tile configuration that a kernel does not support; the text names the rule."""


@dataclass(frozen=True)
class LayerSpec:
    """The layer's facts that are compiled into a kernel.

    Attributes:
        hidden_size, intermediate_size: H (multiple of 32) and I (multiple of 16).
        num_local_experts: experts of this rank, at most 256.
        top_k: routes per token, at most 16.
        ep_size: ranks of the layer, at most 16; ids name ep_size * num_local_experts experts, in rank order.
        activation_mode: "nvfp4" or "bf16" (docs/numerics.md 4.1, 4.2).
        combine_format: "bf16", "fp8" or "fp4": encoding of a route's result row.
        weigh_before_requant: multiply the routing weight before the requantisation, not in the top-k sum.
        swiglu_limit: clamp bound or None.
        swiglu_alpha, swiglu_beta: h = g * sigmoid(alpha * g) * (u + beta).
    """

    hidden_size: int
    intermediate_size: int
    num_local_experts: int
    top_k: int
    activation_mode: str
    combine_format: str = "bf16"
    weigh_before_requant: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_beta: float = 0.0
    ep_size: int = 1

    def check(self) -> None:
        """Raise :class:`KernelConfigError` with every broken rule."""
        faults = []
        if self.hidden_size <= 0 or self.hidden_size % 32:
            faults.append(f"hidden_size {self.hidden_size} must be a positive multiple of 32")
        if self.intermediate_size <= 0 or self.intermediate_size % 16:
            faults.append(f"intermediate_size {self.intermediate_size} must be a positive multiple of 16")
        if not 1 <= self.num_local_experts <= MAX_LOCAL_EXPERTS:
            faults.append(f"num_local_experts {self.num_local_experts} must be in 1..{MAX_LOCAL_EXPERTS}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            faults.append(f"top_k {self.top_k} must be in 1..{MAX_TOP_K}")
        if not 1 <= self.ep_size <= MAX_EP_SIZE:
            faults.append(f"ep_size {self.ep_size} must be in 1..{MAX_EP_SIZE}")
        if self.activation_mode not in ACTIVATION_MODES:
            faults.append(f"activation_mode {self.activation_mode!r} must be one of {ACTIVATION_MODES}")
        if self.combine_format not in COMBINE_FORMATS:
            faults.append(f"combine_format {self.combine_format!r} must be one of {COMBINE_FORMATS}")
        if self.swiglu_limit is not None and not 0 < self.swiglu_limit:
            faults.append(f"swiglu_limit {self.swiglu_limit} must be > 0 or None")
        if faults:
            raise KernelConfigError("layer: " + "; ".join(faults))

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.num_local_experts * self.ep_size

    @property
    def clamp(self) -> float | None:
        """The clamp bound, None where it cannot bind."""
        limit = self.swiglu_limit
        return None if limit is None or limit == float("inf") else limit

    @property
    def result_pieces(self) -> int:
        """Pieces of a result row, the unit of the return counters."""
        return -(-self.hidden_size // RETURN_COLUMNS)

    @property
    def data_row_bytes(self) -> int:
        """Bytes of one route's result row, data plane."""
        h = self.hidden_size
        return {"bf16": 2 * h, "fp8": h, "fp4": h // 2}[self.combine_format]

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of one route's result row, scale plane (0 for bf16)."""
        h = self.hidden_size
        raw = {"bf16": 0, "fp8": h // 32, "fp4": h // 8}[self.combine_format]
        return -(-raw // 16) * 16
