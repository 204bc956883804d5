# SPDX-License-Identifier: Apache-2.0
"""Results as text, as `megamoe-bench/1` JSON and as CSV. Called by the command line on rank 0; measures nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbench.phases import PHASES
from microbench.routing import PROPERTIES, RoutingName
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.errors import MegaMoeConfigError

SCHEMA_NAME = "megamoe-bench/1"
SCHEMA_PATH = Path(__file__).with_name("schema.json")

Row = Mapping[str, Any]


def document(env: Mapping[str, Any], command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole result; `schema.json` beside this file describes it."""
    return {"schema": SCHEMA_NAME, "env": dict(env), "command": command, "rows": [dict(row) for row in rows]}


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write the document; NaN and infinities are refused, because JSON has none."""
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a document back.

    Raises:
        MegaMoeConfigError: not a file, not JSON, or another schema.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise MegaMoeConfigError(f"{path} cannot be read as JSON: {err}") from err
    if not isinstance(result, dict) or result.get("schema") != SCHEMA_NAME:
        raise MegaMoeConfigError(f"{path} is no {SCHEMA_NAME} result; write one with --json")
    return result


def flatten(row: Row) -> dict[str, Any]:
    """The scalar subset of a row, nested objects as `us.p50`; lists are left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": item for inner, item in flatten(value).items()})
        elif not isinstance(value, list):
            flat[name] = value
    return flat


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line per row, columns in the order of the first row that has them; null is an empty cell."""
    lines = [flatten(row) for row in rows]
    # a row without times has `us` empty where others have `us.p50` and so on
    columns = [name for name in dict.fromkeys(name for line in lines for name in line) if name != "us"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)


def header(env: Mapping[str, Any], row: Row) -> str:
    """Lines above the table: machine, case, protocol, units. `row` is any row of the run."""
    ranks = f"{row['ep_size']} rank(s), {env['transport']}, {env['launcher']}, {env['threads_per_rank']} thread(s) each"
    device = env["gpu"] or env["cpu"] or "unknown processor"
    lines = [
        f"{SCHEMA_NAME}  trtllm-megamoe {env['package']} ({(env['commit'] or 'no commit')[:12]})  "
        f"torch {env['torch']}  engine {row['engine']} on {device}  {ranks}",
        f"{row['label']}: hidden {row['hidden']}, intermediate {row['intermediate']}, {row['num_experts']} experts, "
        f"top-{row['top_k']}, {row['weights']} weights; activations {row['activations']}, "
        f"scores {row['score_placement']}",
        f"timed: {row['region']}",
        f"{row['warmup']} warm-up and {row['iters']} timed iterations, slowest rank of each; seed {row['seed']}, "
        f"{row['steps']} input(s) and {row['rotated_layers']} layer(s) in rotation; "
        f"layer built for {row['max_tokens_per_rank']} tokens per rank",
        f"tok/rank = tokens per rank, EP tok = EP total: tokens of all {row['ep_size']} rank(s) together; "
        "rates are the busiest rank's",
    ]
    if row["sol_us"] is None:
        lines.append("no peak rates are known for this device: no percentages, no floor")
    return "\n".join(lines)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _rate(value: float | None, percent: float | None) -> str:
    """Three significant digits, and the share of the device's peak where that is known."""
    if value is None:
        return "-"
    return f"{value:.3g}" if percent is None else f"{value:.3g} ({percent:.0f} %)"


def _time(row: Row, name: str) -> str:
    return _number(None if row["us"] is None else row["us"][name])


def _routing(row: Row) -> str:
    return row["routing"] if row["imbalance"] is None else f"{row['routing']} x{row['imbalance']:g}"


def _verdict(row: Row) -> str:
    check = row["check"]
    if not check["passed"]:
        return str(check["verdict"]).upper()
    return f"ok: {check['tokens_checked']} of {check['tokens_total']} tok, rel-L2 {check['rel_l2']:.1g}"


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: numbers are flushed right; an axis is left out of the table while all rows share its value."""

    title: str
    cell: Callable[[Row], str]
    is_text: bool = False
    is_axis: bool = False


_COLUMNS = (
    _Column("tok/rank", lambda row: str(row["tokens_per_rank"])),
    _Column("EP tok", lambda row: str(row["ep_tokens"])),
    _Column("bucket", lambda row: str(row["bucket"])),
    _Column("rows/expert", lambda row: _number(row["rows_per_expert"], 2)),
    _Column("expert max/mean", lambda row: _number(row["expert_rows"]["max_over_mean"], 2)),
    _Column("rank max/mean", lambda row: _number(row["rank_rows"]["max_over_mean"], 2)),
    _Column("routing", _routing, is_text=True, is_axis=True),
    _Column("wire", lambda row: row["combine_format"], is_text=True, is_axis=True),
    _Column("timing", lambda row: row["timing"], is_text=True, is_axis=True),
    _Column("mode", lambda row: row["mode"], is_text=True, is_axis=True),
    _Column("p50 us", lambda row: _time(row, "p50")),
    _Column("p10 us", lambda row: _time(row, "p10")),
    _Column("p90 us", lambda row: _time(row, "p90")),
    _Column("tok/s", lambda row: _number(row["tokens_per_s"], 0)),
    _Column("TFLOP/s", lambda row: _rate(row["tflops"], row["pct_peak_tflops"])),
    _Column("HBM GB/s", lambda row: _rate(row["hbm_gbs"], row["pct_peak_hbm"])),
    _Column("link GB/s", lambda row: _rate(row["nvl_gbs"], row["pct_peak_nvl"])),
    _Column("SM MHz", lambda row: _number(None if row["clocks"] is None else row["clocks"]["sm_mhz"], 0), is_axis=True),
    _Column("% SOL", lambda row: _number(row["pct_sol"])),
    _Column("bound", lambda row: row["bound"] or "-", is_text=True),
    _Column("check", _verdict, is_text=True),
)


def text_table(rows: Sequence[Row]) -> str:
    """The rows for people, below one line with what all of them share. An unverified row has no time."""
    shared, shown = [], []
    for column in _COLUMNS:
        cells = [column.cell(row) for row in rows]
        if column.is_axis and len(set(cells)) == 1:
            shared += [] if cells[0] == "-" else [f"{column.title} {cells[0]}"]
        else:
            shown.append((column, cells))
    numbers = [index for index, (column, _) in enumerate(shown) if not column.is_text]
    body = table(
        [column.title for column, _ in shown],
        list(zip(*(cells for _, cells in shown), strict=True)),
        right=numbers,
    )
    return "\n".join([f"all rows: {', '.join(shared)}", "", body] if shared else [body])


def footer(rows: Sequence[Row], command: str) -> str:
    """What the routings promise, what failed and why, and the command that repeats the run."""
    lines = [f"{name}: {PROPERTIES[RoutingName(name)]}" for name in dict.fromkeys(row["routing"] for row in rows)]
    failed = [row for row in rows if row["status"] == "failed"]
    for row in failed:
        lines.append(
            f"{str(row['check']['verdict']).upper()}, not timed: {row['tokens_per_rank']} tokens per rank, "
            f"{row['routing']}, {row['combine_format']}: {row['skip_reason']}"
        )
    lines += _rival_lines(rows)
    lines += filter(None, [text_of_phases(rows)])
    lines.append(f"{len(rows) - len(failed)} of {len(rows)} rows verified and timed; repeat with: {command}")
    return "\n".join(lines)


def _rival_lines(rows: Sequence[Row]) -> list[str]:
    """One line per rival and row with its time, or one per rival and reason why there is none."""
    lines: dict[str, None] = {}
    for row in rows:
        for rival in row["rivals"]:
            if rival["us"] is None:
                lines[f"{rival['rival']}: {rival['status']}: {rival['skip_reason']}"] = None
            else:
                ratio = "" if row["us"] is None else f", {rival['us']['p50'] / row['us']['p50']:.2f} x this layer"
                where = f"{row['tokens_per_rank']} tokens per rank, {row['routing']}"
                lines[f"{rival['rival']}: {where}: {rival['us']['p50']:,.1f} us{ratio} ({rival['region']})"] = None
    return list(lines)


def text_of_phases(rows: Sequence[Row]) -> str:
    """A table of the phases of the rows that have them: median over the CTAs, and the longest CTA's; empty without."""
    found = [(row, row["phases"]) for row in rows if row["phases"] is not None]
    if not found:
        return ""
    cells = []
    for row, phases in found:
        spans = {"total": phases["total_us"], **(phases["spans_us"] or dict.fromkeys(PHASES))}
        shown = ["-" if span is None else f"{span['p50']:.1f} / {span['max']:.1f}" for span in spans.values()]
        cells.append([str(row["tokens_per_rank"]), _routing(row), row["combine_format"], *shown])
    names = ["tok/rank", "routing", "wire", "total", *PHASES]
    title = "phases of one launch with time stamps, us, median / longest CTA (the parts add up CTA by CTA):"
    return f"{title}\n\n{table(names, cells, right=[0, *range(3, len(names))])}\n"
