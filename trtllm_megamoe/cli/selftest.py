# SPDX-License-Identifier: Apache-2.0
"""`selftest`: run the correctness suite on this machine's GPU, or on the CPU engine, and say what to report.

The work is in :mod:`trtllm_megamoe.selftest`. Exit codes: 0 all passed, 1 a check failed, 2 it could not begin.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from tqdm import tqdm

from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.cli.failure import EXIT_WRONG_ANSWER, debug_option
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.kernels.family import Family, family_here
from trtllm_megamoe.selftest.objects import obtain_all
from trtllm_megamoe.selftest.plan import Target, make_plan, needed_kernels
from trtllm_megamoe.selftest.process import run_plan
from trtllm_megamoe.selftest.report import Report


@click.command("selftest", short_help="Run the correctness suite on this machine's GPU.")
@click.option("--quick", is_flag=True, help="Few cases: under a minute on a GPU.")
@click.option("--engine", default="cuda", show_default=True, type=click.Choice(["cuda", "cpu"]))
@click.option("--ep-size", default=8, show_default=True, type=click.IntRange(1, 16), help="Virtual ranks; 1: none.")
@click.option("--only", default="", help="Just the cases whose name contains this.")
@click.option("--jobs", default=0, help="Kernels compiled at a time.  [default: the machine's cores, at most 16]")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON.")
@debug_option
@click.pass_context
def command(
    ctx: click.Context, quick: bool, engine: str, ep_size: int, only: str, jobs: int, json_path: Path | None
) -> None:
    """Check the kernels on whatever supported GPU is here: oracle, ranks, graphs, determinism, time-outs.

    Kernels that the cache lacks are compiled first where the DSL is installed. Everything runs through the public
    layer in a process of its own; a hang or a crash is one failure of the report.
    """
    family = _family(engine)
    num_sms = _num_sms() if family is not None else 0
    target = Target(family, num_sms, quick, ep_size, only)
    plan = make_plan(target)
    kernels: list[tuple[str, str]] = []
    if family is not None:
        if family.caution:
            click.echo(f"note: {family.caution}", err=True)
        kernels = obtain_all(family, needed_kernels(target), ObjectCache(), jobs, _bar)
    report = Report.begin(target, plan, kernels)
    for event in run_plan(target, plan):
        entry = report.items[event.index]
        if event.outcome is not None:
            entry.add(event.outcome)
        elif event.kind == "ended":
            entry.seconds = event.seconds
            failed = f"{len(entry.failures)} FAILED" if entry.failures else "ok"
            where = f"{event.index + 1:2d}/{len(plan.items)} {entry.item.group}, {entry.item.case}"
            click.echo(f"{where:54s} {entry.checks:4d} checks {event.seconds:7.1f} s  {failed}", err=True)
    _print(report)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    ctx.exit(0 if report.passed else EXIT_WRONG_ANSWER)


def _family(engine: str) -> Family | None:
    """The GPU's kernels; refuses a machine without them before anything is compiled."""
    if engine == "cpu":
        return None
    try:
        family = family_here()
        choose_engine("cuda", 1)
    except MegaMoeUnavailableError as err:
        raise MegaMoeUnavailableError(f"selftest: {err}. To check the CPU engine instead: --engine cpu") from None
    return family


def _num_sms() -> int:
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _bar(count: int) -> tqdm:
    """Progress over kernels."""
    return tqdm(total=count, desc="kernels", unit="kernel", disable=None)


def _print(report: Report) -> None:
    """The block to paste."""
    click.echo("\n---- trtllm-megamoe selftest: paste from here ----")
    click.echo(table((), [*report.facts(), ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))]))
    click.echo()
    head = ("group", "case", "checks", "launches", "worst rel-L2", "failed", "s")
    click.echo(table(head, report.rows(), right=(2, 3, 4, 5, 6)))
    for case, reason in report.plan.left_out:
        click.echo(f"  left out: {case}: {reason}")
    for fault in report.faults():
        click.echo(f"  FAILED {fault}")
    click.echo(f"\n{report.verdict()}")
    click.echo("---- to here ----")
