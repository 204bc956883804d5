# SPDX-License-Identifier: Apache-2.0
"""Draw a result: time over tokens with the floor and the rivals, and the share of the floor where peaks are known.

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
    has_floor = any(row["sol_us"] is not None for row in rows)
    # a fixed salt and no date: the same result gives the same SVG
    with matplotlib.rc_context({"svg.hashsalt": "megamoe-bench"}):
        figure = Figure(figsize=(7, 7.5 if has_floor else 4.5), layout="constrained")
        panels = figure.subplots(2 if has_floor else 1, sharex=True, squeeze=False)[:, 0]
        for name, members in series.items():
            _draw_series(panels, axis, name, members)
            for rival, points in rival_points(axis, members).items():
                _draw_rival(panels, f"{name}: {rival}" if len(series) > 1 else rival, points)
        panels[0].set(xscale="log", yscale="log", ylabel="time of the slowest rank, us (p50, band p10-p90)")
        panels[-1].set_xlabel(axis.replace("_", " "))
        if has_floor:
            panels[1].set(ylabel="% of the floor reached", ylim=(0, 100))
        ticks = sorted({row[axis] for members in series.values() for row in members})
        panels[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        for panel in panels:
            panel.xaxis.minorticks_off()
            panel.grid(True, which="both", alpha=0.3)
        panels[0].legend(fontsize="small")
        figure.suptitle(_title(document), fontsize="small")
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)


def _draw_series(panels: Any, axis: str, name: str, members: Sequence[Row]) -> None:
    x = [row[axis] for row in members]
    (line,) = panels[0].plot(x, [row["us"]["p50"] for row in members], marker="o", label=name)
    panels[0].fill_between(
        x, [row["us"]["p10"] for row in members], [row["us"]["p90"] for row in members],
        alpha=0.2, color=line.get_color(),
    )  # fmt: skip
    known = [row for row in members if row["sol_us"] is not None]
    if known:
        x = [row[axis] for row in known]
        panels[0].plot(
            x, [row["sol_us"] for row in known], linestyle="--", color=line.get_color(), label=f"{name}: floor"
        )
        panels[1].plot(x, [row["pct_sol"] for row in known], marker="o", color=line.get_color())


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


def _draw_rival(panels: Any, name: str, points: Sequence[tuple[float, float, float | None]]) -> None:
    (line,) = panels[0].plot([x for x, _, _ in points], [us for _, us, _ in points], marker="s", ls=":", label=name)
    known = [(x, share) for x, _, share in points if share is not None]
    if known:
        panels[1].plot([x for x, _ in known], [s for _, s in known], marker="s", ls=":", color=line.get_color())


def _title(document: Mapping[str, Any]) -> str:
    env = document["env"]
    labels = ", ".join(dict.fromkeys(row["label"] for row in document["rows"]))
    commit = (env["commit"] or "no commit")[:12]
    return f"{labels}\n{env['gpu'] or env['cpu']}, {commit}, {env['date_utc']}"
