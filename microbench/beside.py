# SPDX-License-Identifier: Apache-2.0
"""`--rivals`: the same rows per expert through public implementations, in the same processes, on the same cards.

Called by the runner after the layer's own rows, whose memory is free by then. On one rank a rival sees its rows of step
0 and does the experts' work alone; on several ranks the chain of public parts does the whole layer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from microbench.cases import Case
from microbench.check import CheckResult, Verdict, check_output
from microbench.rivals import unfused
from microbench.rivals.base import make_weights
from microbench.rivals.catalog import RIVALS, Measure, measure_all
from microbench.rivals.unfused import UnfusedChain
from microbench.routing import Batch, Load
from microbench.sources import WeightSource
from microbench.timing import Forward, Timed, TimingSpec
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.formats import ActivationMode, CombineFormat

logger = logging.getLogger(__name__)

Timer = Callable[[Forward, TimingSpec, Communicator], Timed]


def measure_beside(
    case: Case,
    batches: Sequence[Sequence[int]],
    specs: Sequence[TimingSpec],
    timer: Timer,
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


def measure_chain(
    case: Case,
    source: WeightSource,
    inputs: Sequence[tuple[torch.Tensor, Batch, Load]],
    specs: Sequence[TimingSpec],
    timer: Timer,
    comm: Communicator,
    device: torch.device,
) -> list[dict[str, Any]]:
    """One row a point of the unfused chain over these ranks; checked against the oracle like the layer, then timed.

    Args:
        inputs: This rank's tokens and routes of each point, and all ranks' counts.
        specs: How each point is timed.

    Collective: yes.
    """
    version = f"torch {torch.__version__}"
    row: dict[str, Any] = {"rival": unfused.NAME, "version": version, "region": unfused.REGION, "check": None}
    chain, obstacle = _build_chain(case, source, comm, device, specs[0].timeout_s)
    if chain is None:
        return [{**row, "status": "skipped", "skip_reason": obstacle, "us": None} for _ in inputs]
    rows = []
    for (x, batch, load), spec in zip(inputs, specs, strict=True):
        chain.bind(x, batch, load)
        outcome = check_output(
            chain.run(), x, batch, source, ActivationMode.BF16, CombineFormat.BF16, comm, spec.timeout_s,
            unfused.TOLERANCE_REL_L2,
        )  # fmt: skip
        us = None
        if outcome.has_passed:
            us = timer(lambda _: chain.run(), replace(spec, meet=chain.meet), comm).samples.summary()
        status = "ok" if outcome.has_passed else "failed"
        rows.append({**row, "check": _check_of(outcome), "status": status, "skip_reason": outcome.reason, "us": us})
    chain.close()
    return rows


def _build_chain(
    case: Case, source: WeightSource, comm: Communicator, device: torch.device, timeout_s: float
) -> tuple[UnfusedChain | None, str | None]:
    """The chain, or the first rank's reason why there is none; all ranks decide alike."""

    def first(reasons: Sequence[str | None]) -> str | None:
        return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)

    obstacle = first(comm.allgather(unfused.why_not(comm, device), timeout_s))
    if obstacle is not None:
        return None, obstacle
    chain, fault = None, None
    try:
        chain = UnfusedChain(case, source, comm, device, timeout_s)
    except Exception as err:  # memory, or a library that is not there: the layer's rows stay
        logger.exception("the unfused chain cannot be built")
        fault = f"cannot be built: {type(err).__name__}: {err}"
    obstacle = first(comm.allgather(fault, timeout_s))
    return (chain, None) if obstacle is None else (None, obstacle)


def _check_of(outcome: CheckResult) -> dict[str, Any]:
    rel_l2 = outcome.rel_l2 if outcome.rel_l2 == outcome.rel_l2 else None  # JSON has no NaN
    verdict = Verdict(outcome.verdict).value
    return {"verdict": verdict, "rel_l2": rel_l2, "rows_checked": outcome.tokens_checked, "reason": outcome.reason}
