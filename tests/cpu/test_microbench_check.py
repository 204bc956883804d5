# SPDX-License-Identifier: Apache-2.0
"""The microbench never times what it has not verified: wrong, changing and unverifiable results all fail visibly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from microbench import check as check_module
from microbench import runner as runner_module
from microbench.cases import Case, preset_case
from microbench.check import (
    QUANTISED_SAMPLES,
    CheckResult,
    Verdict,
    check_output,
    choose_samples,
    sample_tokens,
)
from microbench.routing import Batch, RoutingName, by_tokens, route
from microbench.runner import Point, Settings, run_points
from microbench.sources import SyntheticSource
from microbench.synthetic import tokens
from microbench.timing import Mode, TimingSpec, merge, time_host
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.oracle import OracleOptions, oracle_forward

WAIT_S = 60.0
CASE = preset_case("qwen3-235b", scale_experts=8, scale_channels=64)  # 64 x 64, 16 experts, top-8
SETTINGS = Settings(
    engine="cpu",
    activations="auto",
    warmup=0,
    iters=2,
    seed=0,
    steps=1,
    num_layers=1,
    timeout_s=WAIT_S,
    virtual_ranks=1,
)

SETTINGS_TWO_BY_THREE = Settings(
    engine="cpu",
    activations="bf16",
    warmup=1,
    iters=1,
    seed=0,
    steps=3,
    num_layers=2,
    timeout_s=WAIT_S,
    virtual_ranks=1,
)


def point(tokens_per_rank: int = 3, ep_size: int = 1, **changes: Any) -> Point:
    workload = by_tokens(
        RoutingName.RANDOM, tokens_per_rank, num_experts=CASE.num_experts, top_k=CASE.top_k, ep_size=ep_size, seed=0
    )
    return Point(**{"workload": workload, "combine_format": CombineFormat.BF16, "mode": Mode.LOCKSTEP, **changes})


def right_answer(case: Case, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    return oracle_forward(
        SyntheticSource(case, 0).for_oracle(),
        x,
        batch.topk_ids,
        batch.topk_weights,
        OracleOptions.product(ActivationMode.NVFP4),
    )


def check_on_ranks(spoil: Callable[[int, torch.Tensor], torch.Tensor], ep_size: int = 2) -> list[CheckResult]:
    """Check the right answer of `ep_size` ranks, spoilt on the way; every rank's verdict."""
    workload = point(4, ep_size).workload

    def body(comm: Communicator) -> CheckResult:
        batch = route(workload, comm.rank)
        x = tokens(CASE, 4, seed=0, step=0, rank=comm.rank)
        out = spoil(comm.rank, right_answer(CASE, x, batch))
        source = SyntheticSource(CASE, 0)
        return check_output(out, x, batch, source, ActivationMode.NVFP4, CombineFormat.BF16, comm, WAIT_S)

    return run_threads(ep_size, body, WAIT_S)


def test_check_right_answer_is_verified_on_every_rank() -> None:
    results = check_on_ranks(lambda _, out: out)
    assert results[0] == results[1]
    assert results[0].verdict is Verdict.VERIFIED
    assert results[0].rel_l2 == 0.0
    assert (results[0].tokens_checked, results[0].tokens_total) == (8, 8)
    assert results[0].experts_touched >= 8


def test_check_error_of_one_rank_is_everybodys_verdict() -> None:
    # 2e-3 on one of two ranks: twice the tolerance there, below it over both together
    results = check_on_ranks(lambda rank, out: out.float() * (1.002 if rank == 1 else 1.0))
    assert [result.verdict for result in results] == [Verdict.WRONG] * 2
    assert results[0].rel_l2 == pytest.approx(2e-3, rel=0.01)
    assert "wrong rank(s): 1" in str(results[0].reason)


def test_check_nan_on_one_rank_is_wrong() -> None:
    def spoil(rank: int, out: torch.Tensor) -> torch.Tensor:
        out[0, 0] = math.nan if rank == 0 else out[0, 0]
        return out

    assert check_on_ranks(spoil)[1].verdict is Verdict.WRONG


def test_check_swapped_tokens_are_wrong() -> None:
    assert check_on_ranks(lambda _, out: out.flip(0))[0].verdict is Verdict.WRONG


def test_check_wrong_shape_is_not_a_pass() -> None:
    assert not check_on_ranks(lambda rank, out: out[:3] if rank == 0 else out)[0].has_passed


def test_check_without_an_oracle_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise ImportError("no such reference")

    monkeypatch.setattr(check_module, "oracle_forward", broken)
    results = check_on_ranks(lambda _, out: out)
    assert {result.verdict for result in results} == {Verdict.NOT_VERIFIED}
    assert "no such reference" in str(results[0].reason)


def test_check_without_a_token_is_not_verified() -> None:
    batch = Batch(torch.empty((0, 8), dtype=torch.int64), torch.empty((0, 8)))
    x = torch.empty((0, CASE.hidden_size), dtype=torch.bfloat16)
    source = SyntheticSource(CASE, 0)
    result = check_output(x, x, batch, source, ActivationMode.NVFP4, CombineFormat.BF16, single(), WAIT_S)
    assert result.verdict is Verdict.NOT_VERIFIED


def test_sample_tokens_are_spread_over_live_ones() -> None:
    ids = torch.full((10, 2), -1)
    assert sample_tokens(ids, 3).tolist() == [0, 3, 6]
    ids[4:, 0] = 1
    assert sample_tokens(ids, 3).tolist() == [4, 6, 8]
    assert sample_tokens(ids, 99).tolist() == [4, 5, 6, 7, 8, 9]
    assert sample_tokens(ids[:0], 3).tolist() == []


@pytest.mark.parametrize("routing", [RoutingName.RANDOM, RoutingName.HOT_RANK, RoutingName.ZERO_RANK])
def test_choose_samples_large_layer_touches_eight_experts(
    routing: RoutingName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of nothing stands for a layer too large to follow every token."""
    monkeypatch.setattr(check_module, "_ORACLE_ROUTE_FLOPS", 0.0)
    workload = by_tokens(routing, 64, num_experts=256, top_k=2, ep_size=2, seed=1)
    source = SyntheticSource(preset_case("deepseek-v3", scale_channels=64), 0)

    def body(comm: Communicator) -> set[int]:
        batch = route(workload, comm.rank)
        quantised = choose_samples(source, batch, CombineFormat.FP4, comm, WAIT_S)
        assert quantised.numel() == min(QUANTISED_SAMPLES, batch.topk_ids.shape[0])
        picked = choose_samples(source, batch, CombineFormat.BF16, comm, WAIT_S)
        assert picked.numel() <= 8
        return set(batch.topk_ids[picked].flatten().tolist())

    assert len(set().union(*run_threads(2, body, WAIT_S))) >= 8


def run(settings: Settings = SETTINGS, points: list[Point] | None = None) -> list[dict[str, Any]]:
    return run_points(CASE, points or [point()], settings, single(), on_row=lambda _: None)


def test_run_points_right_layer_is_timed_and_described() -> None:
    points = [point(3), point(1, combine_format=CombineFormat.FP4, mode=Mode.BURST), point(2, requested_rows=1)]
    rows = run(points=points)
    assert [row["tokens_per_rank"] for row in rows] == [3, 1, 2]  # in the order asked for, over two layers
    assert [row["combine_format"] for row in rows] == ["bf16", "fp4", "bf16"]
    assert [row["mode"] for row in rows] == ["lockstep", "burst", "lockstep"]
    for row in rows:
        assert row["status"] == "ok"
        assert row["check"]["rel_l2"] < 1e-3
        assert len(row["samples_us"]) == 2
        assert row["us"]["min"] == min(row["samples_us"]) > 0
        assert (row["engine"], row["arch"], row["timing"], row["pct_sol"]) == ("cpu", "cpu", "cpu", None)
        assert row["max_tokens_per_rank"] == 3
        assert row["tokens_per_rank"] <= row["bucket"]


def test_run_points_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MegaMoELayer.forward
    calls = 0

    def wrong(layer: MegaMoELayer, *arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(layer, *arguments) * 1.25

    monkeypatch.setattr(MegaMoELayer, "forward", wrong)
    (row,) = run()
    assert row["status"] == "failed"
    assert row["check"]["verdict"] == "wrong"
    assert row["us"] is None
    assert row["samples_us"] == []
    assert row["tokens_per_s"] is row["tflops"] is None
    assert calls == 1


def test_run_points_result_that_changes_under_load_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MegaMoELayer.forward
    calls = 0

    def drifting(layer: MegaMoELayer, *arguments: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = forward(layer, *arguments)
        if calls > 2:
            out.view(-1)[0] += 1e-2
        return out

    monkeypatch.setattr(MegaMoELayer, "forward", drifting)
    (row,) = run()
    assert row["status"] == "failed"
    assert "does not repeat" in row["skip_reason"]
    assert row["us"] is None


def test_run_points_every_step_and_layer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    check = runner_module.check_output

    def spy(out: torch.Tensor, x: torch.Tensor, *rest: Any) -> CheckResult:
        seen.append(x)
        return check(out, x, *rest)

    monkeypatch.setattr(runner_module, "check_output", spy)
    (row,) = run(SETTINGS_TWO_BY_THREE)
    assert len(seen) == 6
    assert (row["rotated_layers"], row["steps"]) == (2, 3)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[3])


def test_run_points_other_engine_than_expected_is_refused() -> None:
    settings = Settings(
        engine="auto", activations="auto", warmup=0, iters=1, seed=0, steps=1, num_layers=1, timeout_s=WAIT_S,
        virtual_ranks=1, expected_engine="cuda",
    )  # fmt: skip
    with pytest.raises(MegaMoeVerificationError, match="'cpu' runs"):
        run(settings)


def test_run_points_weights_beyond_memory_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "available_host_bytes", lambda: 10_000)
    monkeypatch.setattr(runner_module, "open_source", lambda *_: pytest.fail("weights were made"))
    with pytest.raises(MegaMoeConfigError, match="--scale-experts"):
        run()


def test_run_points_one_rank_that_cannot_load_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    load = MegaMoELayer.load_weights

    def torn(layer: MegaMoELayer, weights: Any) -> None:
        if layer.ep_rank == 1:
            raise MegaMoeWeightError("file ends early")
        load(layer, weights)

    monkeypatch.setattr(MegaMoELayer, "load_weights", torn)

    def body(comm: Communicator) -> str:
        with pytest.raises(MegaMoeWeightError) as caught:
            run_points(CASE, [point(2, 2)], SETTINGS, comm, on_row=lambda _: None)
        return str(caught.value)

    texts = run_threads(2, body, WAIT_S)
    assert texts[0] == texts[1]
    assert "file ends early (ranks [1] of 2 failed" in texts[0]


def test_merge_takes_the_slowest_rank_of_every_iteration() -> None:
    samples = merge([[1.0, 5.0, 2.0, 2.0], [3.0, 4.0, 2.0, 1.0]])
    assert samples.slowest_us == (3.0, 5.0, 2.0, 2.0)
    summary = samples.summary()
    assert (summary["p50"], summary["min"], summary["mean"]) == (2.5, 2.0, 3.0)
    assert summary["per_rank_p50"] == [2.0, 2.5]


@pytest.mark.parametrize(("mode", "barriers"), [(Mode.LOCKSTEP, 1 + 5), (Mode.BURST, 1 + 1)])
def test_time_host_calls_in_order_and_meets_where_the_mode_says(mode: Mode, barriers: int) -> None:
    calls: list[int] = []
    comm = single()
    count = 0
    barrier = comm.barrier

    def counting(timeout_s: float) -> None:
        nonlocal count
        count += 1
        barrier(timeout_s)

    def forward(index: int) -> torch.Tensor:
        calls.append(index)
        return torch.tensor(float(index))

    comm.barrier = counting  # type: ignore[method-assign]
    timed = time_host(forward, TimingSpec(mode, warmup=2, iters=3, forwards_per_graph=4, timeout_s=WAIT_S), comm)
    assert calls == [0, 1, 2, 3, 4, 0]  # the last one for comparison, not for time
    assert len(timed.samples.slowest_us) == 3
    assert timed.repeated.item() == 0.0
    assert count == barriers


def test_point_that_fails_on_one_rank_leaves_a_row_with_its_reason_and_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = MegaMoELayer.forward, []

    def forward(layer: MegaMoELayer, *arguments: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return real(layer, *arguments)

    monkeypatch.setattr(MegaMoELayer, "forward", forward)
    first, second = run_points(CASE, [point(3), point(5)], SETTINGS, single(), lambda _: None)
    assert first["status"] == "failed" and first["skip_reason"] == "RuntimeError: planted" and first["us"] is None
    assert second["status"] == "ok"
