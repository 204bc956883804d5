# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench sweep`: which points it asks for, and what it leaves behind when axes fail or time is up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner

from microbench import report, sweep
from microbench.cases import preset_case
from microbench.cli import main
from microbench.sources import SyntheticSource
from microbench.sweep import Axis, axes, command_of
from trtllm_megamoe.weights.spec import Component, Projection, TensorKey

SHRUNK = ("--scale-channels", "64", "--iters", "2", "--warmup", "0", "--threads-per-rank", "1")


def points_of(axis: Axis) -> int:
    """Rows that an axis asks for: the product of its lists."""
    product = 1
    for name, value in zip(axis.arguments, axis.arguments[1:], strict=False):
        if name in ("--rows-per-expert", "--tokens-per-rank", "--routing", "--combine-format", "--mode"):
            product *= len(value.split(","))
    return product


def test_axes_are_few_points_and_commands_that_parse() -> None:
    assert 40 <= sum(points_of(axis) for axis in axes()) <= 150
    assert len({axis.name for axis in axes()}) == len(axes())
    run = main.commands["run"]
    assert isinstance(run, click.Command)
    for axis in axes():
        arguments = command_of(axis, "cuda", ())
        options = run.make_context("run", list(arguments)).params
        assert options["use_cuda_graph"] is (axis.name != "eager")
        assert options["engine"] == "cuda"
        assert arguments.count("--mode") == 1 == arguments.count("--activations")
    by_name = {axis.name: command_of(axis, "cuda", ()) for axis in axes()}
    assert "lockstep" in by_name["lockstep"] and "nvfp4" in by_name["nvfp4-activations"]


def test_sweep_merges_its_axes_and_draws_them(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["sweep", "--engine", "cpu", "--out", str(tmp_path), "--only", "wires,lockstep", "--", *SHRUNK],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "sweep.json").read_text())
    jsonschema.Draft202012Validator(json.loads(report.SCHEMA_PATH.read_text())).validate(document)
    assert len(document["rows"]) == 6 + 4
    assert {row["combine_format"] for row in document["rows"]} == {"bf16", "fp8", "fp4"}
    assert {row["mode"] for row in document["rows"]} == {"burst", "lockstep"}
    assert all("SHRUNK" in row["label"] for row in document["rows"])
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 10
    assert {path.name for path in tmp_path.glob("*.svg")} == {"wires.svg", "lockstep.svg"}
    assert json.loads((tmp_path / "axes.json").read_text()) == {"wires": "ok", "lockstep": "ok"}


def test_sweep_goes_on_after_an_axis_that_fails_and_stops_when_time_is_up(tmp_path: Path) -> None:
    started: list[str] = []

    def run(arguments: Sequence[str]) -> int:
        started.append(arguments[-1])
        if len(started) == 1:
            raise RuntimeError("no such kernel")
        return 1

    outcomes = sweep.run_axes(axes()[:3], "cuda", (), tmp_path, run, None, "again")
    assert list(outcomes.values()) == ["RuntimeError: no such kernel", "exit code 1", "exit code 1"]
    assert not (tmp_path / "sweep.json").exists(), "nothing was measured"
    outcomes = sweep.run_axes(axes()[:2], "cuda", (), tmp_path, run, -1.0, "again")
    assert set(outcomes.values()) == {"not started within -1 s"}


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
