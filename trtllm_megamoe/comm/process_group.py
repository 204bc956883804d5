# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed: a default group that the application has made, or the job of torchrun.

Host values travel over a gloo group of our own, so that our collectives never match the application's. Must not touch
a GPU.
"""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import torch.distributed as dist

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError

logger = logging.getLogger(__name__)

_START_S = 120.0
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupCommunicator(Communicator):
    """All ranks of torch.distributed's default group. Collective: construction.

    Args:
        start_timeout_s: Longest wait for all ranks to get here, seconds.

    Raises:
        MegaMoeConfigError: No default group exists and torchrun did not start this process.
        MegaMoeTimeoutError: A rank never came.
    """

    transport = "torch"

    def __init__(self, start_timeout_s: float = _START_S) -> None:
        limit = datetime.timedelta(seconds=start_timeout_s)
        try:
            if not dist.is_initialized():
                _require_torchrun()
                dist.init_process_group("gloo", timeout=limit)
            self._group = dist.new_group(backend="gloo", timeout=limit)
        except (dist.DistStoreError, dist.DistNetworkError) as err:
            raise MegaMoeTimeoutError(f"no process group of all ranks within {start_timeout_s:g} s: {err}") from err
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world_size = self.size

    def allgather(self, value: Any, timeout_s: float) -> list[Any]:
        self.barrier(timeout_s)  # bounded, and names who is missing; then nobody waits long below
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self, timeout_s: float) -> None:
        limit = datetime.timedelta(seconds=timeout_s)
        try:
            dist.monitored_barrier(self._group, timeout=limit, wait_all_ranks=True)
        except RuntimeError as err:  # rank 0's text names the missing ranks
            raise MegaMoeTimeoutError(
                f"rank {self.rank}: waited {timeout_s:g} s in a barrier of {self.size} torch.distributed ranks: {err}"
            ) from err

    def fence(self) -> None:
        """Nothing to order: these ranks share no host memory."""


def _require_torchrun() -> None:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise MegaMoeConfigError(
            f"torch.distributed is not initialised and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "not set; start with torchrun, or call torch.distributed.init_process_group before"
        )
