# SPDX-License-Identifier: Apache-2.0
"""The CPU engine over threads against the independent oracle, and against itself over other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.layer_cases import bits, make_case, oracle_of, run_over_threads, with_splits
from tests.helpers.synthetic import Routing
from trtllm_megamoe.reference.metrics import rel_l2

# Engine and oracle round at the same points; the only freedom is the order of a sum, which can flip a requantised code
# lying within 1e-7 of a tie. One flip moves the result by far less than this bound (docs/numerics.md 4).
SAME_ROUNDINGS_REL_L2 = 1e-3

ROUTINGS = ["uniform", "random", "zipf", "hot_expert", "hot_rank", "all_masked", "masked_30", "duplicates"]


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("input_scales", [True, False])
def test_layer_routings_meet_the_oracle_and_ep_sizes_agree_bitwise(kind: str, input_scales: bool) -> None:
    outputs = {}
    for ep_size in (1, 2, 8):
        case = make_case(kind, ep_size=ep_size, input_scales=input_scales, swiglu_limit=10.0)
        outputs[ep_size] = run_over_threads(case)
    assert rel_l2(outputs[1], oracle_of(case)) < SAME_ROUNDINGS_REL_L2
    assert torch.equal(bits(outputs[1]), bits(outputs[2]))
    assert torch.equal(bits(outputs[1]), bits(outputs[8]))
    if kind != "all_masked":
        assert float(outputs[1].float().norm()) > 0


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("placement", ["after_fc2", "before_requant"])
@pytest.mark.parametrize("mode", ["nvfp4", "bf16"])
def test_layer_formats_and_placements_meet_the_oracle(fmt: str, placement: str, mode: str) -> None:
    options: dict[str, Any] = {"combine_format": fmt, "score_placement": placement, "activations": mode}
    outputs = [
        run_over_threads(make_case("masked_30", ep_size=r, swiglu_alpha=1.702, swiglu_beta=1.0, **options))
        for r in (1, 4)
    ]
    case = make_case("masked_30", ep_size=1, swiglu_alpha=1.702, swiglu_beta=1.0, **options)
    assert rel_l2(outputs[0], oracle_of(case)) < SAME_ROUNDINGS_REL_L2
    assert torch.equal(bits(outputs[0]), bits(outputs[1]))


def test_score_placement_before_requant_differs_from_after_fc2() -> None:
    """B33: the two contracts must not be confused; weights spread over decades make the gap measurable."""
    before, after = (
        run_over_threads(make_case("random", ep_size=2, score_placement=p)) for p in ("before_requant", "after_fc2")
    )
    assert rel_l2(before, after) > 0.01


@settings(max_examples=12)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_layer_any_split_of_tokens_gives_the_same_rows(splits: list[int]) -> None:
    num_tokens = sum(splits)
    case = make_case("masked_30", ep_size=1, num_tokens=max(num_tokens, 1), max_tokens_per_rank=64)
    whole = run_over_threads(case)[:num_tokens]
    spread = run_over_threads(with_splits(case, splits))
    assert torch.equal(bits(whole), bits(spread))


def test_layer_masked_ids_touch_nothing() -> None:
    """B12: sentinels of either kind; the normal row is bit-equal to running it alone."""
    base = make_case("random", ep_size=1, num_tokens=5, num_experts=8, top_k=2)
    ids = torch.tensor([[0, -1], [-1, -1], [7, 8], [3, 2147483647], [2, 5]])
    weights = torch.where((ids >= 0) & (ids < 8), 0.5, float("nan"))
    case = with_splits(base, [5])
    case = type(case)(case.config, case.weights, case.x, Routing(ids, weights), [5])
    out = run_over_threads(case)
    assert not out.isnan().any()
    assert torch.equal(bits(out[1]), torch.zeros(256, dtype=torch.int16))
    alone = type(case)(case.config, case.weights, case.x[4:], Routing(ids[4:], weights[4:]), [1])
    assert torch.equal(bits(run_over_threads(alone)[0]), bits(out[4]))
    assert rel_l2(out, oracle_of(case)) < SAME_ROUNDINGS_REL_L2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["nvfp4", "bf16"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp4"])
def test_layer_not_finite_token_spoils_only_its_own_row(bad: float, mode: str, fmt: str) -> None:
    clean = make_case("random", ep_size=2, activations=mode, combine_format=fmt)
    expected = run_over_threads(clean)
    x = clean.x.clone()
    x[9, 100] = bad
    out = run_over_threads(type(clean)(clean.config, clean.weights, x, clean.routing, clean.splits))
    others = torch.arange(37) != 9
    assert torch.equal(bits(out[others]), bits(expected[others]))
    assert out[9].isnan().all() if bad != bad else True


def test_saturation_small_input_scale_is_reported() -> None:
    """R27: a scale too small for the data is counted, not hidden."""
    from trtllm_megamoe.layer import MegaMoELayer

    case = make_case("random", ep_size=1)
    shrunk = {name: t / 64 if name.endswith("input_scale") else t for name, t in case.weights.items()}
    shares = []
    for weights in (case.weights, shrunk):
        with MegaMoELayer(case.config) as layer:
            layer.load_weights(weights)
            layer.forward(case.x, case.routing.topk_ids, case.routing.topk_weights)
            report = layer.saturation
            assert report.input_blocks == 37 * 256 // 16
            assert report.fc1_out_blocks == 37 * 4 * 144 // 16
            shares.append((report.input_saturated, report.fc1_out_saturated))
    assert shares[1][0] > shares[0][0] and shares[1][1] > shares[0][1]
