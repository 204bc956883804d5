# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code something happened: the innermost frame outside torch and outside this package."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE_PACKAGES = sysconfig.get_paths()["purelib"]  # often a folder inside the standard library's


@dataclass(frozen=True, slots=True)
class Location:
    """A line of user code and the call chain to it, outermost first."""

    path: str
    line: int
    function: str
    source: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}: {self.source}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def _is_user_code(path: str) -> bool:
    if path.startswith("<") or not path or path.startswith((_TORCH, _OURS)):
        return False
    return path.startswith(_SITE_PACKAGES) or not path.startswith(_STDLIB)


def _from_frames(frames: list[tuple[str, int, str]]) -> Location:
    users = [f for f in frames if _is_user_code(f[0])] or frames[-1:] or [("<unknown>", 0, "<unknown>")]
    path, line, function = users[-1]
    stack = tuple(f"{p}:{n} in {name}" for p, n, name in users)
    return Location(path, line, function, linecache.getline(path, line).strip(), stack)


def current_location(frame: FrameType | None = None) -> Location:
    """Location of the code that is running now (or in `frame`)."""
    frames: list[tuple[str, int, str]] = []
    current: FrameType | None = frame or sys._getframe(1)
    while current is not None:
        frames.append((current.f_code.co_filename, current.f_lineno, current.f_code.co_name))
        current = current.f_back
    return _from_frames(frames[::-1])


def raised_location(trace: TracebackType | None) -> Location:
    """Location at which an exception left user code."""
    return _from_frames([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(trace)])
