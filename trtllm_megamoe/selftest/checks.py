# SPDX-License-Identifier: Apache-2.0
"""What a result is compared with and how far it may be off: the oracle at the same rounding points, bits of a twin."""

from __future__ import annotations

import torch

from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.oracle import OracleOptions

TOLERANCE = {"bf16": 3e-3, "fp8": 5e-3, "fp4": 1e-2}
"""rel-L2 by wire. The oracle sums exactly, the kernel in fp32, and the result is bf16 (rel-L2 of that rounding alone:
1.7e-3); coarser wires re-round values that the last bit moved over a boundary."""

CPU_TOLERANCE = 1e-3
"""rel-L2 of the CPU engine, any wire: it rounds where the oracle does, in fp64 between."""

ROW_TOLERANCE = 3e-2
"""rel-L2 of the worst row."""


def oracle_options(config: MegaMoeConfig, mode: ActivationMode) -> OracleOptions:
    """The oracle's rounding points for a layer."""
    return OracleOptions.product(
        mode,
        combine_format=config.combine_format,
        score_placement=config.score_placement,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
    )


def tolerance_of(engine: str, wire: str) -> float:
    """Largest rel-L2 against the oracle that a result of this engine and wire may have."""
    return CPU_TOLERANCE if engine == "cpu" else TOLERANCE[wire]


def compare(out: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """rel-L2 of all and of the worst row, share of equal bf16 values, NaNs and unexpected zero rows."""
    if out.numel() == 0:
        return {"rel_l2": 0.0, "worst_row": 0.0, "equal": 1.0, "nan": 0, "zero_rows": 0}
    a, b = out.double(), expected.double()
    norm = b.norm(dim=1)
    live = norm > 0
    row = (a - b).norm(dim=1)[live] / norm[live]
    return {
        "rel_l2": float((a - b).norm() / b.norm().clamp_min(1e-30)) if live.any() else float((a - b).abs().max()),
        "worst_row": float(row.max()) if live.any() else 0.0,
        "equal": float((out == expected).float().mean()),
        "nan": int(torch.isnan(a).sum()),
        "zero_rows": int(((a.abs().sum(1) == 0) & live).sum()),
    }


def fault_of(measured: dict[str, float], wire: str) -> str:
    """What is wrong with a comparison, empty where it is inside its tolerance; NaN is outside of any."""
    faults = []
    for name, limit in (("rel_l2", TOLERANCE[wire]), ("worst_row", ROW_TOLERANCE)):
        if not measured[name] < limit:
            faults.append(f"{name} {measured[name]:.2e} is not below {limit:g}")
    faults += [f"{measured[name]:.0f} {name}" for name in ("nan", "zero_rows") if measured[name]]
    return ", ".join(faults)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 values as integers: NaN equals NaN, -0 differs from +0."""
    return tensor.contiguous().view(torch.int16)
