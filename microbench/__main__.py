# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench` and `mpirun -n 8 python -m microbench`: call the command line, end all ranks together."""

from __future__ import annotations

import sys
import time

import click

from microbench.cli import main

_FAREWELL_S = 10.0


def _leave_together(exit_code: int) -> None:
    """End the MPI job when a rank fails alone: its peers would wait in MPI's own finalisation for ever."""
    if "mpi4py.MPI" not in sys.modules or exit_code == 0:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_size() == 1:
        return
    farewell = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + _FAREWELL_S
    while not farewell.Test():
        if time.monotonic() > deadline:
            click.echo(f"rank {MPI.COMM_WORLD.Get_rank()} failed alone; ending the job", err=True)
            MPI.COMM_WORLD.Abort(exit_code)
        time.sleep(0.01)


def _run() -> int:
    try:
        code = main(prog_name="python -m microbench", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("aborted", err=True)
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    code = _run()
    _leave_together(code)
    sys.exit(code)
