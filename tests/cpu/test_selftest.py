# SPDX-License-Identifier: Apache-2.0
"""The self-test: runs and reports on the CPU engine, sees planted faults, survives a child that dies or hangs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.cli import invoke
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.kernels.family import FAMILIES
from trtllm_megamoe.selftest import one_rank, process
from trtllm_megamoe.selftest.cases import EVERY_TILE, Case, one_rank_cases, rank_cases, selected
from trtllm_megamoe.selftest.one_rank import Bench, Outcome
from trtllm_megamoe.selftest.plan import Item, Plan, Target, make_plan, needed_kernels

CPU = Target(None, 0, quick=False, ep_size=2, only="odd-nvfp4-fp4")


def small_case() -> Case:
    """The smallest case of one rank, on the CPU engine."""
    case = next(case for case in one_rank_cases() if case.name == "tiny-odd-bf16")
    return dataclasses.replace(case, config=case.config.model_copy(update={"engine": "cpu"}))


def test_selftest_on_the_cpu_engine_passes_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = invoke("selftest", "--engine", "cpu", "--only", "odd-nvfp4-fp4", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "PASS: 18 checks" in done.stdout and "paste from here" in done.stdout
    report = json.loads(path.read_text())
    assert report["schema"] == "megamoe-selftest/1" and report["passed"]
    assert [item["group"] for item in report["items"]] == ["one rank, oracle", "token counts", "determinism"]
    assert all(item["failures"] == [] and item["checks"] > 0 for item in report["items"])


def test_selftest_without_a_gpu_says_so_and_exits_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = invoke("selftest", "--quick")
    assert done.exit_code == 2
    assert "no CUDA device is visible" in done.stderr and "--engine cpu" in done.stderr


def test_selftest_virtual_ranks_and_missing_rank_pass_on_the_cpu_engine() -> None:
    plan = make_plan(dataclasses.replace(CPU, only="ranks-nvfp4", quick=True, ep_size=4))
    assert [item.group for item in plan.items] == ["virtual ranks", "time-outs"]
    outcomes = list(plan.items[1].run())
    assert [outcome.fault for outcome in outcomes] == [""] and "rank 3 of 4" in outcomes[0].check


def test_selftest_wrong_output_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second launch is off by 3 percent: both kinds of comparison see it."""
    calls = 0

    def spoiled(*arguments: object) -> torch.Tensor:
        nonlocal calls
        out = honest(*arguments)  # type: ignore[arg-type]
        calls += 1
        if calls % 2 == 0:
            out *= 1.03
        return out

    honest = one_rank.forward
    monkeypatch.setattr(one_rank, "forward", spoiled)
    faults = [outcome.fault for outcome in one_rank.against_oracle(small_case(), None) if outcome.fault]
    assert any("rel_l2" in fault and "other bits" in fault for fault in faults)


def test_selftest_poison_covers_all_but_what_must_be_zero() -> None:
    with Bench(small_case(), 1) as bench:
        one_rank.poison(bench.workspace)
        spaces = {"shared": bench.workspace.shared.own, "local": bench.workspace.local}
        for region in bench.workspace.table.regions():
            content = spaces[region.space][region.offset_bytes : region.end_bytes]
            assert bool((content == 0xFF).all()) is not region.zero_at_start or not content.numel(), region.name


def _plan(*items: Item) -> Plan:
    return Plan(items, ())


def test_selftest_child_that_dies_costs_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends at once is one failure an item, and after a few of them the rest is reported as not run."""
    real = make_plan(CPU)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    events = list(process.run_plan(CPU, Plan(real.items * 2, ())))
    assert {event.index for event in events} == set(range(6))
    assert all(event.outcome is not None and event.outcome.fault for event in events)


def test_selftest_item_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    plan = make_plan(CPU)
    first = dataclasses.replace(plan.items[0], limit_s=0.001)
    events = list(process.run_plan(CPU, Plan((first, *plan.items[1:]), ())))
    faults = [event.outcome.fault for event in events if event.outcome is not None and event.outcome.fault]
    assert len(faults) == 1 and "did not end within 0.001 s" in faults[0]
    assert [event.index for event in events if event.kind == "ended"] == [1, 2]


def test_selftest_report_counts_failures_and_items_that_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_megamoe.selftest.report import Report

    def nothing() -> Iterator[Outcome]:
        return iter(())

    report = Report.begin(CPU, _plan(Item("a", "x", nothing), Item("b", "y", nothing)), [])
    report.items[0].add(Outcome("one", rel_l2=1e-4))
    report.items[0].add(Outcome("two", "wrong", 5, 2e-3))
    assert not report.passed and report.items[0].worst_rel_l2 == 2e-3 and report.items[0].launches == 6
    assert report.faults() == ["a, x, two: wrong"]
    assert report.rows()[1][5] == "not run"


@pytest.mark.parametrize("arch", list(FAMILIES))
@pytest.mark.parametrize("quick", [True, False])
def test_selftest_needed_kernels_are_legal_and_cover_every_tile(arch: str, quick: bool) -> None:
    family = FAMILIES[arch]
    target = Target(family, 148, quick, ep_size=8)
    kernels = needed_kernels(target)
    keys = [family.object_key(family.kernel(spec, tile)).digest for spec, tile in kernels]
    assert len(set(keys)) == len(keys) > 0
    if not quick:
        basic = next(case for case in selected(quick=False) if case.name == EVERY_TILE)
        spec = family.layer_spec(basic.config, 1, basic.mode)
        tiles = {tile.name for own, tile in kernels if own == spec}
        space = family.tactic_space(spec, 148)
        assert tiles == {family.tile_of(tactic).name for tactic in space.legal_candidates(384)}


def test_selftest_plan_leaves_out_what_an_architecture_lacks_with_the_reason() -> None:
    plan = make_plan(Target(FAMILIES["sm_100a"], 148, quick=False, ep_size=8))
    reasons = dict(plan.left_out)
    assert "no bf16 activations" in reasons["small-bf16"]
    assert "intermediate_size 336" in reasons["odd-nvfp4"]
    groups = {item.group for item in plan.items}
    assert groups >= {"one rank, oracle", "token counts", "determinism", "graphs", "time-outs"}


def test_selftest_unknown_case_is_refused() -> None:
    with pytest.raises(MegaMoeConfigError, match="none is named 'nonsense'"):
        make_plan(dataclasses.replace(CPU, only="nonsense"))


def test_selftest_routings_fit_the_caps() -> None:
    for case in one_rank_cases():
        for seed, routing in enumerate(case.routings):
            ids = one_rank.inputs.named_ids(routing, case.config, seed, "cpu")
            assert ids.shape[0] <= case.config.max_tokens_per_rank, (case.name, routing)
    for case in rank_cases():
        make = partial(one_rank.inputs.rank_ids, case.config, case.ep_size)
        for routing in case.routings:
            assert make(case.ep_size - 1, 5, routing, 1, "cpu").shape == (5, case.config.top_k)
