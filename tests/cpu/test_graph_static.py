# SPDX-License-Identifier: Apache-2.0
"""The static scan against its corpus, its catalogue, and the claim that every rule is needed."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.helpers.graph_corpus import Snippet, read_snippets
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.graph import RULES, scan, scan_function, scan_source
from trtllm_megamoe.graph.static.findings import Family, Level, ScanReport
from trtllm_megamoe.graph.static.render import as_json, as_sarif, as_text

FAULTS, NEAR_MISSES = read_snippets("faults"), read_snippets("near_misses")


def _found(report: ScanReport) -> frozenset[tuple[int, str]]:
    return frozenset((f.line, f.rule) for f in report.findings)


def _wrong(snippets: list[Snippet], disabled: tuple[str, ...] = ()) -> list[str]:
    return [s.name for s in snippets if _found(scan_source(s.source, disabled=disabled)) != s.expected]


def test_corpus_size_covers_every_rule_and_family() -> None:
    assert len(FAULTS) >= 30 and len(NEAR_MISSES) >= 30
    expected = {rule for s in FAULTS for _, rule in s.expected}
    assert expected == set(RULES)
    assert {RULES[rule].family for rule in expected} == set(Family)
    assert all(s.expected for s in FAULTS) and not any(s.expected for s in NEAR_MISSES)


@pytest.mark.parametrize("snippet", FAULTS, ids=lambda s: s.name)
def test_scan_fault_is_found_where_marked(snippet: Snippet) -> None:
    assert _found(scan_source(snippet.source)) == snippet.expected


@pytest.mark.parametrize("snippet", NEAR_MISSES, ids=lambda s: s.name)
def test_scan_near_miss_is_silent(snippet: Snippet) -> None:
    report = scan_source(snippet.source)
    assert report.findings == ()
    assert report.functions, "the snippet must have been looked at"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda r: r.id)
def test_rule_example_fires_and_near_miss_does_not(rule) -> None:
    assert [f.rule for f in scan_source(rule.example).findings] == [rule.id]
    assert scan_source(rule.near_miss).findings == ()


@pytest.mark.parametrize("rule", list(RULES))
def test_corpus_without_a_rule_has_misses(rule: str) -> None:
    hit = [s for s in FAULTS if any(r == rule for _, r in s.expected)]
    assert _wrong(hit, disabled=(rule,)) == [s.name for s in hit]


def test_scan_follows_calls_across_given_files_only(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(
        textwrap.dedent("""
            from .helpers import longest as far

            class Model:
                def forward(self, lengths):
                    return far(lengths.cumsum(0))
            """)
    )
    (package / "helpers.py").write_text(
        "def longest(t):\n    return t.amax().item()\n\ndef unused(t):\n    print(t.sum())\n"
    )
    alone = scan([str(package / "model.py")], hot=["engine.model:Model.forward"])
    assert alone.findings == ()
    both = scan([str(package)], hot=["engine.model:Model"])
    assert [(Path(f.path).name, f.line, f.rule) for f in both.findings] == [("helpers.py", 2, "GR101")]
    assert both.findings[0].hot_path == ("engine.model:Model.forward", "engine.helpers:longest")
    everything = scan([str(package)])
    assert {f.rule for f in everything.findings} == {"GR101", "GR702"}


def test_scan_same_helper_with_host_and_device_values_reports_the_device_call() -> None:
    source = """
        def scale(value):
            return float(value)

        def step(x: "Tensor", n: int):
            return x * scale(n)

        def other(x: "Tensor"):
            return scale(x.sum())
        """
    source = textwrap.dedent(source)
    assert scan_source(source, hot=["step"]).findings == ()
    assert [(f.line, f.rule) for f in scan_source(source, hot=["other"]).findings] == [(3, "GR103")]


def test_scan_nested_step_sees_names_of_the_function_around_it() -> None:
    source = textwrap.dedent("""
        import torch

        def make_step(device):
            buffer = torch.zeros(4, device=device)
            rows = 4

            def step():
                return buffer[:rows].sum().item()

            return step
        """)
    assert [(f.line, f.rule) for f in scan_source(source).findings] == [(9, "GR101")]
    assert [(f.line, f.rule) for f in scan_source(source, hot=["make_step.step"]).findings] == [(9, "GR101")]


def test_scan_recursion_and_mutual_calls_end() -> None:
    source = "def a(x):\n    return b(x.view(-1))\n\ndef b(x):\n    return a(x) if x.sum() > 0 else x\n"
    assert [(f.line, f.rule) for f in scan_source(source).findings] == [(5, "GR201")]


def test_scan_function_object_is_found_in_its_file() -> None:
    assert scan_function(read_snippets).findings == ()
    assert scan_function(read_snippets).functions == ("tests.helpers.graph_corpus:read_snippets",) or (
        "graph_corpus:read_snippets" in scan_function(read_snippets).functions[0]
    )


@pytest.mark.parametrize(
    ("targets", "hot", "message"),
    [
        ([], [], "nothing to scan"),
        (["no_such_module_here"], [], "no file, folder or module"),
        ([__file__], ["test_graph_static"], "malformed"),
        ([__file__], ["test_graph_static:_fund"], "did you mean _found"),
    ],
)
def test_scan_bad_request_is_refused_with_a_reason(targets: list[str], hot: list[str], message: str) -> None:
    with pytest.raises(MegaMoeConfigError, match=message):
        scan(targets, hot)


def test_scan_broken_source_names_file_and_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef step(:\n")
    with pytest.raises(MegaMoeConfigError, match=r"broken\.py.*:2"):
        scan([str(broken)])


def test_allowed_findings_keep_their_reason_and_leave_the_gate_open() -> None:
    report = scan_source("def step(x):\n    return x.sum().item()  # graph-ok[GR101]: once per request\n")
    assert report.findings == () and report.at_least(Level.WARNING) == ()
    assert [(f.rule, f.allowed_because) for f in report.allowed] == [("GR101", "once per request")]
    other = scan_source("def step(x):\n    return x.sum().item()  # graph-ok[GR102]: wrong rule\n")
    assert {f.rule for f in other.findings} == {"GR101", "GR002"}


def test_renderings_carry_every_finding_and_suppression() -> None:
    report = scan_source(
        "import torch\n\ndef step(x: 'Tensor'):\n    y = torch.zeros_like(x)\n    print(x)\n"
        "    return y.cpu()  # graph-ok[GR102]: the reply\n"
    )
    assert [f.rule for f in report.at_least(Level.ERROR)] == ["GR702"]
    text = as_text(report)
    assert "snippet.py:5:5: error GR702 [formatting]" in text and "1 errors, 1 warnings, 1 allowed" in text
    document = json.loads(as_json(report))
    assert document["schema"] == "graph-readiness-scan/1"
    assert [f["rule"] for f in document["findings"]] == ["GR401", "GR702"]
    assert document["allowed"][0]["allowed_because"] == "the reply"
    sarif = json.loads(as_sarif(report))
    (run,) = sarif["runs"]
    assert sarif["version"] == "2.1.0" and len(run["tool"]["driver"]["rules"]) == len(RULES)
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] >= 1 and region["startColumn"] >= 1
    assert [r["suppressions"][0]["justification"] for r in run["results"] if "suppressions" in r] == ["the reply"]


def test_guide_lists_every_rule_as_the_catalogue_says() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "cuda-graphs.md").read_text(encoding="utf-8")
    for rule in RULES.values():
        row = f"| {rule.id} {rule.name} | {rule.level.value} | {rule.what} | {rule.why} | {rule.instead} |"
        assert row in guide, f"docs/cuda-graphs.md lacks or contradicts {rule.id}"
