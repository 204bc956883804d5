# SPDX-License-Identifier: Apache-2.0
"""One measured point as one row of `megamoe-bench/1`: the field names, and every derived number.

Pure: the runner measures, this computes, the report prints. `schema.json` is the same list for machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from microbench.cases import Case
from microbench.check import CheckResult, Verdict
from microbench.environment import arch_name
from microbench.peaks import Peaks
from microbench.roofline import Floor, Work, floor_of, measured_traffic, rank_work
from microbench.routing import Load, Workload
from microbench.timing import Mode, Timed
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.kernels.prepared import LaunchChoice
from trtllm_megamoe.tuning.tuner import TunedBucket

TIMED_REGION = "forward: bf16 tokens in, bf16 rows out; activation staging, dispatch, experts, combine, top-k sum"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything known about one point. `timed` is None when the check did not pass; `loads` has one entry a step."""

    case: Case
    workload: Workload
    requested_rows: int | None
    tokens_by_rank: tuple[int, ...]
    combine_format: CombineFormat
    activations: ActivationMode
    requested_engine: str
    engine: str
    virtual_ranks: int
    max_tokens_per_rank: int
    bucket: int | None
    mode: Mode
    warmup: int
    iters: int
    settle_s: float
    num_layers: int
    loads: tuple[Load, ...]
    check: CheckResult
    timing: str
    timed: Timed | None
    peaks: Peaks | None
    choice: LaunchChoice | None
    clocks: Mapping[str, float] | None
    memory: Mapping[str, int | None] | None = None
    phases: Mapping[str, Any] | None = None
    tuned: TunedBucket | None = None


@dataclass(frozen=True, slots=True)
class _Cost:
    """What the busiest rank must do and the least time it takes, means over the steps; no floor without peaks."""

    work: Work
    floor: Floor | None


def _cost(measured: Measurement) -> _Cost:
    case = measured.case
    works: list[Work] = []
    floors: list[Floor] = []
    for load in measured.loads:
        ranks = [
            rank_work(
                traffic,
                hidden_size=case.hidden_size,
                intermediate_size=case.intermediate_size,
                combine_format=measured.combine_format,
                activations=measured.activations,
            )
            for traffic in measured_traffic(load)
        ]
        # term by term: the rank with most weights to read need not be the one with most rows
        works.append(
            Work(
                max(work.hbm_bytes for work in ranks),
                max(work.flops for work in ranks),
                max(work.link_bytes for work in ranks),
            )
        )
        if measured.peaks is not None:
            floor = floor_of(works[-1], measured.peaks, measured.activations)
            floors += [] if floor is None else [floor]
    steps = len(measured.loads)
    work = Work(*(sum(values) / steps for values in zip(*map(_terms, works), strict=True)))
    if len(floors) < steps:
        return _Cost(work, None)
    mean = (sum(values) / steps for values in zip(*((f.hbm_us, f.tensor_us, f.nvlink_us) for f in floors), strict=True))
    return _Cost(work, Floor(*mean))


def _terms(work: Work) -> tuple[float, float, float]:
    return work.hbm_bytes, work.flops, work.link_bytes


def _worst(summaries: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The step with the largest imbalance."""
    return max(summaries, key=lambda summary: summary["max_over_mean"] or 0.0)


def _percent(value: float | None, peak: float | None) -> float | None:
    return None if value is None or peak is None else 100.0 * value / peak


def make_row(measured: Measurement) -> dict[str, Any]:
    """The row. Rates are those of the busiest rank, the bytes are the roofline's, not counted ones (`bw_kind`)."""
    case, workload, peaks = measured.case, measured.workload, measured.peaks
    cost = _cost(measured)
    samples = None if measured.timed is None else measured.timed.samples
    us = None if samples is None else samples.summary()
    p50 = us["p50"] if us is not None else None
    seconds = p50 / 1e6 if isinstance(p50, float) else None
    tflops = cost.work.flops / seconds / 1e12 if seconds else None
    hbm_gbs = cost.work.hbm_bytes / seconds / 1e9 if seconds else None
    link_gbs = cost.work.link_bytes / seconds / 1e9 if seconds else None
    sol_us = None if cost.floor is None else cost.floor.sol_us
    peak_flops = None if peaks is None else peaks.mma_flops_per_s.get(measured.activations)
    return {
        "case": case.name,
        "label": case.label,
        "arch": arch_name(measured.engine),
        "architecture": case.architecture,
        "weights": case.weights_source,
        "layer": case.layer,
        "hidden": case.hidden_size,
        "intermediate": case.intermediate_size,
        "num_experts": case.num_experts,
        "top_k": case.top_k,
        "scale_experts": case.scale_experts,
        "scale_channels": case.scale_channels,
        "share_of_ep": case.share_of_ep,
        "requested_engine": measured.requested_engine,
        "engine": measured.engine,
        "kernels": [] if measured.choice is None else [measured.choice.kernel],
        "object_hash": None if measured.choice is None else measured.choice.object_hash,
        "ep_size": workload.ep_size,
        "virtual_ranks": measured.virtual_ranks,
        "tokens_per_rank": workload.tokens_per_rank,
        "tokens_by_rank": list(measured.tokens_by_rank),
        "ep_tokens": sum(measured.tokens_by_rank),
        "requested_rows_per_expert": measured.requested_rows,
        "rows_per_expert": _mean_rows(measured.loads),
        "expert_rows": _worst([Load.summary(load.rows_by_expert) for load in measured.loads]),
        "rank_rows": _worst([Load.summary(load.rows_by_rank) for load in measured.loads]),
        "routing": workload.routing.value,
        "imbalance": workload.imbalance,
        "seed": workload.seed,
        "steps": len(measured.loads),
        "recipe": "nvfp4",
        "combine_format": measured.combine_format.value,
        "activations": measured.activations.value,
        "score_placement": case.score_placement.value,
        "max_tokens_per_rank": measured.max_tokens_per_rank,
        "bucket": measured.bucket,
        **_tactic_fields(measured.choice),
        "autotune": None if measured.tuned is None else _tuned_fields(measured.tuned),
        "timing": measured.timing,
        "mode": measured.mode.value,
        "region": TIMED_REGION,
        "warmup": measured.warmup,
        "settle_s": measured.settle_s,
        "iters": measured.iters,
        "iters_per_graph": None if measured.timed is None else measured.timed.iters_per_graph,
        "rotated_layers": measured.num_layers,
        "us": us,
        "samples_us": [] if samples is None else list(samples.slowest_us),
        "clocks": None if measured.clocks is None else dict(measured.clocks),
        "memory": None if measured.memory is None else dict(measured.memory),
        "phases": None if measured.phases is None else dict(measured.phases),
        "tokens_per_s": sum(measured.tokens_by_rank) / seconds if seconds else None,
        "tflops": tflops,
        "pct_peak_tflops": _percent(tflops, None if peak_flops is None else peak_flops / 1e12),
        "hbm_gbs": hbm_gbs,
        "pct_peak_hbm": _percent(hbm_gbs, None if peaks is None else peaks.hbm_bytes_per_s / 1e9),
        "nvl_gbs": link_gbs,
        "pct_peak_nvl": _percent(link_gbs, None if peaks is None else peaks.link_bytes_per_s / 1e9),
        "bw_kind": "algbw",
        "sol_us": sol_us,
        "pct_sol": None if sol_us is None or not isinstance(p50, float) else 100.0 * sol_us / p50,
        "bound": None if cost.floor is None else cost.floor.bound,
        "check": _check_fields(measured.check),
        "rivals": [],
        "status": "ok" if measured.check.has_passed else "failed",
        "skip_reason": measured.check.reason,
    }


def _tactic_fields(choice: LaunchChoice | None) -> dict[str, Any]:
    """What was asked for (null: whatever the layer chooses) and what ran."""
    if choice is None:
        return {"requested_tactic": None, "actual_tactic": None, "tactic_source": None}
    actual = choice.resolved.tactic.to_json()
    is_pinned = choice.resolved.source == "pinned"
    return {
        "requested_tactic": actual if is_pinned else None,
        "actual_tactic": actual,
        "tactic_source": choice.resolved.source,
    }


def _tuned_fields(tuned: TunedBucket) -> dict[str, Any]:
    """What tuning this row's bucket came to; its times are of a full bucket, not of this row."""
    return {
        "time_us": tuned.time_us,
        "heuristic_us": tuned.heuristic_us,
        "num_candidates": tuned.num_candidates,
        "failures": [f"rank {failure.rank}, {failure.tactic}: {failure.reason}" for failure in tuned.failures],
    }


def _mean_rows(loads: Sequence[Load]) -> float:
    return float(torch.stack([load.rows_by_expert for load in loads]).double().mean())


def _check_fields(check: CheckResult) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(check).items() if name != "verdict"}
    for name in ("rel_l2", "cosine"):
        if fields[name] is not None and fields[name] != fields[name]:
            fields[name] = None  # JSON has no NaN; the reason keeps the word
    return {"passed": check.has_passed, "verdict": Verdict(check.verdict).value, **fields}
