# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench sweep`: one axis at a time around a default point, each axis a command line of its own.

Called by the command line. Every axis is run by the same `run` command that a user would type, in this process, so that
any row can be repeated alone; results are merged into one JSON, one CSV and a figure per axis.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from microbench import plot, report
from trtllm_megamoe.errors import MegaMoeConfigError

logger = logging.getLogger(__name__)

ROWS = "1,4,16,64,256,1024"
_DEFAULT_PRESET = "deepseek-v4-pro"
_PRESETS = (_DEFAULT_PRESET, "deepseek-v4-flash", "deepseek-v3", "qwen3-235b", "gpt-oss-120b")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its name, and the arguments of `python -m microbench` that differ from the default point's."""

    name: str
    arguments: tuple[str, ...]


def axes() -> list[Axis]:
    """The default point is DeepSeek-V4-Pro, a share of EP 8, uniform routing, 16-bit activations, bf16 wire, bursts."""

    def at(name: str, rows: str, *more: str, preset: str = _DEFAULT_PRESET) -> Axis:
        return Axis(name, ("--preset", preset, "--share-of-ep", "8", "--rows-per-expert", rows, *more))

    # the small layers are rotated in pairs: one of them would partly stay in L2
    pairs = {"qwen3-235b": ("--layers", "2"), "gpt-oss-120b": ("--layers", "2")}
    return [
        *(at(f"rows-{preset}", ROWS, *pairs.get(preset, ()), preset=preset) for preset in _PRESETS),
        at("nvfp4-activations", ROWS, "--activations", "nvfp4"),
        at("routings", "16,64,256", "--routing", "random,zipf,hot-expert"),
        at("wires", "16,64,1024", "--combine-format", "fp8,fp4"),
        at("lockstep", "1,16,64,256", "--mode", "lockstep"),
        at("eager", "1,16,64", "--eager"),
        Axis(
            "virtual-ranks",
            ("--preset", "qwen3-235b", "--virtual-ranks", "8", "--tokens-per-rank", "1,8,64", "--routing",
             "uniform,hot-rank,zero-rank"),
        ),
    ]  # fmt: skip


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


def run_axes(
    chosen: Sequence[Axis],
    engine: str,
    extra: Sequence[str],
    directory: Path,
    run: Callable[[Sequence[str]], int],
    time_limit_s: float | None,
    command: str,
) -> dict[str, str]:
    """Run the axes and write `sweep.json`, `sweep.csv`, and a figure per axis into `directory`.

    Args:
        run: Executes one command line and returns its exit code.
        time_limit_s: No axis is started later than this many seconds after the first.

    Returns:
        Axis -> `ok`, or why it has no complete result.
    """
    started = time.monotonic()
    outcomes: dict[str, str] = {}
    documents: list[Mapping[str, Any]] = []
    for axis in chosen:
        if time_limit_s is not None and time.monotonic() - started > time_limit_s:
            outcomes[axis.name] = f"not started within {time_limit_s:g} s"
            continue
        path = directory / f"{axis.name}.json"
        arguments = [*command_of(axis, engine, extra), "--json", str(path)]
        click.echo(f"\n{axis.name}: python -m microbench {shlex.join(arguments)}")
        path.unlink(missing_ok=True)
        try:
            code = run(arguments)
            outcomes[axis.name] = "ok" if code == 0 else f"exit code {code}"
        except Exception as err:  # one axis that cannot run here leaves the others alone
            logger.exception("axis %s", axis.name)
            outcomes[axis.name] = f"{type(err).__name__}: {err}"
        if path.exists():
            documents.append(report.read_json(path))
            _draw(documents[-1], directory / f"{axis.name}.svg")
    _merge(documents, directory, command)
    (directory / "axes.json").write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return outcomes


def _draw(document: Mapping[str, Any], output: Path) -> None:
    try:
        plot.draw(document, output)
    except MegaMoeConfigError as err:
        click.echo(f"no figure: {err}")


def _merge(documents: Sequence[Mapping[str, Any]], directory: Path, command: str) -> None:
    """All rows under the first document's environment; the clocks are each row's own."""
    if not documents:
        return
    rows = [row for document in documents for row in document["rows"]]
    report.write_json(directory / "sweep.json", report.document(documents[0]["env"], command, rows))
    report.write_csv(directory / "sweep.csv", rows)
