# SPDX-License-Identifier: Apache-2.0
"""What the GPU suite decides without a GPU: its matrix, its inputs, what it makes of other programs' output."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from microbench import environment
from microbench.routing import RoutingName
from tools import run_gpu_suite
from tools.gpu_suite import correctness, exchange, fixed_cost, kernels, sanitized, sanitizer, stability
from tools.gpu_suite.rank_inputs import BENCH_ROUTINGS, BENCH_TOKENS, ROUTINGS, make_inputs
from tools.gpu_suite.ranks import join
from tools.gpu_suite.shared_fields import SYSTEM_BYTES, field_at, fields, role_of
from tools.ptxsim.kept import KEPT
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.selftest.inputs import named_ids
from vendored_kernels.sm90.config import TILES, fc1_steps, fc2_steps

MODES = ["bf16", "nvfp4"]
ONE_RANK, RANKS = KEPT["sm90_nvfp4"], KEPT["sm90_ranks3"]


# ------------------------------------------------------------------------------------------------------------ matrix
def test_correctness_every_preset_runs_both_modes_over_every_wire() -> None:
    seen = {(case.name.split("-bf16")[0].split("-nvfp4")[0], case.spec.activation_mode, case.spec.combine_format)
            for case in correctness.all_cases()}  # fmt: skip
    assert {(name, mode, wire) for name in PRESETS for mode in MODES for wire in ("bf16", "fp8", "fp4")} <= seen


def test_correctness_presets_spread_the_tiles_over_modes_wires_and_presets() -> None:
    presets = [case for case in correctness.all_cases() if case.name not in correctness.TILES_OF]
    for key in (lambda c: (c.spec.activation_mode, c.spec.combine_format), lambda c: c.name.split("-")[1]):
        groups: dict[object, set[str]] = {}
        for case in presets:
            groups.setdefault(key(case), set()).update(case.tiles)
        assert all(len(tiles) >= 6 for tiles in groups.values()), groups


def test_correctness_kimi_k2_has_its_published_shape() -> None:
    spec = next(case.spec for case in correctness.all_cases() if case.name == "kimi-k2-nvfp4")
    assert (spec.hidden_size, spec.intermediate_size, spec.top_k, spec.num_experts) == (7168, 2048, 8, 384 // 8)


def test_correctness_every_routing_of_a_case_can_be_drawn() -> None:
    for case in correctness.all_cases():
        for seed, routing in enumerate(case.routings):
            ids = named_ids(routing, case.spec, seed, "cpu")
            assert ids.shape[1] == case.spec.top_k and ids.shape[0] <= 1200, (case.name, routing)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("small-bf16", ["small-bf16"]),
        ("odd-nvfp4,tiny", ["tiny-odd-bf16", "odd-nvfp4"]),
        ("gpt-oss", [f"gpt-oss-120b-{mode}{wire}" for mode in MODES for wire in ("", "-fp8", "-fp4")]),
    ],
)
def test_correctness_only_takes_exact_names_before_parts_of_names(only: str, names: list[str]) -> None:
    assert [case.name for case in correctness.wanted(only)] == names


def test_needed_kernels_are_those_of_the_named_parts_and_once() -> None:
    found = kernels.needed(["correctness"], [], MODES)
    assert len(found) < 60 and len({repr(config) for config in found}) == len(found)
    assert set(map(repr, kernels.needed(["graph", "faults"], [], MODES))) < set(map(repr, found))
    assert len(kernels.needed(["sanitizer", "exchange-sanitizer"], [], MODES)) == 4
    assert len(kernels.needed(["sanitizer"], [], ["nvfp4"])) == 1
    assert kernels.needed(["layers-ranks", "rivals"], [], MODES) == []


def test_determinism_has_the_largest_size_in_both_modes() -> None:
    large = [config for config in stability.needed("determinism") if config.layer.hidden_size == 7168]
    assert [config.layer.activation_mode for config in large] == MODES


# ------------------------------------------------------------------------------------------------------------ inputs
def test_exchange_runs_every_routing_of_the_microbench_and_an_imbalance() -> None:
    assert {name for name, _ in BENCH_ROUTINGS.values()} == set(RoutingName)
    assert any(imbalance for _, imbalance in BENCH_ROUTINGS.values())


@pytest.mark.parametrize("case", exchange.SPECS)
def test_exchange_inputs_of_every_routing_fit_the_layer(case: str) -> None:
    spec, _ = exchange.SPECS[case]
    counts = [rank % 3 for rank in range(spec.ep_size)]
    for name in (*ROUTINGS, *BENCH_ROUTINGS):
        inputs = make_inputs(spec, counts, name, 5, int32=True, device="cpu")
        assert len(inputs) == spec.ep_size
        tokens = [i.tokens for i in inputs]
        assert tokens == counts or (name in BENCH_ROUTINGS and max(tokens) == BENCH_TOKENS <= exchange.CAP)
        for i in inputs:
            assert i.ids.dtype == torch.int32 and i.ids.shape == i.weights.shape == (i.tokens, spec.top_k)
            assert i.weights.dtype == torch.float32 and i.x.shape == (i.tokens, spec.hidden_size)
    assert 0 in [i.tokens for i in make_inputs(spec, counts, "bench zero-rank", 5, device="cpu")]


def test_exchange_imbalance_loads_one_rank_more_than_the_mean() -> None:
    spec, _ = exchange.SPECS["ranks-nvfp4"]
    ids = join(make_inputs(spec, [], "bench hot-rank, imbalance 1.5", 3, device="cpu")).ids
    rows = torch.bincount(ids.flatten() // spec.num_local_experts, minlength=8)
    assert int(rows.max()) == pytest.approx(1.5 * ids.numel() / 8, abs=8)


def test_exchange_graphs_say_which_tiles_and_buckets_they_captured() -> None:
    spec, _ = exchange.SPECS[exchange.SOAK_SPEC]
    captured = [exchange._captured(spec, 16, tile) for tile in exchange.SOAK_TILES]
    assert [c["tile"] for c in captured] == list(exchange.SOAK_TILES)
    assert all(c["token_widths"] == TILES[c["tile"]].token_widths for c in captured)
    assert captured[0]["buckets"][0] == 1


@pytest.mark.parametrize(("part", "mode"), [(part, mode) for part in sanitized.CASES for mode in MODES])
def test_sanitized_launch_is_small_and_reaches_every_width(part: str, mode: str) -> None:
    config = sanitized.kernel_of(part, mode)
    spec = config.layer
    inputs = sanitized.make_inputs(spec, "cpu")
    joined = join(inputs)
    assert [i.tokens for i in inputs] == list(sanitized.TOKENS[spec.ep_size])
    masked = (joined.ids < 0).all(dim=1)
    assert int(masked.sum()) == 1 and bool(torch.isnan(joined.weights[masked]).all())
    rows = torch.bincount(joined.ids[joined.ids >= 0], minlength=spec.num_experts).tolist()
    assert rows == list(sanitized.ROWS[spec.ep_size])
    widest = config.tile.widest
    blocks = [n for count in rows for n in (*([widest] * (count // widest)), count % widest) if n]
    widths = {next(w for w in config.tile.token_widths if w >= n) for n in blocks}
    assert widths == set(config.tile.token_widths)
    for rank in range(spec.ep_size):  # tiles and stages of a CTA on average: more than the rings hold
        own = rows[rank * spec.num_local_experts : (rank + 1) * spec.num_local_experts]
        own_blocks = sum(-(-count // widest) for count in own)
        tiles = own_blocks * (config.fc1_row_tiles + config.fc2_row_tiles)
        fc1_stages = -(-fc1_steps(spec) // config.steps_per_stage)
        fc2_stages = -(-fc2_steps(spec) // config.steps_per_stage)
        stages = own_blocks * (config.fc1_row_tiles * fc1_stages + config.fc2_row_tiles * fc2_stages)
        assert tiles / sanitized.CTAS > config.ring_slots
        assert stages / sanitized.CTAS > max(config.weight_stages, config.token_stages)


# --------------------------------------------------------------------------------------------------------- sanitizers
def test_shared_fields_are_where_the_dsl_puts_them() -> None:
    expected = {
        "wfull": 0, "wempty": 72, "tfull": 144, "tempty": 216, "ifull": 288, "iempty": 352, "done": 416, "stamps": 480,
        "info": 496, "control": 752, "noted": 816, "rows": 896, "table": 1152, "exchange": 2752, "staging": 2816,
        "tokens": 5120, "weights": 41984,
    }  # fmt: skip
    assert {field.name: field.offset for field in fields(ONE_RANK)} == expected
    moved = {"staging": 3328, "tokens": 6144, "weights": 43008}
    assert {field.name: field.offset for field in fields(RANKS)} == expected | moved


def test_field_at_masks_the_cluster_and_says_what_lies_outside() -> None:
    known = fields(ONE_RANK)
    assert field_at(SYSTEM_BYTES + 496 + 35, known) == ("info", 35)
    assert field_at((1 << 24) + SYSTEM_BYTES + 896, known) == ("rows", 0)
    assert field_at(0x10, known)[0] == "outside"


def test_role_of_threads() -> None:
    assert [role_of(t, RANKS) for t in (0, 255, 256, 288, 320, 352, 384, 511)] == [
        "math", "math", "W", "T", "R", "Z", "D", "D",
    ]  # fmt: skip


NAME = "kernel_cutlass_kernel_vendored_kernelssm90kernelSm90MegaMoeNvfp4Kernel_object_at___CopyAtom_0"


def _record(kind: str, address: int, first: tuple[str, int, int], second: tuple[str, int, int]) -> list[str]:
    head = f"========= Error: Potential {kind} hazard detected at __shared__ 0x{address:x} in block (3,0,0) :"
    sides = [f"=========     {what} Thread ({thread},0,0) at {NAME}+0x{at:x}" for what, thread, at in (first, second)]
    return [head, *sides, "=========     Current Value : 0, Incoming Value : 181", "========= "]


def _output(records: list[list[str]], ok: str = "true") -> str:
    lines = ["========= COMPUTE-SANITIZER", f'{{"case": "x", "ok": {ok}}}', *(line for r in records for line in r)]
    lines.append(f"========= RACECHECK SUMMARY: {len(records)} hazards displayed ({len(records)} errors, 0 warnings)")
    return "\n".join(lines)


INFO, ROWS, STAGING = (SYSTEM_BYTES + offset for offset in (496, 896, 2816))
RING = [_record("RAW", INFO + i, ("Write", 256, 0x28C0), ("Read", 40, 0x94D0)) for i in range(4)]
WORD = _record("WAR", ROWS + 5, ("Read", 40, 0x9500), ("Write", 290, 0x2960))


def test_racecheck_groups_hazards_by_field_and_sites_and_explains_ring_entries() -> None:
    said = sanitizer.judge("racecheck", 99, _output([*RING, WORD]), ONE_RANK)
    assert said["ok"] and said["unexplained"] == [] and said["hazards"] == 5
    entry, word = said["groups"]
    assert (entry["field"], entry["first"], entry["second"]) == ("info", "W write 0x28c0", "math read 0x94d0")
    assert entry["hazards"] == 4 and entry["offsets"] == [0, 3] and entry["kind"] == "RAW"
    assert (word["field"], word["kind"], word["second"]) == ("rows", "WAR", "T write 0x2960")
    assert "kernel+0x2960" in word["examples"][0][2]
    assert said["verdict"] == "RACECHECK SUMMARY: 5 hazards displayed (5 errors, 0 warnings)"


@pytest.mark.parametrize(
    "record",
    [
        _record("RAW", INFO, ("Write", 12, 0x500), ("Read", 256, 0x28C0)),  # a math warp writes a ring entry
        _record("RAW", STAGING, ("Write", 256, 0x500), ("Read", 1, 0x600)),  # W has nothing to do there
        _record("WAW", ROWS, ("Write", 290, 0x500), ("Write", 260, 0x600)),  # one of two writers is not T
        _record("RAW", 0x10, ("Write", 256, 0x500), ("Read", 1, 0x600)),  # outside of every field
        ["========= Error: Potential RAW hazard detected at __shared__ 0x5f0 in block (0,0,0) :", "?", "?"],
    ],
)
def test_racecheck_any_other_hazard_is_unexplained(record: list[str]) -> None:
    said = sanitizer.judge("racecheck", 99, _output([*RING, record]), ONE_RANK)
    assert not said["ok"] and len(said["unexplained"]) == 1 and len(said["groups"]) == 1


def test_racecheck_words_of_a_table_are_explained_by_place() -> None:
    """Two words of the exchange's tables go from W to D at a barrier; other words do not."""
    exchange = SYSTEM_BYTES + 2752
    lost = exchange + 12 * RANKS.layer.ep_size
    blocks = [_record("RAW", lost + i, ("Write", 256, 0x5090), ("Read", 384, 0xBD30)) for i in range(4, 12)]
    said = sanitizer.judge("racecheck", 99, _output(blocks), RANKS)
    assert said["ok"] and said["groups"][0]["hazards"] == 8
    sent = _record("RAW", lost, ("Write", 256, 0x5090), ("Read", 384, 0xBD30))
    assert not sanitizer.judge("racecheck", 99, _output([*blocks, sent]), RANKS)["ok"]


def test_racecheck_with_hazards_that_were_not_printed_fails() -> None:
    """The tool counts its summaries, one an instruction, beside the hazards."""
    output = _output(RING).replace("(4 errors, 0 warnings)", "(4 errors, 1 warnings)")
    assert not sanitizer.judge("racecheck", 99, output, ONE_RANK)["ok"]
    summary = f"========= Error: Race reported between Write access at {NAME}+0x28c0\n"
    pair = f"=========     and Read access at {NAME}+0x94d0 [4 hazards]\n"
    said = sanitizer.judge("racecheck", 99, summary + pair + output, ONE_RANK)
    assert said["ok"] and len(said["analysis"]) == 2 and NAME not in said["analysis"][0]


def test_racecheck_without_hazards_passes_and_without_a_verdict_or_right_result_fails() -> None:
    assert sanitizer.judge("racecheck", 0, _output([]), ONE_RANK)["ok"]
    assert not sanitizer.judge("racecheck", 99, _output(RING, "false"), ONE_RANK)["ok"]
    assert not sanitizer.judge("racecheck", 0, '{"ok": true}', ONE_RANK)["ok"]
    # hazards were counted, but none could be read
    unread = '{"ok": true}\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)'
    assert not sanitizer.judge("racecheck", 99, unread, ONE_RANK)["ok"]


def test_racecheck_that_is_late_keeps_what_it_had_said() -> None:
    said = sanitizer.judge("racecheck", None, _output(RING), ONE_RANK)
    assert not said["ok"] and said["verdict"] == "did not end in time" and said["hazards"] == 4


def test_memcheck_passes_with_no_errors_and_a_right_result_only() -> None:
    good = '{"ok": true}\n========= ERROR SUMMARY: 0 errors'
    assert sanitizer.judge("memcheck", 0, good, ONE_RANK)["ok"]
    assert not sanitizer.judge("memcheck", 0, good.replace("true", "false"), ONE_RANK)["ok"]
    assert not sanitizer.judge("memcheck", 99, good.replace("0 errors", "2 errors"), ONE_RANK)["ok"]
    assert not sanitizer.judge("memcheck", 127, "no such file", ONE_RANK)["ok"]


def test_watched_ends_the_whole_group_and_returns_the_output_so_far() -> None:
    script = "import time; print('said', flush=True); time.sleep(60)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"
    started = time.monotonic()
    assert sanitizer.watched([sys.executable, "-c", nested], 3.0) == (None, "said\n")
    assert time.monotonic() - started < 20
    assert sanitizer.watched([sys.executable, "-c", "print(1)"], 60.0) == (0, "1\n")
    assert sanitizer.watched(["/no/such/sanitizer"], 1.0)[0] == 127


def test_sanitizer_runs_each_tool_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[list[str], float]] = []

    def fake(command: list[str], limit_s: float) -> tuple[int, str]:
        seen.append((command, limit_s))
        return 0, f"{_output([])}\n========= ERROR SUMMARY: 0 errors"

    monkeypatch.setattr(sanitizer, "watched", fake)
    found = list(sanitizer.run("exchange-sanitizer", MODES, tmp_path, ["synccheck", "racecheck"]))
    assert [(r["check"], r["mode"]) for r in found] == [(t, m) for m in MODES for t in ("synccheck", "racecheck")]
    assert [limit for _, limit in seen] == [60.0, 560.0] * 2
    assert set(run_gpu_suite.SANITIZERS) == set(sanitizer.TOOLS)
    assert set(run_gpu_suite.SANITIZER_PARTS) == set(sanitized.CASES)
    command = seen[1][0]
    assert command[command.index("--tool") + 1] == "racecheck"
    assert command[-5:] == ["tools.gpu_suite.sanitized", "exchange-sanitizer", "bf16", "--cache", str(tmp_path)]


# ------------------------------------------------------------------------------------------------------------ reports
@pytest.mark.parametrize(
    ("status", "last", "counts", "ok"),
    [
        (0, "12 passed in 3.21s", (12, 0, 0, 0), True),
        (0, "11 passed, 1 skipped in 3.21s", (11, 0, 1, 0), False),
        (1, "2 failed, 9 passed, 1 error in 3.21s", (9, 2, 0, 1), False),
        (0, "3 skipped in 0.10s", (0, 0, 3, 0), False),
        (5, "no tests ran in 0.01s", (0, 0, 0, 0), False),
    ],
)
def test_layers_count_tests_and_a_skipped_one_fails(status: int, last: str, counts: tuple[int, ...], ok: bool) -> None:
    said = stability.pytest_result(status, f"...\nSKIPPED [1] tests/gpu/a.py:3: needs mpi4py\n{last}\n")
    assert tuple(said["counts"].values()) == counts and said["ok"] is ok
    assert said["skips"] == ["SKIPPED [1] tests/gpu/a.py:3: needs mpi4py"]


def test_fixed_cost_reports_both_differences() -> None:
    full, empty = ({"ranks": 148.5, "together": 110.2, "alone": 103.8}, {"ranks": 6.1, "together": 2.1, "alone": 5.9})
    found = fixed_cost.costs(full, empty)
    assert found["together_us"] == 110.2 and found["alone_empty_us"] == 5.9
    assert found["together_minus_alone_us"] == 6.4
    assert found["together_minus_alone_without_empty_us"] == pytest.approx((110.2 - 2.1) - (103.8 - 5.9), abs=0.01)
    assert found["ranks_minus_alone_us"] == 44.7


def test_suite_lists_the_kernels_of_a_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run_gpu_suite.py", "sanitizer", "exchange-sanitizer", "--cache", "nowhere", "--modes", "bf16", "--needs"]
    monkeypatch.setattr(sys, "argv", words)
    assert run_gpu_suite.main() == 0
    assert capsys.readouterr().out.endswith("\n2 kernels\n")
    monkeypatch.setattr(sys, "argv", [*words, "--sanitizers", "racecheck,lint"])
    with pytest.raises(SystemExit):
        run_gpu_suite.main()
    assert "unknown sanitizers ['lint']" in capsys.readouterr().err


def test_commit_comes_from_git_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc123")
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    assert environment.commit() == "abc123"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    assert environment.commit() is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(environment, "_git", lambda *words: "0f" if words[0] == "rev-parse" else " M file")
    assert environment.commit() == "0f-dirty"
