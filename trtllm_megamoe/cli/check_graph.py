# SPDX-License-Identifier: Apache-2.0
"""`check-graph`: scan files for what breaks CUDA-graph capture, and run a step under the dynamic methods.

Exit code 0: clean; 1: open findings or a failed check; 2: bad input. The static part needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from trtllm_megamoe.cli.failure import debug_option
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.graph.static.findings import Level
from trtllm_megamoe.graph.static.render import FORMATS
from trtllm_megamoe.graph.static.rules import RULES
from trtllm_megamoe.graph.static.scan import scan


@click.command("check-graph")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option("--hot", multiple=True, metavar="MODULE:FUNCTION", help="Start here; default: every function.")
@click.option("--run", "step", metavar="MODULE:MAKE_STEP", help="Run the step that this function makes, and watch it.")
@click.option("--device", default="auto", show_default=True, help="For --run: cuda, cuda:N or cpu (a rehearsal).")
@click.option("--rounds", default=3, show_default=True, help="For --run: sets of inputs to compare.")
@click.option("--max-allocations", type=int, help="For --run: most tensors that the region may allocate.")
@click.option("--format", "form", type=click.Choice(list(FORMATS)), default="text", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
@click.option("--fail-on", type=click.Choice([level.value for level in Level]), default="warning", show_default=True)
@click.option("--explain", metavar="RULE", help="Print one rule (or `all`) and exit.")
@debug_option
def command(
    paths: tuple[str, ...],
    hot: tuple[str, ...],
    step: str | None,
    device: str,
    rounds: int,
    max_allocations: int | None,
    form: str,
    output: Path | None,
    fail_on: str,
    explain: str | None,
) -> None:
    """Find what stalls the host or breaks CUDA-graph capture in a decode step.

    PATH is a Python file, a folder or a module name; calls are followed inside the given files. With --run, the step is
    also executed: all its syncs are located in one pass, then it is captured and replayed with changed inputs.
    """
    if explain is not None:
        click.echo(_explained(explain))
        return
    if not (paths or hot or step):
        raise MegaMoeConfigError("nothing to check: give PATHs, --hot module:function, or --run module:make_step")
    if step is not None and form == "sarif":
        raise MegaMoeConfigError("SARIF describes source files only; use --format text or json together with --run")
    parts: list[str] = []
    failed = False
    if paths or hot:
        report = scan(paths, hot)
        parts.append(FORMATS[form](report))
        failed = bool(report.at_least(Level(fail_on)))
    if step is not None:
        text, passed = _run(step, device, rounds, max_allocations, form)
        parts.append(text)
        failed = failed or not passed
    _emit(_joined(parts, form), output)
    if failed:
        raise MegaMoeVerificationError("not ready for CUDA graphs; see the report")


def _run(step: str, device: str, rounds: int, max_allocations: int | None, form: str) -> tuple[str, bool]:
    import torch

    from trtllm_megamoe.graph.dynamic.capture import check_capture
    from trtllm_megamoe.graph.dynamic.step import load_maker
    from trtllm_megamoe.graph.dynamic.syncs import find_syncs

    make = load_maker(step)
    try:
        target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as err:
        raise MegaMoeConfigError(f"device {device!r} is unknown: {err}") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise MegaMoeConfigError(f"device {device!r} asked for, but no CUDA GPU is visible; --device cpu rehearses")
    syncs = find_syncs(make(target), device=target)
    # Last and on a step of its own: a capture that breaks can leave state half advanced.
    capture = check_capture(make(target), rounds=rounds, max_allocations=max_allocations, device=target)
    if form == "json":
        text = json.dumps({"schema": "graph-readiness-run/1", "checks": [syncs.as_dict(), capture.as_dict()]}, indent=2)
    else:
        text = f"{syncs.as_text()}\n{capture.as_text()}"
    return text, syncs.passed and capture.passed


def _joined(parts: list[str], form: str) -> str:
    if form != "json" or len(parts) == 1:
        return "\n".join(parts)
    documents: list[dict[str, Any]] = [json.loads(part) for part in parts]
    return json.dumps({"schema": "graph-readiness/1", "scan": documents[0], "run": documents[1]}, indent=2)


def _emit(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as err:
        raise MegaMoeConfigError(f"cannot write {output}: {err.strerror}; give a file in an existing folder") from None


def _explained(rule_id: str) -> str:
    if rule_id != "all" and rule_id not in RULES:
        raise MegaMoeConfigError(f"rule {rule_id!r} is unknown; allowed: all, {', '.join(RULES)}")
    chosen = RULES.values() if rule_id == "all" else [RULES[rule_id]]
    return "\n".join(
        f"{r.id} {r.name} ({r.level.value}; {r.family.value})\n  what:    {r.what}\n  why:     {r.why}\n"
        f"  instead: {r.instead}"
        for r in chosen
    )


check_graph_command = command
