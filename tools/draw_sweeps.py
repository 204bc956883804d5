# SPDX-License-Identifier: Apache-2.0
"""The text of docs/benchmarks.md that comes from `microbench sweep`: one GPU, and several. Pure, over parsed JSON.

Used by tools/draw_results.py, which knows the files. Times are medians of the slowest rank; a row without a verified
result is shown with its verdict, never with a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from microbench.compare import FEW_ROWS
from microbench.phases import PHASES

Row = Mapping[str, Any]

DEFAULT = "deepseek-v4-pro"


def number(value: float) -> str:
    """Three significant digits or more, never in powers of ten."""
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 10 or value == 0 else f"{value:#.3g}"


def cell(row: Row | None, unit_us: float = 1e3) -> str:
    """A row's median, in ms unless `unit_us` says otherwise; what kept it from being timed; or nothing."""
    if row is None:
        return ""
    return str(row["check"]["verdict"]) if row["us"] is None else number(row["us"]["p50"] / unit_us)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows).replace("| --- ", "|---").replace("|--- |", "|---|")


def pivot(
    rows: Sequence[Row],
    title: str,
    column: Callable[[Row], int],
    line: Callable[[Row], str],
    show: Callable[[Row | None], str] = cell,
) -> str:
    """Rows as a table: a column per amount, a line per name, in the order of the rows."""
    columns = sorted({column(row) for row in rows})
    found = {(line(row), column(row)): row for row in rows}
    names = dict.fromkeys(map(line, rows))
    return markdown(
        [title, *map(str, columns)], [[name, *(show(found.get((name, c))) for c in columns)] for name in names]
    )


def made_with(env: Mapping[str, Any], command: str) -> str:
    """Date, versions, command."""
    gpu = f"{env['gpu'] or env['cpu']}"
    return (
        f"{gpu}, {str(env['date_utc'])[:10]}, driver {env['driver']}, torch {env['torch']}, package "
        f"{env['package']}. `{command}`"
    )


def _is_default(row: Row, **changed: Any) -> bool:
    """Whether a row is the default point but for what is named (and its preset, amount and activations)."""
    expected = {
        "routing": "uniform", "combine_format": "bf16", "mode": "burst", "timing": "cuda_graph", "ep_size": 1,
        **changed,
    }  # fmt: skip
    return all(row[name] == value for name, value in expected.items()) and row["phases"] is None


def bench_rows(document: Mapping[str, Any], shapes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every preset's points in the fields of the GPU suite's `bench` part; `shapes`: preset -> name there."""
    return [
        {
            "shape": shapes[row["case"]],
            "mode": row["activations"],
            "routing": row["routing"],
            "rows": row["requested_rows_per_expert"],
            "floor_ms": row["sol_us"] / 1e3,
            "sustained_ms": row["us"]["p50"] / 1e3,
            "ok": True,
        }
        for row in document["rows"]
        if _is_shown(row, shapes) and row["us"] is not None
    ]  # fmt: skip


def rival_rows(document: Mapping[str, Any], shapes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rivals beside these points, in the fields of the GPU suite's `rivals` part."""
    return [
        {
            **rival,
            "shape": shapes[row["case"]],
            "routing": row["routing"],
            "rows": row["requested_rows_per_expert"],
            "floor_ms": row["sol_us"] / 1e3,
            "sustained_ms": None if rival["us"] is None else rival["us"]["p50"] / 1e3,
            "ok": rival["status"] == "ok",
        }
        for row in document["rows"]
        if _is_shown(row, shapes)
        for rival in row["rivals"]
    ]


def _is_shown(row: Row, shapes: Mapping[str, str]) -> bool:
    """Whether a row belongs to the presets' tables: one rank's share, uniform or Zipf, else as the default point."""
    is_share = row["case"] in shapes and row["share_of_ep"] > 1 and row["sol_us"] is not None
    return is_share and row["routing"] in ("uniform", "zipf") and _is_default(row, routing=row["routing"])


def other_axes(rows: Sequence[Row]) -> str:
    """What differs from the default point of the default preset, one axis at a time."""
    amount = "requested_rows_per_expert"
    axes: list[tuple[str, list[Row]]] = [("default point", [r for r in rows if _is_default(r)])]
    for name in dict.fromkeys(row["routing"] for row in rows):
        axes.append((f"routing {name}", [r for r in rows if name != "uniform" and _is_default(r, routing=name)]))
    for name in ("fp8", "fp4"):
        axes.append((f"wire {name}", [r for r in rows if _is_default(r, combine_format=name)]))
    axes.append(("lockstep", [r for r in rows if _is_default(r, mode="lockstep")]))
    axes.append(("launched one by one", [r for r in rows if _is_default(r, timing="eager")]))
    named = [dict(row) | {"axis": name} for name, members in axes for row in members if row["activations"] == "bf16"]
    return pivot(named, "rows per expert", lambda row: row[amount], lambda row: row["axis"]) if named else ""


def memory_table(rows: Sequence[Row]) -> str:
    """Weights, workspace and transients of every preset at its largest amount, GB."""
    largest: dict[str, Row] = {}
    for row in rows:
        is_wanted = row["memory"] is not None and row["share_of_ep"] > 1 and row["activations"] == "bf16"
        before = largest.get(row["case"])
        if is_wanted and _is_default(row) and (before is None or row["tokens_per_rank"] > before["tokens_per_rank"]):
            largest[row["case"]] = row
    lines = []
    for name, row in largest.items():
        memory = row["memory"]
        values = [memory["weights_bytes"], memory["workspace_bytes"], memory["transient_bytes"] or 0]
        lines.append([name, str(row["max_tokens_per_rank"]), *(number(value / 1e9) for value in values)])
    head = ["layer", "tokens it is built for", "weights", "workspace", "outputs of a graph's forwards"]
    return markdown(head, lines) if lines else ""


def phase_table(rows: Sequence[Row]) -> str:
    """Phases of the rows that have them: median and longest CTA, us."""
    lines = []
    for row in rows:
        if row["phases"] is not None:
            spans = {"total": row["phases"]["total_us"], **(row["phases"]["spans_us"] or dict.fromkeys(PHASES))}
            shown = [
                "" if span is None else f"{number(span['p50'])} / {number(span['max'])}" for span in spans.values()
            ]
            lines.append([f"{row['case']}, {row['ep_size']} rank(s), {row['tokens_per_rank']} tokens each", *shown])
    return markdown(["one launch, us, median / longest CTA", "total", *PHASES], lines) if lines else ""


def event_table(rows: Sequence[Row]) -> str:
    """When the events of a launch came on the rank whose launch was the longest: earliest / middle / latest CTA, us."""
    shown = [row for row in rows if row["phases"] is not None and row["phases"].get("events_us")]
    names = dict.fromkeys(name for row in shown for name in row["phases"]["events_us"])
    lines = []
    for row in shown:
        spreads = [row["phases"]["events_us"].get(name) for name in names]
        texts = ["" if s is None else " / ".join(number(s[key]) for key in ("min", "p50", "max")) for s in spreads]
        lines.append([f"{row['case']}, {row['ep_size']} rank(s), {row['tokens_per_rank']} tokens each", *texts])
    return markdown(["us since the first CTA entered", *names], lines) if lines else ""


def agreement_text(found: Mapping[str, Any] | None) -> str:
    """Two runs of one command, in one sentence a band."""
    if found is None:
        return ""
    parts = []
    for band, where in zip(found["bands"], (f"up to {FEW_ROWS}", f"above {FEW_ROWS}"), strict=True):
        if band["rows"]:
            worst = f"the worst differs by {band['worst_pct']:.1f} %"
            parts.append(
                f"{where} rows per expert {band['within']} of {band['rows']} within {band['bound_pct']:g} % ({worst})"
            )
    return f"**Two runs of one command in this sweep**: {'; '.join(parts)}." if parts else ""


def by_tokens(rows: Sequence[Row]) -> str:
    """Microseconds over tokens a rank, a line per preset, routing and wire."""

    def line(row: Row) -> str:
        return f"{row['case']}, {row['routing']}, wire {row['combine_format']}"

    title = "tokens a rank"
    return pivot(rows, title, lambda row: row["tokens_per_rank"], line, lambda row: cell(row, 1.0)) if rows else ""


def failures(rows: Sequence[Row], outcomes: Mapping[str, Any] | None) -> list[str]:
    """Axes without a complete result, and rows that were not timed."""
    axes = {name: entry["outcome"] for name, entry in (outcomes or {}).items() if entry["outcome"] != "ok"}
    lines = [f"- axis `{name}`: {outcome.splitlines()[0]}" for name, outcome in axes.items()]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"- {row['label']}, {row['tokens_per_rank']} tokens, {row['routing']}: {row['skip_reason']}")
    return ["**Without a result**", "", *lines] if lines else []


def sweep_block(
    document: Mapping[str, Any], agreement: Mapping[str, Any] | None, outcomes: Mapping[str, Any] | None
) -> str:
    """Everything of a sweep on one GPU but the tables of the presets."""
    rows = document["rows"]
    mine = [row for row in rows if row["case"] == DEFAULT and row["share_of_ep"] > 1]
    ranks = [row for row in rows if row["ep_size"] > 1 and row["phases"] is None]
    sections = [
        ("One axis at a time around DeepSeek-V4-Pro, 16-bit activations, ms", other_axes(mine)),
        (
            "Eight virtual ranks on one GPU (threads, each with its stream and an eighth of the multiprocessors), us",
            by_tokens(ranks),
        ),
        ("Where one launch spends its time (a kernel with time stamps)", phase_table(rows)),
        ("Memory of one layer, one rank's share, GB", memory_table(rows)),
    ]
    lines = [f"Sweep: {made_with(document['env'], document['command'])}"]
    for title, text in sections:
        lines += ["", f"**{title}**", "", text] if text else []
    lines += ["", agreement_text(agreement)] if agreement_text(agreement) else []
    lines += ["", *failures(rows, outcomes)] if failures(rows, outcomes) else []
    return "\n".join(lines)


def _chain_of(row: Row) -> Row | None:
    return next((rival for rival in row["rivals"] if rival["status"] != "skipped"), None)


def _preset_over_ranks(rows: Sequence[Row]) -> str:
    """One preset: floor, our rows by mode and activations, the chain, link traffic."""
    shown: list[tuple[str, Row, str]] = []
    plain = [row for row in rows if row["routing"] == "uniform" and row["combine_format"] == "bf16"]
    for row in plain:
        if row["activations"] == "bf16" and row["mode"] == "burst" and row["sol_us"] is not None:
            shown.append(("floor of these GPUs", row, number(row["sol_us"])))
    for row in plain:
        activations = {"bf16": "16-bit", "nvfp4": "NVFP4"}[row["activations"]]
        shown.append((f"this layer, {activations} activations, {row['mode']}", row, cell(row, 1.0)))
    for row in plain:
        chain = _chain_of(row)
        if chain is not None and row["mode"] == "burst":
            text = str(chain["check"]["verdict"]) if chain["us"] is None else number(chain["us"]["p50"])
            shown.append((chain["rival"], row, text))
    for row in plain:
        if row["activations"] == "bf16" and row["mode"] == "burst" and row["nvl_gbs"] is not None:
            shown.append(("GB/s that leave a GPU", row, number(row["nvl_gbs"])))
    entries = [{"line": line, "tokens": row["tokens_per_rank"], "text": text} for line, row, text in shown]
    return pivot(
        entries, "tokens a rank", lambda entry: entry["tokens"], lambda entry: entry["line"],
        lambda entry: "" if entry is None else entry["text"],
    )  # fmt: skip


def links_text(links: Mapping[str, Any]) -> str:
    """Latencies and bandwidths between two GPUs, item by item."""
    lines: list[list[str]] = []
    if links["flag_us"] is not None:
        lines.append(["a flag, one way", f"{links['flag_us']:.2f} us"])
    if links["load_ns"] is not None:
        lines += [[f"a dependent load, {who}", f"{ns:.0f} ns"] for who, ns in links["load_ns"].items()]
    if links["copy_gbs"] is not None:
        lines += [[f"a copy out of the next GPU, {who}", f"{gbs:.0f} GB/s"] for who, gbs in links["copy_gbs"].items()]
    for name, times in links["layer_us"].items():
        for tokens, us in times.items():
            shown = "" if us is None else f"{us:.1f} us"
            lines.append([f"the layer {name}, {tokens} token(s) a rank", shown])
    lines += [[name, f"not measured: {reason}"] for name, reason in links["skipped"].items()]
    return markdown(["item", "measured"], lines)


def ranks_block(report: Mapping[str, Any]) -> str:
    """A report of tools/multigpu_suite.py."""
    outcome = {step["step"]: step for step in report["steps"]}
    lines = [f"{report['ranks']} GPUs, {str(report['date_utc'])[:10]}: `{report['command']}`", ""]
    for name, step in outcome.items():
        last = next((line for line in reversed(step["output"]) if " passed" in line or " failed" in line), "")
        verdict = "passed" if step["ok"] else f"FAILED ({step['status']})"
        lines.append(
            f"- {name}: {verdict}, {step['seconds']:g} s{f'; {last.strip(chr(61) + chr(32))}' if last else ''}"
        )
    results = outcome.get("bench", {}).get("results", {})
    rows = results.get("sweep", {"rows": []})["rows"]
    if rows:
        lines += ["", made_with(results["sweep"]["env"], results["sweep"]["command"])]
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case and row["phases"] is None]
        if mine:
            shape = f"H {mine[0]['hidden']}, I {mine[0]['intermediate']}, {mine[0]['num_experts']} experts"
            lines += ["", f"**{case} ({shape}, top-{mine[0]['top_k']}), us**", "", _preset_over_ranks(mine)]
    others = [
        row for row in rows if row["phases"] is None and (row["routing"], row["combine_format"]) != ("uniform", "bf16")
    ]
    if others:
        title = "**Other wires and routings, 16-bit activations, us**"
        table = pivot(
            others, "tokens a rank", lambda row: row["tokens_per_rank"],
            lambda row: f"{row['case']}, {row['routing']}, wire {row['combine_format']}, {row['mode']}",
            lambda row: cell(row, 1.0),
        )  # fmt: skip
        lines += ["", title, "", table]
    for title, text in (
        ("Where one launch spends its time, the slowest rank", phase_table(rows)),
        ("When, earliest / middle / latest CTA of that rank (vendored_kernels/timeline.py)", event_table(rows)),
        ("Links", links_text(results["links"]) if "links" in results else ""),
    ):
        lines += ["", f"**{title}**", "", text] if text else []
    text = agreement_text(results.get("agreement"))
    lines += ["", text] if text else []
    missing = failures(rows, results.get("axes"))
    return "\n".join([*lines, *(["", *missing] if missing else [])])
