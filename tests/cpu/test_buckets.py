# SPDX-License-Identifier: Apache-2.0
"""The bucket ladder and how the layer chooses from it: cap rule, selection, errors that name both numbers."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cli import invoke
from tests.helpers.layer_cases import WATCHDOG_S, bits, forward_rank, make_case, with_splits
from trtllm_megamoe.buckets import BucketLadder, launch_cap
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.errors import MegaMoeCapacityError, MegaMoeConfigError, MegaMoeStateError
from trtllm_megamoe.layer import MegaMoELayer


@pytest.mark.parametrize(
    ("moe_max", "engine_max", "expected"),
    [(1024, 8192, 1024), (8192, 1024, 1024), (None, 8192, 8192), (4096, None, 4096), (1, 1, 1), (8192, 8192, 8192)],
)
def test_launch_cap_is_the_smaller_bound_and_knows_no_dp_size(
    moe_max: int | None, engine_max: int | None, expected: int
) -> None:
    assert launch_cap(moe_max, engine_max) == expected


@pytest.mark.parametrize(
    ("moe_max", "engine_max", "named"),
    [(None, None, "neither moe_max_num_tokens nor max_num_tokens"), (0, 8192, "moe_max_num_tokens is 0"),
     (8, -3, "max_num_tokens is -3")],
)  # fmt: skip
def test_launch_cap_without_a_usable_bound_is_refused(moe_max: int | None, engine_max: int | None, named: str) -> None:
    with pytest.raises(MegaMoeConfigError, match=named):
        launch_cap(moe_max, engine_max)


@pytest.mark.parametrize(
    ("cap", "rungs"),
    [
        (1, (1,)),
        (8, (8,)),
        (9, (8, 9)),
        (17, (8, 16, 17)),
        (256, (8, 16, 32, 64, 128, 256)),
        (300, (8, 16, 32, 64, 128, 256, 300)),
        (8192, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        (100_000, (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 100_000)),
    ],
)
def test_ladder_for_cap_has_every_rung_below_it_and_the_cap(cap: int, rungs: tuple[int, ...]) -> None:
    ladder = BucketLadder.for_cap(cap)
    assert ladder.rungs == rungs
    assert ladder.cap == cap


@given(cap=st.integers(1, 20_000), tokens=st.integers(1, 20_000))
def test_ladder_select_returns_the_smallest_rung_that_holds_the_tokens(cap: int, tokens: int) -> None:
    ladder = BucketLadder.for_cap(cap)
    if tokens > cap:
        with pytest.raises(MegaMoeCapacityError):
            ladder.select(tokens)
        return
    chosen = ladder.select(tokens)
    assert chosen == min(rung for rung in ladder.rungs if rung >= tokens)


@given(cap=st.integers(1, 4096), tokens=st.integers(5, 4096))
def test_ladder_select_takes_a_bucket_that_the_step_fills_more_than_half(cap: int, tokens: int) -> None:
    """A bucket's tile suits its fullest step, so no step may be far below it; 1 to 4 tokens take the narrowest."""
    if tokens <= cap:
        assert tokens > BucketLadder.for_cap(cap).select(tokens) / 2


@given(small=st.integers(1, 5000), large=st.integers(1, 5000), tokens=st.integers(1, 5000))
def test_ladder_select_below_the_last_rung_does_not_depend_on_the_cap(small: int, large: int, tokens: int) -> None:
    """Decode must not pay for a larger prefill cap: only a step in a ladder's last bucket can differ."""
    ladders = [BucketLadder.for_cap(small), BucketLadder.for_cap(large)]
    if all(len(ladder.rungs) > 1 and tokens <= ladder.rungs[-2] for ladder in ladders):
        assert ladders[0].select(tokens) == ladders[1].select(tokens)


@pytest.mark.parametrize("unknown", [None, 0])
def test_ladder_select_unknown_or_zero_is_the_cap(unknown: int | None) -> None:
    assert BucketLadder.for_cap(8192).select(unknown) == 8192


def test_ladder_select_above_the_cap_names_both_numbers() -> None:
    with pytest.raises(MegaMoeCapacityError, match=r"\b65 tokens.*\b64 tokens"):
        BucketLadder.for_cap(64).select(65)


def test_ladder_select_negative_count_is_refused() -> None:
    with pytest.raises(MegaMoeConfigError, match="-1"):
        BucketLadder.for_cap(64).select(-1)


@pytest.mark.parametrize("cap", [0, -5])
def test_ladder_for_cap_below_one_is_refused(cap: int) -> None:
    with pytest.raises(MegaMoeConfigError, match=str(cap)):
        BucketLadder.for_cap(cap)


def test_ladder_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        BucketLadder.for_cap(8).rungs = (1,)  # type: ignore[misc]


def test_layer_takes_the_bucket_of_the_fullest_rank_and_keeps_its_bits() -> None:
    """Rank 1 has no tokens and still takes rank 0's bucket; the hint changes no bit of the result."""
    base = make_case("random", ep_size=2, num_tokens=20, max_tokens_per_rank=300)
    case = with_splits(base, [20, 0])

    def body(comm: Communicator) -> list[tuple[int | None, torch.Tensor]]:
        seen = []
        with MegaMoELayer(case.config, comm) as layer:
            assert layer.last_bucket is None
            layer.load_weights(case.weights)
            for hint in (None, 20, 200, 300, 0):
                rows = case.rank_slice(comm.rank)
                routing = case.routing
                out = layer.forward(case.x[rows], routing.topk_ids[rows], routing.topk_weights[rows], hint)
                seen.append((layer.last_bucket, bits(out)))
        return seen

    for seen in run_threads(2, body, WATCHDOG_S):
        assert [bucket for bucket, _ in seen] == [300, 32, 256, 300, 300]
        assert all(torch.equal(out, seen[0][1]) for _, out in seen)


@pytest.mark.parametrize(
    ("hint", "error", "message"),
    [
        (38, MegaMoeCapacityError, r"\b38 tokens.*\b37 tokens"),
        (36, MegaMoeConfigError, r"36 is below this rank's own 37 tokens"),
        (-1, MegaMoeConfigError, r"negative, got -1"),
        (torch.tensor(37), MegaMoeConfigError, r"must be a Python int or None, got Tensor"),
    ],
)
def test_layer_with_a_wrong_hint_refuses_before_the_launch(hint: object, error: type[Exception], message: str) -> None:
    case = make_case("random", ep_size=1)
    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        with pytest.raises(error, match=message):
            layer.forward(case.x, case.routing.topk_ids, case.routing.topk_weights, hint)  # type: ignore[arg-type]
        assert layer.last_bucket is None
        forward_rank(layer, case, 0)  # nothing was launched, so the layer still works
        assert layer.last_bucket == 37


def test_layer_prepare_launches_every_bucket_on_every_rank_and_changes_no_result() -> None:
    case = with_splits(make_case("random", ep_size=2, num_tokens=20, max_tokens_per_rank=300), [20, 0])

    def body(comm: Communicator) -> tuple[list[int | None], torch.Tensor]:
        with MegaMoELayer(case.config, comm) as layer:
            with pytest.raises(MegaMoeStateError, match="load"):
                layer.prepare()
            layer.load_weights(case.weights)
            launched: list[int | None] = []
            forward = layer._engine.forward

            def record(*arguments: Any) -> torch.Tensor:
                out = forward(*arguments)
                launched.append(layer.last_bucket)
                return out

            layer._engine.forward = record  # type: ignore[method-assign]
            layer.prepare()
            return launched, bits(forward_rank(layer, case, comm.rank))

    with MegaMoELayer(case.config) as alone:
        alone.load_weights(case.weights)
        expected = bits(forward_rank(alone, case, 0))
    results = run_threads(2, body, WATCHDOG_S)
    ladder = [8, 16, 32, 64, 128, 256, 300]
    assert [launched[: len(ladder)] for launched, _ in results] == [ladder] * 2
    assert torch.equal(results[0][1], expected)


def test_explain_shows_the_ladder_as_text_and_json() -> None:
    arguments = ("explain", "deepseek-v3", "--max-tokens-per-rank", 8192)
    ladder = [8 * 2**i for i in range(11)]  # 8 to the cap, every power of two
    assert f"{', '.join(map(str, ladder))} tokens a rank" in invoke(*arguments).output
    assert json.loads(invoke(*arguments, "--json").output)["buckets"] == ladder
