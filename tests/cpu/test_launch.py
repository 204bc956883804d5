# SPDX-License-Identifier: Apache-2.0
"""Launcher detection (B63): every combination of variables is either one world or an error that names them."""

from __future__ import annotations

import importlib
import subprocess

import pytest

import trtllm_megamoe.comm
from trtllm_megamoe.comm.launch import Launch, detect, mpirun_command, mpirun_environment, run_mpirun
from trtllm_megamoe.errors import MegaMoeConfigError

OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "8"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}


def test_mpi_stays_a_function_once_the_communicator_is_imported() -> None:
    """A module of the same name would take its place at the second call in one process."""
    pytest.importorskip("mpi4py")
    importlib.import_module("trtllm_megamoe.comm.mpi_ranks")
    assert callable(trtllm_megamoe.comm.mpi) and callable(trtllm_megamoe.comm.single)


def test_detect_no_launcher_is_world_one_and_says_so() -> None:
    launch = detect({"HOME": "/nowhere", "OMPI_ALLOW_RUN_AS_ROOT": "1"})
    assert launch == Launch("none", 0, 1)
    assert not launch.is_launched
    assert "world size 1" in launch.describe()


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (OMPI, "openmpi"),
        (PMI, "pmi"),
        (SRUN, "slurm"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "slurm"),
        ({**SRUN, "PMIX_RANK": "3"}, "slurm"),
        ({**OMPI, **SRUN}, "openmpi"),
        ({**OMPI, **PMI}, "openmpi"),
        # mpirun in a batch script: every process inherits the script's own SLURM_PROCID
        ({**OMPI, "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}, "openmpi"),
        ({**OMPI, "SLURM_JOB_ID": "77"}, "openmpi"),
        ({**OMPI, "PMI_EXTRA": "x", "HOSTNAME": "n" * 70}, "openmpi"),
    ],
)
def test_detect_agreeing_variables_give_rank_and_size(env: dict[str, str], launcher: str) -> None:
    launch = detect(env)
    assert (launch.launcher, launch.rank, launch.size) == (launcher, 3, 8)
    assert "rank 3 of 8" in launch.describe()


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({**OMPI, **SRUN, "SLURM_STEP_NUM_TASKS": "4"}, ["OMPI_COMM_WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"]),
        ({**OMPI, **SRUN, "SLURM_PROCID": "2"}, ["OMPI_COMM_WORLD_RANK=3", "SLURM_PROCID=2"]),
        ({**OMPI, "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ["OMPI_COMM_WORLD_SIZE=8", "SLURM_NTASKS=4"]),
        ({**OMPI, "PMI_RANK": "3", "PMI_SIZE": "2"}, None),
        ({**OMPI, **PMI, "PMI_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=1"]),
    ],
)
def test_detect_contradiction_is_an_error_that_names_both(env: dict[str, str], named: list[str] | None) -> None:
    with pytest.raises(MegaMoeConfigError) as caught:
        detect(env)
    for text in named or []:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0"},
        {"SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
        {"PMIX_RANK": "0"},
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "8", "OMPI_COMM_WORLD_SIZE": "8"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "eight"},
        {"PMI_RANK": "-1", "PMI_SIZE": "1"},
    ],
)
def test_detect_unknown_world_is_an_error(env: dict[str, str]) -> None:
    with pytest.raises(MegaMoeConfigError):
        detect(env)


def test_detect_one_task_allocation_is_world_one() -> None:
    assert detect({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "5"}) == Launch("none", 0, 1)


def test_require_world_mpi_disagrees_is_an_error() -> None:
    detect(OMPI).require_world(3, 8)
    with pytest.raises(MegaMoeConfigError, match=r"rank 3 of 8.*rank 0 of 1"):
        detect(OMPI).require_world(0, 1)


def test_mpirun_environment_drops_an_outer_launcher() -> None:
    outer = {**OMPI, **PMI, "PMIX_NAMESPACE": "a", "PRTE_LAUNCHED": "1", "HOME": "/h", "OMP_NUM_THREADS": "1"}
    fresh = mpirun_environment(4, outer)
    assert not detect(fresh).is_launched
    assert fresh["HOME"] == "/h"
    assert fresh["OMP_NUM_THREADS"] == "1"


def test_mpirun_command_zero_ranks_is_refused() -> None:
    with pytest.raises(MegaMoeConfigError, match="at least one rank"):
        mpirun_command(0, [])


def test_mpirun_command_starts_ranks_that_detect_themselves() -> None:
    program = "from trtllm_megamoe.comm.launch import detect; l = detect(); print('saw', l.launcher, l.rank, l.size)"
    done = subprocess.run(
        mpirun_command(3, ["-c", program]),
        env=mpirun_environment(3),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("saw")) == [
        f"saw openmpi {rank} 3" for rank in range(3)
    ]


def test_run_mpirun_returns_the_jobs_exit_code() -> None:
    assert run_mpirun(1, ["-c", "raise SystemExit(2)"], timeout_s=30) == 2
