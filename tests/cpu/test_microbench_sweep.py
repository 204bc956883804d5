# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench sweep`: which points it asks for, and what it leaves behind when axes fail or time is up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner

from microbench import axes, compare, report, sweep
from microbench.axes import Axis, command_of, one_gpu, several_gpus
from microbench.cases import preset_case
from microbench.cli import main
from microbench.sources import SyntheticSource
from microbench.sweep import Limits
from trtllm_megamoe.comm import single
from trtllm_megamoe.weights.spec import Component, Projection, TensorKey

REPEATED = "rows-deepseek-v4-pro"
ONE_THREAD = ("--threads-per-rank", "1")


def points_of(axis: Axis) -> int:
    """Rows that an axis asks for: the product of its lists."""
    product = 1
    for name, value in zip(axis.arguments, axis.arguments[1:], strict=False):
        if name in ("--rows-per-expert", "--tokens-per-rank", "--routing", "--combine-format", "--mode"):
            product *= len(value.split(","))
    return product


def test_axes_are_few_points_and_commands_that_parse() -> None:
    assert 80 <= sum(points_of(axis) for axis in one_gpu()) <= 150
    assert len({axis.name for axis in one_gpu()}) == len(one_gpu())
    run = main.commands["run"]
    assert isinstance(run, click.Command)
    for axis in one_gpu():
        arguments = command_of(axis, "cuda", ())
        options = run.make_context("run", list(arguments)).params
        assert options["use_cuda_graph"] is (axis.name != "eager")
        assert options["engine"] == "cuda"
        assert arguments.count("--mode") == 1 == arguments.count("--activations")
    by_name = {axis.name: command_of(axis, "cuda", ()) for axis in one_gpu()}
    assert "lockstep" in by_name["lockstep"] and "nvfp4" in by_name["nvfp4-deepseek-v3"]
    assert by_name[axes.REPEAT] == by_name[REPEATED]


def test_small_commands_change_amounts_and_widths_only() -> None:
    for axis in [*one_gpu(), *several_gpus(2)]:
        if not axis.is_run:
            assert command_of(axis, "cpu", (), is_small=True) == [*axis.arguments, "--engine", "cpu"]
            continue
        words = command_of(axis, "cpu", (), is_small=True)
        assert words[-6:] == ["--scale-channels", "64", "--iters", "2", "--warmup", "0"]
        amounts = [words[i + 1] for i, word in enumerate(words) if word in ("--rows-per-expert", "--tokens-per-rank")]
        assert amounts in (["1,2"], ["1,3"]) and "--cuda-graph" not in words and "--phases" not in words
        assert ("--phases" in command_of(axis, "cuda", ())) is axis.name.endswith("phases")


def test_sweep_names_the_kernels_it_needs() -> None:
    result = CliRunner().invoke(main, ["sweep", "--needs"])
    assert result.exit_code == 0, result.output
    *names, total = result.output.split("\n")[:-1]
    assert total == f"{len(names)} kernels" and len(names) == len(set(names))
    # with a bucket at every power of two, steps of any shape meet four tile widths: 5 presets in 2 modes and 2 more
    # wires, then 3 widths of eight ranks in 3 wires, and 5 with time stamps
    assert len(names) <= (5 * 2 + 2) * 4 + 3 * 3 + 5
    plain = [name for name in names if not name.endswith("-timestamps")]
    assert len(plain) == len(names) - 5, "three tiles of one rank and two of eight are also split into phases"
    assert len([name for name in plain if "-r8-" in name]) == 9, "eight ranks share one GPU: three tiles a wire"
    assert len([name for name in names if "h7168-i3072" in name and name.endswith("nvfp4-bf16")]) == 4
    over_gpus = CliRunner().invoke(main, ["sweep", "--needs", "--ranks", "2"]).output.split("\n")[:-1]
    assert over_gpus[-1] == f"{len(over_gpus) - 1} kernels" and len(over_gpus) <= 56
    assert all("-r2-" in name for name in over_gpus[:-1] if "h7168-i2048-e32-k8-r1-bf16-bf16" not in name)
    only = CliRunner().invoke(main, ["sweep", "--needs", "--only", "virtual-ranks"]).output
    assert only.count("\n") == 1 + 3 and all(name in names for name in only.split("\n")[:3])


def test_sweep_merges_its_axes_and_draws_them(tmp_path: Path) -> None:
    options = ["--engine", "cpu", "--out", str(tmp_path), "--only", "wires,lockstep", "--small"]
    result = CliRunner().invoke(main, ["sweep", *options, "--", *ONE_THREAD])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "sweep.json").read_text())
    jsonschema.Draft202012Validator(json.loads(report.SCHEMA_PATH.read_text())).validate(document)
    assert len(document["rows"]) == 4 + 2
    assert {row["combine_format"] for row in document["rows"]} == {"bf16", "fp8", "fp4"}
    assert {row["mode"] for row in document["rows"]} == {"burst", "lockstep"}
    assert all("SHRUNK" in row["label"] for row in document["rows"])
    assert all(row["memory"]["weights_bytes"] > 0 < row["memory"]["workspace_bytes"] for row in document["rows"])
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 6
    assert {path.name for path in tmp_path.glob("*.svg")} == {"wires.svg", "lockstep.svg"}
    book = json.loads((tmp_path / "axes.json").read_text())
    assert {name: entry["outcome"] for name, entry in book.items()} == {"wires": "ok", "lockstep": "ok"}


def result_of(axis: Axis, p50: float) -> dict[str, Any]:
    """A document of one row that stands for an axis."""
    row = {name: None for name in compare.IDENTITY} | {
        "label": axis.name if axis.name != axes.REPEAT else REPEATED, "engine": "cuda", "ep_size": 1,
        "tokens_per_rank": 8, "rows_per_expert": 1.0, "status": "ok", "us": {"p50": p50}, "timing": "cuda_graph",
    }  # fmt: skip
    environment = dict.fromkeys(compare.ENVIRONMENT)
    return {"schema": report.SCHEMA_NAME, "env": environment, "command": axis.name, "rows": [row]}


def fake_run(started: list[str], p50: float = 100.0) -> Callable[[Sequence[str]], int]:
    """Runs nothing; writes a row."""

    def run(arguments: Sequence[str]) -> int:
        path = Path(arguments[-1])
        started.append(path.stem)
        axis = next(axis for axis in one_gpu() if axis.name == path.stem)
        path.write_text(json.dumps(result_of(axis, p50 * (1 if path.stem != axes.REPEAT else 1.05))))
        return 0

    return run


def test_sweep_goes_on_after_an_axis_that_fails_and_stops_when_time_is_up(tmp_path: Path) -> None:
    started: list[str] = []

    def run(arguments: Sequence[str]) -> int:
        started.append(arguments[-1])
        if len(started) == 1:
            raise RuntimeError("no such kernel")
        return 1

    outcomes = sweep.run_axes(one_gpu()[:3], "cuda", (), tmp_path, run, Limits(), "again", single())
    failed = "exit code 1: not every row is verified and timed"
    assert list(outcomes.values()) == ["RuntimeError: no such kernel", failed, failed]
    assert not (tmp_path / "sweep.json").exists(), "nothing was measured"
    late = tmp_path / "late"
    late.mkdir()
    outcomes = sweep.run_axes(one_gpu()[:2], "cuda", (), late, run, Limits(start_s=-1.0), "again", single())
    assert set(outcomes.values()) == {"not started within -1 s"}


def test_sweep_started_again_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_draw", lambda document, output: None)
    started: list[str] = []

    def dies(arguments: Sequence[str]) -> int:
        if "deepseek-v3" in arguments:
            raise KeyboardInterrupt  # as good as a killed process: nothing below runs
        return fake_run(started)(arguments)

    chosen = [axis for axis in one_gpu() if axis.name in (REPEATED, "rows-deepseek-v3", "lockstep", axes.REPEAT)]
    with pytest.raises(KeyboardInterrupt):
        sweep.run_axes(chosen, "cuda", (), tmp_path, dies, Limits(), "first", single())
    assert started == [REPEATED]
    outcomes = sweep.run_axes(chosen, "cuda", (), tmp_path, fake_run(started), Limits(), "second", single())
    assert started == [REPEATED, axes.REPEAT, "lockstep"], "neither again what is done nor what ended a process"
    assert outcomes["rows-deepseek-v3"] == "ended with the process"
    assert len(json.loads((tmp_path / "sweep.json").read_text())["rows"]) == 2, "repeated rows are no new points"
    found = json.loads((tmp_path / "agreement.json").read_text())
    assert found["bands"][0]["worst_pct"] == pytest.approx(5.0) and found["agrees"] is False
    other = sweep.run_axes(
        chosen[:1], "cuda", ("--seed", "9"), tmp_path, fake_run(started), Limits(), "other", single()
    )
    assert other == {REPEATED: "ok"} and len(started) == 4, "another command is measured anew"


def test_axis_that_takes_too_long_ends_the_process_with_a_record(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from microbench import axes, sweep\n"
        "from trtllm_megamoe.comm import single\n"
        "sweep.run_axes(axes.one_gpu()[:1], 'cuda', (), Path(sys.argv[1]), lambda _: time.sleep(600) or 0, "
        "sweep.Limits(axis_s=1.0), 'x', single())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stderr
    assert json.loads((tmp_path / "axes.json").read_text())[REPEATED]["outcome"] == "ended with the process"


def test_sweep_of_an_unknown_axis_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["sweep", "--out", str(tmp_path), "--only", "nonesuch"])
    assert result.exit_code == 2
    assert "no axis is called nonesuch" in result.output


def test_synthetic_weights_survive_whatever_the_layer_does_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = preset_case("qwen3-235b", scale_experts=8, scale_channels=64)
    source, fresh = SyntheticSource(case, 3), SyntheticSource(case, 3)
    key = TensorKey(2, Projection.UP, Component.CODES)
    for _, tensor in source.for_rank(range(case.num_experts)):
        tensor.zero_()
    assert source.read(key).equal(fresh.read(key))
    monkeypatch.setattr("microbench.sources._KEPT_BYTES", 0)
    small = SyntheticSource(case, 3)
    for expert in (3, 2):
        assert small.read(TensorKey(expert, Projection.UP, Component.CODES)).any()
    assert list(small._kept) == [2], "no room: one expert at a time"
    assert small.read(key).equal(fresh.read(key))
