# SPDX-License-Identifier: Apache-2.0
"""What a scan says: rules, findings and the report. Data only; called by every other module of the static method."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Level(str, enum.Enum):
    """How bad a finding is: an error stalls or breaks capture, a warning costs time or freezes a value silently."""

    ERROR = "error"
    WARNING = "warning"


class Family(str, enum.Enum):
    """Chapters of the checklist (R51)."""

    TRANSFER = "explicit transfers"
    CONTROL = "host control flow on device values"
    SHAPE = "data-dependent shapes"
    ALLOCATION = "per-step allocation"
    RNG = "host random numbers"
    SYNC = "synchronisation primitives"
    SNEAKY = "sneaky reads"
    HYGIENE = "allow-list hygiene"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the checklist.

    `example` is a whole module in which the rule must fire, `near_miss` one in which nothing may fire; both are tested.
    """

    id: str
    name: str
    family: Family
    level: Level
    what: str
    why: str
    instead: str
    example: str
    near_miss: str


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place in the source that breaks a rule; lines and columns start at 1."""

    path: str
    line: int
    column: int
    rule: str
    message: str = field(compare=False)
    function: str = field(compare=False)
    hot_path: tuple[str, ...] = field(compare=False, default=())
    allowed_because: str | None = field(compare=False, default=None)

    @property
    def location(self) -> str:
        """`path:line:column`, the form that editors follow."""
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class ScanReport:
    """Result of one scan: open findings, findings that a comment allows, and what was looked at."""

    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...]
    files: tuple[str, ...]
    functions: tuple[str, ...]

    def at_least(self, level: Level) -> tuple[Finding, ...]:
        """Open findings whose rule is at `level` or worse."""
        from trtllm_megamoe.graph.static.rules import RULES

        wanted = (Level.ERROR,) if level is Level.ERROR else (Level.ERROR, Level.WARNING)
        return tuple(f for f in self.findings if RULES[f.rule].level in wanted)
