# SPDX-License-Identifier: Apache-2.0
"""Counters of Nsight Compute as one table: a column per launch, and JSON to keep.

    ncu --section SpeedOfLight --section SchedulerStats --section WarpStateStats --section ComputeWorkloadAnalysis \\
        --section MemoryWorkloadAnalysis --clock-control none -k regex:Sm90MegaMoe --launch-skip 2 --launch-count 1 \\
        --csv --page raw --print-units base \\
        python tools/run_gpu_suite.py once --shapes S --modes bf16 --points uniform:R --cache DIR > S-R.csv
    python tools/ncu_table.py S-R.csv ... --out counters.json

Stalls are warps per issued instruction that wait for the same reason. Counters come with the clock as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

COUNTERS: dict[str, tuple[str, float]] = {
    "duration_us": ("gpu__time_duration.sum", 1e-3),
    "sm_mhz": ("gpc__cycles_elapsed.avg.per_second", 1e-6),
    "tensor_pct": ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "issue_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_pct": ("dram__cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_tb_s": ("dram__bytes.sum.per_second", 1e-12),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1.0),
    "no_eligible_pct": ("smsp__issue_inst0.avg.pct_of_peak_sustained_active", 1.0),
}
"""Name in the table: the counter in its base unit, and what to multiply it with."""

_STALL = "smsp__average_warps_issue_stalled_"
_STALL_END = "_per_issue_active.ratio"
LEAST_STALL = 0.05
"""Reasons that are smaller in every column are left out of the table."""


def read_launch(path: Path) -> dict[str, Any]:
    """Counters of the one launch in a raw page.

    Raises:
        ValueError: The file does not hold one launch in base units.
    """
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    if len(lines) != 3:
        raise ValueError(f"{path}: {len(lines)} lines of values, expected names, units and one launch (`--page raw`)")
    names, units, values = csv.reader(lines)
    found = {name: value.replace(",", "") for name, value in zip(names, values, strict=True)}
    unit = dict(zip(names, units, strict=True)).get("gpu__time_duration.sum")
    if unit != "ns":
        raise ValueError(f"{path}: the duration is in {unit}, expected ns (`--print-units base`)")
    launch: dict[str, Any] = {"file": path.name}
    for name, (counter, factor) in COUNTERS.items():
        launch[name] = round(float(found[counter]) * factor, 2) if counter in found else None
    stalls = {n[len(_STALL) : -len(_STALL_END)]: float(found[n]) for n in found if n.startswith(_STALL)}
    launch["stalls_per_issue"] = dict(sorted(stalls.items(), key=lambda item: -item[1]))
    return launch


def table(launches: list[dict[str, Any]]) -> str:
    """Rows are counters, then stalls, the largest of any column first."""
    names = [launch["file"].removesuffix(".csv") for launch in launches]
    lines = [f"{'':18}" + "".join(f"{name:>16}" for name in names)]
    lines += [f"{name:18}" + "".join(f"{launch[name]!s:>16}" for launch in launches) for name in COUNTERS]
    largest: dict[str, float] = {}
    for launch in launches:
        for reason, value in launch["stalls_per_issue"].items():
            largest[reason] = max(largest.get(reason, 0.0), value)
    shown = [reason for reason, value in largest.items() if value >= LEAST_STALL and reason != "selected"]
    for reason in sorted(shown, key=lambda reason: -largest[reason]):
        values = [launch["stalls_per_issue"].get(reason, 0.0) for launch in launches]
        lines.append(f"{reason:18}" + "".join(f"{value:16.2f}" for value in values))
    return "\n".join(lines)


def main() -> int:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="raw pages, one launch each")
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    launches = [read_launch(path) for path in arguments.files]
    print(table(launches))
    if arguments.out:
        arguments.out.write_text(json.dumps(launches, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
