# SPDX-License-Identifier: Apache-2.0
"""Reading the event buffer of kernels with timestamps."""

from __future__ import annotations

import pytest

from vendored_kernels import timeline


def _row(entered_ns: int, cycles: int, **words: int) -> list[int]:
    row = [0] * timeline.CTA_WORDS
    row[timeline.ENTERED], row[timeline.ENTERED_NS] = cycles, entered_ns
    row[timeline.LEFT], row[timeline.LEFT_NS] = cycles + 20_000, entered_ns + 10_000
    for name, value in words.items():
        row[getattr(timeline, name)] = value
    return row


def test_read_two_ctas_share_one_clock_in_nanoseconds() -> None:
    first, second = _row(5_000, 1_000, TABLE=3_000), _row(6_000, 900_000, CELLS=900_200)
    second[timeline.TILE_COUNT] = 2
    begin = timeline.FIRST_TILE
    second[begin : begin + 4] = [900_400, 900_800, 901_000, 902_001]
    a, b = timeline.read([first, second])
    assert (a.entered, b.entered) == (0.0, 1_000.0)
    assert a.events == {"table": 1_000.0, "left": 10_000.0}  # two cycles a nanosecond; what never happened is missing
    assert b.events == {"cells": 1_100.0, "left": 11_000.0}
    assert b.tiles == ((1_200.0, 1_400.0, False), (1_500.0, 2_000.5, True))
    assert (a.num_tiles, b.num_tiles) == (0, 2)


def test_read_more_tiles_than_kept_reads_those_that_are() -> None:
    row = _row(0, 10)
    row[timeline.TILE_COUNT] = timeline.TRACE_TILES + 9
    (cta,) = timeline.read([row])
    assert len(cta.tiles) == timeline.TRACE_TILES and cta.num_tiles == timeline.TRACE_TILES + 9


def test_read_cta_that_never_left_is_refused() -> None:
    row = _row(0, 10)
    row[timeline.LEFT] = 0
    with pytest.raises(ValueError, match=r"CTAs \[1\] of 2 wrote no end"):
        timeline.read([_row(0, 10), row])


def test_read_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="every row must have"):
        timeline.read([[0] * 7])


def test_layout_words_do_not_overlap() -> None:
    words = [timeline.ENTERED, timeline.ENTERED_NS, timeline.LEFT_NS, timeline.TILE_COUNT, *timeline.EVENT_NAMES]
    assert len(set(words)) == len(words) and max(words) < timeline.FIRST_TILE
