# SPDX-License-Identifier: Apache-2.0
"""Phases of a launch: every CTA's pieces add up to its whole, and stamps that change a result give none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jsonschema
import pytest
import torch

from microbench import phases, report
from microbench.phases import PHASES, spans_of, summarise
from trtllm_megamoe.comm import Communicator, run_threads, single
from vendored_kernels import timeline
from vendored_kernels.timeline import CtaTimeline

BUSY = CtaTimeline(
    100.0,
    {"staged": 300.0, "tiles_done": 4_100.0, "returned": 5_000.0, "left": 6_500.0},
    ((1_000.0, 2_000.0, False), (2_200.0, 3_000.0, False), (3_500.0, 4_000.0, True)),
    3,
)
IDLE = CtaTimeline(0.0, {"tiles_done": 900.0, "returned": 5_200.0, "left": 5_300.0}, (), 0)


def test_spans_of_a_cta_add_up_to_its_whole_launch() -> None:
    spans = spans_of(BUSY)
    assert spans == {
        "dispatch": 900.0, "fc1": 1_800.0, "fc2": 500.0, "between": 700.0, "combine": 1_000.0, "reduce": 1_500.0,
    }  # fmt: skip
    for cta in (BUSY, IDLE):
        found = spans_of(cta)
        assert found is not None and tuple(found) == PHASES
        assert sum(found.values()) == pytest.approx(cta.events["left"] - cta.entered)
    idle = spans_of(IDLE)
    assert idle is not None
    assert (idle["dispatch"], idle["combine"], idle["fc1"]) == (900.0, 4_300.0, 0.0)


def test_summary_is_over_ctas_and_then_over_launches() -> None:
    late = CtaTimeline(BUSY.entered, BUSY.events | {"left": 9_500.0}, BUSY.tiles, 3)
    found = summarise([[BUSY, IDLE], [late, IDLE], [late, IDLE]])
    assert (found["launches"], found["ctas"]) == (3, 2)
    assert found["total_us"] == {"min": 5.3, "p50": pytest.approx((9.4 + 5.3) / 2), "max": 9.4}
    assert found["spans_us"]["reduce"] == {"min": 0.1, "p50": pytest.approx(2.3), "max": 4.5}
    assert found["events_us"]["staged"] == {"min": 0.3, "p50": 0.3, "max": 0.3}, "of the one CTA that has it"
    assert found["events_us"]["left"] == {"min": 5.3, "p50": pytest.approx((9.5 + 5.3) / 2), "max": 9.5}
    assert set(found["events_us"]) == {"staged", "tiles_done", "returned", "left"}
    cut = CtaTimeline(0.0, {"left": 9.0}, ((1.0, 2.0, False),), timeline.TRACE_TILES + 1)
    assert summarise([[cut, IDLE]])["spans_us"] is None, "tiles that were not kept cannot be told apart"


def _stamped_rows(ctas: int, base: int) -> list[list[int]]:
    """Buffer of a launch: a cycle is half a nanosecond; the last CTA leaves last."""
    rows = []
    for cta in range(ctas):
        row = [0] * timeline.CTA_WORDS
        row[timeline.ENTERED], row[timeline.ENTERED_NS] = 10, base
        row[timeline.RETURNED], row[timeline.LEFT] = 1_010, 2_010 + 200 * cta
        row[timeline.LEFT_NS] = base + (row[timeline.LEFT] - 10) // 2
        row[timeline.FIRST_TILE], row[timeline.FIRST_TILE + 1], row[timeline.TILE_COUNT] = 210, 411, 1
        rows.append(row)
    return rows


class Layer:
    """What `measure` needs of a layer: an engine that writes stamps, slower on rank 1."""

    last_bucket = 16

    def __init__(self, comm: Communicator, with_stamps: torch.Tensor) -> None:
        self.engine, self._comm, self._out = self, comm, with_stamps
        self._buffer: torch.Tensor | None = None
        self.forwards = 0

    @contextmanager
    def record_timeline(self, bucket: int) -> Iterator[torch.Tensor]:
        assert bucket == self.last_bucket
        self._buffer = torch.ones(2 + self._comm.rank, timeline.CTA_WORDS, dtype=torch.int64)
        yield self._buffer
        self._buffer = None

    def forward(self) -> torch.Tensor:
        assert self._buffer is not None and not self._buffer.any(), "zeroed before every launch"
        self._buffer.copy_(torch.tensor(_stamped_rows(self._buffer.shape[0], 7_000 + self.forwards)))
        self.forwards += 1
        return self._out


def test_measure_gives_the_rank_whose_launch_is_longest_to_all() -> None:
    expected = torch.arange(4.0)

    def body(comm: Communicator) -> Any:
        layer: Any = Layer(comm, expected.clone())
        return phases.measure(layer, layer.forward, expected, comm, 10.0), layer.forwards

    (first, forwards), (second, _) = run_threads(2, body, 30.0)
    assert first == second and forwards == phases.LAUNCHES + 1
    assert (first["rank"], first["ctas"], first["launches"]) == (1, 3, phases.LAUNCHES)
    assert first["total_us"] == {"min": 1.0, "p50": 1.1, "max": 1.2}
    assert first["spans_us"]["fc2"]["p50"] == pytest.approx(0.1, abs=2e-3)  # the low bit of the end says fc2
    schema = json.loads(report.SCHEMA_PATH.read_text())["properties"]["rows"]["items"]["properties"]["phases"]
    jsonschema.Draft202012Validator(schema).validate(first)
    text = report.text_of_phases([{"tokens_per_rank": 8, "routing": "uniform", "imbalance": None,
                                   "combine_format": "fp8", "phases": first}])  # fmt: skip
    assert "1.1 / 1.2" in text and "combine" in text


def test_measure_gives_nothing_where_stamps_change_the_result() -> None:
    layer: Any = Layer(single(), torch.zeros(4))
    assert phases.measure(layer, layer.forward, torch.ones(4), single(), 10.0) is None
