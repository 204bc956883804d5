# SPDX-License-Identifier: Apache-2.0
"""The two measuring scripts around buckets and start-up, on the CPU engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import compare_caps, measure_warm_start
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
    assert [row["buckets"] for row in rows] == [[16, 16], [16, 16], [64, 64]]
    assert all(len(row["us"]) == 2 and min(row["us"]) > 0 for row in rows)


def test_compare_caps_reports_the_median_over_turns() -> None:
    script = iter([10.0, 20.0, 12.0, 26.0, 11.0, 23.0])

    def timer(run: object, comm: object, timeout_s: float) -> float:
        return next(script)

    (row,) = compare_caps.compare([config(64), config(300)], [1], 3, timer)
    assert (row["us"], row["ratio"]) == ([11.0, 23.0], round(23 / 11, 4))
    assert row["spread_pct"] == 30.0, "26 against 20"


@pytest.mark.slow  # four processes that import torch
def test_warm_start_counts_what_is_above_the_bare_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "start.json"
    options = ["--engine", "cpu", "--preset", "gpt-oss-120b", "--share-of-ep", "32", "--rounds", "1"]
    code = measure_warm_start.main([*options, "--max-tokens-per-rank", "16", "--out", str(out)])
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert code == (0 if result["within_limit"] else 1)
    assert result["warm_s"] > 0 and result["bare_s"] > 0
    assert result["above_bare_s"] == pytest.approx(result["warm_s"] - result["bare_s"])
    assert {"import", "load weights and kernels", "launch every bucket"} <= set(result["phases_s"])
