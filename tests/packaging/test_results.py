# SPDX-License-Identifier: Apache-2.0
"""The tables in README.md and docs/benchmarks.md are what the committed results say, and drawn right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import draw_results
from tools.draw_results import BEGIN, END, Part, benchmarks_block, newest, readme_block, replaced

ENVIRONMENT = {
    "date_utc": "2026-12-01T00:00:00+00:00", "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11",
    "cutlass_dsl": "4.8.1", "kernel_sources": "0123456789abcdef",
}  # fmt: skip


def ours(rows: int, ms: float, mode: str = "bf16", routing: str = "uniform") -> dict[str, Any]:
    return {
        "shape": "v4-pro", "mode": mode, "routing": routing, "rows": rows, "floor_ms": 0.399, "sustained_ms": ms,
        "ok": True,
    }  # fmt: skip


def theirs(name: str, rows: int, status: str = "ok", **more: Any) -> dict[str, Any]:
    base = {"shape": "v4-pro", "routing": "uniform", "rows": rows, "rival": name, "version": "1.2", "status": status}
    return {**base, "floor_ms": 0.399, "sustained_ms": 2.0, "ok": status != "failed", **more}


@pytest.mark.parametrize("path", draw_results.documents(), ids=lambda path: path.name)
def test_committed_tables_are_up_to_date(path: Path) -> None:
    wanted = draw_results.documents()[path]
    assert path.read_text(encoding="utf-8") == wanted, "run python tools/draw_results.py"


def test_newest_result_of_a_part_counts(tmp_path: Path) -> None:
    for name, date, command in (("b", "2026-11-01", "old"), ("a", "2026-11-02", "new"), ("c", "2026-11-03", "checks")):
        part = "goldens" if command == "checks" else "bench"
        document = {"command": command, "environment": {**ENVIRONMENT, "date_utc": date}, part: {"results": []}}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert newest("bench", tmp_path).command == "new"
    with pytest.raises(SystemExit, match="holds the part 'rivals'"):
        newest("rivals", tmp_path)


def test_tables_show_floor_layer_rivals_and_every_gap() -> None:
    bench = Part(
        ENVIRONMENT,
        "bench",
        [ours(1, 0.41749), ours(16, 12.345), ours(16, 0.5, "nvfp4"), ours(64, 0.9, "bf16", "zipf")],
    )
    wrong = {"check": {"verdict": "not verified"}}
    rivals = Part(
        ENVIRONMENT,
        "rivals",
        [
            theirs("a", 1),
            theirs("a", 16, "failed", **wrong),
            theirs("b", 1, "skipped", check=None, skip_reason="no compiler"),
        ],
    )
    text = readme_block(bench, rivals)
    assert "| rows per expert | 1 | 16 |" in text, "uniform routing only"
    assert "| floor of this GPU | 0.399 | 0.399 |" in text
    assert "| this layer, 16-bit activations | 0.417 | 12.3 |" in text
    assert "| this layer, NVFP4 activations |  | 0.500 |" in text
    assert "| a (1.2), no gather, no sum | 2.00 | not verified |" in text
    assert "| b" not in text
    untimed = Part(ENVIRONMENT, "rivals", [theirs("a", 1, "failed", check={"verdict": "verified"})])
    assert "| a (1.2), no gather, no sum | not timed |" in readme_block(bench, untimed)
    text = benchmarks_block(bench, rivals)
    assert "| 64, zipf |" in text
    assert "b: not run, no compiler" in text


def test_block_replaces_what_lies_between_its_markers_only() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(text, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replaced(replaced(text, "new"), "new") == replaced(text, "new")
    with pytest.raises(SystemExit, match="markers"):
        replaced("no markers", "new")


def test_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = Part(ENVIRONMENT, "bench", [ours(1, 0.42), ours(16, 0.5)])
    draw_results.draw_figure(bench, Part(ENVIRONMENT, "", [theirs("a", 1), theirs("a", 16)]), tmp_path / "f.svg")
    assert "this layer" in (tmp_path / "f.svg").read_text() or (tmp_path / "f.svg").stat().st_size > 10_000
