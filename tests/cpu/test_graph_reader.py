# SPDX-License-Identifier: Apache-2.0
"""The static scan on snippets by a reader of docs/cuda-graphs.md who had seen neither the scan nor its corpus.

The snippets are never tuned to the scan: what it judges wrongly is named here, and leaves the list when it is mended.
"""

from __future__ import annotations

import pytest

from tests.helpers.graph_corpus import Snippet, read_snippets
from trtllm_megamoe.graph import scan_source
from trtllm_megamoe.graph.static.findings import ScanReport

FAULTS, NEAR_MISSES = read_snippets("reader/faults"), read_snippets("reader/near_misses")

MIN_RIGHT = 27  # of 30

#: Snippet name -> why the scan and the reader disagree.
KNOWN_WRONG = {
    "a-idle_rank_returns": "right rule, other line: the scan marks the `if`, the reader the `return` under it",
}


def _is_right(snippet: Snippet, report: ScanReport) -> bool:
    """Exactly the marked lines with the marked rules, by a scan that did look at the snippet's functions."""
    return bool(report.functions) and {(f.line, f.rule) for f in report.findings} == snippet.expected


def test_reader_corpus_has_one_fault_per_fault_and_none_per_near_miss() -> None:
    assert len(FAULTS) == 15 and len(NEAR_MISSES) == 15
    assert all(len(s.expected) == 1 for s in FAULTS) and not any(s.expected for s in NEAR_MISSES)
    names = [s.name for s in FAULTS + NEAR_MISSES]
    assert len(set(names)) == len(names) and set(KNOWN_WRONG) <= set(names)
    rules = [rule for s in FAULTS for _, rule in s.expected]
    assert len(set(rules)) == len(rules), "every fault breaks another rule"
    assert {rule[:3] for rule in rules} == {f"GR{family}" for family in range(8)}


@pytest.mark.parametrize("snippet", FAULTS + NEAR_MISSES, ids=lambda s: s.name)
def test_scan_reader_snippet_is_judged_right_unless_known_wrong(snippet: Snippet) -> None:
    report = scan_source(snippet.source)
    found = sorted((f.line, f.rule) for f in report.findings)
    expected = sorted(snippet.expected)
    assert _is_right(snippet, report) != (snippet.name in KNOWN_WRONG), f"found {found}, expected {expected}"


def test_scan_reader_corpus_is_judged_right_nearly_always() -> None:
    right = [s.name for s in FAULTS + NEAR_MISSES if _is_right(s, scan_source(s.source))]
    assert len(right) >= MIN_RIGHT, right
