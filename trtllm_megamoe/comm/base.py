# SPDX-License-Identifier: Apache-2.0
"""What a communicator offers: who am I, rare collectives, a memory fence, and launching beside one's peers.

Collectives are for construction only; the forward path uses shared memory (`trtllm_megamoe.symmetric`) and the fence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trtllm_megamoe.errors import MegaMoeConfigError


class Communicator(ABC):
    """One rank's view of its expert-parallel group. Every method is bounded by `timeout_s`.

    `world_size` is the number of ranks of the whole job; `transport` is `threads`, `mpi` or `torch`.
    """

    rank: int
    size: int
    world_size: int
    transport: str

    @abstractmethod
    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Exchange one picklable value; index r of the result is rank r's. Collective."""

    @abstractmethod
    def barrier(self, timeout_s: float) -> None:
        """Return when every rank has entered. Collective."""

    @abstractmethod
    def fence(self) -> None:
        """Order this rank's earlier accesses to shared bytes before its later ones (release and acquire)."""

    def require_whole_job(self) -> None:
        """Refuse a group that is a part of its job; touches no peer, so hybrids fail with a message instead of hanging.

        Raises:
            MegaMoeConfigError: The job has other ranks as well. Source: requirement R7.
        """
        if self.world_size != self.size:
            raise MegaMoeConfigError(
                f"rank {self.rank}: the group has {self.size} ranks, the job has {self.world_size}; the "
                "expert-parallel group must be the whole job (pure DEP), with no other parallelism beside it"
            )

    def launch_together(self, launch: Callable[[], None], timeout_s: float) -> None:
        """Issue device work that waits for the peers' launches; call it with nothing but the launch inside.

        Ranks of different processes just issue it. Ranks that share one GPU from one process issue theirs between two
        meetings of all ranks' threads: whatever may block on the device (an allocation, a copy, the load of code)
        comes before the first or after the second, so it never stands between a launch and one it waits for.

        Collective: where ranks share a process. Graph-safe: replaying is such work; capturing is not and needs no call.
        """
        launch()
