# SPDX-License-Identifier: Apache-2.0
"""Memory that all ranks of a group can address: what every provider offers, and how it starts.

Workspaces allocate it through `trtllm_megamoe.symmetric.allocate_symmetric`; engines read its views and addresses.
Providers must not know what the bytes mean beyond the region table's zero-at-start flags and header.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeRankDivergenceError
from trtllm_megamoe.regions import HEADER_WORDS, RegionTable, Space, header_words


class SymmetricMemory(ABC):
    """One collective allocation of the region table's `shared` space on every rank of a group.

    Allocated once, at construction, in the same order on all ranks; until it is closed no address changes.

    Attributes:
        views: Every rank's space as a uint8 tensor of this process; index = rank.
        peer_addresses: Base address of every rank's space as this process and its device see it, own included.
        generation: Non-zero, below 2^63, the same on all ranks, another one for every allocation.

    Collective: construction and :meth:`close`. Source: requirements R6, R7, R53; design D5, D9.
    """

    def __init__(
        self, rank: int, views: Sequence[torch.Tensor], generation: int, addresses: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._is_closed = False
        self.views: tuple[torch.Tensor, ...] = tuple(views)
        self.peer_addresses: tuple[int, ...] = tuple(addresses or (view.data_ptr() for view in views))
        self.generation = generation

    @property
    def own(self) -> torch.Tensor:
        """This rank's space, uint8."""
        return self.views[self._rank]

    def close(self) -> None:
        """Give the memory back; no rank may touch a view or an address afterwards. Idempotent. Collective."""
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self.views = ()

    @abstractmethod
    def _release(self) -> None:
        """Give back what this provider holds; called once."""


def draw_generation() -> int:
    """A candidate generation; the ranks use rank 0's."""
    return secrets.randbits(62) | 1


def zero_at_start(memory: torch.Tensor, table: RegionTable, space: Space) -> None:
    """Write zeros over the regions of a space that must hold them before the first launch."""
    for region in table.regions(space):
        if region.zero_at_start:
            memory[region.offset_bytes : region.end_bytes].zero_()


def initialise_shared(own: torch.Tensor, table: RegionTable, generation: int) -> None:
    """Put a `shared` space to its start: zeros and the header; done when this returns, also on a GPU."""
    zero_at_start(own, table, "shared")
    _header(own, table).copy_(torch.tensor(header_words(table, generation), dtype=torch.int64))
    if own.is_cuda:
        torch.cuda.current_stream(own.device).synchronize()


def require_same_header(memory: SymmetricMemory, table: RegionTable, comm: Communicator) -> None:
    """Read every rank's header through this rank's mapping: the address is that rank's, of this allocation and layout.

    Raises:
        MegaMoeRankDivergenceError: Some rank's header differs; names the word.
    """
    expected = header_words(table, memory.generation)
    for peer, view in enumerate(memory.views):
        found = tuple(_header(view, table).tolist())
        for word, (seen, own) in enumerate(zip(found, expected, strict=True)):
            if seen != own:
                raise MegaMoeRankDivergenceError(
                    f"rank {comm.rank}: the shared memory of rank {peer} is not the one that was allocated with this "
                    f"rank's: header word {word} ({HEADER_WORDS[word]}) is {seen:#x}, expected {own:#x}. "
                    "Build the workspace anew on all ranks"
                )


def _header(space: torch.Tensor, table: RegionTable) -> torch.Tensor:
    region = table["header"]
    return space[region.offset_bytes : region.end_bytes].view(torch.int64)
