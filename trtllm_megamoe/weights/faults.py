# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a delivery of weights, collected and reported together (R21).

Used by staging, the lifecycle and the audit. It only records and words faults; it decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from trtllm_megamoe.errors import MegaMoeWeightError

_MAX_LINES = 40


class FaultKind(str, enum.Enum):
    """Closed set of faults; docs/weights.md section 2 has the policy of each."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "wrong shape"
    DTYPE = "wrong dtype"
    SCALE = "degenerate scale"
    FAMILY = "incomplete family"
    LATE = "too late"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one tensor. `expert` is the GLOBAL id, or None when the fault is not one expert's."""

    kind: FaultKind
    parameter: str
    expert: int | None
    detail: str


def id_ranges(ids: Iterable[int]) -> str:
    """`0-3, 7` from any iterable of ids."""
    parts: list[str] = []
    start = previous = None
    for value in sorted(set(ids)):
        if previous is not None and value == previous + 1:
            previous = value
            continue
        if previous is not None:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = value
    if previous is not None:
        parts.append(f"{start}" if start == previous else f"{start}-{previous}")
    return ", ".join(parts)


class FaultLog:
    """Collects faults of one layer; equal faults of many experts become one line."""

    def __init__(self) -> None:
        self._faults: dict[Fault, None] = {}

    def add(self, kind: FaultKind, parameter: str, expert: int | None, detail: str) -> None:
        """Record one fault; recording it twice changes nothing."""
        self._faults[Fault(kind, parameter, expert, detail)] = None

    def extend(self, other: FaultLog) -> None:
        """Take over all faults of another log."""
        self._faults.update(other._faults)

    def __len__(self) -> int:
        return len(self._faults)

    @property
    def faults(self) -> list[Fault]:
        """All faults in the order of discovery."""
        return list(self._faults)

    def lines(self) -> list[str]:
        """One line per (kind, parameter, detail), each with its expert ids."""
        groups: dict[tuple[FaultKind, str, str], list[int]] = {}
        for fault in self._faults:
            ids = groups.setdefault((fault.kind, fault.parameter, fault.detail), [])
            if fault.expert is not None:
                ids.append(fault.expert)
        lines = []
        for (kind, parameter, detail), ids in groups.items():
            who = f" of expert{'s' if len(set(ids)) > 1 else ''} {id_ranges(ids)}" if ids else ""
            lines.append(f"{kind.value}: {parameter}{who}{f' ({detail})' if detail else ''}")
        return lines

    def text(self, where: str) -> str:
        """All lines as one message."""
        lines = self.lines()
        shown = lines[:_MAX_LINES]
        if len(lines) > _MAX_LINES:
            shown.append(f"... and {len(lines) - _MAX_LINES} more kinds of fault")
        return f"{where}: {len(self._faults)} fault{'s' if len(self._faults) > 1 else ''}: " + "; ".join(shown)

    def raise_if_any(self, where: str, advice: str = "") -> None:
        """Raise ONE error that names every fault.

        Raises:
            MegaMoeWeightError: there is at least one fault.
        """
        if self._faults:
            raise MegaMoeWeightError(self.text(where) + (f". {advice}" if advice else ""))
