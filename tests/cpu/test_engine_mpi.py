# SPDX-License-Identifier: Apache-2.0
"""The CPU engine over MPI ranks on shared-memory windows: the bits of one rank, and a rank that is killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.layer_cases import bits
from tests.helpers.mpi_program import KILL_LIMIT_S, KILLED_RANK, launch_cases
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment, run_mpirun
from trtllm_megamoe.layer import MegaMoELayer

WATCHDOG_S = 150.0


@pytest.mark.parametrize("ep_size", [2, 8])
def test_mpi_launches_on_own_and_shared_workspaces_have_the_bits_of_one_rank(ep_size: int, tmp_path: Path) -> None:
    program = ["-m", "mpi4py", "-m", "tests.helpers.mpi_program", "launches", str(tmp_path)]
    assert run_mpirun(ep_size, program, WATCHDOG_S) == 0
    per_rank = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(ep_size)]
    cases = launch_cases(ep_size)
    with MegaMoELayer(cases[0].config) as layer:
        layer.load_weights(cases[0].weights)
        for index, case in enumerate(cases):
            expected = layer.forward(case.x, case.routing.topk_ids, case.routing.topk_weights)
            for name in (f"a{index}", f"b{index}", f"c{index}"):
                got = torch.cat([outputs[name] for outputs in per_rank])
                assert torch.equal(bits(got), bits(expected)), name


def test_mpi_killed_rank_is_named_by_the_survivors_within_the_limit(tmp_path: Path) -> None:
    """--continuous keeps mpirun from ending the survivors itself, which is what a host without mpirun would see."""
    command = mpirun_command(3, ["-m", "tests.helpers.mpi_program", "killed", str(tmp_path)])
    command[1:1] = ["--continuous"]
    job = subprocess.Popen(command, env=mpirun_environment(3), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        job.wait(WATCHDOG_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"survivors did not end; their own limit is {KILL_LIMIT_S:g} s")
    finally:
        job.kill()
    texts = [(tmp_path / f"error{rank}").read_text() for rank in range(3) if rank != KILLED_RANK]
    # the first survivor to give up tells the other one to stop, which may then name the first instead
    named = [text for text in texts if f"for rank {KILLED_RANK} in launch 2" in text]
    followed = [text for text in texts if "gave up" in text]
    assert named and len(named) + len(followed) == 2, texts
