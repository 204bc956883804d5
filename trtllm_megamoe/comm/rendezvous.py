# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over ranks that already know each other: a rendezvous that two jobs on one node cannot share (R8).

Needed by symmetric memory on GPUs, which exchanges its handles through the group's store; no rank sends a tensor, so
the group is a gloo group and costs no GPU memory. The CPU engine never comes here. Rank 0 lets the operating system
choose the port of its own store, so that nobody can take it in between, and ALL ranks join the exchange that announces
it, whatever happened on rank 0.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError, MegaMoeUnavailableError

logger = logging.getLogger(__name__)

# torch's stubs do not export them
_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
_PREFIX_STORE: Any = dist.PrefixStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Announcement:
    """What rank 0 tells: where its store listens, or why there is none."""

    host: str
    port: int
    error: str | None = None


def ensure_process_group(comm: Communicator, timeout_s: float) -> None:
    """Make the default process group exist, with exactly the ranks of `comm`. Collective; idempotent.

    MASTER_ADDR and MASTER_PORT count where both are set on rank 0.

    Args:
        comm: The ranks; at least one.
        timeout_s: Longest wait in each step, seconds.

    Raises:
        MegaMoeConfigError: A process group of another size or order exists; MASTER_PORT is not a number.
        MegaMoeUnavailableError: Rank 0 cannot listen; the same text on every rank.
        MegaMoeTimeoutError: A rank did not reach rank 0's store in time.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (comm.rank, comm.size):
            raise MegaMoeConfigError(
                f"rank {comm.rank} of {comm.size}: torch.distributed is initialised as rank {dist.get_rank()} of "
                f"{dist.get_world_size()}; the expert-parallel group must be its whole world, in the same order"
            )
        return
    limit = datetime.timedelta(seconds=timeout_s)
    store: Any = None
    announcement = _Announcement("", 0)
    if comm.rank == 0:
        store, announcement = _listen(comm.size, limit)
    announcement = comm.allgather(announcement, timeout_s)[0]
    if announcement.error is not None:
        raise MegaMoeUnavailableError(f"torch.distributed cannot start: {announcement.error}")
    try:
        if store is None:
            store = _TCP_STORE(announcement.host, announcement.port, comm.size, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo",
            store=_PREFIX_STORE("trtllm_megamoe", store),
            rank=comm.rank,
            world_size=comm.size,
            timeout=limit,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        where = f"{announcement.host}:{announcement.port}"
        raise MegaMoeTimeoutError(
            f"rank {comm.rank}: no process group at {where} within {timeout_s:g} s: {err}"
        ) from err
    logger.info("rank %d/%d: process group at %s:%d", comm.rank, comm.size, announcement.host, announcement.port)


def _listen(world_size: int, limit: datetime.timedelta) -> tuple[Any, _Announcement]:
    """Rank 0's store; an error becomes an announcement, so that nobody waits for one."""
    try:
        host, port = _address()
        store = _TCP_STORE(host, port, world_size, is_master=True, timeout=limit, wait_for_workers=False)
    except (MegaMoeConfigError, OSError, dist.DistError) as err:
        return None, _Announcement("", 0, f"rank 0: {err}")
    return store, _Announcement(host, store.port)


def _address() -> tuple[str, int]:
    """Host and port to listen on; port 0 lets the system choose. A name that does not resolve gives the loopback."""
    asked = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if asked[0] is not None and asked[1] is not None:
        if not asked[1].isdigit():
            raise MegaMoeConfigError(f"MASTER_PORT={asked[1]!r} is not a port number")
        return asked[0], int(asked[1])
    name = socket.gethostname()
    return (name if _resolves(name) else "127.0.0.1"), 0


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError as err:
        logger.info("host name %s does not resolve (%s); using the loopback address", name, err)
        return False
    except UnicodeError as err:  # a label of more than 63 characters
        logger.info("host name %s is no legal name (%s); using the loopback address", name, err)
        return False
    return True
