# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory inside one process: one rank alone, or virtual ranks (threads) on one GPU or in host memory.

Virtual ranks have an allocation each, not slices of one, between guards of a known byte pattern: an offset that is
wrong by any amount up to the guard's size writes there and is found. Must not start threads or streams.
"""

from __future__ import annotations

import torch

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeVerificationError
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.base import SymmetricMemory, draw_generation, initialise_shared

GUARD_BYTES = 1 << 16
"""Bytes of each guard; a multiple of every alignment, so that the space between keeps its base aligned."""

GUARD_BYTE = 0xA5
"""Content of a guard; no counter, flag or scale of a launch is four of these in a row."""


class LocalMemory(SymmetricMemory):
    """One rank: a plain allocation on its device."""

    def __init__(self, table: RegionTable, device: torch.device) -> None:
        space = torch.empty(table.total_bytes("shared"), dtype=torch.uint8, device=device)
        super().__init__(0, [space], draw_generation())
        initialise_shared(space, table, self.generation)

    def _release(self) -> None:
        """The tensor dies with its last reference."""


class VirtualRankMemory(SymmetricMemory):
    """Ranks that are threads of one process on one device, each with its own guarded allocation.

    Args:
        table: The regions.
        comm: This rank's thread communicator.
        device: Where; the same for all ranks.
        timeout_s: Longest wait for the other ranks, seconds.

    Raises:
        MegaMoeConfigError: On a GPU, and this thread works on the default stream: launches that wait for each other
            need a stream each.
        MegaMoeTimeoutError: A rank never came.
    """

    def __init__(self, table: RegionTable, comm: Communicator, device: torch.device, timeout_s: float) -> None:
        if device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
            raise MegaMoeConfigError(
                f"rank {comm.rank}: virtual ranks on one GPU wait for each other, so each needs a stream of its own, "
                f"got the default stream; start them with run_threads(..., device='{device}')"
            )
        num_bytes = table.total_bytes("shared")
        self._guarded = torch.empty(num_bytes + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        for guard in self._guards():
            guard.fill_(GUARD_BYTE)
        generation = comm.allgather(draw_generation(), timeout_s)[0]
        own = self._guarded[GUARD_BYTES : GUARD_BYTES + num_bytes]
        initialise_shared(own, table, generation)  # before any peer learns the address
        super().__init__(comm.rank, comm.allgather(own, timeout_s), generation)

    def check_guards(self) -> None:
        """Look for writes in front of or behind this rank's space. On a GPU it waits for this thread's stream.

        Raises:
            MegaMoeVerificationError: Names the rank, the side and the first byte that was overwritten.
        """
        for side, guard in zip(("in front of", "behind"), self._guards(), strict=True):
            written = (guard != GUARD_BYTE).nonzero()
            if written.numel():
                first = int(written[0])
                distance = GUARD_BYTES - first if side == "in front of" else first + 1
                raise MegaMoeVerificationError(
                    f"rank {self._rank}: {written.numel()} bytes were written {side} its shared memory, the first one "
                    f"{distance} bytes outside; some rank used a wrong offset"
                )

    def _guards(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._guarded[:GUARD_BYTES], self._guarded[-GUARD_BYTES:]

    def _release(self) -> None:
        self.check_guards()
