# SPDX-License-Identifier: Apache-2.0
"""Runs a plan in a process of its own: a kernel that hangs or spoils the GPU context costs one item, not the report.

`run_plan` is the parent's side: it starts `python -m trtllm_megamoe.selftest.process`, reads one JSON line an event,
ends a child that exceeds an item's limit or dies, records that, and goes on behind it with a new child.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any

from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.kernels.family import FAMILIES
from trtllm_megamoe.selftest.one_rank import Outcome
from trtllm_megamoe.selftest.plan import Item, Plan, Target, make_plan

START_S = 120.0
"""Longest time until a child has imported everything and begins an item."""

MAX_DEATHS = 4
"""Children that may die; the items behind the last one are reported as not run."""

_SPOILED = 70
"""Exit code of a child whose GPU context is beyond use."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an item: it began, a check has an outcome, or it ended."""

    index: int
    kind: str
    outcome: Outcome | None = None
    seconds: float = 0.0


def run_plan(target: Target, plan: Plan) -> Iterator[Event]:
    """All items in order; every item yields "began", its outcomes, "ended"."""
    index, deaths = 0, 0
    while index < len(plan.items):
        if deaths >= MAX_DEATHS:
            fault = f"not run: {deaths} processes had died or hung before"
            yield from (Event(i, "outcome", Outcome("all", fault, 0)) for i in range(index, len(plan.items)))
            return
        died_at = yield from _run_child(target, plan.items, index)
        if died_at is None:
            return
        deaths, index = deaths + 1, died_at + 1


def _run_child(target: Target, items: tuple[Item, ...], first: int) -> Generator[Event, None, int | None]:
    """Events of one child; returns the item that it spoiled or at which it died, or None."""
    request = json.dumps({**asdict(target), "family": target.family.arch if target.family else None, "first": first})
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "trtllm_megamoe.selftest.process", request],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # virtual ranks wait for each other and must not share a hardware queue; read when CUDA starts
            env={"CUDA_DEVICE_MAX_CONNECTIONS": "32", **os.environ},
        )
        assert child.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(child.stdout, lines), daemon=True).start()
        index, limit_s = first, START_S  # the item to blame for what happens next
        try:
            while True:
                try:
                    line = lines.get(timeout=limit_s)
                except queue.Empty:
                    fault = f"did not end within {limit_s:g} s; its process was killed"
                    yield Event(index, "outcome", Outcome("all", fault, 0))
                    return index
                if line is None:
                    child.wait()
                    if child.returncode == 0 or index == len(items):
                        return None
                    if child.returncode == _SPOILED:
                        return index - 1
                    yield Event(index, "outcome", Outcome("all", _last_words(child.returncode, errors), 0))
                    return index
                event = _event(json.loads(line))
                yield event
                if event.kind == "ended":
                    index, limit_s = event.index + 1, START_S
                else:
                    index, limit_s = event.index, items[event.index].limit_s
        finally:
            child.kill()
            child.wait()


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _event(value: dict[str, Any]) -> Event:
    outcome = value.pop("outcome", None)
    return Event(outcome=Outcome(**outcome) if outcome else None, **value)


def _last_words(code: int, errors: IO[str]) -> str:
    errors.seek(0)
    said = errors.read().strip().splitlines()
    return f"its process ended with code {code}: {said[-1] if said else 'no message'}"


def main() -> None:
    """The child: run the items from `first` on and write one line an event."""
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no event

    def tell(index: int, kind: str, **more: Any) -> None:
        out.write(json.dumps({"index": index, "kind": kind, **more}) + "\n")
        out.flush()

    first, arch = request.pop("first"), request.pop("family")
    plan = make_plan(Target(family=FAMILIES[arch] if arch else None, **request))
    for index, item in enumerate(plan.items[first:], first):
        tell(index, "began")
        started = time.perf_counter()
        is_spoiled = False
        try:
            for outcome in item.run():
                tell(index, "outcome", outcome=asdict(outcome))
        except MegaMoeError as err:
            tell(index, "outcome", outcome=asdict(Outcome("all", f"{type(err).__name__}: {err}", 0)))
        except Exception as err:
            is_spoiled = "CUDA" in str(err)
            text = f"{type(err).__name__}: {str(err).strip() or 'no message'}".splitlines()[0]
            tell(index, "outcome", outcome=asdict(Outcome("all", text, 0)))
        tell(index, "ended", seconds=round(time.perf_counter() - started, 2))
        if is_spoiled:
            os._exit(_SPOILED)
    out.flush()
    os._exit(0)  # threads of ranks that gave up may still wait


if __name__ == "__main__":
    main()
