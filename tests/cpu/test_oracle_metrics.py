# SPDX-License-Identifier: Apache-2.0
"""Error metrics: known values, zero and NaN cases, and a report that names coordinates."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.reference.metrics import calc_diff, cosine, mismatch_report, rel_l2

E = torch.tensor([[3.0, 0.0], [0.0, 4.0]])


def test_rel_l2_known_values() -> None:
    assert rel_l2(E, E) == 0
    assert rel_l2(E * 1.5, E) == pytest.approx(0.5)
    assert rel_l2(E + torch.tensor([[0.0, 3.0], [4.0, 0.0]]), E) == pytest.approx(1.0)
    assert rel_l2((E * 1.5).to(torch.bfloat16), E) == pytest.approx(0.5)


def test_metrics_zero_and_empty_tensors_have_defined_values() -> None:
    zero, empty = torch.zeros(2, 2), torch.empty(0, 4)
    assert (rel_l2(zero, zero), cosine(zero, zero), calc_diff(zero, zero)) == (0, 1, 0)
    assert (rel_l2(empty, empty), cosine(empty, empty), calc_diff(empty, empty)) == (0, 1, 0)
    assert (rel_l2(E, zero), cosine(E, zero), calc_diff(E, zero)) == (math.inf, 0, 1)


@pytest.mark.parametrize("metric", [rel_l2, cosine, calc_diff])
def test_metrics_nan_never_passes_and_shapes_must_match(metric) -> None:  # type: ignore[no-untyped-def]
    bad = E.clone()
    bad[0, 0] = math.nan
    assert math.isnan(metric(bad, E)) and math.isnan(metric(bad, torch.zeros(2, 2)))
    with pytest.raises(MegaMoeConfigError, match="shapes"):
        metric(E, E.flatten())


def test_cosine_and_calc_diff_known_values() -> None:
    turned = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    assert cosine(E * 7, E) == pytest.approx(1) and cosine(-E, E) == pytest.approx(-1) and cosine(turned, E) == 0
    assert calc_diff(turned, E) == 1
    assert calc_diff(E * 2, E) == pytest.approx(1 - 2 * 2 / 5)


def test_mismatch_report_names_the_first_coordinates() -> None:
    actual = torch.zeros(4, 8)
    actual[1, 7], actual[3, 2], actual[3, 3] = 2.0, math.nan, -1.0
    report = mismatch_report(actual, torch.zeros(4, 8), limit=2, names=("token", "column"))
    assert report is not None
    lines = report.splitlines()
    assert lines[0].startswith("3 of 32 values differ")
    assert lines[1:] == [
        "  [token 1, column 7] got 2, expected 0",
        "  [token 3, column 2] got nan, expected 0",
    ]


def test_mismatch_report_within_tolerance_or_equal_nan_is_none() -> None:
    nan = torch.tensor([math.nan, math.inf, 1.0])
    assert mismatch_report(nan, nan) is None
    assert mismatch_report(nan * torch.tensor([1, 1, 1.01]), nan, rtol=0.02) is None
    assert mismatch_report(nan * torch.tensor([1, 1, 1.01]), nan, atol=0.001) is not None
    assert mismatch_report(torch.tensor([200], dtype=torch.uint8), torch.tensor([201], dtype=torch.uint8)) is not None
    assert mismatch_report(torch.zeros(2), torch.zeros(3)) == "shapes differ: got (2,), expected (3,)"
