# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer's tools over the launches of `sanitized.py`, a process and a time limit each, and what they said.

racecheck does not follow the phases of our mbarriers, so it reports hand-overs through them: stages of the two rings,
ring entries that W fills and T completes, and the per-row words that T writes, all read by other warps. Nor does it
follow a barrier at which one side only arrives. Those, and one word of T's own, are expected and named here by field,
writer and, where a field holds other things too, place; a hazard anywhere else, or with another writer, is
`unexplained`. It counts bytes: a launch has a million or two of them in the weight ring, and every one is read here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_suite.sanitized import CTAS, kernel_of
from tools.gpu_suite.shared_fields import Field, field_at, fields, role_of
from vendored_kernels.sm90.config import KernelConfig

ROOT = Path(__file__).parent.parent.parent
TOOLS = {"memcheck": 60.0, "synccheck": 60.0, "racecheck": 560.0}
"""Tool -> seconds that it may take."""

HANDED_OVER = {
    ("info", "W"): "a ring entry: mbarriers ifull and iempty",
    ("info", "T"): "the given-up word of a ring entry: mbarriers tfull, done and iempty",
    ("rows", "T"): "per-row words of a ring entry: mbarriers tfull, done and iempty",
    ("weights", "W"): "a stage of the weight ring: mbarriers wfull and wempty",
    ("tokens", "T"): "a stage of the token ring: mbarriers tfull and tempty",
    ("control", "T"): "T's own word, 0 until a wait gives up: who sees it early skips a wait of a failed launch",
    ("exchange", "W"): "blocks and live experts: bar.arrive of W, T, R, Z, bar.sync of D (PRODUCER_BARRIER)",
}
"""(field, warp that writes) -> how it is handed over where racecheck sees nothing."""


def known_bytes(place: str, config: KernelConfig) -> range | None:
    """Offsets in a field that `HANDED_OVER` speaks of; None: all of it."""
    blocks = 12 * config.layer.ep_size + 4  # behind the bases, the routes sent and a word (ExchangeOffsets)
    return {"control": range(56, 60), "exchange": range(blocks, blocks + 8)}.get(place)


_HAZARD = re.compile(
    r"\b(?P<severity>Error|Warning|Warn|Info)\b.*\b(?P<kind>RAW|WAR|WAW) hazard detected at __shared__ "
    r"0x(?P<address>[0-9a-f]+) in block \((?P<block>[0-9, ]+)\)",
    re.IGNORECASE,
)
_ACCESS = re.compile(
    r"\b(?P<access>Read|Write) Thread \((?P<thread>\d+), *0, *0\) at .*\+0x(?P<at>[0-9a-f]+)", re.IGNORECASE
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_COUNTED = re.compile(r"RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warnings\)")
_ANALYSED = re.compile(r"and (?:Read|Write) access at")
_KERNEL_NAME = re.compile(r"kernel_cutlass\w*(?=\+0x)")
_EXAMPLES = 2
PRINT_LIMIT = 20_000_000
"""Hazards that are printed, one a byte."""


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a hazard: which warp, what it does, and the instruction's offset in the kernel."""

    role: str
    kind: str
    at: int

    def __str__(self) -> str:
        return f"{self.role} {self.kind} 0x{self.at:x}"


@dataclass(slots=True)
class Group:
    """Hazards of the same kind, field and two instructions, in the order in which these ran."""

    kind: str
    severity: str
    place: str
    first: Access
    second: Access
    known: range | None
    bytes: int = 0
    offsets: set[int] = field(default_factory=set)
    examples: list[list[str]] = field(default_factory=list)

    @property
    def explanation(self) -> str:
        """How the data is handed over, empty where nothing is known that would order the two."""
        writers = {access.role for access in (self.first, self.second) if access.kind == "write"}
        if self.known is not None and not (min(self.offsets) in self.known and max(self.offsets) in self.known):
            return ""
        known = [HANDED_OVER.get((self.place, role), "") for role in sorted(writers)]
        return "; ".join(known) if known and all(known) else ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `offsets` are the first and last byte inside the field."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "field": self.place,
            "offsets": [min(self.offsets), max(self.offsets)],
            "first": str(self.first),
            "second": str(self.second),
            "hazards": self.bytes,
            "explanation": self.explanation,
            "examples": self.examples,
        }


def run(part: str, modes: Sequence[str], cache_dir: Path, tools: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One result per mode and tool."""
    for mode in modes:
        config = kernel_of(part, mode)
        for tool in tools:
            program = [
                sys.executable,
                "-m",
                "tools.gpu_suite.sanitized",
                part,
                mode,
                "--cache",
                str(cache_dir.absolute()),
            ]
            options = command_of(tool)
            started = time.monotonic()
            status, output = watched([*options, *program], TOOLS[tool])
            seconds = round(time.monotonic() - started, 1)
            result: dict[str, Any] = {"check": tool, "mode": mode, "ctas_per_rank": CTAS, "ranks": config.layer.ep_size}
            result |= {"seconds": seconds, "limit_s": TOOLS[tool], "exit": status, "command": shlex.join(options)}
            yield result | judge(tool, status, output, config)


def command_of(tool: str) -> list[str]:
    """The sanitizer's part of the command line; only our kernels are instrumented."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=kernel_cutlass", "--error-exitcode", "99"]
    if tool == "racecheck":
        command += ["--racecheck-report", "all", "--print-limit", str(PRINT_LIMIT), "--show-backtrace", "no"]
    return command


def watched(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status and output; None where the time was over, with what had been said until then."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    try:
        process = subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", **pipes)
    except OSError as err:  # no sanitizer here
        return 127, str(err)
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and the program under it
        return None, process.communicate()[0]
    return process.returncode, output


def judge(tool: str, status: int | None, output: str, config: KernelConfig) -> dict[str, Any]:
    """Verdict, records and `ok` of what a tool said."""
    lines = output.splitlines()
    verdict = next((found[0] for line in reversed(lines) if (found := _SUMMARY.search(line))), "none")
    result: dict[str, Any] = {"verdict": verdict if status is not None else "did not end in time"}
    is_right = status is not None and '"ok": true' in output  # the launch ran and its result is right
    if not is_right:
        result["said"] = [_short(line) for line in lines[-20:]]
    if tool != "racecheck":
        result["report"] = [_short(line) for line in lines if line.startswith("====")][-80:]
        return result | {"ok": is_right and status == 0 and verdict.startswith("ERROR SUMMARY: 0 errors")}
    groups = hazards(lines, config)
    unexplained = [group.to_dict() for group in groups if not group.explanation]
    analysis = [_short(line) for line in lines if "Race reported" in line or _ANALYSED.search(line)]
    result |= {
        "fields": {f.name: [f.offset, f.size] for f in fields(config)},
        "hazards": sum(group.bytes for group in groups),
        "groups": [group.to_dict() for group in groups if group.explanation],
        "unexplained": unexplained,
        "analysis": analysis,
    }
    counted = _COUNTED.match(verdict)
    summaries = sum("Race reported" in line for line in analysis)  # one for each instruction; counted too
    is_complete = counted is not None and result["hazards"] + summaries >= int(counted[2]) + int(counted[3])
    return result | {"ok": is_right and is_complete and not unexplained}


def _short(line: str) -> str:
    return _KERNEL_NAME.sub("kernel", line)


def hazards(lines: Sequence[str], config: KernelConfig) -> list[Group]:
    """Hazard records, three or four lines each, grouped; most hazards first."""
    known: list[Field] = fields(config)
    groups: dict[tuple[Any, ...], Group] = {}
    for number, line in enumerate(lines):
        found = _HAZARD.search(line) if "hazard detected" in line else None
        if found is None:
            continue
        sides = [side for text in lines[number + 1 : number + 3] if (side := _ACCESS.search(text))]
        if len(sides) == 2:
            first, second = (
                Access(role_of(int(s["thread"]), config), s["access"].lower(), int(s["at"], 16)) for s in sides
            )
        else:  # kept as it is: a record that nobody understands must not vanish
            first = second = Access("unknown", "write", 0)
        name, offset = field_at(int(found["address"], 16), known)
        kind, severity = found["kind"].upper(), found["severity"].lower()
        key = (kind, severity, name, first, second)
        if key not in groups:
            groups[key] = Group(*key, known_bytes(name, config))
        group = groups[key]
        group.bytes += 1
        group.offsets.add(offset)
        if len(group.examples) < _EXAMPLES:
            group.examples.append([_short(text).strip("= ") for text in lines[number : number + 4]])
    return sorted(groups.values(), key=lambda group: -group.bytes)
