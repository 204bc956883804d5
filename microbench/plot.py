# SPDX-License-Identifier: Apache-2.0
"""Draw a result: time over tokens with the floor and the rivals, the share of the floor, memory; what is known of them.

Needs matplotlib (the `bench` extra). Reads parsed JSON, writes one figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError

Row = Mapping[str, Any]

SUFFIXES = (".svg", ".png")

# What makes a line of its own; only those that differ within the result are named in the legend.
_SERIES = ("label", "engine", "ep_size", "routing", "imbalance", "combine_format", "activations", "mode")


def group_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Timed rows by legend text, each series ascending along x."""
    timed = [row for row in rows if row["us"] is not None]
    varying = [name for name in _SERIES if len({row[name] for row in timed}) > 1]
    series: dict[str, list[Row]] = {}
    for row in timed:
        name = ", ".join(str(row[axis]) for axis in varying if row[axis] is not None) or str(row["label"])
        series.setdefault(name, []).append(row)
    axis = x_axis(rows)
    return {name: sorted(members, key=lambda row: float(row[axis])) for name, members in series.items()}


def x_axis(rows: Sequence[Row]) -> str:
    """`rows_per_expert` when that was asked for on every row, else `tokens_per_rank`."""
    by_rows = all(row["requested_rows_per_expert"] is not None for row in rows)
    return "rows_per_expert" if by_rows else "tokens_per_rank"


def draw(document: Mapping[str, Any], output: Path) -> None:
    """Write the figure; its format follows the suffix.

    Raises:
        MegaMoeConfigError: another suffix, or no row with a time.
        MegaMoeUnavailableError: matplotlib is missing.
    """
    if output.suffix not in SUFFIXES:
        raise MegaMoeConfigError(f"cannot draw {output}: the name must end in {' or '.join(SUFFIXES)}")
    rows = document["rows"]
    series = group_series(rows)
    if not series:
        raise MegaMoeConfigError("no row of this result has a time; nothing to draw")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as err:
        raise MegaMoeUnavailableError(
            "drawing needs matplotlib; install it with: pip install 'trtllm-megamoe[bench]'"
        ) from err

    axis = x_axis(rows)
    kinds = ["time"]
    kinds += ["floor"] if any(row["sol_us"] is not None for row in rows) else []
    kinds += ["memory"] if any(memory_of(row) is not None for row in rows) else []
    # a fixed salt and no date: the same result gives the same SVG
    with matplotlib.rc_context({"svg.hashsalt": "megamoe-bench"}):
        figure = Figure(figsize=(7, 1.5 + 3 * len(kinds)), layout="constrained")
        axes = figure.subplots(len(kinds), sharex=True, squeeze=False)[:, 0]
        panels = dict(zip(kinds, axes, strict=True))
        for name, members in series.items():
            _draw_series(panels, axis, name, members)
            for rival, points in rival_points(axis, members).items():
                _draw_rival(panels, f"{name}: {rival}" if len(series) > 1 else rival, points)
        panels["time"].set(xscale="log", yscale="log", ylabel="time of the slowest rank, us (p50, band p10-p90)")
        axes[-1].set_xlabel(axis.replace("_", " "))
        if "floor" in panels:
            panels["floor"].set(ylabel="% of the floor reached", ylim=(0, 100))
        if "memory" in panels:
            panels["memory"].set(ylabel="memory of rank 0, GB", ylim=(0, None))
            panels["memory"].legend(fontsize="x-small")
        ticks = sorted({row[axis] for members in series.values() for row in members})
        axes[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        for panel in axes:
            panel.xaxis.minorticks_off()
            panel.grid(True, which="both", alpha=0.3)
        panels["time"].legend(fontsize="small")
        figure.suptitle(_title(document), fontsize="small")
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def _draw_series(panels: Mapping[str, Any], axis: str, name: str, members: Sequence[Row]) -> None:
    x = [row[axis] for row in members]
    (line,) = panels["time"].plot(x, [row["us"]["p50"] for row in members], marker="o", label=name)
    color = line.get_color()
    panels["time"].fill_between(
        x, [row["us"]["p10"] for row in members], [row["us"]["p90"] for row in members], alpha=0.2, color=color
    )
    known = [row for row in members if row["sol_us"] is not None]
    if known:
        x = [row[axis] for row in known]
        panels["time"].plot(x, [row["sol_us"] for row in known], linestyle="--", color=color, label=f"{name}: floor")
        panels["floor"].plot(x, [row["pct_sol"] for row in known], marker="o", color=color)
    measured = [(row[axis], memory) for row in members if (memory := memory_of(row)) is not None]
    for what, style in zip(MEMORY, ("o-", "--", ":"), strict=True) if measured else ():
        values = [memory[what] for _, memory in measured]
        panels["memory"].plot([x for x, _ in measured], values, style, color=color, label=f"{name}: {what}")


MEMORY = ("peak", "weights", "workspace")
"""What the memory panel shows: weights of one layer, the workspace that all layers share, and both with what a timed
forward took on top (no transient is known on the CPU engine)."""


def memory_of(row: Row) -> dict[str, float] | None:
    """`MEMORY` of one row in GB; None where it was not recorded."""
    memory = row.get("memory")
    if memory is None:
        return None
    weights, workspace = memory["weights_bytes"] / 1e9, memory["workspace_bytes"] / 1e9
    peak = weights + workspace + (memory["transient_bytes"] or 0) / 1e9
    return dict(zip(MEMORY, (peak, weights, workspace), strict=True))


def rival_points(axis: str, members: Sequence[Row]) -> dict[str, list[tuple[float, float, float | None]]]:
    """(x, p50 in microseconds, share of the floor in per cent) of every rival that has times."""
    points: dict[str, list[tuple[float, float, float | None]]] = {}
    for row in members:
        for rival in row["rivals"]:
            if rival["us"] is not None:
                p50 = rival["us"]["p50"]
                share = None if row["sol_us"] is None else 100.0 * row["sol_us"] / p50
                points.setdefault(rival["rival"], []).append((float(row[axis]), p50, share))
    return points


def _draw_rival(panels: Mapping[str, Any], name: str, points: Sequence[tuple[float, float, float | None]]) -> None:
    (line,) = panels["time"].plot(
        [x for x, _, _ in points], [us for _, us, _ in points], marker="s", ls=":", label=name
    )
    known = [(x, share) for x, _, share in points if share is not None]
    if known:
        panels["floor"].plot([x for x, _ in known], [s for _, s in known], marker="s", ls=":", color=line.get_color())


def _title(document: Mapping[str, Any]) -> str:
    env = document["env"]
    labels = ", ".join(dict.fromkeys(row["label"] for row in document["rows"]))
    commit = (env["commit"] or "no commit")[:12]
    return f"{labels}\n{env['gpu'] or env['cpu']}, {commit}, {env['date_utc']}"
