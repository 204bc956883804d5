# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench sweep`: one axis at a time around a default point, each axis a command line of its own.

Called by the command line. Every axis is run by the same `run` command that a user would type, in this process, so that
any row can be repeated alone; results are merged into one JSON, one CSV and a figure per axis. The directory is the
memory of a sweep: started again, it goes on where it ended.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from microbench import compare, plot, report
from microbench.axes import REPEAT, Axis, command_of
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError

logger = logging.getLogger(__name__)

_WAIT_S = 120.0  # for the slowest rank at the end of an axis


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is run.

    Attributes:
        start_s: Seconds after which no further axis is started; None: no limit.
        axis_s: Seconds after which one axis ends the process; None: no limit.
        is_small: See :func:`microbench.axes.command_of`.
    """

    start_s: float | None = None
    axis_s: float | None = None
    is_small: bool = False


_RUNNING = "ended with the process"
"""What is recorded while an axis runs, and remains when it takes the process with it."""


def run_axes(
    chosen: Sequence[Axis],
    engine: str,
    extra: Sequence[str],
    directory: Path,
    run: Callable[[Sequence[str]], int],
    limits: Limits,
    command: str,
    comm: Communicator,
) -> dict[str, str]:
    """Run the axes that `directory` has no outcome of; write `sweep.json`, `sweep.csv`, and a figure per axis into it.

    Args:
        run: Executes one command line on this rank and returns its exit code.
        comm: The ranks; rank 0 decides, and it alone writes.

    Returns:
        Axis -> `ok`, or why it has no complete result; earlier outcomes of the same commands are kept.

    Collective: yes.
    """
    started = time.monotonic()
    assert sys.__stderr__ is not None  # a command line has one
    book = _Book(directory / "axes.json", is_writer=comm.rank == 0)
    for axis in chosen:
        arguments = command_of(axis, engine, extra, is_small=limits.is_small)
        is_late = limits.start_s is not None and time.monotonic() - started > limits.start_s
        earlier, is_late = comm.allgather((book.outcome(axis.name, arguments), is_late), _WAIT_S)[0]
        if earlier is not None:
            _say(comm, f"\n{axis.name}: kept from before: {earlier}")
            continue
        if is_late:
            book.postpone(axis.name, f"not started within {limits.start_s:g} s")
            continue
        path = directory / f"{axis.name}.json"
        _say(comm, f"\n{axis.name}: python -m microbench {shlex.join(arguments)}")
        if comm.rank == 0:
            path.unlink(missing_ok=True)
        book.note(axis.name, arguments, _RUNNING)
        begun = time.monotonic()
        if limits.axis_s is not None:
            faulthandler.dump_traceback_later(limits.axis_s, exit=True, file=sys.__stderr__)
        try:
            outcome = _attempt(axis, [*arguments, "--json", str(path)], run, comm)
        finally:
            if limits.axis_s is not None:
                faulthandler.cancel_dump_traceback_later()
        book.note(axis.name, arguments, outcome)
        _say(comm, f"{axis.name}: {outcome}, {time.monotonic() - begun:.1f} s")
        if comm.rank == 0:
            _merge(book.documents(), directory, command)  # now: the next axis may take the process along
    if comm.rank == 0:
        documents = book.documents()
        _merge(documents, directory, command)
        for name, document in documents.items():
            _draw(document, directory / f"{name}.svg")
        _compare(documents, directory, book.same_command_as(REPEAT))
    return {axis.name: book.outcomes[axis.name] for axis in chosen}


def _attempt(axis: Axis, arguments: Sequence[str], run: Callable[[Sequence[str]], int], comm: Communicator) -> str:
    """`ok`, or the first rank's fault; an axis that cannot run here leaves the others alone."""
    fault = None
    try:
        code = run(arguments)
        fault = None if code == 0 else f"exit code {code}: not every row is verified and timed"
    except Exception as err:
        logger.exception("axis %s", axis.name)
        fault = f"{type(err).__name__}: {err}"
    faults = comm.allgather(fault, _WAIT_S)
    if comm.size == 1:
        return fault or "ok"
    return next((f"rank {rank}: {text}" for rank, text in enumerate(faults) if text is not None), "ok")


def _say(comm: Communicator, text: str) -> None:
    if comm.rank == 0:
        click.echo(text)


class _Book:
    """Outcomes of the axes, on disk after every change of its writer."""

    def __init__(self, path: Path, is_writer: bool) -> None:
        self._path, self._is_writer = path, is_writer
        self._entries: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    @property
    def outcomes(self) -> dict[str, str]:
        """Axis -> outcome."""
        return {name: str(entry["outcome"]) for name, entry in self._entries.items()}

    def documents(self) -> dict[str, dict[str, Any]]:
        """Axis -> result, of all runs of the layer that have left one here."""
        commands = {name: entry["command"] for name, entry in self._entries.items()}
        runs = [name for name, words in commands.items() if words is not None and words[0].startswith("-")]
        paths = {name: self._path.with_name(f"{name}.json") for name in runs}
        return {name: report.read_json(path) for name, path in paths.items() if path.exists()}

    def same_command_as(self, name: str) -> str | None:
        """Another axis with the command of this one, if both were started."""
        command = self._entries.get(name, {}).get("command")
        same = (other for other, entry in self._entries.items() if command and entry["command"] == command)
        return next((other for other in same if other != name), None)

    def outcome(self, name: str, arguments: Sequence[str]) -> str | None:
        """What this very command came to before; None where it was never started."""
        entry = self._entries.get(name)
        return str(entry["outcome"]) if entry is not None and entry["command"] == list(arguments) else None

    def note(self, name: str, arguments: Sequence[str], outcome: str) -> None:
        """Record an axis that was started."""
        self._write(name, list(arguments), outcome)

    def postpone(self, name: str, reason: str) -> None:
        """Record an axis that a later call may still run."""
        self._write(name, None, reason)

    def _write(self, name: str, command: list[str] | None, outcome: str) -> None:
        self._entries[name] = {"outcome": outcome, "command": command}
        if self._is_writer:
            self._path.write_text(json.dumps(self._entries, indent=1) + "\n", encoding="utf-8")


def _draw(document: Mapping[str, Any], output: Path) -> None:
    try:
        plot.draw(document, output)
    except (MegaMoeConfigError, MegaMoeUnavailableError) as err:
        click.echo(f"no figure {output.name}: {err}")


def _merge(documents: Mapping[str, Mapping[str, Any]], directory: Path, command: str) -> None:
    """All rows but the repeated ones under the first document's environment; the clocks are each row's own."""
    rows = [row for name, document in documents.items() if name != REPEAT for row in document["rows"]]
    if rows:
        environment = next(iter(documents.values()))["env"]
        report.write_json(directory / "sweep.json", report.document(environment, command, rows))
        report.write_csv(directory / "sweep.csv", rows)


def _compare(documents: Mapping[str, Mapping[str, Any]], directory: Path, repeated: str | None) -> None:
    """How far the repeated axis agrees with its first run."""
    if REPEAT in documents and repeated is not None and repeated in documents:
        comparison = compare.compare(documents[repeated], documents[REPEAT])
        if comparison.pairs:
            found = compare.agreement(comparison)
            (directory / "agreement.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            click.echo("\n" + compare.describe_agreement(found))
