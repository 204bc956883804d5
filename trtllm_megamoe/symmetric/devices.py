# SPDX-License-Identifier: Apache-2.0
"""Which GPU each rank of a group works on, and whether these GPUs may share memory (R7).

Every rule is a pure function of facts that all ranks exchange, so every rank takes the same decision or raises the same
error. Must not allocate on a GPU.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._autograd import DeviceType

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeUnavailableError

logger = logging.getLogger(__name__)

OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's own: 1 lets several ranks map memory of one GPU. They then take turns on it; for correctness only."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RankGpus:
    """What one rank tells about its machine.

    `visible` are the UUIDs of the GPUs that its process sees, by CUDA index; `current` is the index it works on now.
    """

    host: str
    visible: tuple[str, ...]
    current: int
    may_overlap: bool


def choose_device(comm: Communicator, timeout_s: float) -> torch.device:
    """This rank's GPU; it is the current device afterwards.

    Ranks of one process work on the current device. Ranks of different processes keep their current devices where
    these are all different (the application has chosen), else rank r takes the r-th visible GPU.

    Raises:
        MegaMoeUnavailableError: Ranks on several nodes, fewer GPUs than ranks without the overlap variable, or GPUs
            that cannot address each other; the same text on every rank.

    Collective: where ranks are processes.
    """
    if comm.size == 1 or comm.transport == "threads":
        return torch.device("cuda", torch.cuda.current_device())
    facts = comm.allgather(_own_gpus(), timeout_s)
    indices = plan(facts)
    index = indices[comm.rank]
    peers = [facts[rank].visible[chosen] for rank, chosen in enumerate(indices)]
    obstacle = why_not_connected(comm.rank, index, peers, facts[comm.rank].visible, can_access, nvlink_matrix())
    obstacles = [text for text in comm.allgather(obstacle, timeout_s) if text is not None]
    if obstacles:
        raise MegaMoeUnavailableError(obstacles[0])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def plan(facts: Sequence[RankGpus]) -> list[int]:
    """CUDA index of each rank's GPU, as its own process counts; index of the list = rank.

    Raises:
        MegaMoeUnavailableError: See :func:`choose_device`.
    """
    size = len(facts)
    hosts = {fact.host: rank for rank, fact in enumerate(facts)}
    if len(hosts) > 1:
        named = ", ".join(f"{host.split('/')[0]} (rank {rank})" for host, rank in hosts.items())
        raise MegaMoeUnavailableError(
            f"{size} ranks are spread over {len(hosts)} nodes: {named}; all ranks of a group run on one node"
        )
    blind = [rank for rank, fact in enumerate(facts) if not fact.visible]
    if blind:
        raise MegaMoeUnavailableError(f"ranks {blind} of {size} see no GPU; check CUDA_VISIBLE_DEVICES there")
    chosen = [fact.current for fact in facts]
    if not _are_distinct(facts, chosen):
        chosen = [rank % len(fact.visible) for rank, fact in enumerate(facts)]
    if all(fact.may_overlap for fact in facts):
        return chosen
    num_gpus = len({uuid for fact in facts for uuid in fact.visible})
    if num_gpus < size:
        raise MegaMoeUnavailableError(
            f"{size} ranks see {num_gpus} different GPUs on this node; every rank needs its own. Start fewer ranks, or "
            f"set {OVERLAP_VARIABLE}=1 on every rank to let them take turns (slow, for correctness only)"
        )
    if not _are_distinct(facts, chosen):
        raise MegaMoeUnavailableError(
            f"{size} ranks would share GPUs although the node has {num_gpus}: {_describe(facts, chosen)}. Let every "
            "rank see all GPUs (CUDA_VISIBLE_DEVICES), or call torch.cuda.set_device on each before"
        )
    repeated = [index for index, count in Counter(chosen).items() if count > 1]
    if repeated:  # torch tells GPUs apart by index
        raise MegaMoeUnavailableError(
            f"several ranks call different GPUs by the same CUDA index {repeated}: {_describe(facts, chosen)}. "
            "torch symmetric memory needs every rank to see all GPUs: start the ranks with the same "
            "CUDA_VISIBLE_DEVICES"
        )
    return chosen


def why_not_connected(
    rank: int,
    own: int,
    peers: Sequence[str],
    visible: Sequence[str],
    can_access: Callable[[int, int], bool],
    nvlinks: Sequence[Sequence[int]] | None,
) -> str | None:
    """Why this rank's GPU cannot share memory with every peer's, or None.

    Args:
        rank: This rank.
        own: Its CUDA index.
        peers: UUID of every rank's GPU.
        visible: UUIDs by this process' CUDA indices.
        can_access: Whether the first CUDA index can map memory of the second.
        nvlinks: Links between each pair of CUDA indices, or None where that cannot be told.
    """
    for peer, uuid in enumerate(peers):
        if uuid == visible[own] or uuid not in visible:
            continue
        index = visible.index(uuid)
        where = f"rank {rank}: its GPU {own} and rank {peer}'s GPU {index}"
        if not can_access(own, index):
            return f"{where} cannot map each other's memory; all ranks must be in one NVLink domain"
        if nvlinks is not None and nvlinks[own][index] == 0:
            return (
                f"{where} are not connected by NVLink; the kernels' counters need it, all ranks must be in one NVLink "
                "domain. Choose other GPUs with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m shows the links)"
            )
    return None


def can_access(first: int, second: int) -> bool:
    """Whether one CUDA device can map another one's memory."""
    return bool(torch.cuda.can_device_access_peer(first, second))


def nvlink_matrix() -> list[list[int]] | None:
    """NVLinks between each pair of visible GPUs, or None where NVML does not tell."""
    try:
        detect: Any = c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        matrix: list[list[int]] = detect(DeviceType.CUDA, "nvlink").matrix
    except (AttributeError, RuntimeError) as err:
        logger.warning("cannot tell which GPUs NVLink connects: %s", err)
        return None
    return matrix


def _own_gpus() -> RankGpus:
    count = torch.cuda.device_count()
    return RankGpus(
        host=f"{socket.gethostname()}/{_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ''}",
        visible=tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count)),
        current=torch.cuda.current_device() if count else 0,
        may_overlap=os.environ.get(OVERLAP_VARIABLE) == "1",
    )


def _are_distinct(facts: Sequence[RankGpus], chosen: Sequence[int]) -> bool:
    return len({fact.visible[index] for fact, index in zip(facts, chosen, strict=True)}) == len(facts)


def _describe(facts: Sequence[RankGpus], chosen: Sequence[int]) -> str:
    return ", ".join(
        f"rank {rank}: GPU {index} of the {len(fact.visible)} it sees"
        for rank, (fact, index) in enumerate(zip(facts, chosen, strict=True))
    )
