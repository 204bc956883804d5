# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: one leaves a launch out, one is killed; all of them on one GPU. With fewer GPUs
than ranks they take turns on it (slow).

Kernels come from the cache; `tools/needed_kernels.py layers --compile DIR` fills it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.dead_rank_program import LIMIT_S
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment
from trtllm_megamoe.symmetric.devices import OVERLAP_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper, pytest.mark.timeout(240)]
WATCHDOG_S = 120.0


def _environment(ranks: int) -> dict[str, str]:
    overlap = {OVERLAP_VARIABLE: "1"} if torch.cuda.device_count() < ranks else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", **overlap}


def _check_survivors(directory: Path, ranks: int, outputs: list[str]) -> None:
    """Every rank but the last has named the last one twice, in time, and gone on; `outputs` explain a miss."""
    for rank in range(ranks - 1):
        path = directory / f"rank{rank}.json"
        assert path.is_file(), outputs
        result = json.loads(path.read_text())
        for event in ("absent", "killed"):
            error = result[event]["error"]
            # with three ranks or more another survivor may have given up first, and says for whom it waited
            assert f"rank {ranks - 1}" in error and ("Timeout" in error or "Aborted" in error), result
            assert result[event]["seconds"] < 10 * LIMIT_S, result
        assert result["rebuilt_rel_l2"] < 3e-3 and result["fresh_rel_l2"] < 3e-3, result


def test_dead_process_every_other_rank_names_it_in_time_and_goes_on(tmp_path: Path) -> None:
    """A rank that leaves a launch out, then one that is killed; see the program. `MEGAMOE_TEST_RANKS` says how many."""
    ranks = int(os.environ.get("MEGAMOE_TEST_RANKS", "2"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        started_as = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        started_as |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # type: ignore[dict-item]
        environment = _environment(ranks) | {name: str(value) for name, value in started_as.items()}
        command = [sys.executable, "-m", "tests.helpers.dead_rank_program", str(tmp_path)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [process.communicate(timeout=WATCHDOG_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[-1].returncode == -9, outputs[-1]
    _check_survivors(tmp_path, ranks, outputs)


def test_dead_process_under_mpirun_every_other_rank_names_it_in_time_and_goes_on(tmp_path: Path) -> None:
    """The same ranks started by mpirun, which is told not to end the survivors itself."""
    ranks = int(os.environ.get("MEGAMOE_TEST_RANKS", "2"))
    command = mpirun_command(ranks, ["-m", "tests.helpers.dead_rank_program", str(tmp_path)])
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    command[1:1] = ["--enable-recovery" if " 4." in version.splitlines()[0] else "--continuous"]
    environment = mpirun_environment(ranks, _environment(ranks))
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output = job.communicate(timeout=WATCHDOG_S)[0].decode()
    finally:
        job.terminate()
    _check_survivors(tmp_path, ranks, [output])


def test_eight_processes_on_one_gpu_give_the_bits_of_one_rank() -> None:
    """`tests/multigpu` under mpirun -n 8 with few launches: processes take turns on the GPU."""
    command = mpirun_command(8, ["-m", "pytest", "-q", "-x", "tests/multigpu", "-k", "over_gpus"])
    environment = mpirun_environment(8, _environment(8)) | {"MEGAMOE_SOAK_LAUNCHES": "20"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
