# SPDX-License-Identifier: Apache-2.0
"""Run under mpirun by tests/cpu/test_rendezvous.py: `python -m tests.helpers.rendezvous_program OUT_DIR START_FILE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trtllm_megamoe.comm import mpi
from trtllm_megamoe.comm.rendezvous import ensure_process_group

WAIT_S = 60.0


def main() -> None:
    out_dir, start = Path(sys.argv[1]), Path(sys.argv[2])
    comm = mpi()
    (out_dir / f"ready{comm.rank}").touch()
    deadline = time.monotonic() + WAIT_S
    while not start.exists() and time.monotonic() < deadline:  # both jobs meet at the same moment
        time.sleep(0.02)
    ensure_process_group(comm, WAIT_S)
    ensure_process_group(comm, WAIT_S)
    total = torch.tensor([float(comm.rank + 1)])
    dist.all_reduce(total)
    (out_dir / f"sum{comm.rank}").write_text(str(total.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
