# SPDX-License-Identifier: Apache-2.0
"""How far a result is from the reference: norms for tolerances, a report for people.

Called by `run`, tests and the microbench. All sums are float64; NaN anywhere makes a norm NaN, never a pass.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.errors import MegaMoeConfigError


def _pair(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if actual.shape != expected.shape:
        raise MegaMoeConfigError(f"cannot compare shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    return actual.detach().to("cpu", torch.float64).flatten(), expected.detach().to("cpu", torch.float64).flatten()


def rel_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 when both are zero or empty, infinity when only `expected` is zero."""
    a, e = _pair(actual, expected)
    error, scale = float((a - e).norm()), float(e.norm())
    if scale == 0:
        return 0.0 if error == 0 else error * float("inf")
    return error / scale


def cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Cosine of the angle between both, taken as one vector; 1 when both are zero or empty, 0 when one of them is."""
    a, e = _pair(actual, expected)
    norms = float(a.norm()) * float(e.norm())
    if norms == 0:
        return 1.0 if float(a.norm()) == float(e.norm()) else 0.0
    return float(a @ e) / norms


def calc_diff(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - 2 <a, e> / (<a, a> + <e, e>): about half the squared relative error; 0 if both are zero."""
    a, e = _pair(actual, expected)
    energy = float(a @ a + e @ e)
    return 0.0 if energy == 0 else 1.0 - 2.0 * float(a @ e) / energy


def mismatch_report(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    limit: int = 5,
    names: tuple[str, ...] = (),
) -> str | None:
    """Say where two tensors differ by more than atol + rtol * |expected|; None if nowhere.

    The default tolerances ask for equal values (+0 and -0 are equal, NaN equals NaN only); compare integer views for
    equal bits.

    Args:
        limit: how many coordinates to list, in row-major order.
        names: a word for each dimension, for instance ("token", "column").
    """
    if actual.shape != expected.shape:
        return f"shapes differ: got {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    a, e = (t.detach().to("cpu", torch.float64) for t in (actual, expected))
    both_nan = a.isnan() & e.isnan()
    bad = ~((a == e) | both_nan | ((a - e).abs() <= atol + rtol * e.abs()))
    where = bad.nonzero()
    if len(where) == 0:
        return None
    lines = [f"{len(where)} of {a.numel()} values differ (rel-L2 {rel_l2(actual, expected):.3e}); first:"]
    for coordinate in where[:limit].tolist():
        named = names if len(names) == len(coordinate) else ("",) * len(coordinate)
        place = ", ".join(f"{name} {index}".strip() for name, index in zip(named, coordinate, strict=True))
        got, wanted = a[tuple(coordinate)].item(), e[tuple(coordinate)].item()
        lines.append(f"  [{place}] got {got:.9g}, expected {wanted:.9g}")
    return "\n".join(lines)
