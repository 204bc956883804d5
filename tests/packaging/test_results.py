# SPDX-License-Identifier: Apache-2.0
"""The tables in README.md and docs/benchmarks.md are what the committed results say, and drawn right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from microbench.phases import PHASES
from tools import draw_results
from tools.draw_results import BEGIN, END, Part, benchmarks_block, newest, readme_block, replaced
from tools.draw_sweeps import ranks_block

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


@pytest.mark.parametrize("directory", [draw_results.SWEEP, draw_results.SKEWED], ids=lambda path: path.name)
def test_no_rival_is_faster_at_any_point_as_the_page_says(directory: Path) -> None:
    bench, rivals = draw_results.sweep_parts(directory)
    assert bench is not None and rivals is not None
    best = {(r["shape"], r["routing"], r["rows"]): r["sustained_ms"] for r in bench.rows if r["mode"] == "bf16"}
    timed = [row for row in rivals.rows if row["sustained_ms"] is not None]
    points = {(row["shape"], row["routing"], row["rows"]) for row in timed}
    slower = [row for row in timed if row["sustained_ms"] > best[row["shape"], row["routing"], row["rows"]]]
    assert len(slower) == len(timed)
    assert f"all {len(points)} points" in (draw_results.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


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


def swept(case: str, amount: int, p50_us: float | None, **changed: Any) -> dict[str, Any]:
    """A row of a sweep: the default point but for what is named."""
    row = {
        "case": case, "label": case, "activations": "bf16", "routing": "uniform", "combine_format": "bf16",
        "mode": "burst", "timing": "cuda_graph", "ep_size": 1, "share_of_ep": 8, "requested_rows_per_expert": amount,
        "tokens_per_rank": 8 * amount, "max_tokens_per_rank": 8192, "phases": None, "rivals": [], "sol_us": 400.0,
        "nvl_gbs": 50.0, "hidden": 7168, "intermediate": 3072, "num_experts": 48, "top_k": 6, "skip_reason": None,
        "status": "ok", "check": {"verdict": "verified"}, "us": {"p50": p50_us},
        "memory": {"weights_bytes": 1_800_000_000, "workspace_bytes": 2_000_000_000, "transient_bytes": 470_000_000},
    }  # fmt: skip
    if p50_us is None:
        row |= {"us": None, "status": "failed", "check": {"verdict": "wrong"}, "skip_reason": "rel-L2 0.5"}
    return row | changed


SWEEP_ENV = {
    "gpu": "NVIDIA H200", "cpu": "x", "date_utc": "2026-12-02T00:00:00+00:00", "driver": "580", "torch": "2.11",
    "package": "0.1.0", "kernel_dsl": "4.8.1", "kernel_sources": "abcdefabcdef", "commit": None,
}  # fmt: skip
SPAN = {"min": 1.0, "p50": 2.5, "max": 12.34}


def test_sweep_gives_the_presets_tables_and_the_rest_of_its_page(tmp_path: Path) -> None:
    beside = [
        {"rival": "grouped", "status": "ok", "check": None, "us": {"p50": 1500.0}},
        {"rival": "indexed", "status": "failed", "check": None, "us": None},
    ]
    rows = [
        swept("deepseek-v4-pro", 1, 430.0),
        swept("deepseek-v4-pro", 64, 1234.0),
        swept("deepseek-v4-pro", 64, 800.0, activations="nvfp4"),
        swept("deepseek-v4-pro", 64, 900.0, routing="zipf", rivals=beside),
        swept("deepseek-v4-pro", 64, 810.0, combine_format="fp8"),
        swept("deepseek-v4-pro", 64, 850.0, timing="eager"),
        swept("deepseek-v4-pro", 1024, None),
        swept("qwen3-235b", 1, 55.0, ep_size=8, share_of_ep=1),
        swept("deepseek-v4-pro", 16, 9.0, phases={"total_us": SPAN, "spans_us": dict.fromkeys(PHASES, SPAN)}),
    ]
    document = {"schema": "megamoe-bench/1", "env": SWEEP_ENV, "command": "python -m microbench sweep", "rows": rows}
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    outcomes = {"wires": {"outcome": "ok"}, "eager": {"outcome": "not started within 9 s"}}
    (tmp_path / "axes.json").write_text(json.dumps(outcomes))
    bands = [{"bound_pct": 3.0, "rows": 3, "within": 2, "worst_pct": 3.4}, {"bound_pct": 10.0, "rows": 0, "within": 0}]
    (tmp_path / "agreement.json").write_text(json.dumps({"bands": bands, "outside": [], "agrees": False}))
    part, rivals = draw_results.sweep_parts(tmp_path)
    assert part is not None and rivals is not None
    assert [(row["rival"], row["rows"], row["routing"], row["sustained_ms"]) for row in rivals.rows] == [
        ("grouped", 64, "zipf", 1.5), ("indexed", 64, "zipf", None),
    ]  # fmt: skip
    assert [(row["rows"], row["mode"], row["sustained_ms"]) for row in part.rows] == [
        (1, "bf16", 0.43), (64, "bf16", 1.234), (64, "nvfp4", 0.8), (64, "bf16", 0.9),
    ], "neither other axes nor ranks nor split launches"  # fmt: skip
    text = readme_block(part, Part(ENVIRONMENT, "rivals", []))
    assert "`python -m microbench sweep`" in text and "CuTe DSL 4.8.1" in text and "| 0.430 | 1.23 |" in text
    page = draw_results.sweep_text(tmp_path)
    assert "| default point | 0.430 | 1.23 | wrong |" in page
    assert "| routing zipf |  | 0.900 |  |" in page and "| wire fp8 |  | 0.810 |  |" in page
    assert "| launched one by one |  | 0.850 |  |" in page
    assert "| qwen3-235b, uniform, wire bf16 | 55 |" in page, "microseconds of eight ranks"
    assert "16 tokens each" not in page and "128 tokens each | 2.50 / 12.3 |" in page
    assert "| deepseek-v4-pro | 8192 | 1.80 | 2.00 | 0.470 |" in page
    assert "2 of 3 within 3 % (the worst differs by 3.4 %)" in page
    assert "- axis `eager`: not started within 9 s" in page and "rel-L2 0.5" in page
    assert draw_results.sweep_text(tmp_path / "none") == "No sweep has been run on a GPU."


def test_report_over_gpus_shows_floor_chain_links_and_what_failed(tmp_path: Path) -> None:
    chain = {"rival": "chain", "status": "ok", "check": {"verdict": "verified"}, "us": {"p50": 700.0}}
    over = {"ep_size": 2, "share_of_ep": 1, "num_experts": 96}
    phases = {"total_us": SPAN, "spans_us": dict.fromkeys(PHASES, SPAN), "events_us": {"cells": SPAN, "left": SPAN}}
    rows = [
        swept("deepseek-v4-pro", 8, 500.0, tokens_per_rank=64, rivals=[chain], **over),
        swept("deepseek-v4-pro", 8, 520.0, tokens_per_rank=64, mode="lockstep", **over),
        swept("deepseek-v4-pro", 8, 510.0, tokens_per_rank=64, activations="nvfp4", **over),
        swept("deepseek-v4-pro", 8, None, tokens_per_rank=512, **over),
        swept("deepseek-v3", 8, 300.0, tokens_per_rank=64, combine_format="fp4", **over),
        swept("deepseek-v3", 8, 310.0, tokens_per_rank=64, phases=phases, **over),
    ]
    links = {
        "flag_us": 1.234, "load_ns": {"own": 600.0, "peer": 1500.0}, "copy_gbs": None, "skipped": {"copy_gbs": "why"},
        "layer_us": {"together": {"0": 12.0, "1": None}, "alone": {"0": 5.0, "1": 60.0}},
    }  # fmt: skip
    results = {"sweep": {"env": SWEEP_ENV, "command": "mpirun", "rows": rows}, "links": links, "axes": {}}
    steps = [
        {"step": "tests", "ok": True, "seconds": 40.0, "status": 0, "output": ["== 12 passed in 30 s =="]},
        {"step": "dead-rank", "ok": False, "seconds": 60.0, "status": "killed after 60 s", "output": []},
        {"step": "bench", "ok": True, "seconds": 90.0, "status": 0, "output": [], "results": results},
    ]
    report = {"ranks": 2, "date_utc": "2026-12-02T00:00:00+00:00", "command": "suite", "steps": steps}
    (tmp_path / "suite.json").write_text(json.dumps(report))
    (tmp_path / "old.json").write_text(json.dumps({**report, "date_utc": "2026-12-01", "ranks": 4}))
    (tmp_path / "plain.json").write_text(json.dumps({"schema": "megamoe-bench/1", "rows": []}))
    (tmp_path / "older.json").write_text(json.dumps({**report, "date_utc": "2026-11-01"}))
    found = draw_results.newest_ranks(tmp_path)
    assert [(one["ranks"], one["date_utc"][:10]) for one in found] == [(4, "2026-12-01"), (2, "2026-12-02")]
    text = ranks_block(found[1])
    assert "- tests: passed, 40 s; 12 passed in 30 s" in text and "- dead-rank: FAILED (killed after 60 s)" in text
    assert "| floor of these GPUs | 400 | 400 |" in text
    assert "| this layer, 16-bit activations, burst | 500 | wrong |" in text
    assert "| this layer, 16-bit activations, lockstep | 520 |  |" in text and "| chain | 700 |  |" in text
    assert "| deepseek-v3, uniform, wire fp4, burst | 300 |" in text
    assert "| us since the first CTA entered | cells | left |" in text and "| 1.00 / 2.50 / 12.3 |" in text
    assert "| a flag, one way | 1.23 us |" in text and "| copy_gbs | not measured: why |" in text
    assert "| the layer together, 1 token(s) a rank |  |" in text
    assert draw_results.newest_ranks(tmp_path / "none") == []
