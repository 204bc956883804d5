# SPDX-License-Identifier: Apache-2.0
"""A kernel family for the tuner's tests: its legality rule, its heuristic, and a runner whose times can be invented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace


def tactic(width: int, **changes: int) -> Tactic:
    fields = {"tile_rows": 256, "math_warpgroups": 2, "math_registers": 232, "producer_registers": 40} | changes
    return Tactic(token_widths=(width, 2 * width), max_stages=fields.pop("max_stages", 9), fc1_lag=3, **fields)


CANDIDATES = tuple(tactic(width) for width in (8, 16, 24, 32, 64, 128))
"""The last one's wider width is 256, which the rule refuses."""


def why_illegal(chosen: Tactic, bucket: int) -> str | None:
    if chosen.token_widths[-1] > 128:
        return f"token width {chosen.token_widths[-1]} exceeds 128"
    return None if chosen.tile_rows in (128, 256) else f"tile_rows {chosen.tile_rows} must be 128 or 256"


def heuristic(bucket: int) -> Tactic:
    return tactic(8) if bucket <= 64 else tactic(32)


SPACE = TacticSpace("toy", why_illegal, heuristic, lambda bucket: CANDIDATES)


class ScriptedRunner:
    """Takes its answers from functions of (tactic, bucket) and records every call."""

    def __init__(
        self,
        time_us: Callable[[Tactic, int], float],
        prepare: Callable[[Tactic, int], None] = lambda chosen, bucket: None,
    ) -> None:
        self._time_us, self._prepare = time_us, prepare
        self.calls: list[tuple[str, int]] = []
        self.num_recoveries = 0

    def prepare(self, chosen: Tactic, bucket: int) -> None:
        self.calls.append(("prepare", chosen.token_widths[0]))
        self._prepare(chosen, bucket)

    def measure(self, chosen: Tactic, bucket: int) -> float:
        self.calls.append(("measure", chosen.token_widths[0]))
        return self._time_us(chosen, bucket)

    def recover(self) -> None:
        self.num_recoveries += 1


class CountingCommunicator(Communicator):
    """Passes everything on and counts the exchanges."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size, self.transport = comm.rank, comm.size, comm.transport
        self.world_size = comm.world_size
        self.num_exchanges = 0

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        self.num_exchanges += 1
        return self._comm.allgather(value, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self.num_exchanges += 1
        self._comm.barrier(timeout_s)

    def fence(self) -> None:
        self._comm.fence()
