# SPDX-License-Identifier: Apache-2.0
"""A report as tables for people and as JSON for machines. Called by the command line; judges nothing itself."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import Any

from tools.protocol_explorer.study import Report, VariantRow


def table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [header, *[tuple(f"{c:,}" if isinstance(c, int) else str(c) for c in row) for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    lines = []
    for line in cells:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _mark(ok: bool) -> str:
    return "ok" if ok else "FAIL"


def verdict(row: VariantRow) -> str:
    """`early read 5, deadlock 2 of 7`, or `safe`."""
    if set(row.verdicts) == {"ok"}:
        return "safe"
    kinds = sorted(((count, kind) for kind, count in row.verdicts.items() if kind != "ok"), reverse=True)
    return ", ".join(f"{kind} {count}" for count, kind in kinds) + f" of {row.tried}"


def text(report: Report) -> str:
    """All tables of a report."""
    parts = []
    if report.protocol:
        rows = [
            (
                _mark(row.ok),
                row.family,
                f"{row.ranks} x {row.launches}, T <= {row.max_tokens}",
                row.explored,
                "all, up to rotation" if row.complete else f"sample of {row.total:,}",
                row.states,
                row.first_fault,
            )
            for row in report.protocol
        ]
        header = ("", "protocol", "ranks x launches", "scenarios", "", "states", "")
        parts.append(table(header, rows))
    if report.ring:
        ring = [
            (_mark(row.ok), row.order, row.group, row.ctas, row.slots, row.blocks, row.verdict, row.predicted)
            for row in report.ring
            if row.verdict != "ok" or not row.ok
        ]
        good = sum(row.ok for row in report.ring)
        parts.append(table(("", "ring: order", "group", "CTAs", "slots", "blocks", "verdict", "rule"), ring))
        parts.append(f"{good} of {len(report.ring)} rings behave as the rule says; those that deadlock are listed")
    if report.reductions:
        checks = [
            (_mark(row.ok), row.family, row.comparisons, row.fine_states, row.reduced_states, len(row.disagreements))
            for row in report.reductions
        ]
        names = ("", "reductions checked on", "verdicts", "states without", "states with", "differ")
        parts.append(table(names, checks))
    if report.walks:
        parts.append(f"random schedules of larger scenarios: {report.walks}")
    if report.variants:
        variants = [
            (_mark(row.ok), row.group, row.name, verdict(row), row.tried, row.states, len(row.trace))
            for row in report.variants
        ]
        header = ("", "taken away", "", "verdict", "scenarios", "states", "shortest trace")
        parts.append(table(header, variants))
    return "\n\n".join(parts)


def as_json(report: Report, command: str) -> str:
    """The whole report with the shortest traces."""
    facts: dict[str, Any] = {"command": command, "python": platform.python_version(), "ok": report.ok}
    facts.update(dataclasses.asdict(report))
    return json.dumps(facts, indent=1) + "\n"
