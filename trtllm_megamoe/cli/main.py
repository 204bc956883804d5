# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_megamoe`: the command group.

Commands are imported when they are called, so that `doctor` works on a machine where torch does not.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import click

from trtllm_megamoe import __version__
from trtllm_megamoe.cli.failure import Failure, debug_option
from trtllm_megamoe.envs import log_level

_COMMANDS = {
    "run": "trtllm_megamoe.cli.run",
    "doctor": "trtllm_megamoe.cli.doctor",
    "explain": "trtllm_megamoe.cli.explain",
    "verify-checkpoint": "trtllm_megamoe.cli.verify_checkpoint",
    "check-graph": "trtllm_megamoe.cli.check_graph",
    "compile": "trtllm_megamoe.cli.compile",
    "selftest": "trtllm_megamoe.cli.selftest",
    "tune": "trtllm_megamoe.cli.tune",
    "cache": "trtllm_megamoe.cli.cache",
}
"""Command name -> module that holds `command`."""


class _Group(click.Group):
    """Finds commands lazily and gives every error to :class:`Failure`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise Failure(error, ctx) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtllm-megamoe")
@debug_option
def main() -> None:
    """Fused mixture-of-experts layers for NVFP4 checkpoints."""
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s: %(message)s")
