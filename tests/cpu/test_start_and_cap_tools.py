# SPDX-License-Identifier: Apache-2.0
"""The two measuring scripts around buckets and start-up, on the CPU engine."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trtllm_megamoe
from tools import compare_caps, measure_warm_start, run_gpu_suite
from trtllm_megamoe.config import MegaMoeConfig


def config(cap: int) -> MegaMoeConfig:
    return MegaMoeConfig.create(
        hidden_size=128, intermediate_size=64, num_experts=8, top_k=2, max_tokens_per_rank=cap, activations="bf16",
        engine="cpu",
    )  # fmt: skip


def test_compare_caps_takes_turns_on_equal_results_and_the_same_bucket() -> None:
    rows = list(compare_caps.compare([config(64), config(300)], [1, 16, 40], 2, compare_caps.time_host))
    assert [row["tokens"] for row in rows] == [1, 16, 40]
    assert all(row["bits_equal"] for row in rows)
    assert [row["buckets"] for row in rows] == [[8, 8], [16, 16], [64, 64]]
    assert all(len(row["us"]) == 2 and min(row["us"]) > 0 for row in rows)


def test_compare_caps_reports_the_median_over_turns() -> None:
    script = iter([10.0, 20.0, 12.0, 26.0, 11.0, 23.0])

    def timer(run: object, comm: object, timeout_s: float) -> float:
        return next(script)

    (row,) = compare_caps.compare([config(64), config(300)], [1], 3, timer)
    assert (row["us"], row["ratio"]) == ([11.0, 23.0], round(23 / 11, 4))
    assert row["spread_pct"] == 30.0, "26 against 20"


@pytest.mark.slow  # two processes that import torch
@pytest.mark.parametrize("has_dsl", [False, True])
def test_warm_start_counts_what_is_above_the_bare_process(
    has_dsl: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "start.json"
    if has_dsl:
        (tmp_path / "cutlass").mkdir()
        (tmp_path / "cutlass" / "__init__.py").write_text("raise SystemExit('a warm start imported the DSL')")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    elif importlib.util.find_spec("cutlass") is not None:
        pytest.skip("the DSL is installed here")
    options = ["--engine", "cpu", "--preset", "gpt-oss-120b", "--share-of-ep", "32", "--num-experts", "4"]
    options += ["--warm-ups", "0", "--rounds", "1"]
    code = measure_warm_start.main([*options, "--max-tokens-per-rank", "16", "--out", str(out)])
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["fault"] is None and result["canaries_intact"]
    assert result["dsl_installed"] is has_dsl
    assert result["command"].startswith("tools/measure_warm_start.py --engine cpu --preset gpt-oss-120b")
    made = result["environment"]
    assert (made["package"], made["torch"]) == (trtllm_megamoe.__version__, torch.__version__)
    assert made["gpu"] is made["driver"] is None, "a run on the CPU engine says nothing about a GPU"
    assert made["date_utc"][:4] >= "2026" and made["kernel_sources"]
    assert code == (0 if result["within_limit"] else 1)
    assert {"import", "load weights and kernels", "launch every bucket"} <= set(result["phases_s"])
    uncounted = sum(result["phases_s"][name] for name in ("canaries", "draw weights", "check", "reload weights"))
    assert result["warm_s"] == pytest.approx(sum(result["phases_s"].values()) - uncounted)
    assert 0 < result["bare_s"] == pytest.approx(result["warm_s"] - result["above_bare_s"])


def test_warm_start_report_of_a_fault_says_where_and_how_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm process that never got as far has not said whether it could import the DSL."""
    monkeypatch.setattr(measure_warm_start, "start", lambda *given: {"phases_s": {}, "fault": "ended"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(run_gpu_suite, "_driver", lambda: "580.1")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert measure_warm_start.main(["--preset", "kimi-k2", "--rounds", "1"]) == 1
    result = json.loads(printed.getvalue())
    assert result["fault"] == "ended" and result["dsl_installed"] is None
    assert result["command"] == "tools/measure_warm_start.py --preset kimi-k2 --rounds 1"
    made = result["environment"]
    assert (made["gpu"], made["sms"], made["driver"]) == ("NVIDIA H200", 132, "580.1")


def test_warm_start_child_that_outlasts_its_limit_is_ended_and_reported() -> None:
    found = measure_warm_start.start("bare", ["--engine", "cpu"], 0.05)
    assert found["fault"] == "ended after its limit of 0.05 s"


def test_warm_start_child_that_fails_says_why() -> None:
    found = measure_warm_start.start("bare", ["--none-such"], 60.0)
    assert found["fault"].startswith("exit code 2: ") and "--none-such" in found["fault"]


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"canaries_intact": True, "compiler_loaded": False}, None),
        ({"canaries_intact": False, "compiler_loaded": False}, "memory of other tensors"),
        ({"canaries_intact": True, "compiler_loaded": True}, "compiler was loaded"),
    ],
)
def test_warm_start_changed_canary_or_loaded_compiler_does_not_count(facts: dict[str, bool], fault: str | None) -> None:
    lines = [{"phase": "torch", "s": 2.0}, {"phase": "check", "s": 0.1, **facts}]
    found = measure_warm_start.read_child("\n".join(json.dumps(line) for line in lines))
    assert found["phases_s"] == {"torch": 2.0, "check": 0.1}
    assert found["fault"] is None if fault is None else fault in found["fault"]
