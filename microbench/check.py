# SPDX-License-Identifier: Apache-2.0
"""Correctness before time: every rank compares its own output rows with the oracle, the verdict is common to all.

Used by the runner. Where the layer is too large for the oracle to follow every token, an even sample of each rank's
tokens is checked and the row says how many. A check that could not be made is `not verified`, never a pass (B68).
"""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass

import torch

from microbench.routing import Batch
from microbench.sources import WeightSource
from trtllm_megamoe.comm import Communicator
from trtllm_megamoe.formats import ActivationMode, CombineFormat
from trtllm_megamoe.reference.metrics import cosine, rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, oracle_forward
from trtllm_megamoe.selftest.checks import tolerance_of

logger = logging.getLogger(__name__)

MIN_EXPERTS_TOUCHED = 8
QUANTISED_SAMPLES = 8
_ORACLE_ROUTE_FLOPS = 2e10  # about ten seconds of float64 matmul on one core
_ORACLE_EXPERT_VALUES = 2e8  # weights decoded to float64, about as long


class Verdict(str, enum.Enum):
    """Outcome of a check."""

    VERIFIED = "verified"
    WRONG = "wrong"
    NOT_VERIFIED = "not verified"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was compared on all ranks together; the numbers are those of the worst rank.

    `reason` is None unless the verdict is `not verified` or `wrong`.
    """

    verdict: Verdict
    rel_l2: float | None
    cosine: float | None
    tolerance: float
    tokens_checked: int
    tokens_total: int
    experts_touched: int
    reason: str | None = None

    @property
    def has_passed(self) -> bool:
        """Whether the result may be timed."""
        return self.verdict is Verdict.VERIFIED


def sample_tokens(topk_ids: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Indices of at most `num_samples` tokens of one rank, evenly spaced over those with a live route, ascending.

    A token without a live route is sampled only when there is no other.
    """
    live = (topk_ids >= 0).any(dim=1).nonzero().flatten()
    pool = live if live.numel() else torch.arange(topk_ids.shape[0])
    count = min(num_samples, pool.numel())
    return pool[torch.arange(count) * pool.numel() // max(count, 1)]


def choose_samples(
    source: WeightSource, batch: Batch, combine_format: CombineFormat, comm: Communicator, timeout_s: float
) -> torch.Tensor:
    """Tokens of this rank to check: all of them where that is cheap, else enough for eight experts over all ranks.

    A quantised wire is checked on several tokens of each rank: a sum that ends beside a rounding boundary moves one
    code by a whole step, so the error of one row alone scatters by half of itself.

    Collective: yes.
    """
    case = source.case
    values = 3 * case.hidden_size * case.intermediate_size
    mine = torch.unique(batch.topk_ids[batch.topk_ids >= 0])
    shared = comm.allgather((batch.topk_ids.shape[0], set(mine.tolist())), timeout_s)
    most_tokens = max(num_tokens for num_tokens, _ in shared)
    reachable = len(set().union(*(experts for _, experts in shared)))
    affordable = int(_ORACLE_ROUTE_FLOPS / (comm.size * case.top_k * 2 * values))
    if most_tokens <= affordable and reachable * values <= _ORACLE_EXPERT_VALUES:
        return torch.arange(batch.topk_ids.shape[0])
    wanted = min(MIN_EXPERTS_TOUCHED, reachable)
    num_samples = 1 if combine_format is CombineFormat.BF16 else QUANTISED_SAMPLES
    while True:
        picked = sample_tokens(batch.topk_ids, num_samples)
        ids = batch.topk_ids[picked]
        touched = set().union(*comm.allgather(set(ids[ids >= 0].tolist()), timeout_s))
        if len(touched) >= wanted or num_samples >= most_tokens:
            return picked
        num_samples *= 2


@dataclass(frozen=True, slots=True)
class _RankCheck:
    """One rank's part, exchanged between ranks; `rel_l2` and `cosine` are None where the rank checked no token."""

    rel_l2: float | None
    cosine: float | None
    tokens_checked: int
    tokens_total: int
    experts: frozenset[int]
    fault: str | None


def check_output(
    out: torch.Tensor,
    x: torch.Tensor,
    batch: Batch,
    source: WeightSource,
    activations: ActivationMode,
    combine_format: CombineFormat,
    comm: Communicator,
    timeout_s: float,
    tolerance: float | None = None,
) -> CheckResult:
    """Compare every rank's output with the oracle's.

    Args:
        out: (T, H) bf16, what the layer returned for `x` (T, H) bf16 and `batch`.
        source: The weights, read again on the oracle's own path.
        timeout_s: Longest wait for the slowest rank's oracle.
        tolerance: Bound on rel-L2; None: that of our engine on the device of `out` and of the wire.

    Returns:
        The same result on every rank.

    Collective: yes.
    """
    picked = choose_samples(source, batch, combine_format, comm, timeout_s)
    mine = _check_rank(out, x, batch, picked, source, activations, combine_format)
    ranks: list[_RankCheck] = comm.allgather(mine, timeout_s)
    errors = [part.rel_l2 for part in ranks if part.rel_l2 is not None]
    # NaN must win: max() would drop it
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=None)
    faults = [f"rank {rank}: {part.fault}" for rank, part in enumerate(ranks) if part.fault is not None]
    reason: str | None = None
    if tolerance is None:
        tolerance = tolerance_of(out.device.type, combine_format.value)  # an engine's outputs lie where it runs
    if faults:
        verdict, reason = Verdict.NOT_VERIFIED, "; ".join(faults)
    elif worst is None:
        verdict, reason = Verdict.NOT_VERIFIED, "no rank had a token to check"
    elif worst < tolerance:
        verdict = Verdict.VERIFIED
    else:
        bad = [r for r, part in enumerate(ranks) if part.rel_l2 is not None and not part.rel_l2 < tolerance]
        verdict = Verdict.WRONG
        reason = f"rel-L2 {worst:.3e} is not below {tolerance:g}; wrong rank(s): {', '.join(map(str, bad))}"
    return CheckResult(
        verdict=verdict,
        rel_l2=worst,
        cosine=min((part.cosine for part in ranks if part.cosine is not None), default=None),
        tolerance=tolerance,
        tokens_checked=sum(part.tokens_checked for part in ranks),
        tokens_total=sum(part.tokens_total for part in ranks),
        experts_touched=len(frozenset().union(*(part.experts for part in ranks))),
        reason=reason,
    )


def _check_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    batch: Batch,
    picked: torch.Tensor,
    source: WeightSource,
    activations: ActivationMode,
    combine_format: CombineFormat,
) -> _RankCheck:
    total, ids = batch.topk_ids.shape[0], batch.topk_ids[picked]
    if out.shape != x.shape:
        fault = f"output {tuple(out.shape)} for x {tuple(x.shape)}"
        return _RankCheck(math.nan, math.nan, 0, total, frozenset(), fault)
    if not picked.numel():
        return _RankCheck(None, None, 0, total, frozenset(), None)
    case = source.case
    options = OracleOptions.product(
        activations,
        combine_format=combine_format,
        score_placement=case.score_placement,
        swiglu_limit=case.swiglu_limit,
        swiglu_alpha=case.swiglu_alpha,
        swiglu_beta=case.swiglu_beta,
    )
    routed = (x[picked.to(x.device)].to(out.device), ids.to(out.device), batch.topk_weights[picked].to(out.device))
    try:
        expected = oracle_forward(source.for_oracle(), *routed, options)  # on a GPU, where that is where the output is
    except Exception as err:  # whatever it was, peers wait for this rank's word
        logger.exception("the oracle failed")
        return _RankCheck(None, None, 0, total, frozenset(), f"the oracle failed: {type(err).__name__}: {err}")
    actual = out[picked.to(out.device)]
    experts = frozenset(ids[ids >= 0].tolist())
    return _RankCheck(rel_l2(actual, expected), cosine(actual, expected), len(picked), total, experts, None)
