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
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError

logger = logging.getLogger(__name__)

ROWS = "1,4,16,64,256,1024"
FEWER_ROWS = "1,16,64,256,1024"
_DEFAULT_PRESET = "deepseek-v4-pro"
_PRESETS = (_DEFAULT_PRESET, "deepseek-v3", "qwen3-235b", "deepseek-v4-flash", "gpt-oss-120b")

REPEATED = f"rows-{_DEFAULT_PRESET}"
REPEAT = "repeat"
"""The same command as `REPEATED`, later in the same run: how far two runs of one command agree."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its name, and the arguments of `python -m microbench` that differ from the default point's."""

    name: str
    arguments: tuple[str, ...]


def axes() -> list[Axis]:
    """The default point is DeepSeek-V4-Pro, a share of EP 8, uniform routing, 16-bit activations, bf16 wire, bursts.

    What matters most comes first, for a sweep whose time runs out.
    """
    # the small layers are rotated in pairs: one of them would partly stay in L2
    pairs = {"qwen3-235b": ("--layers", "2"), "gpt-oss-120b": ("--layers", "2")}
    # 128 experts of gpt-oss in eight shares are 16, with top-4 of them
    share = ("--share-of-ep", "8")

    def at(name: str, rows: str, *more: str, preset: str = _DEFAULT_PRESET) -> Axis:
        where = ("--preset", preset, *share, "--rows-per-expert", rows)
        return Axis(name, (*where, *pairs.get(preset, ()), *more))

    def ranks(name: str, tokens: str, *more: str) -> Axis:
        where = ("--preset", "qwen3-235b", "--virtual-ranks", "8", "--tokens-per-rank", tokens)
        return Axis(name, (*where, *more))

    return [
        *(at(f"rows-{preset}", ROWS, preset=preset) for preset in _PRESETS),
        *(at(f"nvfp4-{preset}", FEWER_ROWS, "--activations", "nvfp4", preset=preset) for preset in _PRESETS),
        at("routings", "16,64,256", "--routing", "random,zipf,hot-expert"),
        at(REPEAT, ROWS),
        at("wires", "16,64,1024", "--combine-format", "fp8,fp4"),
        at("lockstep", "1,16,64,256", "--mode", "lockstep"),
        at("eager", "1,16,64", "--eager"),
        ranks("virtual-ranks", "1,8,64", "--routing", "uniform,hot-rank,zero-rank"),
        ranks("virtual-ranks-wires", "8,64", "--combine-format", "fp8,fp4"),
    ]


_DEFAULTS = ("--mode", "burst", "--activations", "bf16", "--iters", "30", "--warmup", "5")


def command_of(axis: Axis, engine: str, extra: Sequence[str]) -> list[str]:
    """Arguments of `python -m microbench` for one axis."""
    arguments = [argument for argument in axis.arguments if argument != "--eager"]
    defaults = [
        word
        for name, value in zip(_DEFAULTS[::2], _DEFAULTS[1::2], strict=True)
        if name not in arguments
        for word in (name, value)
    ]
    is_graph = engine == "cuda" and "--eager" not in axis.arguments
    return ["--engine", engine, *arguments, *defaults, *(["--cuda-graph"] if is_graph else []), *extra]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which no further axis is started, and after which one axis ends the process; None: no limit."""

    start_s: float | None = None
    axis_s: float | None = None


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
) -> dict[str, str]:
    """Run the axes that `directory` has no outcome of; write `sweep.json`, `sweep.csv`, and a figure per axis into it.

    Args:
        run: Executes one command line and returns its exit code.

    Returns:
        Axis -> `ok`, or why it has no complete result; earlier outcomes of the same commands are kept.
    """
    started = time.monotonic()
    assert sys.__stderr__ is not None  # a command line has one
    book = _Book(directory / "axes.json")
    for axis in chosen:
        arguments = command_of(axis, engine, extra)
        earlier = book.outcome(axis.name, arguments)
        if earlier is not None:
            click.echo(f"\n{axis.name}: kept from before: {earlier}")
            continue
        if limits.start_s is not None and time.monotonic() - started > limits.start_s:
            book.postpone(axis.name, f"not started within {limits.start_s:g} s")
            continue
        path = directory / f"{axis.name}.json"
        click.echo(f"\n{axis.name}: python -m microbench {shlex.join(arguments)}")
        path.unlink(missing_ok=True)
        book.note(axis.name, arguments, _RUNNING)
        begun = time.monotonic()
        try:
            if limits.axis_s is not None:
                faulthandler.dump_traceback_later(limits.axis_s, exit=True, file=sys.__stderr__)
            code = run([*arguments, "--json", str(path)])
            outcome = "ok" if code == 0 else f"exit code {code}: not every row is verified and timed"
        except Exception as err:  # one axis that cannot run here leaves the others alone
            logger.exception("axis %s", axis.name)
            outcome = f"{type(err).__name__}: {err}"
        finally:
            if limits.axis_s is not None:
                faulthandler.cancel_dump_traceback_later()
        book.note(axis.name, arguments, outcome)
        click.echo(f"{axis.name}: {outcome}, {time.monotonic() - begun:.1f} s")
    documents = {a.name: report.read_json(path) for a in chosen if (path := directory / f"{a.name}.json").exists()}
    for name, document in documents.items():
        _draw(document, directory / f"{name}.svg")
    _merge(documents, directory, command)
    return {axis.name: book.outcomes[axis.name] for axis in chosen}


class _Book:
    """Outcomes of the axes, on disk after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    @property
    def outcomes(self) -> dict[str, str]:
        """Axis -> outcome."""
        return {name: str(entry["outcome"]) for name, entry in self._entries.items()}

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
    if REPEAT in documents and REPEATED in documents:
        comparison = compare.compare(documents[REPEATED], documents[REPEAT])
        if comparison.pairs:
            found = compare.agreement(comparison)
            (directory / "agreement.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            click.echo("\n" + compare.describe_agreement(found))
