# SPDX-License-Identifier: Apache-2.0
"""The rivals, and how any of them is measured: checked first, timed only where right, and a reason for every gap.

Used by `python -m microbench` and by the GPU suite; both bring their own way of timing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from microbench.check import Verdict
from microbench.environment import version_of
from microbench.rivals.base import REGION, Rival, RivalCheck, Rows, Weights, check, make_rows
from microbench.rivals.humming_nvfp4 import HummingGrouped, HummingIndexed
from microbench.rivals.torch_grouped import TorchGrouped
from microbench.rivals.triton_mxfp4 import TritonMxfp4EightWarps, TritonMxfp4FourWarps

logger = logging.getLogger(__name__)

RIVALS: tuple[type[Rival], ...] = (
    TorchGrouped,
    HummingGrouped,
    HummingIndexed,
    TritonMxfp4FourWarps,
    TritonMxfp4EightWarps,
)

NOT_RUN = {
    "DeepGEMM, fp8 weights and activations": (
        "other numbers: on sm_90 its grouped GEMMs (m_grouped_fp8_gemm_nt_contiguous and _masked; main of 2026-09) "
        "take fp8 weights with a scale per 128 x 128 and fp8 activations with a scale per 128, which cannot hold these "
        "weights; and twice their bytes"
    ),
    "FlashInfer moe_ep, NVFP4 weights, fp8 activations": (
        "other numbers: its fused kernel for sm_90 with NVFP4 weights (release 0.7.4) quantises activations to fp8, a "
        "scale per token; the one with bf16 activations is in its main branch only"
    ),
    "FlashInfer MoELayer, NVFP4 weights, bf16 activations": (
        "not tried: release 0.7.4 has it for sm_90 on one rank (cuTile kernels; a low-latency path for up to 8 tokens)"
    ),
}
"""Implementations that people ask for and that are not timed beside the layer, each with the reason."""

Measure = Callable[[Callable[[int], torch.Tensor]], dict[str, Any]]
"""Times call i of a rotation over weight sets; returns fields of the row."""


def measure_all(
    weight_sets: Sequence[Weights],
    batches: Sequence[Sequence[int]],
    measure: Callable[[int], Measure],
    rivals: Sequence[type[Rival]] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every rival on every batch.

    Args:
        weight_sets: Equal shapes, different memory: rotated, so that weights come from memory and not from caches.
        batches: Rows per expert of each point.
        measure: The timer of a point, by its index.
        rivals: None: all of them, and those that are never run with their reasons.

    Yields:
        (index of the point, row). A row has `rival`, `version`, `region`, `status` (`ok`; `failed`: the output is wrong
        or could not be checked; `skipped`: it cannot run here), `skip_reason` and `check`; times where it is `ok`.
    """
    for kind in RIVALS if rivals is None else rivals:
        built: list[Rival] = []
        own: list[Weights] = []
        obstacle = kind.why_not()
        if obstacle is None:
            try:
                own = [kind.in_own_format(weights) for weights in weight_sets]
                built = [kind(weights, [sum(counts) for counts in batches]) for weights in own]
            except Exception as err:  # a rival's own troubles end the rival, never the run
                logger.exception("%s cannot be built", kind.name)
                obstacle = f"cannot be built: {type(err).__name__}: {err}"
        for index, counts in enumerate(batches):
            row: dict[str, Any] = {"rival": kind.name, "version": version_of(kind.distribution), "region": REGION}
            if obstacle is not None:
                yield index, {**row, "status": "skipped", "skip_reason": obstacle, "check": None}
                continue
            rows = make_rows(weight_sets[0], counts)
            outcome = _check_sets(built, own, rows)
            row |= {"check": {**asdict(outcome), "verdict": outcome.verdict.value}}
            if outcome.verdict is not Verdict.VERIFIED:
                yield index, {**row, "status": "failed", "skip_reason": outcome.reason}
                continue
            try:
                times = measure(index)(lambda i, sets=built: sets[i % len(sets)].run())  # type: ignore[misc]
            except Exception as err:  # as above: a rival that cannot be captured, for one
                logger.exception("%s cannot be timed", kind.name)
                reason = f"cannot be timed: {type(err).__name__}: {err}"
                yield index, {**row, "status": "failed", "skip_reason": reason}
                continue
            yield index, {**row, "status": "ok", "skip_reason": None, **times}
        built.clear()
        own.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for name, reason in NOT_RUN.items() if rivals is None else ():
        for index in range(len(batches)):
            row = {"rival": name, "version": None, "region": REGION, "check": None}
            yield index, {**row, "status": "skipped", "skip_reason": reason}


def _check_sets(built: Sequence[Rival], weight_sets: Sequence[Weights], rows: Rows) -> RivalCheck:
    """The worst outcome over the weight sets, or the first that is no pass."""
    outcomes = []
    for rival, weights in zip(built, weight_sets, strict=True):
        try:
            rival.bind(rows)
            outcomes.append(check(rival.run(), weights, rows))
        except Exception as err:  # as above; a result that nobody could look at is not a result
            logger.exception("%s cannot be checked", rival.name)
            return RivalCheck(Verdict.NOT_VERIFIED, None, 0, f"{type(err).__name__}: {err}")
        if outcomes[-1].verdict is not Verdict.VERIFIED:
            return outcomes[-1]
    return max(outcomes, key=lambda outcome: outcome.rel_l2 or 0.0)
