# SPDX-License-Identifier: Apache-2.0
"""Where a CTA was when: layout and meaning of the event buffer of kernels compiled with `timestamps`. No DSL, no torch.

The kernel writes cycle counts of its multiprocessor (`vendored_kernels/common/stamps.py`); readers turn rows of the
buffer into nanoseconds on one clock. Not for timing whole launches: an instrumented kernel is slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ENTERED, ENTERED_NS, LEFT, LEFT_NS, TILE_COUNT = 0, 1, 2, 3, 4
"""Words of a CTA: cycles and nanoseconds (GPU clock) at its first and last instruction, finished tiles."""
COUNTED, STAGED, PUBLISHED, CELLS, TABLE, FIRST_ROWS, PULLED, TILES_DONE, ANNOUNCED, RETURNED, OFFERED = range(5, 16)
"""Cycles when: routes are counted; this CTA's tokens are staged; size cells are out (CTA 0 of a rank); everybody's
cells are in; the tile table stands; the first tile's token rows are there; the first dispatch warp has pulled its
last row; the math warps leave the tile loop; the last result rows are announced; all own result rows have come;
the payload tags are out (CTA 0 of a rank)."""
EVENT_NAMES = {
    COUNTED: "counted",
    STAGED: "staged",
    PUBLISHED: "published",
    CELLS: "cells",
    OFFERED: "offered",
    TABLE: "table",
    FIRST_ROWS: "first_rows",
    PULLED: "pulled",
    TILES_DONE: "tiles_done",
    ANNOUNCED: "announced",
    RETURNED: "returned",
    LEFT: "left",
}
FIRST_TILE = 16
TRACE_TILES = 248
"""Tiles whose begin and end are kept, two words each; the low bit of the end is 1 for fc2."""
CTA_WORDS = FIRST_TILE + 2 * TRACE_TILES


@dataclass(frozen=True, slots=True)
class CtaTimeline:
    """One CTA of one launch; nanoseconds since the launch's first CTA entered.

    Attributes:
        entered: when it entered.
        events: event name -> time; events that did not happen are missing.
        tiles: (begin, end, is fc2) in the order of execution, at most TRACE_TILES.
        num_tiles: all tiles it finished.
    """

    entered: float
    events: dict[str, float]
    tiles: tuple[tuple[float, float, bool], ...]
    num_tiles: int


def read(rows: Sequence[Sequence[int]]) -> list[CtaTimeline]:
    """Decode a launch's buffer, one row of CTA_WORDS u64 per CTA (zeroed before the launch).

    Cycles become nanoseconds by the CTAs' median rate; the GPU's coarser clock only aligns the CTAs.

    Raises:
        ValueError: a CTA never left, or a row has another length.
    """
    if any(len(row) != CTA_WORDS for row in rows):
        raise ValueError(f"every row must have {CTA_WORDS} words, got lengths {sorted({len(row) for row in rows})}")
    missing = [i for i, row in enumerate(rows) if not row[LEFT]]
    if missing:
        raise ValueError(f"CTAs {missing[:8]} of {len(rows)} wrote no end: the buffer is not that of a finished launch")
    # With a coarse clock a short launch can show no time at all for one CTA: the median of all does not mind.
    rate = statistics.median((row[LEFT_NS] - row[ENTERED_NS]) / (row[LEFT] - row[ENTERED]) for row in rows)
    first = min(row[ENTERED_NS] for row in rows)
    return [_cta(row, rate, first) for row in rows]


def _cta(row: Sequence[int], rate: float, first: int) -> CtaTimeline:
    entered = row[ENTERED_NS] - first

    def at(cycles: int) -> float:
        return entered + (cycles - row[ENTERED]) * rate

    kept = min(row[TILE_COUNT], TRACE_TILES)
    pairs = [(row[FIRST_TILE + 2 * i], row[FIRST_TILE + 2 * i + 1]) for i in range(kept)]
    return CtaTimeline(
        float(entered),
        {name: at(row[word]) for word, name in EVENT_NAMES.items() if row[word]},
        tuple((at(begin), at(end), bool(end & 1)) for begin, end in pairs),
        row[TILE_COUNT],
    )
