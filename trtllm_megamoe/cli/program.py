# SPDX-License-Identifier: Apache-2.0
"""Run a click command as a program: under MPI all ranks end together, whatever happened to one of them.

Called by `python -m trtllm_megamoe`, the console script and `python -m microbench`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

_ABORTED = 130  # the shell's code for Ctrl-C


def run_program(command: click.Command, name: str) -> NoReturn:
    """Call `command` with this process's arguments and exit with its code."""
    exit_code = _call(command, name)
    if exit_code != 0 and "mpi4py.MPI" in sys.modules:
        from trtllm_megamoe.comm.mpi_ranks import leave_together

        leave_together(exit_code)
    sys.exit(exit_code)


def _call(command: click.Command, name: str) -> int:
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("aborted", err=True)
        return _ABORTED
    return code if isinstance(code, int) else 0
