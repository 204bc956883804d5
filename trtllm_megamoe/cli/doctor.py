# SPDX-License-Identifier: Apache-2.0
"""`doctor`: print :mod:`trtllm_megamoe.doctor`'s diagnosis; exit 0 when at least one engine can run."""

from __future__ import annotations

import json

import click

from trtllm_megamoe import __version__
from trtllm_megamoe.cli.failure import EXIT_BAD_INPUT, debug_option
from trtllm_megamoe.cli.host import doctor_host
from trtllm_megamoe.cli.text import table
from trtllm_megamoe.doctor import diagnose
from trtllm_megamoe.envs import ENV_VARS


@click.command("doctor", short_help="What this machine can run, and why not.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema megamoe-doctor/1) instead of a table.")
@click.option("--host", "is_host", is_flag=True, help="Compare an installed tensorrt_llm with what the plug-in needs.")
@debug_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, is_host: bool) -> None:
    """Say what this machine can run, requirement by requirement, and why not."""
    if is_host:
        ctx.exit(0 if doctor_host(as_json) else EXIT_BAD_INPUT)
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        click.echo(f"trtllm-megamoe {__version__}\n")
        rows = [(f.verdict, f.requirement, f.reason, f.needed_for) for f in diagnosis.findings]
        click.echo(table(("verdict", "requirement", "found", "needed for"), rows))
        steps = [(f.requirement, f.next_step) for f in diagnosis.findings if f.next_step]
        if steps:
            click.echo("\nTo meet the others:\n" + table((), steps))
        click.echo("\nEngines:")
        for engine in diagnosis.engines:
            click.echo(f"  {engine.engine:4}  {'can run' if engine.can_run else 'cannot run'}: {engine.reason}")
        click.echo("\nEnvironment variables:")
        click.echo(table((), [(v.name, v.get() or "(unset)", v.description) for v in ENV_VARS]))
    ctx.exit(0 if diagnosis.can_run else EXIT_BAD_INPUT)
