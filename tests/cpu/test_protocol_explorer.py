# SPDX-License-Identifier: Apache-2.0
"""The protocol's model: clean in every interleaving, and every thing that can be taken from it is missed (design D6).

The full study is `python -m tools.protocol_explorer --full --mutants`; this is its quick form, plus random schedules of
larger cases. No test depends on time.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.protocol_explorer import __main__ as cli
from tools.protocol_explorer import families, study
from tools.protocol_explorer.explore import explore, shortest_fault, walk
from tools.protocol_explorer.machine import ADD, TAGS, WAIT, Op
from tools.protocol_explorer.protocol import Protocol
from tools.protocol_explorer.scenario import Scenario, rotate, routings
from tools.protocol_explorer.variants import BANKED, CLEARED, EDGES, PROTOCOL, Variant, all_variants
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.regions import Geometry, RegionTable

ROOT = Path(__file__).parents[2]
HERE = study.Workers(1)
VARIANTS = {variant.name: variant for variant in all_variants()}

EVERYTHING = Scenario(  # two CTAs, duplicates, a masked slot, T = 0 ranks, tiles and blocks of several rows
    (
        (((0, 0), (1, -1), (0, 3)), ()),
        ((), ((2, 3), (0, 1))),
        (((0, 2), (0, 1), (0, 0), (2, 2)), ((0, 0),)),
    ),
    local_experts=2,
    top_k=2,
    ctas=2,
    block_rows=2,
    tile_rows=3,
    row_tiles=2,
)
EVERYTHING_IN_A_RING = Scenario(
    EVERYTHING.launches, local_experts=2, top_k=2, ctas=2, row_tiles=2, ring_slots=2, order="block slow"
)


def _ops(scenario: Scenario) -> tuple[Protocol, list[Op]]:
    protocol = Protocol(scenario, PROTOCOL)
    programs = protocol.machine().programs
    return protocol, [op for launch in programs for rank in launch for program in rank for op in program]


def _object(protocol: Protocol, address: int) -> str:
    """`rank 1 pool_ready[0][1]` -> `pool_ready`."""
    return protocol.memory.name(address).split()[2].split("[")[0]


@pytest.mark.parametrize("family", families.PROTOCOL_FAMILIES, ids=lambda family: family.name)
def test_protocol_every_interleaving_of_a_family_is_clean(family: families.Family) -> None:
    row = study.study_family(family, HERE, quick=True)
    assert row.ok, row
    assert row.explored == family.quick
    assert row.states > 50 * row.explored  # an explorer that stops early sees a handful of states


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_taken_away_is_reported_or_safe_with_a_reason(name: str) -> None:
    row = study.study_variant(VARIANTS[name], quick=True)
    assert row.ok, row


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_always_changes_the_model(name: str) -> None:
    variant = VARIANTS[name]
    scenario = EVERYTHING_IN_A_RING if variant.ring else EVERYTHING
    machines = [Protocol(scenario, v).machine() for v in (PROTOCOL, variant)]
    facts = [(m.programs, m.memory.initial) for m in machines]
    assert facts[0] != facts[1]


def test_variants_cover_every_wait_and_release_of_the_programs() -> None:
    """Read off the programs themselves, so that a wait or release added to the protocol cannot lack its variants."""
    waits, releases = set(), set()
    for scenario in (EVERYTHING, EVERYTHING_IN_A_RING):
        protocol, ops = _ops(scenario)
        waits |= {f"{op.step}: {_object(protocol, op.args[0][0])}" for op in ops if op.code in (WAIT, TAGS)}
        releases |= {_object(protocol, address) for op in ops if op.code == ADD for address, _ in op.args}
    assert waits == {wait for edge in EDGES for wait in edge.waits}
    assert releases == {edge.release for edge in EDGES if edge.counted}
    dropped = set().union(*(variant.drop for variant in all_variants()))
    assert waits | releases <= dropped
    assert waits == set().union(*(variant.hoist for variant in all_variants()))
    assert set(BANKED) == set().union(*(variant.one_bank for variant in all_variants()))
    assert {f"clear: {name}" for name in CLEARED} <= dropped


def test_model_objects_are_regions_of_the_product() -> None:
    config = MegaMoeConfig.create(hidden_size=64, intermediate_size=32, num_experts=4, top_k=2, max_tokens_per_rank=4)
    regions = {region.name for region in RegionTable(Geometry.from_config(config, 2)).regions()}
    protocol, ops = _ops(EVERYTHING)
    shared = {
        "header",
        "size_cells",
        "payload_tags",
        "index_rows",
        "payload",
        "payload_scales",
        "result_data",
        "result_scales",
    }
    shared |= {"return_counters", "expected_returns", "epoch", "pool", "pool_meta", "fc1_out", "fc1_ready"}
    assert shared <= regions
    touched = {_object(protocol, a[0]) for op in ops if op.code in (WAIT, TAGS, ADD) for a in op.args}
    assert {"size_cells", "return_counters", "fc1_ready"} <= touched


@pytest.mark.parametrize("family", families.QUICKLY_CHECKED, ids=lambda family: family.name)
def test_reductions_never_change_a_verdict(family: families.Family) -> None:
    for scenario in family.scenarios(quick=True):
        comparisons, fine_states, reduced_states, disagreements = study.compare(scenario)
        assert not disagreements
        assert comparisons >= 10
        assert fine_states > 2 * reduced_states  # or nothing was reduced and the comparison says nothing


def test_ring_deadlocks_exactly_where_the_rule_says() -> None:
    rows = study.study_ring(quick=True)
    assert [row for row in rows if not row.ok] == []
    assert {row.verdict for row in rows} == {"ok", "deadlock"}


def test_ring_block_slow_with_one_slot_never_deadlocks_on_two_ranks() -> None:
    skew = Scenario((((0, 0), (0, 1)), ((1, 1), (1, 0))), top_k=1)
    routed = tuple(tuple(tuple((e,) for e in rank) for rank in launch) for launch in skew.launches)
    for order, verdict in (("block slow", "ok"), ("row tile slow", "deadlock")):
        scenario = Scenario(routed, row_tiles=2, ring_slots=1, order=order)
        assert explore(scenario, PROTOCOL).verdict == verdict


@settings(deadline=None, max_examples=60)
@given(chance=st.randoms(use_true_random=False), seed=st.integers(0, 2**32 - 1))
def test_protocol_random_schedules_of_larger_cases_are_clean(chance: random.Random, seed: int) -> None:
    outcome = walk(study.random_scenario(chance), PROTOCOL, seed)
    assert outcome.ok, outcome


@pytest.mark.parametrize(
    "name",
    [
        "no wait pull: payload_tags",
        "no wait reduce: return_counters",
        "one bank of pool_ready",
        "return_counters in tiles, ranks differ in column tiles",
        "payload of the next launch staged before the reduction",
    ],
)
def test_random_schedules_find_faults_of_larger_cases(name: str) -> None:
    """The property test above could not fail otherwise."""
    found = (walk(study.random_scenario(random.Random(seed)), VARIANTS[name], seed) for seed in range(200))
    assert any(not outcome.ok for outcome in found)


def test_explore_deadlock_names_who_waits_for_what() -> None:
    outcome = explore(next(iter(families.WITNESSES[2].scenarios())), Variant("x", "x", drop=frozenset({"pool_ready"})))
    assert outcome.verdict == "deadlock"
    assert "math 0: fc1 waits for rank" in outcome.detail and "pool_ready" in outcome.detail


def test_explore_more_states_than_the_limit_is_not_ok() -> None:
    outcome = explore(EVERYTHING, PROTOCOL, reduce=True, limit=50)
    assert outcome.verdict == "limit" and not outcome.ok


def test_shortest_fault_replays_to_the_fault() -> None:
    outcome = shortest_fault(next(iter(families.WITNESSES[2].scenarios())), VARIANTS["no wait reduce: return_counters"])
    assert outcome.verdict == "early read"
    assert outcome.trace and all(line.startswith("rank ") for line in outcome.trace)
    assert "reduce finds" in outcome.detail


def test_routings_up_to_rotation_lose_no_class() -> None:
    kept = list(routings(3, 1, masked=True))
    every = {rotate(routing, by, 3, 1) for routing in kept for by in range(3)}
    assert len(every) == 5**3  # no token, a masked one, or one of three experts, on each of three ranks
    assert len(kept) == (5**3 + 2 * 5) // 3  # Burnside: rotations by 1 and 2 fix five routings each


def test_cli_reports_tables_json_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = families.Family("small", 2, 1, 1)
    monkeypatch.setattr(cli, "PROTOCOL_FAMILIES", (small,))
    monkeypatch.setattr(cli, "WALKS", {True: 3})
    out = tmp_path / "report.json"
    result = CliRunner().invoke(cli.main, ["--json", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["ok"] and report["protocol"][0]["verdicts"] == {"ok": 6}
    assert "everything is as it must be" in result.output
    monkeypatch.setattr(study, "PROTOCOL", VARIANTS["no wait reduce: return_counters"])
    result = CliRunner().invoke(cli.main, ["--json", str(out)])
    assert result.exit_code == 1 and "FAIL" in result.output
    assert not json.loads(out.read_text())["ok"]


def test_cli_trace_unknown_or_ambiguous_name_lists_the_mutants() -> None:
    result = CliRunner().invoke(cli.main, ["--trace", "never cleared"])
    assert result.exit_code == 1 and "claim never cleared" in result.output
    result = CliRunner().invoke(cli.main, ["--trace", "first tag equals"])
    assert result.exit_code == 0 and "wrong count" in result.output


def test_document_shows_the_committed_run_and_every_variant() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    report = json.loads((ROOT / "tools" / "protocol_explorer" / "full.json").read_text())
    assert report["ok"] and report["command"].endswith("--json report.json")
    assert [family["family"] for family in report["protocol"]] == [f.name for f in families.PROTOCOL_FAMILIES]
    for family in report["protocol"]:
        states = f"{family['states']:,}".replace(",", " ")
        assert any(line.startswith(f"| {family['family']} |") and states in line for line in text.splitlines())
    assert [variant["name"] for variant in report["variants"]] == list(VARIANTS)
    for name, variant in VARIANTS.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert ("**safe**" in row) == bool(variant.safe)
