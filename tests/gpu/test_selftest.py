# SPDX-License-Identifier: Apache-2.0
"""The self-test's short form on whatever supported GPU is here; kernels come from the cache or are compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import invoke

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_selftest_quick_passes_on_this_gpu(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = invoke("selftest", "--quick", "--json", path)
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text())
    assert report["passed"] and report["environment"]["engine"] == "cuda" and report["kernels"]
    assert {item["group"] for item in report["items"]} >= {"one rank, oracle", "graphs", "time-outs"}
