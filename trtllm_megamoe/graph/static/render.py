# SPDX-License-Identifier: Apache-2.0
"""Scan reports as text, JSON and SARIF. Pure functions of a report; the CLI and the pytest plugin print the result."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from trtllm_megamoe.graph.static.findings import Finding, Level, Rule, ScanReport
from trtllm_megamoe.graph.static.rules import RULES

SCHEMA = "graph-readiness-scan/1"
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_TOOL = "trtllm-megamoe check-graph"


def as_text(report: ScanReport) -> str:
    """One line a finding, the cure below it, and a summary line."""
    lines = []
    for finding in report.findings:
        rule = RULES[finding.rule]
        lines.append(f"{finding.location}: {rule.level.value} {rule.id} [{rule.name}] {finding.message}")
        lines.append(f"    in {finding.function}{_reached(finding)}; instead: {rule.instead}")
    counts = Counter(RULES[f.rule].level for f in report.findings)
    lines.append(
        f"{len(report.functions)} functions in {len(report.files)} files: {counts[Level.ERROR]} errors, "
        f"{counts[Level.WARNING]} warnings, {len(report.allowed)} allowed by comment"
    )
    return "\n".join(lines)


def _reached(finding: Finding) -> str:
    return f" (called from {finding.hot_path[0]})" if len(finding.hot_path) > 1 else ""


def as_json(report: ScanReport) -> str:
    """The whole report; `schema` names the format."""
    document = {
        "schema": SCHEMA,
        "files": list(report.files),
        "functions": list(report.functions),
        "findings": [_finding(f) for f in report.findings],
        "allowed": [_finding(f) for f in report.allowed],
    }
    return json.dumps(document, indent=2)


def _finding(finding: Finding) -> dict[str, Any]:
    rule = RULES[finding.rule]
    document: dict[str, Any] = {
        "rule": rule.id,
        "name": rule.name,
        "family": rule.family.value,
        "level": rule.level.value,
        "path": finding.path,
        "line": finding.line,
        "column": finding.column,
        "function": finding.function,
        "hot_path": list(finding.hot_path),
        "message": finding.message,
        "why": rule.why,
        "instead": rule.instead,
    }
    if finding.allowed_because is not None:
        document["allowed_because"] = finding.allowed_because
    return document


def as_sarif(report: ScanReport) -> str:
    """SARIF 2.1.0, the form that code-review tools show in place; allowed findings appear as suppressed."""
    indices = {rule: position for position, rule in enumerate(RULES)}
    document = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": _TOOL, "rules": [_sarif_rule(rule) for rule in RULES.values()]}},
                "columnKind": "utf16CodeUnits",
                "results": [_sarif_result(f, indices) for f in (*report.findings, *report.allowed)],
            }
        ],
    }
    return json.dumps(document, indent=2)


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.what},
        "fullDescription": {"text": f"{rule.why} Instead: {rule.instead}"},
        "defaultConfiguration": {"level": rule.level.value},
        "properties": {"family": rule.family.value},
    }


def _sarif_result(finding: Finding, indices: dict[str, int]) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": indices[finding.rule],
        "level": RULES[finding.rule].level.value,
        "message": {"text": f"{finding.message}. Instead: {RULES[finding.rule].instead}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": finding.path}, "region": region}}],
    }
    if finding.allowed_because is not None:
        result["suppressions"] = [{"kind": "inSource", "justification": finding.allowed_because}]
    return result


FORMATS: dict[str, Callable[[ScanReport], str]] = {"text": as_text, "json": as_json, "sarif": as_sarif}
