# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed rendezvous: two jobs at once on one node, loopback, and errors that reach every rank."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment
from trtllm_megamoe.comm.rendezvous import ensure_process_group
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeUnavailableError

WATCHDOG_S = 200.0


@pytest.fixture(autouse=True)
def _no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_rendezvous_two_jobs_at_once_do_not_collide(tmp_path: Path) -> None:
    start, jobs, outs = tmp_path / "start", [], []
    try:
        for index in range(2):
            out = tmp_path / f"job{index}"
            out.mkdir()
            outs.append(out)
            command = mpirun_command(2, ["-m", "tests.helpers.rendezvous_program", str(out), str(start)])
            jobs.append(subprocess.Popen(command, env=mpirun_environment(2)))
        deadline = time.monotonic() + WATCHDOG_S
        while not all((out / f"ready{r}").exists() for out in outs for r in range(2)):
            assert time.monotonic() < deadline, "the jobs did not start"
            time.sleep(0.05)
        start.touch()
        assert [job.wait(WATCHDOG_S) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
    assert [(out / f"sum{rank}").read_text() for out in outs for rank in range(2)] == ["3.0"] * 4


def test_rendezvous_name_that_does_not_resolve_falls_back_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 70 + ".invalid")
    try:
        ensure_process_group(single(), 20.0)
        assert dist.get_world_size() == 1
        with pytest.raises(MegaMoeConfigError, match="is initialised as rank 0 of 1"):
            run_threads(2, lambda comm: ensure_process_group(comm, 5.0), 30.0)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_rendezvous_failure_of_rank_zero_is_the_same_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks join the exchange unconditionally, so nobody waits for a store that never came."""
    texts: list[str] = []

    def body(comm: Communicator) -> None:
        with pytest.raises(MegaMoeUnavailableError) as caught:
            ensure_process_group(comm, 10.0)
        texts.append(str(caught.value))

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (str(taken.getsockname()[1]), "http"):
            monkeypatch.setenv("MASTER_PORT", port)
            run_threads(3, body, 60.0)
    assert len(texts) == 6 and len(set(texts[:3])) == len(set(texts[3:])) == 1
    assert "MASTER_PORT='http' is not a port number" in texts[-1]
