# SPDX-License-Identifier: Apache-2.0
"""Ranks and their shared memory: one process (`single`), threads of one process, or MPI ranks of one node."""

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.comm.threads import run_threads, single

__all__ = ["Communicator", "mpi", "run_threads", "single"]


def mpi() -> Communicator:
    """Communicator of the MPI job this process runs in (mpi4py is imported here, not before).

    Raises:
        MegaMoeUnavailableError: mpi4py or an MPI library is missing, or the ranks span several nodes.
    """
    from trtllm_megamoe.comm.mpi import MpiCommunicator

    return MpiCommunicator()
