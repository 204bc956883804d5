# SPDX-License-Identifier: Apache-2.0
"""The table of Nsight Compute's counters: values, units, stalls, and files that are something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.ncu_table import read_launch, table

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {
    "Kernel Name": ("", "Sm90MegaMoe"),
    "gpu__time_duration.sum": ("ns", "720,320"),
    "dram__bytes.sum.per_second": ("byte/s", "2,844,418,302,976.46"),
    STALL.format("long_scoreboard"): ("inst", "1.72"),
    STALL.format("selected"): ("inst", "1.00"),
    STALL.format("drain"): ("inst", "0.01"),
}


def _page(path: Path, **changes: tuple[str, str]) -> Path:
    columns = COLUMNS | {name.replace("__DOT__", "."): value for name, value in changes.items()}
    rows = [list(columns), [unit for unit, _ in columns.values()], [value for _, value in columns.values()]]
    lines = ["==PROF== Connected", *(",".join(f'"{cell}"' for cell in row) for row in rows), "once: 1 results"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_ncu_counters_are_scaled_and_stalls_sorted(tmp_path: Path) -> None:
    launch = read_launch(_page(tmp_path / "a.csv"))
    assert (launch["duration_us"], launch["dram_tb_s"], launch["l2_pct"]) == (720.32, 2.84, None)
    assert list(launch["stalls_per_issue"]) == ["long_scoreboard", "selected", "drain"]
    text = table([launch, launch])
    assert text.splitlines()[0].split() == ["a", "a"]
    assert "long_scoreboard" in text and "drain" not in text and "selected" not in text


def test_ncu_other_units_and_other_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is in ms, expected ns"):
        read_launch(_page(tmp_path / "b.csv", gpu__time_duration__DOT__sum=("ms", "0.72")))
    (tmp_path / "c.csv").write_text('"a","b"\n')
    with pytest.raises(ValueError, match="1 lines of values"):
        read_launch(tmp_path / "c.csv")
