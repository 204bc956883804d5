# SPDX-License-Identifier: Apache-2.0
"""The one place that turns errors into a message and an exit code; every command uses it through the command group.

Exit codes: 0 done, 1 a wrong answer, 2 bad input or a missing requirement, 3 the run could not finish (a peer failed, a
wait expired, or a fault of this package). A traceback appears only with `--debug`. Imports neither torch nor MPI.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click

from trtllm_megamoe.errors import (
    MegaMoeConfigError,
    MegaMoeError,
    MegaMoeUnavailableError,
    MegaMoeVerificationError,
    MegaMoeWeightError,
)

EXIT_WRONG_ANSWER = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_FINISHED = 3

_DEBUG_KEY = "trtllm_megamoe.debug"
_RANK_KEY = "trtllm_megamoe.rank"

_INPUT_ERRORS = (MegaMoeConfigError, MegaMoeWeightError, MegaMoeUnavailableError)

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])


def _remember_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    ctx.meta[_DEBUG_KEY] = ctx.meta.get(_DEBUG_KEY, False) or value
    return value


def debug_option(command: AnyCommand) -> AnyCommand:
    """Add `--debug`, which may stand before or behind the command's name."""
    option = click.option(
        "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
    )
    return option(command)


def set_rank(rank: int) -> None:
    """Tell who speaks: an error that all ranks raise alike is printed by rank 0 only."""
    click.get_current_context().meta[_RANK_KEY] = rank


class Failure(click.ClickException):
    """An error on its way to the terminal."""

    def __init__(self, error: Exception, ctx: click.Context) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_debug = bool(ctx.meta.get(_DEBUG_KEY))
        self.rank = int(ctx.meta.get(_RANK_KEY, 0))

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Exit code of this kind of error."""
        if isinstance(self.error, MegaMoeVerificationError):
            return EXIT_WRONG_ANSWER
        return EXIT_BAD_INPUT if isinstance(self.error, _INPUT_ERRORS) else EXIT_NOT_FINISHED

    def show(self, file: IO[Any] | None = None) -> None:
        """Print one message to stderr, behind the traceback where `--debug` asks for it."""
        if self.rank > 0 and self.exit_code != EXIT_NOT_FINISHED:
            return
        if self.is_debug:
            traceback.print_exception(self.error)
        text = self.message
        if not isinstance(self.error, MegaMoeError):
            text = f"internal error: {type(self.error).__name__}: {text} (a fault of this package; --debug shows where)"
        click.echo(f"error: {text}", err=True)
