# SPDX-License-Identifier: Apache-2.0
"""The executor's proxy in the parent process; it submits a module global."""

from __future__ import annotations

from tensorrt_llm.executor.worker import worker_main
from tensorrt_llm.llmapi.mpi_session import MpiPoolSession


class GenerationExecutorProxy:
    def __init__(self, llm_args, scenario, out_dir):
        self.session = MpiPoolSession(llm_args.tensor_parallel_size)
        self.arguments = (llm_args, scenario, out_dir)

    def run(self, timeout_s):
        return self.session.submit_sync(worker_main, *self.arguments, timeout_s=timeout_s)
