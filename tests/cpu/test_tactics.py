# SPDX-License-Identifier: Apache-2.0
"""Tactics, their one legality rule, and the collective tuner: lockstep, failures, divergence, no state left behind."""

from __future__ import annotations

import ast
import gc
import json
import logging
import math
import pickle
import random
import subprocess
import sys
import weakref
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tactics import CANDIDATES, SPACE, CountingCommunicator, ScriptedRunner, heuristic, tactic
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeRankDivergenceError
from trtllm_megamoe.tuning.tactic import DEFAULT_TACTIC, Tactic
from trtllm_megamoe.tuning.tuner import MIN_GAIN, TunedBucket, tune

WATCHDOG_S = 60.0
WAIT_S = 20.0

TACTICS = st.builds(
    Tactic,
    token_widths=st.lists(st.integers(1, 300), max_size=5).map(tuple),
    tile_rows=st.integers(),
    math_warpgroups=st.integers(),
    math_registers=st.integers(),
    producer_registers=st.integers(),
    max_stages=st.integers(),
    fc1_lag=st.integers(),
)


# -- the value


@given(TACTICS)
def test_tactic_survives_repr_json_pickle_and_plain_literals(chosen: Tactic) -> None:
    assert eval(repr(chosen)) == chosen
    assert Tactic.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert Tactic(**ast.literal_eval(repr(asdict(chosen)))) == chosen  # for a host that does not know the class
    assert len({chosen, eval(repr(chosen))}) == 1


def test_tactic_hash_is_the_same_in_every_process() -> None:
    chosen = tactic(16)
    code = f"from trtllm_megamoe.tuning.tactic import Tactic; print(hash({chosen!r}))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WATCHDOG_S)
    assert int(seen.stdout) == hash(chosen)


def test_tactic_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        tactic(16).tile_rows = 128  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile_rows": 256.0}, {"tile_rows": "256"}, {"fc1_lag": True}, {"token_widths": [8, 16]},
        {"token_widths": (8, "16")}, {"max_stages": None},
    ],
    ids=str,
)  # fmt: skip
def test_tactic_of_other_types_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MegaMoeConfigError, match="tuple of integers and integers"):
        replace(tactic(16), **wrong)


@pytest.mark.parametrize(
    "value",
    [None, -1, [], {}, {**tactic(8).to_json(), "extra": 1}, {**tactic(8).to_json(), "token_widths": 8}],
    ids=["none", "number", "list", "empty", "extra field", "scalar widths"],
)
def test_tactic_from_json_of_another_form_is_refused(value: object) -> None:
    with pytest.raises(MegaMoeConfigError, match="tactic"):
        Tactic.from_json(value)


# -- one predicate


def test_space_resolves_the_default_to_the_heuristics_tactic() -> None:
    assert SPACE.resolve(DEFAULT_TACTIC, 64) == tactic(8)
    assert SPACE.resolve(DEFAULT_TACTIC, 256) == tactic(32)
    assert SPACE.resolve(tactic(24), 64) == tactic(24)


@pytest.mark.parametrize("unknown", [0, -2, 7])
def test_space_with_another_integer_is_refused(unknown: int) -> None:
    with pytest.raises(MegaMoeConfigError, match=f"tactic {unknown} is unknown"):
        SPACE.resolve(unknown, 64)


def test_space_refuses_an_illegal_tactic_by_rule_and_bucket() -> None:
    with pytest.raises(MegaMoeConfigError, match=r"cannot run bucket 64 of kernel 'toy': token width 256 exceeds 128"):
        SPACE.resolve(tactic(128), 64)


def test_space_with_an_illegal_heuristic_is_refused_by_the_same_rule() -> None:
    broken = replace(SPACE, heuristic=lambda bucket: tactic(128))
    with pytest.raises(MegaMoeConfigError, match="token width 256 exceeds 128"):
        broken.legal_candidates(64)


def test_space_candidates_are_the_legal_ones_once_and_the_heuristics_first() -> None:
    legal = [tactic(width) for width in (8, 16, 24, 32, 64)]
    assert SPACE.legal_candidates(64) == legal
    assert SPACE.legal_candidates(256) == [tactic(32), *(t for t in legal if t != tactic(32))]


# -- the tuner

TIMES = {8: 50.0, 16: 40.0, 24: 45.0, 32: 60.0, 64: 70.0}


def _time_us(chosen: Tactic, bucket: int) -> float:
    return TIMES[chosen.token_widths[0]] + bucket / 1000


def test_tune_takes_the_fastest_on_the_slowest_rank() -> None:
    """Tactic 24 is best on average, 16 on the slowest rank, which is what a step waits for."""
    slow = {0: {24: 90.0}, 1: {16: 41.0}}

    def body(comm: Communicator) -> list[TunedBucket]:
        runner = ScriptedRunner(lambda t, b: slow[comm.rank].get(t.token_widths[0], _time_us(t, b) - 20 * comm.rank))
        return tune(SPACE, [64], runner, comm, WAIT_S)

    first, second = run_threads(2, body, WATCHDOG_S)
    assert first == second
    (tuned,) = first
    assert (tuned.tactic, tuned.num_candidates, tuned.failures) == (tactic(16), 5, ())
    assert tuned.time_us == 41.0
    assert tuned.heuristic_us == pytest.approx(50.064)


@pytest.mark.parametrize(("gain", "winner"), [(MIN_GAIN / 2, 8), (2 * MIN_GAIN, 16)])
def test_tune_keeps_the_heuristics_tactic_unless_another_is_clearly_faster(gain: float, winner: int) -> None:
    runner = ScriptedRunner(lambda t, b: 100.0 * (1 - gain) if t == tactic(16) else 100.0)
    (tuned,) = tune(SPACE, [64], runner, single(), WAIT_S)
    assert tuned.tactic == tactic(winner)


def _raise_on_rank(comm: Communicator, rank: int, width: int, error: Exception) -> Any:
    def act(chosen: Tactic, bucket: int) -> float:
        if comm.rank == rank and chosen.token_widths[0] == width:
            raise error
        return _time_us(chosen, bucket)

    return act


@pytest.mark.parametrize("rank", [0, 2])
def test_tune_with_a_candidate_that_cannot_be_prepared_on_one_rank_launches_it_nowhere(rank: int) -> None:
    def body(comm: Communicator) -> tuple[list[TunedBucket], ScriptedRunner]:
        runner = ScriptedRunner(_time_us, _raise_on_rank(comm, rank, 16, RuntimeError("ptxas: out of registers")))
        return tune(SPACE, [64, 256], runner, comm, WAIT_S), runner

    results = run_threads(3, body, WATCHDOG_S)
    assert all(outcome == results[0][0] for outcome, _ in results)
    for tuned in results[0][0]:
        assert tuned.tactic == tactic(24)
        (failure,) = tuned.failures
        assert (failure.tactic, failure.rank) == (tactic(16), rank)
        assert failure.reason == "RuntimeError: ptxas: out of registers"
    for _, runner in results:
        assert ("measure", 16) not in runner.calls
        assert runner.num_recoveries == 0
        assert len(runner.calls) == 2 * (5 + 4)


def test_tune_with_a_candidate_that_fails_in_flight_recovers_on_all_ranks_and_goes_on() -> None:
    def body(comm: Communicator) -> tuple[list[TunedBucket], ScriptedRunner]:
        runner = ScriptedRunner(_raise_on_rank(comm, 1, 16, TimeoutError("rank 0 did not launch")))
        return tune(SPACE, [64], runner, comm, WAIT_S), runner

    results = run_threads(3, body, WATCHDOG_S)
    assert [runner.num_recoveries for _, runner in results] == [1, 1, 1]
    assert all(outcome == results[0][0] for outcome, _ in results)
    assert results[0][0][0].tactic == tactic(24)
    assert "rank 0 did not launch" in results[0][0][0].failures[0].reason


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -1.0])
def test_tune_never_chooses_a_time_that_is_none(wrong: float) -> None:
    runner = ScriptedRunner(lambda t, b: wrong if t == tactic(24) else _time_us(t, b))
    (tuned,) = tune(SPACE, [64], runner, single(), WAIT_S)
    assert tuned.tactic == tactic(16)
    assert f"measured {wrong} us" in tuned.failures[0].reason


def test_tune_whose_heuristic_fails_takes_the_best_of_the_others() -> None:
    def broken(chosen: Tactic, bucket: int) -> float:
        if chosen == heuristic(bucket):
            raise RuntimeError("no")
        return _time_us(chosen, bucket)

    (tuned,) = tune(SPACE, [64], ScriptedRunner(broken), single(), WAIT_S)
    assert (tuned.tactic, tuned.heuristic_us) == (tactic(16), None)


def test_tune_whose_candidates_all_fail_stays_with_the_heuristic(caplog: pytest.LogCaptureFixture) -> None:
    def broken(chosen: Tactic, bucket: int) -> float:
        raise RuntimeError("no")

    with caplog.at_level(logging.WARNING):
        (tuned,) = tune(SPACE, [64], ScriptedRunner(broken), single(), WAIT_S)
    assert (tuned.tactic, tuned.time_us, len(tuned.failures)) == (tactic(8), None, 5)
    assert "no candidate ran" in caplog.text


def test_tune_with_a_warm_and_a_cold_rank_agrees_and_exchanges_alike() -> None:
    """B41: rank 0 knows bucket 64, rank 1 another outcome for 256, rank 2 nothing; rank 0's word counts."""
    warm = TunedBucket(64, tactic(64), 1.0, 2.0, 5)
    stale = TunedBucket(256, tactic(24), 1.0, 2.0, 5)
    known = [{64: warm}, {256: stale}, None]

    def body(comm: Communicator) -> tuple[list[TunedBucket], int, ScriptedRunner]:
        counting, runner = CountingCommunicator(comm), ScriptedRunner(_time_us)
        return tune(SPACE, [64, 256], runner, counting, WAIT_S, known=known[comm.rank]), counting.num_exchanges, runner

    results = run_threads(3, body, WATCHDOG_S)
    assert all(outcome == [warm, replace(outcome[1], bucket=256)] for outcome, _, _ in results)
    assert all(outcome[1].tactic == tactic(16) for outcome, _, _ in results)
    assert len({exchanges for _, exchanges, _ in results}) == 1
    assert len({str(runner.calls) for _, _, runner in results}) == 1


def test_tune_a_second_time_is_a_lookup() -> None:
    outcome = tune(SPACE, [64, 256], ScriptedRunner(_time_us), single(), WAIT_S)
    idle = ScriptedRunner(_time_us)
    again = tune(SPACE, [64, 256], idle, single(), WAIT_S, known={tuned.bucket: tuned for tuned in outcome})
    assert again == outcome
    assert idle.calls == []


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 4))
def test_tune_with_random_times_and_failures_never_diverges(seed: int, ranks: int) -> None:
    """B41: every rank has its own noise and its own failures; all exchange alike and end with the same outcome."""

    def body(comm: Communicator) -> tuple[list[TunedBucket], int]:
        rng, counting = random.Random(seed * 10 + comm.rank), CountingCommunicator(comm)

        def maybe_fail(chosen: Tactic, bucket: int) -> None:
            if rng.random() < 0.15:
                raise MemoryError("no")

        def noisy(chosen: Tactic, bucket: int) -> float:
            maybe_fail(chosen, bucket)
            return rng.choice([rng.uniform(10, 100), 50.0, math.nan])

        return tune(SPACE, [16, 64, 256], ScriptedRunner(noisy, maybe_fail), counting, WAIT_S), counting.num_exchanges

    results = run_threads(ranks, body, WATCHDOG_S)
    assert len({str(outcome) for outcome, _ in results}) == 1
    assert len({exchanges for _, exchanges in results}) == 1
    for tuned in results[0][0]:
        assert SPACE.why_illegal(tuned.tactic, tuned.bucket) is None
        assert tuned.tactic not in [failure.tactic for failure in tuned.failures] or tuned.time_us is None


@pytest.mark.parametrize("what", ["buckets", "candidates"])
def test_tune_on_ranks_that_differ_is_refused_on_all_before_a_launch(what: str) -> None:
    runners = [ScriptedRunner(_time_us) for _ in range(2)]
    errors: list[str] = []

    def body(comm: Communicator) -> None:
        is_odd = comm.rank == 1
        space = replace(SPACE, candidates=lambda b: CANDIDATES[: 3 - comm.rank]) if what == "candidates" else SPACE
        buckets = [64, 128] if is_odd and what == "buckets" else [64]
        try:
            tune(space, buckets, runners[comm.rank], comm, WAIT_S)
        except MegaMoeRankDivergenceError as err:
            errors.append(str(err))

    run_threads(2, body, WATCHDOG_S)
    assert len(errors) == 2 and len(set(errors)) == 1 and what in errors[0]
    assert [runner.calls for runner in runners] == [[], []]


def test_tune_keeps_nothing_of_a_runner() -> None:
    """R33: no configuration outlives its runner; twenty runs leave no more objects than one."""

    def once() -> weakref.ref[ScriptedRunner]:
        runner = ScriptedRunner(_time_us)
        tune(SPACE, [64], runner, single(), WAIT_S)
        return weakref.ref(runner)

    assert once()() is None
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        once()
    gc.collect()
    assert len(gc.get_objects()) - before < 20  # fewer than one per run: unrelated bookkeeping of the interpreter


def test_tune_reports_progress_and_logs_the_gain(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, logger="trtllm_megamoe"):
        tune(
            SPACE,
            [64],
            ScriptedRunner(_time_us),
            single(),
            WAIT_S,
            progress=lambda bucket, done: seen.append((bucket, done)),
        )
    assert seen == [(64, done) for done in range(1, 6)]
    assert "40.1 us (heuristic: 50.1 us), 5 candidates, 0 failed" in caplog.text
