# SPDX-License-Identifier: Apache-2.0
"""Plain text for terminals: a column-aligned table and byte counts. Used by the commands."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align columns by their widest cell; `right` names the columns to flush right. No headers, no rule line."""
    lines = [tuple(headers), *map(tuple, rows)] if headers else [tuple(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    if headers:
        lines.insert(1, tuple("-" * width for width in widths))
    text = []
    for line in lines:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text)


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one: `1.50 GiB`, `17 B`."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"
