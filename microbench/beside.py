# SPDX-License-Identifier: Apache-2.0
"""`--rivals`: the same rows per expert through public implementations, in the same process, on the same card.

Called by the runner after the layer's own rows, whose memory is free by then. A rival sees rank 0's rows of step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from microbench.cases import Case
from microbench.rivals.base import make_weights
from microbench.rivals.catalog import RIVALS, Measure, measure_all
from microbench.timing import Forward, Timed, TimingSpec
from trtllm_megamoe.comm import Communicator


def measure_beside(
    case: Case,
    batches: Sequence[Sequence[int]],
    specs: Sequence[TimingSpec],
    timer: Callable[[Forward, TimingSpec, Communicator], Timed],
    num_sets: int,
    seed: int,
    comm: Communicator,
) -> list[list[dict[str, Any]]]:
    """Rows of all rivals, by point: `us` as in the layer's own rows, or why there is none.

    Args:
        batches: Rows per expert of each point.
        specs: How each point is timed.
        num_sets: Weight sets to rotate through, as many as the layer has layers.
    """
    weights = []
    if any(rival.why_not() is None for rival in RIVALS):
        device = torch.device("cuda", torch.cuda.current_device())
        shape = (case.hidden_size, case.intermediate_size, case.num_experts)
        weights = [make_weights(*shape, device, seed + index) for index in range(num_sets)]

    def measure(index: int) -> Measure:
        def time(run: Forward) -> dict[str, Any]:
            return {"us": timer(run, specs[index], comm).samples.summary()}

        return time

    beside: list[list[dict[str, Any]]] = [[] for _ in batches]
    for index, row in measure_all(weights, batches, measure):
        beside[index].append({"us": None, **row})
    return beside
