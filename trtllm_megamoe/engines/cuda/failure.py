# SPDX-License-Identifier: Apache-2.0
"""From the error record of a launch to the error that the host raises."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_megamoe.errors import (
    MegaMoeAbortedError,
    MegaMoeError,
    MegaMoeRankDivergenceError,
    MegaMoeTimeoutError,
)
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.regions import HEADER_WORDS

_AFTERWARDS = "Its result is not valid; build the layer anew on all ranks"


def failure_of(record: Sequence[int], num_local_experts: int, timeout_s: float) -> MegaMoeError:
    """The error of a set record: who waited where in which launch, for whom, and what it saw.

    Args:
        record: The eight words of `vendored_kernels.launch.ERROR_FIELDS`.
        num_local_experts: Experts of a rank: turns a size cell's number into its source and expert.
        timeout_s: The limit that the launch had.
    """
    _, rank, site, index, epoch, expected, seen, _ = record
    launch = epoch + 1
    if site == hopper.SITE_PEER:
        waiting = f", waiting for rank {expected}" if expected >= 0 else ""
        return MegaMoeAbortedError(
            f"rank {rank}: rank {index} gave up{waiting}, seen in launch {launch}. {_AFTERWARDS}"
        )
    if site == hopper.SITE_HEADER:
        return MegaMoeRankDivergenceError(
            f"rank {rank}: rank {index} takes part in launch {launch} with another buffer, layer or load than this "
            f"rank: header word {seen:#x}, own {expected:#x} (words: {', '.join(HEADER_WORDS[:4])}). {_AFTERWARDS}"
        )
    if site == hopper.SITE_CELLS:
        where = f"size cells for rank {index // num_local_experts} (local expert {index % num_local_experts})"
    else:
        where = hopper.describe_site(site, index)
    return MegaMoeTimeoutError(
        f"rank {rank}: waited {timeout_s:g} s at {where} in launch {launch}: expected {expected}, seen {seen}; that "
        f"rank did not launch, stopped, or is slower than timeout_s. {_AFTERWARDS}"
    )
