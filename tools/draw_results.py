# SPDX-License-Identifier: Apache-2.0
"""Draws the tables of README.md and docs/benchmarks.md, and the figure, from the committed results.

    python tools/draw_results.py            # rewrite what lies between the markers
    python tools/draw_results.py --check    # exit 1 when a document is not what the results say
    python tools/draw_results.py --figure   # also docs/hopper-floor.svg (needs matplotlib)

The newest file of microbench/results/hopper that holds a part (`bench`, `rivals`) counts, by its date; of a sweep on
one GPU the directory microbench/results/sweep as `microbench sweep --out` left it, which then gives the presets' tables
as well, and the rivals' where it was run with them; of skewed routing beside the rivals microbench/results/sweep-zipf;
of several GPUs the newest report of tools/multigpu_suite.py for each number of GPUs in microbench/results/multigpu. No
number of a table is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.draw_sweeps import bench_rows, ranks_block, rival_rows, sweep_block

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "microbench/results/hopper"
SWEEP = ROOT / "microbench/results/sweep"
SKEWED = ROOT / "microbench/results/sweep-zipf"
RANKS = ROOT / "microbench/results/multigpu"
FIGURE = ROOT / "docs/hopper-floor.svg"


def marks(name: str = "") -> tuple[str, str]:
    """The pair of markers around a drawn block."""
    begin, end = (f"<!-- drawn by tools/draw_results.py: {name}{side} -->" for side in ("begin", "end"))
    return begin, end


BEGIN, END = marks()
HEADLINE = "v4-pro"
SHAPES = {
    "v4-pro": "DeepSeek-V4-Pro (H 7168, I 3072, 48 of 384 experts)",
    "dsv3": "DeepSeek-V3 (H 7168, I 2048, 32 of 256 experts)",
    "qwen3-235b": "Qwen3-235B (H 4096, I 1536, 16 of 128 experts)",
    "v4-flash": "DeepSeek-V4-Flash (H 4096, I 2048, 32 of 256 experts)",
    "gpt-oss": "gpt-oss-120b (H 2880, I 2880, 16 of 128 experts)",
}
PRESETS = {
    "deepseek-v4-pro": "v4-pro",
    "deepseek-v3": "dsv3",
    "qwen3-235b": "qwen3-235b",
    "deepseek-v4-flash": "v4-flash",
    "gpt-oss-120b": "gpt-oss",
}
"""Shapes of a sweep's presets."""

OURS = {"bf16": "this layer, 16-bit activations", "nvfp4": "this layer, NVFP4 activations"}

Row = Mapping[str, Any]
Point = tuple[str, int]
"""Routing and rows per expert."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a report: where and with what it was made, and its rows."""

    environment: Mapping[str, Any]
    command: str
    rows: Sequence[Row]


def newest(part: str, directory: Path = RESULTS) -> Part:
    """The newest result that holds a part.

    Raises:
        SystemExit: There is none.
    """
    found = []
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document.get(part), dict) and "results" in document[part]:
            found.append(document)
    if not found:
        raise SystemExit(f"no result in {directory} holds the part {part!r}")
    latest = max(found, key=lambda document: str(document["environment"]["date_utc"]))
    return Part(latest["environment"], latest["command"], latest[part]["results"])


def read(path: Path) -> Any:
    """Parsed JSON, or None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def sweep_parts(directory: Path = SWEEP) -> tuple[Part | None, Part | None]:
    """A sweep's rows of the presets and of the rivals beside them, as the GPU suite has them; None for what is not."""
    document = read(directory / "sweep.json")
    if document is None:
        return None, None
    environment = {**document["env"], "cutlass_dsl": document["env"]["kernel_dsl"]}
    rivals = rival_rows(document, PRESETS)
    return (
        Part(environment, document["command"], bench_rows(document, PRESETS)),
        Part(environment, document["command"], rivals) if rivals else None,
    )


def parts(directory: Path = RESULTS) -> tuple[Part, Part]:
    """This layer's rows and the rivals', the sweep's where it has them."""
    bench, rivals = sweep_parts()
    return bench or newest("bench", directory), rivals or newest("rivals", directory)


def newest_ranks(directory: Path = RANKS) -> list[Any]:
    """The newest report over several GPUs for each number of them, the most GPUs first."""
    reports = [document for path in sorted(directory.glob("*.json")) if "steps" in (document := read(path))]
    latest = {report["ranks"]: report for report in sorted(reports, key=lambda report: str(report["date_utc"]))}
    return [latest[ranks] for ranks in sorted(latest, reverse=True)]


def number(value: float) -> str:
    """Three significant digits, as tables show milliseconds."""
    return f"{value:.3g}" if value >= 10 else f"{value:#.3g}"


def status_of(rival: Row) -> str:
    """`ok`, `failed` or `skipped`."""
    return str(rival.get("status", "ok" if rival["ok"] else "failed"))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if status_of(row) != "ok":
        verdict = (row.get("check") or {}).get("verdict", "not run")
        return "not timed" if verdict == "verified" else str(verdict)
    return number(row["sustained_ms"])


def _lines_of(rows: Sequence[Row], points: Sequence[Point], name: str) -> str:
    by_point = {(row["routing"], row["rows"]): row for row in rows}
    return f"| {name} | " + " | ".join(_cell(by_point.get(point)) for point in points) + " |"


def table(shape: str, points: Sequence[Point], bench: Part, rivals: Part) -> str:
    """One shape's times in ms: the floor, this layer, the rivals."""
    ours = [row for row in bench.rows if row["shape"] == shape]
    floors = {(row["routing"], row["rows"]): row["floor_ms"] for row in ours}
    heads = [str(rows) if routing == "uniform" else f"{rows}, {routing}" for routing, rows in points]
    lines = [
        "| rows per expert | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(points),
        "| floor of this GPU | " + " | ".join(number(floors[p]) if p in floors else "" for p in points) + " |",
    ]
    for mode, name in OURS.items():
        rows = [row for row in ours if row["mode"] == mode]
        if rows:
            lines.append(_lines_of(rows, points, name))
    theirs = [row for row in rivals.rows if row["shape"] == shape]
    for rival in dict.fromkeys(row["rival"] for row in theirs):
        rows = [row for row in theirs if row["rival"] == rival]
        if any(status_of(row) != "skipped" for row in rows):
            version = rows[0].get("version")
            name = f"{rival}{f' ({version})' if version else ''}, no gather, no sum"
            lines.append(_lines_of(rows, points, name))
    return "\n".join(lines)


def points_of(shape: str, bench: Part, *, uniform_only: bool) -> list[Point]:
    """Points of a shape: uniform routing first, rows ascending."""
    points = {(row["routing"], row["rows"]) for row in bench.rows if row["shape"] == shape}
    wanted = [point for point in points if point[0] == "uniform" or not uniform_only]
    return sorted(wanted, key=lambda point: (point[0] != "uniform", point))


def made_with(part: Part) -> str:
    """Date and versions."""
    env = part.environment
    return (
        f"{env['gpu']}, {str(env['date_utc'])[:10]}, driver {env['driver']}, torch {env['torch']}, CuTe DSL "
        f"{env['cutlass_dsl']}, kernel sources {env['kernel_sources'][:12]}"
    )


def skipped(rivals: Part) -> list[str]:
    """Rivals that were not run, once each, with the reason."""
    reasons = {row["rival"]: row.get("skip_reason") for row in rivals.rows if status_of(row) == "skipped"}
    return [f"{rival}: not run, {reason}" for rival, reason in reasons.items()]


def program_of(part: Part) -> str:
    """What measured a part."""
    return "python -m microbench sweep" if "microbench sweep" in part.command else "tools/run_gpu_suite.py"


def readme_block(bench: Part, rivals: Part) -> str:
    """The README's paragraph and table."""
    env = bench.environment
    return "\n".join(
        [
            f"One {env['gpu'].removeprefix('NVIDIA ')}, one rank's share of an EP8 layer of DeepSeek-V4-Pro, uniform "
            "routing, bf16 tokens in and out, ms,",
            f"medians of sustained CUDA-graph replays ({str(env['date_utc'])[:10]}, torch {env['torch']}, CuTe DSL "
            f"{env['cutlass_dsl']}, `{program_of(bench)}`):",
            "",
            table(HEADLINE, points_of(HEADLINE, bench, uniform_only=True), bench, rivals),
        ]
    )


def benchmarks_block(bench: Part, rivals: Part) -> str:
    """All shapes and routings for docs/benchmarks.md."""
    lines = [f"Made with: {made_with(bench)}. `{bench.command}`"]
    if rivals.environment != bench.environment:
        lines.append(f"Rivals: {made_with(rivals)}. `{rivals.command}`")
    for shape, title in SHAPES.items():
        points = points_of(shape, bench, uniform_only=False)
        if points:
            lines += ["", f"**{title}**, ms", "", table(shape, points, bench, rivals)]
    lines += ["", *skipped(rivals)] if skipped(rivals) else []
    return "\n".join(lines)


def replaced(text: str, block: str, name: str = "") -> str:
    """`text` with `block` between its markers.

    Raises:
        SystemExit: The text has no such pair of markers.
    """
    first, last = marks(name)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise SystemExit(f"no pair of markers {first!r}, {last!r}")
    return f"{before}{first}\n{block}\n{last}{after}"


def sweep_text(directory: Path = SWEEP) -> str:
    """What a sweep on one GPU says besides the presets' tables."""
    document = read(directory / "sweep.json")
    if document is None:
        return "No sweep has been run on a GPU."
    return sweep_block(document, read(directory / "agreement.json"), read(directory / "axes.json"))


def skewed_text(directory: Path = SKEWED) -> str:
    """Every shape under skewed routing with the rivals beside it."""
    bench, rivals = sweep_parts(directory)
    return benchmarks_block(bench, rivals) if bench and rivals else "Skewed routing has not been run beside the rivals."


def documents(directory: Path = RESULTS) -> dict[Path, str]:
    """Every drawn document as the results want it."""
    bench, rivals = parts(directory)
    blocks = [f"### {report['ranks']} GPUs\n\n{ranks_block(report)}" for report in newest_ranks()]
    over_ranks = "\n\n".join(blocks) or "The suite for several GPUs has not been run."
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md"))
    page = replaced(page, benchmarks_block(bench, rivals))
    page = replaced(page, skewed_text(), "skewed ")
    page = replaced(replaced(page, sweep_text(), "sweep "), over_ranks, "ranks ")
    return {
        ROOT / "README.md": replaced(readme, readme_block(bench, rivals)),
        ROOT / "docs/benchmarks.md": page,
    }


def draw_figure(bench: Part, rivals: Part, output: Path) -> None:
    """Per cent of the floor over rows per expert, uniform routing, a panel a shape."""
    import matplotlib
    from matplotlib.figure import Figure

    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in bench.rows)]
    with matplotlib.rc_context({"svg.hashsalt": "megamoe-results"}):
        figure = Figure(figsize=(4 * len(shapes), 4), layout="constrained")
        panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
        for panel, shape in zip(panels, shapes, strict=True):
            series: dict[str, list[Row]] = {}
            for row in [*bench.rows, *rivals.rows]:
                if row["shape"] == shape and row["routing"] == "uniform" and status_of(row) == "ok":
                    series.setdefault(row.get("rival") or OURS[row["mode"]], []).append(row)
            for name, rows in series.items():
                rows.sort(key=lambda row: int(row["rows"]))
                shares = [100 * row["floor_ms"] / row["sustained_ms"] for row in rows]
                panel.plot([row["rows"] for row in rows], shares, marker="o", label=name)
            ticks = sorted({row["rows"] for rows in series.values() for row in rows})
            panel.set(xscale="log", xlabel="rows per expert", title=SHAPES[shape].split(" (")[0], ylim=(0, 105))
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.xaxis.minorticks_off()
            panel.grid(True, alpha=0.3)
        panels[0].set_ylabel("% of the floor, sustained")
        panels[0].legend(fontsize="x-small", loc="lower center")
        figure.savefig(output, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 with `--check` when a document is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--figure", action="store_true")
    options = parser.parse_args(arguments)
    stale = []
    for path, text in documents().items():
        if path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
    if options.figure and not options.check:
        draw_figure(*parts(), FIGURE)
    print(f"{'not up to date' if options.check else 'rewritten'}: {', '.join(stale) or 'nothing'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
