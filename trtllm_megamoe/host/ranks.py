# SPDX-License-Identifier: Apache-2.0
"""The expert-parallel group inside the host: who belongs to it, and proof that its ranks agree.

Pure DEP only: the MPI world of the workers IS the expert-parallel group (R7). That is checked from numbers this
process already has, before anything collective, so that a hybrid of pipeline or context parallelism fails with a
message instead of hanging.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trtllm_megamoe.agreement import require_rank_identical
from trtllm_megamoe.comm import Communicator, mpi, single
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError, MegaMoeUnavailableError


def why_not_pure_dep(mapping: Any) -> str | None:
    """Why a mapping is not pure DEP, or None. Local: touches neither MPI nor a GPU."""
    world, ep_size = int(mapping.world_size), int(mapping.moe_ep_size)
    if world != ep_size:
        return (
            f"the world has {world} ranks but moe_expert_parallel_size is {ep_size}; this backend is pure DEP: use "
            "enable_attention_dp with moe_expert_parallel_size equal to the number of GPUs, no pipeline or context "
            "parallelism"
        )
    return None


_ABSENT_RANK = (
    "Some rank does not take part in the plug-in's handshake: it failed on its own (see its log), or the plug-in is "
    "not active there. Start all ranks alike; for ranks that the host does not spawn itself install the start-up hook "
    "(python -m trtllm_megamoe.host --install-hook, TRTLLM_MEGAMOE_ENABLE=1)"
)


def ep_communicator(mapping: Any, timeout_s: float) -> Communicator:
    """The communicator of the expert-parallel group, one per process.

    Raises:
        MegaMoeTimeoutError: A rank never came.
        MegaMoeConfigError: Not pure DEP, or MPI counts ranks differently; raised before anything collective.
        MegaMoeUnavailableError: Several ranks without MPI.

    Collective: the first call in a process.
    """
    obstacle = why_not_pure_dep(mapping)
    if obstacle is not None:
        raise MegaMoeConfigError(f"rank {mapping.rank}: {obstacle}")
    ep_size, ep_rank = int(mapping.moe_ep_size), int(mapping.moe_ep_rank)
    if ep_size == 1:
        return _single_communicator()
    rank, size = _mpi_world()
    if (rank, size) != (ep_rank, ep_size):
        raise MegaMoeConfigError(
            f"rank {mapping.rank}: MPI says rank {rank} of {size}, the host's mapping says {ep_rank} of {ep_size}; "
            "start the workers through trtllm-serve, LLM(...) or mpirun with one rank per GPU"
        )
    try:
        return _world_communicator(timeout_s)
    except MegaMoeTimeoutError as err:
        raise MegaMoeTimeoutError(f"{err}. {_ABSENT_RANK}") from err


@functools.cache
def _single_communicator() -> Communicator:
    return single()


@functools.cache
def _world_communicator(timeout_s: float) -> Communicator:
    return mpi(timeout_s)


def _mpi_world() -> tuple[int, int]:
    try:
        from mpi4py import MPI
    except ImportError as err:
        raise MegaMoeUnavailableError(
            f"several ranks need MPI, but mpi4py does not import ({err}); orchestrators without MPI are not supported"
        ) from err
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def handshake(facts: Mapping[str, object], comm: Communicator, timeout_s: float) -> None:
    """Prove that every rank of the group holds the same facts. Collective.

    Raises:
        MegaMoeRankDivergenceError: The same text on every rank.
        MegaMoeTimeoutError: Some rank never came, most likely because the plug-in is not active there.
    """
    try:
        require_rank_identical(facts, comm, timeout_s)
    except MegaMoeTimeoutError as err:
        raise MegaMoeTimeoutError(f"{err}. {_ABSENT_RANK}") from err
