# SPDX-License-Identifier: Apache-2.0
"""Run under torchrun by tests/cpu/test_symmetric_processes.py: `-m tests.helpers.torchrun_program OUT_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.cpu.test_symmetric import table_for
from trtllm_megamoe.comm import torch_distributed
from trtllm_megamoe.errors import MegaMoeTimeoutError, MegaMoeUnavailableError
from trtllm_megamoe.symmetric import allocate_symmetric

WAIT_S = 30.0


def main() -> None:
    comm = torch_distributed(WAIT_S)
    lines = [f"{comm.allgather({'rank': comm.rank}, WAIT_S)} of {comm.size}", "", ""]
    try:
        allocate_symmetric(table_for(comm.size), comm, torch.device("cpu"), WAIT_S)
    except MegaMoeUnavailableError as err:
        lines[2] = str(err)
    comm.barrier(WAIT_S)
    if comm.rank == 0:  # rank 1 does not enter
        try:
            comm.barrier(1.0)
        except MegaMoeTimeoutError as err:
            lines[1] = " ".join(str(err).split())
    out = Path(sys.argv[1]) / f"rank{comm.rank}"
    out.write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
