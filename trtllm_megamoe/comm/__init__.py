# SPDX-License-Identifier: Apache-2.0
"""Ranks and their shared memory: one process (`single`), threads of one process, or MPI ranks of one node."""

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.comm.threads import run_threads, single

__all__ = ["Communicator", "mpi", "run_threads", "single"]


def mpi(start_timeout_s: float | None = None) -> Communicator:
    """Communicator of the MPI job this process runs in (mpi4py is imported here, not before). Collective.

    Args:
        start_timeout_s: Longest wait for all ranks to get here, seconds; None takes the default.

    Raises:
        MegaMoeTimeoutError: Some rank never came.
        MegaMoeUnavailableError: mpi4py or an MPI library is missing, or the ranks span several nodes.
    """
    from trtllm_megamoe.comm.mpi import MpiCommunicator

    return MpiCommunicator() if start_timeout_s is None else MpiCommunicator(start_timeout_s=start_timeout_s)
