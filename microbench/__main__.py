# SPDX-License-Identifier: Apache-2.0
"""`python -m microbench` and `mpirun -n 8 python -m microbench`."""

from microbench.cli import main
from trtllm_megamoe.cli.program import run_program

if __name__ == "__main__":
    run_program(main, "python -m microbench")
