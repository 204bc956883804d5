# SPDX-License-Identifier: Apache-2.0
"""What a communicator offers: who am I, shared bytes that peers can map, a memory fence, and rare collectives.

The CPU engine's protocol needs nothing else. Collectives are for construction only; the forward path uses the shared
bytes and the fence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SharedBytes:
    """One collective allocation: uint8 views of every rank's bytes (index = rank), and how to give it back."""

    views: Sequence[torch.Tensor]
    release: Callable[[], None]


class Communicator(ABC):
    """One rank's view of its expert-parallel group. Every method is bounded by `timeout_s`."""

    rank: int
    size: int
    transport: str

    @abstractmethod
    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        """Exchange one picklable value; index r of the result is rank r's. Collective."""

    @abstractmethod
    def barrier(self, timeout_s: float) -> None:
        """Return when every rank has entered. Collective."""

    @abstractmethod
    def allocate_shared(self, num_bytes: int, timeout_s: float) -> SharedBytes:
        """Allocate `num_bytes` on every rank and map all ranks' bytes here. Collective, and so is its `release`.

        The bytes are NOT zeroed (the region table says which must be).
        """

    @abstractmethod
    def fence(self) -> None:
        """Order this rank's earlier accesses to shared bytes before its later ones (release and acquire)."""
