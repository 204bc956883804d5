# SPDX-License-Identifier: Apache-2.0
"""`python -m trtllm_megamoe`, and the console script's target."""

from __future__ import annotations

from typing import NoReturn

from trtllm_megamoe.cli.main import main
from trtllm_megamoe.cli.program import run_program


def program() -> NoReturn:
    """Run the command line."""
    run_program(main, "trtllm-megamoe")


if __name__ == "__main__":
    run_program(main, "python -m trtllm_megamoe")
