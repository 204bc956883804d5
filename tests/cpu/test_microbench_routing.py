# SPDX-License-Identifier: Apache-2.0
"""Every promise that a routing workload makes, over presets, rank counts and random shapes (B66)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microbench.routing import (
    PROPERTIES,
    Batch,
    Load,
    RoutingName,
    Workload,
    by_rows,
    by_tokens,
    count_routes,
    route,
    tokens_by_rank,
)
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.presets import PRESETS

DSV3 = {"num_experts": 256, "top_k": 8, "ep_size": 8, "seed": 0}
SMALL = {"num_experts": 16, "top_k": 4, "ep_size": 4, "seed": 5}


def batches(workload: Workload, step: int = 0) -> list[Batch]:
    return [route(workload, rank, step) for rank in range(workload.ep_size)]


def load_of(workload: Workload, step: int = 0) -> Load:
    return Load(torch.stack([count_routes(b.topk_ids, workload.num_experts) for b in batches(workload, step)]))


def has_repeats(topk_ids: torch.Tensor) -> bool:
    """Whether a token names a live expert twice."""
    ordered = topk_ids.sort(dim=1).values
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any())


def test_properties_cover_every_name() -> None:
    assert set(PROPERTIES) == set(RoutingName)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("ep_size", [1, 8])
def test_uniform_rows_per_expert_are_exact(name: str, rows: int, ep_size: int) -> None:
    shape = PRESETS[name]
    # EP 1 as one rank's share of an eight-way layer
    num_experts = shape.num_experts if ep_size > 1 else shape.num_experts // 8
    workload = by_rows(RoutingName.UNIFORM, rows, num_experts=num_experts, top_k=shape.top_k, ep_size=ep_size, seed=1)
    parts = batches(workload)
    assert load_of(workload).rows_by_expert.tolist() == [rows] * num_experts
    slots = sum(b.topk_ids.numel() for b in parts)
    spare = sum(int((b.topk_ids == -1).sum()) for b in parts)
    assert slots - spare == rows * num_experts
    assert spare < ep_size * shape.top_k  # no more tokens than it takes
    assert not any(has_repeats(b.topk_ids) for b in parts)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_uniform_tokens_per_rank_are_balanced(name: str, tokens: int) -> None:
    shape = PRESETS[name]
    workload = by_tokens(
        RoutingName.UNIFORM, tokens, num_experts=shape.num_experts, top_k=shape.top_k, ep_size=8, seed=2
    )
    load = load_of(workload)
    summary = Load.summary(load.rows_by_rank)
    assert summary["max_over_mean"] is not None
    assert summary["max_over_mean"] <= 1.05
    assert int(load.rows_by_expert.max() - load.rows_by_expert.min()) <= 1
    assert int(load.sent.sum()) == 8 * tokens * shape.top_k


@settings(max_examples=60)
@given(
    ep_size=st.sampled_from([1, 2, 4, 8]),
    num_local=st.integers(1, 9),
    data=st.data(),
    tokens=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_uniform_any_shape_is_balanced_and_distinct(
    ep_size: int, num_local: int, data: st.DataObject, tokens: int, seed: int
) -> None:
    num_experts = ep_size * num_local
    top_k = data.draw(st.integers(1, num_experts))
    workload = by_tokens(RoutingName.UNIFORM, tokens, num_experts=num_experts, top_k=top_k, ep_size=ep_size, seed=seed)
    load = load_of(workload)
    assert int(load.rows_by_expert.max() - load.rows_by_expert.min()) <= 1
    assert int(load.rows_by_rank.max() - load.rows_by_rank.min()) <= 1
    assert not any(has_repeats(b.topk_ids) for b in batches(workload))


@pytest.mark.parametrize("routing", RoutingName)
def test_route_is_a_pure_function_that_differs_by_rank_seed_and_step(routing: RoutingName) -> None:
    workload = by_tokens(routing, 32, **DSV3)
    other_seed = by_tokens(routing, 32, **{**DSV3, "seed": 9})
    ranks = [r for r, tokens in enumerate(tokens_by_rank(workload)) if tokens == 32 or routing is RoutingName.RAGGED]
    first = route(workload, ranks[0])
    torch.manual_seed(77)  # the global generator has no say
    again = route(workload, ranks[0])
    assert torch.equal(first.topk_ids, again.topk_ids)
    assert torch.equal(first.topk_weights, again.topk_weights)
    for other in (route(workload, ranks[1]), route(other_seed, ranks[0]), route(workload, ranks[0], 1)):
        common = min(len(first.topk_ids), len(other.topk_ids))
        assert common == 0 or not torch.equal(first.topk_ids[:common], other.topk_ids[:common])
        assert common == 0 or not torch.equal(first.topk_weights[:common], other.topk_weights[:common])


@pytest.mark.parametrize("routing", RoutingName)
def test_route_dtypes_and_weights_of_spare_slots(routing: RoutingName) -> None:
    needs_tokens = routing in (RoutingName.RAGGED, RoutingName.ZERO_RANK)
    workload = by_tokens(routing, 5, **SMALL) if needs_tokens else by_rows(routing, 3, **SMALL)
    for rank, batch in enumerate(batches(workload)):
        assert batch.topk_ids.dtype == torch.int64
        assert batch.topk_weights.dtype == torch.float32
        assert batch.topk_ids.shape == batch.topk_weights.shape == (tokens_by_rank(workload)[rank], 4)
        assert torch.equal(batch.topk_weights.isnan(), batch.topk_ids == -1)
    live = sum(int((b.topk_ids >= 0).sum()) for b in batches(workload))
    assert needs_tokens or live == 3 * 16


def test_random_ids_are_distinct_and_uneven() -> None:
    workload = by_tokens(RoutingName.RANDOM, 64, **DSV3)
    assert not any(has_repeats(b.topk_ids) for b in batches(workload))
    rows = load_of(workload).rows_by_expert  # mean 16: binomial, so not all equal
    assert int(rows.max()) > 20


def test_zipf_repeats_ids_and_favours_one_expert_by_the_law() -> None:
    workload = by_tokens(RoutingName.ZIPF, 1024, num_experts=48, top_k=6, ep_size=1, seed=0)
    assert has_repeats(route(workload, 0).topk_ids)
    rows = load_of(workload).rows_by_expert
    # 1 / (1 + 1/2 + ... + 1/48) = 22.4 %; 6144 draws: four standard deviations are 2.2 %
    assert float(rows.max()) / float(rows.sum()) == pytest.approx(0.224, abs=0.022)
    hottest = int(rows.argmax())
    assert int(load_of(workload, step=1).rows_by_expert.argmax()) == hottest


def test_hot_expert_is_in_every_token_once() -> None:
    workload = by_tokens(RoutingName.HOT_EXPERT, 40, **DSV3)
    rows = load_of(workload).rows_by_expert
    hot = int(rows.argmax())
    assert int(rows[hot]) == 8 * 40
    for batch in batches(workload):
        assert torch.equal((batch.topk_ids == hot).sum(dim=1), torch.ones(40, dtype=torch.int64))
        assert not has_repeats(batch.topk_ids)


def test_hot_rank_gets_everything() -> None:
    load = load_of(by_tokens(RoutingName.HOT_RANK, 16, **DSV3))
    rows = load.rows_by_rank
    assert int(rows.max()) == int(rows.sum()) == 8 * 16 * 8
    assert Load.summary(rows)["max_over_mean"] == 8.0


@pytest.mark.parametrize("imbalance", [1.0, 2.0, 4.0, 7.0])
@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-pro", "gpt-oss-120b"])
def test_hot_rank_imbalance_is_achieved(imbalance: float, name: str) -> None:
    shape = PRESETS[name]
    workload = by_tokens(
        RoutingName.HOT_RANK, 64, num_experts=shape.num_experts, top_k=shape.top_k, ep_size=8, seed=4,
        imbalance=imbalance,
    )  # fmt: skip
    load = load_of(workload)
    hot = int(
        load_of(
            by_tokens(RoutingName.HOT_RANK, 1, num_experts=shape.num_experts, top_k=shape.top_k, ep_size=8, seed=4)
        ).rows_by_rank.argmax()
    )
    mean = float(load.rows_by_rank.double().mean())
    # the quota is exact up to one row per source rank
    assert abs(int(load.rows_by_rank[hot]) - imbalance * mean) <= 8
    assert not any(has_repeats(b.topk_ids) for b in batches(workload))


def test_hot_rank_with_fewer_experts_than_top_k_repeats_but_stays_inside() -> None:
    workload = by_tokens(RoutingName.HOT_RANK, 6, num_experts=8, top_k=4, ep_size=4, seed=0)
    rows = load_of(workload).rows_by_rank
    assert sorted(rows.tolist()) == [0, 0, 0, 4 * 6 * 4]


def test_ragged_ranks_form_the_ramp() -> None:
    workload = by_tokens(RoutingName.RAGGED, 32, **DSV3)
    counts = tokens_by_rank(workload)
    assert sorted(counts) == [4, 8, 12, 16, 20, 24, 28, 32]
    assert [b.topk_ids.shape[0] for b in batches(workload)] == list(counts)
    assert {tokens_by_rank(workload, step) for step in range(6)} != {counts}


def test_zero_rank_half_of_the_ranks_have_no_token() -> None:
    workload = by_tokens(RoutingName.ZERO_RANK, 5, **DSV3)
    assert sorted(tokens_by_rank(workload)) == [0] * 4 + [5] * 4
    assert int(load_of(workload).sent.sum()) == 4 * 5 * 8


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: by_tokens(RoutingName.UNIFORM, 1, num_experts=6, top_k=2, ep_size=4, seed=0), "6 experts"),
        (lambda: by_tokens(RoutingName.UNIFORM, 1, num_experts=4, top_k=5, ep_size=4, seed=0), "top-k 5"),
        (lambda: by_tokens(RoutingName.UNIFORM, -1, **SMALL), "-1"),
        (lambda: by_rows(RoutingName.UNIFORM, -2, **SMALL), "-2"),
        (lambda: by_rows(RoutingName.RAGGED, 2, **SMALL), "--tokens-per-rank"),
        (lambda: by_tokens(RoutingName.ZERO_RANK, 2, **{**SMALL, "ep_size": 1}), "at least 2 ranks"),
        (lambda: by_tokens(RoutingName.UNIFORM, 2, **SMALL, imbalance=2.0), "hot-rank"),
        (lambda: by_tokens(RoutingName.HOT_RANK, 2, **SMALL, imbalance=4.5), "outside 1..4"),
    ],
)
def test_workload_illegal_request_is_refused_with_its_reason(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(MegaMoeConfigError, match=named):
        make()


def test_count_routes_ignores_masked_ids() -> None:
    ids = torch.tensor([[0, -1, 3], [3, 4, 2**31 - 1]])
    assert count_routes(ids, 4).tolist() == [1, 0, 0, 2]


def test_load_summary_of_nothing_has_no_quotient() -> None:
    assert Load.summary(torch.zeros(4, dtype=torch.int64)) == {"mean": 0.0, "max": 0, "max_over_mean": None}
    assert Load.summary(torch.tensor([1, 3])) == {"mean": 2.0, "max": 3, "max_over_mean": 1.5}
