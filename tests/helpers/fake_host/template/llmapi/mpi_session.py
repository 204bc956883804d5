# SPDX-License-Identifier: Apache-2.0
"""Starts the rank workers. The real session spawns; here mpirun does, with the same two filters on what reaches them:
sys.path is forwarded whole, of the environment only TRTLLM*/TLLM* names (and what any process needs to start)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from trtllm_megamoe.comm.launch import mpirun_command, mpirun_environment

_SYSTEM = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "LANG")


class MpiPoolSession:
    def __init__(self, n_workers):
        self.n_workers = n_workers

    def submit_sync(self, function, *args, timeout_s):
        environment = {n: v for n, v in os.environ.items() if n in _SYSTEM or n.startswith(("TRTLLM", "TLLM"))}
        environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with tempfile.TemporaryDirectory() as name:
            work = Path(name) / "work.pkl"
            work.write_bytes(pickle.dumps((function, args)))
            command = mpirun_command(self.n_workers, ["-m", "tensorrt_llm.executor.spawned", str(work)])
            job = subprocess.Popen(
                command, env=mpirun_environment(self.n_workers, environment), stdin=subprocess.DEVNULL
            )
            try:
                return job.wait(timeout_s)
            finally:
                if job.poll() is None:
                    job.terminate()
                    try:
                        job.wait(10)
                    except subprocess.TimeoutExpired:
                        job.kill()
                        job.wait()
