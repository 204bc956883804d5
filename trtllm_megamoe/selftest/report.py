# SPDX-License-Identifier: Apache-2.0
"""What a self-test found, as a table, as JSON (schema `megamoe-selftest/1`) and as a block to paste into a report."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass, field
from typing import Any

import torch

import trtllm_megamoe
from trtllm_megamoe.selftest.one_rank import Outcome
from trtllm_megamoe.selftest.plan import Item, Plan, Target
from vendored_kernels import registry

SHOWN_FAULTS = 20


@dataclass(slots=True)
class ItemReport:
    """One item's results."""

    item: Item
    checks: int = 0
    launches: int = 0
    worst_rel_l2: float | None = None
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one check."""
        self.checks += 1
        self.launches += outcome.runs
        if outcome.rel_l2 is not None:
            self.worst_rel_l2 = max(self.worst_rel_l2 or 0.0, outcome.rel_l2)
        if outcome.fault:
            self.failures.append((outcome.check, outcome.fault))


@dataclass(slots=True)
class Report:
    """All results on one machine; `kernels` are (name, digest of the object)."""

    target: Target
    plan: Plan
    kernels: list[tuple[str, str]]
    environment: dict[str, Any]
    items: list[ItemReport]

    @classmethod
    def begin(cls, target: Target, plan: Plan, kernels: list[tuple[str, str]]) -> Report:
        """Nothing run yet."""
        return cls(target, plan, kernels, environment(target), [ItemReport(item) for item in plan.items])

    @property
    def passed(self) -> bool:
        """Every item ran and no check failed."""
        return all(item.checks and not item.failures for item in self.items)

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table: group, case, checks, launches, worst rel-L2, failures, seconds."""
        return [
            (
                report.item.group,
                report.item.case,
                str(report.checks),
                str(report.launches),
                "" if report.worst_rel_l2 is None else f"{report.worst_rel_l2:.1e}",
                str(len(report.failures)) if report.checks else "not run",
                f"{report.seconds:.1f}",
            )
            for report in self.items
        ]

    def faults(self) -> list[str]:
        """One line a failed check, `SHOWN_FAULTS` at most."""
        found = [
            f"{report.item.group}, {report.item.case}, {check}: {fault}"
            for report in self.items
            for check, fault in report.failures
        ]
        more = len(found) - SHOWN_FAULTS
        return found[:SHOWN_FAULTS] + ([f"and {more} more (--json FILE has all)"] if more > 0 else [])

    def verdict(self) -> str:
        """One line."""
        checks = sum(report.checks for report in self.items)
        failed = sum(len(report.failures) for report in self.items)
        launches = sum(report.launches for report in self.items)
        return f"{'PASS' if self.passed else 'FAIL'}: {checks} checks, {launches} launches, {failed} failed"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": "megamoe-selftest/1",
            "passed": self.passed,
            "environment": self.environment,
            "quick": self.target.quick,
            "kernels": [{"name": name, "object": digest} for name, digest in self.kernels],
            "left_out": [{"case": case, "reason": reason} for case, reason in self.plan.left_out],
            "items": [
                {
                    "group": report.item.group,
                    "case": report.item.case,
                    "checks": report.checks,
                    "launches": report.launches,
                    "worst_rel_l2": report.worst_rel_l2,
                    "seconds": report.seconds,
                    "failures": [{"check": check, "fault": fault} for check, fault in report.failures],
                }
                for report in self.items
            ],
        }

    def facts(self) -> list[tuple[str, str]]:
        """Head of the block to paste."""
        shown = {name: value for name, value in self.environment.items() if value is not None}
        return [(name.replace("_", " "), str(value)) for name, value in shown.items()]


def environment(target: Target) -> dict[str, Any]:
    """Where the results come from."""
    found: dict[str, Any] = {
        "version": trtllm_megamoe.__version__,
        "engine": target.engine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    if target.family is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "arch": target.family.arch,
            "kernel_sources": registry.source_digest(target.family.arch)[:24],
            "dsl": registry.DSL_VERSION,
        }
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown (nvidia-smi does not answer)"
