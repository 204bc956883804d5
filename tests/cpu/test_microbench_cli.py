# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench` from its command line: exit codes, text, JSON, CSV, figures, and two ranks under mpirun."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner, Result

from microbench import check as check_module
from microbench import environment, report
from microbench.cases import preset_case
from microbench.check import CheckResult, Verdict
from microbench.cli import main, repeat_command
from microbench.compare import agreement, compare, describe
from microbench.peaks import find_peaks
from microbench.plot import group_series, memory_of, rival_points
from microbench.rivals.catalog import NOT_RUN, RIVALS
from microbench.routing import Load, RoutingName, by_rows, count_routes, route
from microbench.rows import Measurement, make_row
from microbench.timing import Mode, Timed, merge
from tests.helpers.tactics import tactic
from trtllm_megamoe.comm.launch import Launch, run_mpirun
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels.prepared import LaunchChoice
from trtllm_megamoe.tuning.table import ResolvedTactic
from trtllm_megamoe.tuning.tactic import Tactic

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "tests/data/modelopt_nvfp4_qwen3_moe"
TINY = ["--preset", "qwen3-235b", "--scale-experts", "8", "--scale-channels", "64"]
QUICK = ["--iters", "2", "--warmup", "0", "--threads-per-rank", "1"]

# What the product promises of every row, whatever else the schema has.
PROMISED = [
    "case", "arch", "engine", "ep_size", "virtual_ranks", "tokens_per_rank", "rows_per_expert", "combine_format",
    "activations", "routing", "timing", "us", "samples_us", "pct_sol", "check", "status",
]  # fmt: skip


@pytest.fixture(autouse=True)
def clean_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher variable of the test's own surroundings, and the number of threads as before."""
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_NTASKS", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)


def bench(*arguments: str) -> Result:
    threads = torch.get_num_threads()
    result = CliRunner().invoke(main, arguments, prog_name="python -m microbench")
    torch.set_num_threads(threads)
    return result


def validated(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    schema = json.loads(report.SCHEMA_PATH.read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    for row in document["rows"]:
        assert [name for name in PROMISED if name not in row] == []
    return document


def test_bench_one_rank_says_so_and_writes_valid_files(tmp_path: Path) -> None:
    json_path, csv_path = tmp_path / "a.json", tmp_path / "a.csv"
    result = bench(
        "--engine", "cpu", "--checkpoint", str(QWEN), "--layer", "1", "--tokens-per-rank", "1,5",
        "--combine-format", "bf16,fp8", "--json", str(json_path), "--csv", str(csv_path), *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "no launcher, world size 1" in result.output
    assert "tok/rank = tokens per rank, EP tok = EP total" in result.output
    assert "4 of 4 rows verified and timed" in result.output
    document = validated(json_path)
    assert [(row["combine_format"], row["tokens_per_rank"]) for row in document["rows"]] == [
        ("bf16", 1), ("bf16", 5), ("fp8", 1), ("fp8", 5),
    ]  # fmt: skip
    assert document["env"]["gpu"] is None
    assert document["env"]["object_hashes"] == []
    assert all(row["kernels"] == [] and row["pct_sol"] is None for row in document["rows"])
    with csv_path.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4
    assert float(lines[1]["us.p50"]) == document["rows"][1]["us"]["p50"]
    assert lines[0]["pct_sol"] == ""


def test_bench_share_and_virtual_ranks_describe_themselves(tmp_path: Path) -> None:
    share, virtual = tmp_path / "share.json", tmp_path / "virtual.json"
    result = bench(
        "--preset", "deepseek-v4-pro", "--scale-channels", "64", "--share-of-ep", "16", "--rows-per-expert", "3",
        "--json", str(share), *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = validated(share)["rows"]
    assert (row["case"], row["ep_size"], row["share_of_ep"], row["num_experts"]) == ("deepseek-v4-pro", 1, 16, 24)
    assert row["expert_rows"] == {"mean": 3.0, "max": 3, "max_over_mean": 1.0}
    assert (row["rows_per_expert"], row["requested_rows_per_expert"]) == (3.0, 3)
    assert "SHRUNK" in row["label"]
    assert "SHRUNK" in result.output

    result = bench(
        *TINY, "--virtual-ranks", "4", "--routing", "ragged,zero-rank,hot-rank", "--imbalance", "2",
        "--tokens-per-rank", "4", "--json", str(virtual), *QUICK,
    )  # fmt: skip
    assert result.exit_code == 2, "imbalance belongs to hot-rank only"
    result = bench(
        *TINY, "--virtual-ranks", "4", "--routing", "ragged,zero-rank", "--tokens-per-rank", "4",
        "--json", str(virtual), *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    ragged, zero = validated(virtual)["rows"]
    assert (ragged["ep_size"], ragged["virtual_ranks"]) == (4, 4)
    assert sorted(ragged["tokens_by_rank"]) == [1, 2, 3, 4]
    assert sorted(zero["tokens_by_rank"]) == [0, 0, 4, 4]
    assert (ragged["ep_tokens"], zero["ep_tokens"]) == (10, 8)


def test_bench_rivals_that_cannot_run_say_why(tmp_path: Path) -> None:
    path = tmp_path / "rivals.json"
    result = bench(*TINY, "--engine", "cpu", "--rivals", "--tokens-per-rank", "2,3", "--json", str(path), *QUICK)
    assert result.exit_code == 0, result.output
    for row in validated(path)["rows"]:
        assert [rival["status"] for rival in row["rivals"]] == ["skipped"] * (len(RIVALS) + len(NOT_RUN))
        assert all(rival["skip_reason"] and rival["us"] is None for rival in row["rivals"])
    assert "torch._grouped_mm, bf16 weights: skipped: needs a GPU" in result.output


def test_bench_unverified_result_is_visible_and_exits_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise ImportError("no such reference")

    monkeypatch.setattr(check_module, "oracle_forward", broken)
    path = tmp_path / "bad.json"
    result = bench(*TINY, "--tokens-per-rank", "2", "--json", str(path), *QUICK)
    assert result.exit_code == 1
    assert "NOT VERIFIED" in result.output
    assert "no such reference" in result.output
    (row,) = validated(path)["rows"]
    assert (row["status"], row["us"], row["samples_us"]) == ("failed", None, [])
    assert row["check"]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--preset"),
        (["--preset", "qwen3-235b", "--checkpoint", str(QWEN), "--layer", "0"], "either"),
        (["--checkpoint", str(QWEN)], "--layer"),
        (["--checkpoint", str(QWEN), "--layer", "5"], "layer 5"),
        (["--checkpoint", str(QWEN), "--layer", "0", "--scale-experts", "2"], "presets"),
        (["--preset", "qwen3-235b", "--layer", "0"], "--layer"),
        (["--preset", "nonesuch"], "nonesuch"),
        ([*TINY, "--tokens-per-rank", "1", "--rows-per-expert", "1"], "use one of the two"),
        ([*TINY, "--tokens-per-rank", "0"], "at least 1"),
        ([*TINY, "--tokens-per-rank", "1,x"], "1,x"),
        ([*TINY, "--routing", "spiral"], "spiral"),
        ([*TINY, "--routing", "zero-rank"], "at least 2 ranks"),
        ([*TINY, "--engine", "cpu", "--autotune"], "no tactics to choose from"),
        ([*TINY, "--engine", "cpu", "--phases"], "no time stamps"),
        ([*TINY, "--combine-format", "fp2"], "fp2"),
        ([*TINY, "--engine", "cuda"], "cuda"),
        ([*TINY, "--engine", "cpu", "--cuda-graph"], "no CUDA graph"),
        ([*TINY, "--share-of-ep", "2", "--virtual-ranks", "2"], "one rank"),
        ([*TINY, "--virtual-ranks", "3"], "16 experts"),
        ([*TINY, "--json", "/nonexistent-directory/a.json"], "/nonexistent-directory"),
        (["compare", "/nonexistent.json", "/nonexistent.json"], "/nonexistent.json"),
    ],
)
def test_bench_bad_input_exits_2_with_one_message(arguments: list[str], named: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert named in result.output
    assert "Traceback" not in result.output


def test_bench_contradictory_launcher_variables_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    result = bench(*TINY)
    assert result.exit_code == 2
    assert "OMPI_COMM_WORLD_RANK" in result.output


def test_bench_other_engine_than_expected_exits_1() -> None:
    result = bench(*TINY, "--expect-engine", "cuda", *QUICK)
    assert result.exit_code == 1
    assert "--expect-engine" in result.output


def test_bench_two_mpi_ranks_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mpi.json"
    program = ["-m", "microbench", "--checkpoint", str(QWEN), "--layer", "0", "--tokens-per-rank", "1,3",
               "--expect-engine", "cpu", "--json", str(path), *QUICK]  # fmt: skip
    # run_mpirun is the watchdog: it stops the job and raises
    assert run_mpirun(2, program, timeout_s=90) == 0
    document = validated(path)
    assert document["env"]["transport"] == "mpi"
    assert document["env"]["launcher"] == "openmpi"
    assert document["command"].startswith("mpirun -n 2 python -m microbench --checkpoint")
    for row in document["rows"]:
        assert (row["ep_size"], row["virtual_ranks"], row["check"]["passed"]) == (2, 1, True)
        assert row["ep_tokens"] == 2 * row["tokens_per_rank"]
        assert len(row["us"]["per_rank_p50"]) == 2
    out = capfd.readouterr().out
    assert out.count("megamoe-bench/1") == 1, "one rank speaks"


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_bench_bad_input_of_a_job_is_told_by_rank_0_only(
    rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    result = bench(*TINY, "--share-of-ep", "2")
    assert result.exit_code == 2
    assert ("--share-of-ep 2 is one rank's share" in result.output) is speaks


CHOICE = LaunchChoice("sm_90a-n16", "0123abcd", ResolvedTactic(tactic(16), "tuned"))
CLOCKS = {
    "sm_mhz": 1700.0, "sm_mhz_min": 1500.0, "mem_mhz": 3201.0, "power_w": 600.0, "power_w_max": 690.0,
    "temperature_c": 60.0, "readings": 12.0,
}  # fmt: skip


def gpu_measurement(rows_per_expert: int = 64, us: tuple[float, ...] = (700.0, 660.0, 680.0)) -> Measurement:
    """What an H200 would measure, with made-up times."""
    case = preset_case("deepseek-v4-pro").cut_to_share(8)
    workload = by_rows(RoutingName.UNIFORM, rows_per_expert, num_experts=48, top_k=6, ep_size=1, seed=0)
    load = Load(count_routes(route(workload, 0).topk_ids, 48).unsqueeze(0))
    return Measurement(
        case=case, workload=workload, requested_rows=rows_per_expert, tokens_by_rank=(workload.tokens_per_rank,),
        combine_format=CombineFormat.BF16, activations=ActivationMode.BF16, requested_engine="cpu", engine="cpu",
        virtual_ranks=1, max_tokens_per_rank=workload.tokens_per_rank,
        bucket=workload.tokens_per_rank, mode=Mode.BURST, warmup=1, iters=len(us), settle_s=0.0,
        num_layers=1, loads=(load,), check=CheckResult(Verdict.VERIFIED, 1e-5, 1.0, 1e-3, 8, 8, 48),
        timing="cuda_graph", timed=Timed(merge([us]), torch.empty(0), 4), peaks=find_peaks("NVIDIA H200"),
        choice=CHOICE, clocks=CLOCKS,
    )  # fmt: skip


def gpu_row(*amounts: Any, **changes: Any) -> dict[str, Any]:
    """A row as an H200 would give it, computed by the product's own code from made-up times."""
    return {**make_row(gpu_measurement(*amounts)), **changes}


def result_of(*rows: dict[str, Any]) -> dict[str, Any]:
    env = dict.fromkeys(("commit", "gpu", "driver", "cpu", "torch", "cutlass_dsl", "threads_per_rank", "transport"))
    return report.document({**env, "date_utc": "2026-01-01"}, "python -m microbench", rows)


def test_make_row_known_peaks_gives_share_of_the_floor() -> None:
    row = gpu_row()
    # 48 * 64 rows * 132.12 MFLOP at 790 TFLOP/s = 513.8 us; p50 is 680 us
    assert row["sol_us"] == pytest.approx(513.8, rel=1e-3)
    assert row["pct_sol"] == pytest.approx(75.55, rel=1e-3)
    assert row["bound"] == "tensor"
    assert row["tflops"] == pytest.approx(48 * 64 * 132_120_576 / 680e-6 / 1e12)
    assert row["pct_peak_tflops"] == pytest.approx(row["pct_sol"])
    # 48 experts of 37.16 MB
    assert row["hbm_gbs"] == pytest.approx(48 * 37_158_912 / 680e-6 / 1e9)
    assert row["nvl_gbs"] == 0.0
    assert row["tokens_per_s"] == pytest.approx(512 / 680e-6)


def test_gpu_row_says_what_ran_and_at_which_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpu_row()
    properties = json.loads(report.SCHEMA_PATH.read_text())["properties"]["rows"]["items"]
    jsonschema.Draft202012Validator(properties).validate(row)
    assert (row["kernels"], row["object_hash"]) == (["sm_90a-n16"], "0123abcd")
    assert (row["requested_tactic"], row["tactic_source"]) == (None, "tuned")
    assert Tactic.from_json(row["actual_tactic"]) == CHOICE.resolved.tactic
    assert row["clocks"] == CLOCKS
    assert "1,700" in report.text_table([row])

    monkeypatch.setattr(environment, "_gpu_facts", dict)
    monkeypatch.setattr(environment, "device_limits", lambda index: {"sm_max": 1980.0, "limit": 700.0})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    slower = {**row, "clocks": {**CLOCKS, "sm_mhz": 1900.0, "sm_mhz_min": 1400.0}, "object_hash": "ffff"}
    unread = {**row, "clocks": None}
    rows = [{**each, "engine": "cuda"} for each in (row, slower, unread)]
    env = environment.collect(rows, 1, "none", "threads")
    assert env["object_hashes"] == ["0123abcd", "ffff"]
    assert env["clocks_mhz"] == {"sm": 1800.0, "sm_lowest": 1400.0, "mem": 3201.0, "sm_max": 1980.0}
    assert env["power_w"] == {"median": 600.0, "highest": 690.0, "limit": 700.0}
    assert environment.collect([unread], 1, "none", "threads")["clocks_mhz"] is None


def test_pinned_tactic_is_the_requested_one() -> None:
    pinned = replace(CHOICE, resolved=ResolvedTactic(tactic(16), "pinned"))
    row = make_row(replace(gpu_measurement(), choice=pinned))
    assert row["requested_tactic"] == row["actual_tactic"] == tactic(16).to_json()


def test_text_table_names_shared_axes_once_and_units_in_the_header() -> None:
    rows = [gpu_row(16), gpu_row(64), gpu_row(64, mode="lockstep")]
    text = report.text_table(rows)
    assert "all rows: routing uniform, wire bf16" in text
    assert "p50 us" in text
    assert "burst" in text
    assert "75.6" in text  # per cent of the floor


def test_write_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_json(tmp_path / "x.json", result_of(gpu_row(tflops=float("nan"))))


def test_repeat_command_names_the_ranks_and_quotes() -> None:
    assert repeat_command(Launch("openmpi", 0, 8), ["--json", "a b"]) == "mpirun -n 8 python -m microbench --json 'a b'"
    assert repeat_command(Launch("none", 0, 1), []) == "python -m microbench"


def test_compare_matches_rows_and_gives_the_geometric_mean() -> None:
    a = result_of(gpu_row(16, (100.0,)), gpu_row(64, (400.0,)), gpu_row(256))
    b = result_of(gpu_row(64, (100.0,)), gpu_row(16, (400.0,)), gpu_row(64, (9.0,), hidden=4096))
    b["env"]["commit"] = "abc"
    comparison = compare(a, b)
    assert comparison.ratios == [4.0, 0.25]
    assert comparison.geometric_mean == pytest.approx(1.0)
    assert [row["tokens_per_rank"] for row in comparison.only_a] == [2048]
    assert [row["hidden"] for row in comparison.only_b] == [4096]  # another geometry is never compared
    text = describe(comparison)
    assert "commit: None -> abc" in text
    assert "geometric mean of B / A over 2 rows: 1.000" in text


def test_compare_tells_launches_from_replays_where_both_are_there() -> None:
    a = result_of(gpu_row(16, (100.0,)), gpu_row(16, (300.0,), timing="eager"))
    b = result_of(gpu_row(16, (303.0,), timing="eager"), gpu_row(16, (102.0,)))
    assert compare(a, b).ratios == [1.02, 1.01]
    cpu = result_of(gpu_row(16, (1000.0,), timing="cpu", engine="cpu"))
    assert compare(result_of(gpu_row(16, (100.0,))), cpu).ratios == [10.0], "engines are compared, however they launch"


def test_agreement_bounds_are_3_percent_up_to_16_rows_and_10_above(tmp_path: Path) -> None:
    a = result_of(*(gpu_row(rows, (1000.0,)) for rows in (4, 16, 64, 256)))
    b = result_of(gpu_row(4, (971.0,)), gpu_row(16, (1031.0,)), gpu_row(64, (1099.0,)), gpu_row(256, (890.0,)))
    found = agreement(compare(a, b))
    assert [(band["within"], band["rows"]) for band in found["bands"]] == [(1, 2), (1, 2)]
    assert [band["worst_pct"] for band in found["bands"]] == [pytest.approx(3.1), pytest.approx(11.0)]
    assert len(found["outside"]) == 2 and found["agrees"] is False
    text = describe(compare(a, b))
    assert "two runs of one command do not agree" in text
    assert "up to 16 rows per expert: 1 of 2 rows within 3 %; the worst differs by 3.1 %" in text
    assert agreement(compare(a, a))["agrees"] is True
    few = agreement(compare(result_of(gpu_row(4)), result_of(gpu_row(4))))
    assert few["bands"][1] == {"bound_pct": 10.0, "rows": 0, "within": 0, "worst_pct": None}
    for name, result in (("a", a), ("b", b)):
        report.write_json(tmp_path / f"{name}.json", result)
    both = (str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert bench("compare", *both).exit_code == 0
    assert bench("compare", *both, "--agreement").exit_code == 1
    assert bench("compare", both[0], both[0], "--agreement").exit_code == 0


def test_compare_without_common_rows_is_refused() -> None:
    failed = gpu_row(64) | {"us": None}
    with pytest.raises(MegaMoeConfigError, match="no timed row in common"):
        describe(compare(result_of(failed), result_of(gpu_row(64))))


def test_compare_command_fails_above_the_limit(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    report.write_json(a, result_of(gpu_row(64, (100.0,))))
    report.write_json(b, result_of(gpu_row(64, (104.0,))))
    assert bench("compare", str(a), str(b), "--fail-above", "5").exit_code == 0
    assert bench("compare", str(a), str(b), "--fail-above", "3").exit_code == 1


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_draws_floor_and_series(tmp_path: Path, suffix: str) -> None:
    source, output = tmp_path / "a.json", tmp_path / f"figure.{suffix}"
    rows = [gpu_row(n, mode=mode) for n in (64, 1, 16) for mode in ("burst", "lockstep")]
    report.write_json(source, result_of(*rows))
    assert list(group_series(rows)) == ["burst", "lockstep"]
    assert [row["rows_per_expert"] for row in group_series(rows)["burst"]] == [1, 16, 64]
    result = bench("plot", str(source), "--output", str(output))
    assert result.exit_code == 0, result.output
    data = output.read_bytes()
    assert data.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    if suffix == "svg":
        bench("plot", str(source), "--output", str(output))
        assert output.read_bytes() == data, "the same result gives the same figure"


def test_plot_memory_adds_up_and_old_results_have_none(tmp_path: Path) -> None:
    memory = {"weights_bytes": 2_000_000_000, "workspace_bytes": 500_000_000, "transient_bytes": 250_000_000}
    row = gpu_row(16, memory=memory)
    assert memory_of(row) == {"peak": 2.75, "weights": 2.0, "workspace": 0.5}
    on_cpu = gpu_row(16, memory=memory | {"transient_bytes": None})
    assert memory_of(on_cpu) == {"peak": 2.5, "weights": 2.0, "workspace": 0.5}
    assert memory_of({name: value for name, value in row.items() if name != "memory"}) is None
    sizes = []
    for name, rows in (("with", [row]), ("without", [gpu_row(16)])):
        report.write_json(tmp_path / f"{name}.json", result_of(*rows))
        assert bench("plot", str(tmp_path / f"{name}.json"), "--output", str(tmp_path / f"{name}.svg")).exit_code == 0
        sizes.append((tmp_path / f"{name}.svg").stat().st_size)
    assert sizes[0] > sizes[1] + 1000, "a third panel"


def rival_row(name: str, p50: float | None) -> dict[str, Any]:
    """A rival beside a row, timed or not."""
    us = None if p50 is None else {**dict.fromkeys(("p50", "p10", "p90", "mean", "min"), p50), "per_rank_p50": [p50]}
    check = {"verdict": "verified", "rel_l2": 2e-3, "rows_checked": 9, "reason": None}
    status, reason = ("ok", None) if us else ("skipped", "not installed")
    return {
        "rival": name, "version": "1", "region": "sorted rows", "status": status, "skip_reason": reason,
        "check": check if us else None, "us": us,
    }  # fmt: skip


def test_plot_and_footer_show_rivals_with_their_share_of_the_floor(tmp_path: Path) -> None:
    rows = [gpu_row(n, rivals=[rival_row("fast", 513.8 * 2), rival_row("absent", None)]) for n in (16, 64)]
    properties = json.loads(report.SCHEMA_PATH.read_text())["properties"]["rows"]["items"]
    jsonschema.Draft202012Validator(properties).validate(rows[0])
    points = rival_points("rows_per_expert", rows)
    assert list(points) == ["fast"]
    assert points["fast"][1] == (64.0, 513.8 * 2, pytest.approx(50.0, rel=1e-3))
    text = report.footer(rows, "again")
    assert "absent: skipped: not installed" in text
    assert "1,027.6 us, 1.51 x this layer" in text
    source, output = tmp_path / "a.json", tmp_path / "figure.svg"
    report.write_json(source, result_of(*rows))
    assert bench("plot", str(source), "--output", str(output)).exit_code == 0
    assert "fast" in output.read_text() or output.stat().st_size > 10_000


def test_plot_unknown_suffix_or_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    report.write_json(source, result_of(gpu_row(64)))
    assert bench("plot", str(source), "--output", str(tmp_path / "a.bmp")).exit_code == 2
    report.write_json(source, result_of(gpu_row(64) | {"us": None}))
    assert bench("plot", str(source), "--output", str(tmp_path / "a.svg")).exit_code == 2
