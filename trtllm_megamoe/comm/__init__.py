# SPDX-License-Identifier: Apache-2.0
"""Ranks: one process (`single`), threads of one process, MPI ranks of one node, or ranks of torch.distributed."""

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.comm.threads import run_threads, single

__all__ = ["Communicator", "mpi", "run_threads", "single", "torch_distributed"]


def mpi(start_timeout_s: float | None = None) -> Communicator:
    """Communicator of the MPI job this process runs in (mpi4py is imported here, not before). Collective.

    Args:
        start_timeout_s: Longest wait for all ranks to get here, seconds; None takes the default.

    Raises:
        MegaMoeTimeoutError: Some rank never came.
        MegaMoeUnavailableError: mpi4py or an MPI library is missing, or the ranks span several nodes.
    """
    from trtllm_megamoe.comm.mpi_ranks import MpiCommunicator

    return MpiCommunicator() if start_timeout_s is None else MpiCommunicator(start_timeout_s=start_timeout_s)


def torch_distributed(start_timeout_s: float | None = None) -> Communicator:
    """Communicator of all ranks of torch.distributed, which torchrun or the application has started. Collective.

    Engines on the CPU do not run over it: its ranks share memory on GPUs only.

    Args:
        start_timeout_s: Longest wait for all ranks to get here, seconds; None takes the default.

    Raises:
        MegaMoeConfigError: No default group exists and torchrun did not start this process.
        MegaMoeTimeoutError: Some rank never came.
    """
    from trtllm_megamoe.comm.process_group import ProcessGroupCommunicator

    return ProcessGroupCommunicator() if start_timeout_s is None else ProcessGroupCommunicator(start_timeout_s)
