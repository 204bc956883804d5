# SPDX-License-Identifier: Apache-2.0
"""Routing workloads: pure functions of (name, seed, step), one rank's slice at a time.

Used by the runner; knows nothing of layers, weights or time. What each name promises is in :data:`PROPERTIES` and is
tested; what was achieved is measured by :class:`Load` and reported with every row (B66).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

from microbench.seeds import stream
from trtllm_megamoe.errors import MegaMoeConfigError


class RoutingName(str, enum.Enum):
    """The workloads of `--routing`."""

    UNIFORM = "uniform"
    RANDOM = "random"
    ZIPF = "zipf"
    HOT_EXPERT = "hot-expert"
    HOT_RANK = "hot-rank"
    RAGGED = "ragged"
    ZERO_RANK = "zero-rank"


PROPERTIES: dict[RoutingName, str] = {
    RoutingName.UNIFORM: "rows per expert and rows per rank are equal up to one; ids of a token are distinct",
    RoutingName.RANDOM: "distinct experts per token, all equally likely: rows per expert are binomial",
    RoutingName.ZIPF: "expert of popularity rank i drawn with weight 1/i, with replacement: ids of a token may repeat",
    RoutingName.HOT_EXPERT: "one expert is in every token; the other experts of a token are random and distinct",
    RoutingName.HOT_RANK: "one rank gets all routes, or with --imbalance F that rank gets F times the mean",
    RoutingName.RAGGED: "tokens of the ranks are 1/R, 2/R, ... 1 of the given count, in random order; ids random",
    RoutingName.ZERO_RANK: "half of the ranks (rounded down) have no token, the others the given count; ids random",
}

_UNEVEN_TOKENS = (RoutingName.RAGGED, RoutingName.ZERO_RANK)


@dataclass(frozen=True, slots=True)
class Workload:
    """One routing over `ep_size` ranks.

    `tokens_per_rank` is the largest T of any rank. The first `live_routes` of the `ep_size * T * top_k` slots are
    routed, in the order token-of-every-rank, slot; the rest carry -1. Use :func:`by_tokens` or :func:`by_rows`.
    """

    routing: RoutingName
    num_experts: int
    top_k: int
    ep_size: int
    tokens_per_rank: int
    live_routes: int
    seed: int
    imbalance: float | None = None

    def __post_init__(self) -> None:
        if self.num_experts % self.ep_size:
            raise MegaMoeConfigError(
                f"{self.num_experts} experts do not divide over {self.ep_size} ranks; choose another rank count"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise MegaMoeConfigError(f"top-k {self.top_k} is outside 1..{self.num_experts}, the number of experts")
        if self.tokens_per_rank < 0:
            raise MegaMoeConfigError(f"tokens per rank must not be negative, got {self.tokens_per_rank}")
        if self.routing in _UNEVEN_TOKENS and self.ep_size < 2:
            raise MegaMoeConfigError(f"routing {self.routing.value} needs at least 2 ranks, got {self.ep_size}")
        if self.imbalance is not None:
            if self.routing is not RoutingName.HOT_RANK:
                raise MegaMoeConfigError(f"imbalance belongs to routing hot-rank, got routing {self.routing.value}")
            if not 1.0 <= self.imbalance <= self.ep_size:
                raise MegaMoeConfigError(
                    f"imbalance {self.imbalance:g} is outside 1..{self.ep_size}: one rank of {self.ep_size} gets "
                    "at least the mean and at most everything"
                )

    @property
    def num_local_experts(self) -> int:
        """L, experts a rank owns."""
        return self.num_experts // self.ep_size


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's routes: `topk_ids` (T, K) int64, `topk_weights` (T, K) float32.

    Weights of slots with id -1 are NaN: reading one shows in the result.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def by_tokens(
    routing: RoutingName,
    tokens_per_rank: int,
    *,
    num_experts: int,
    top_k: int,
    ep_size: int,
    seed: int,
    imbalance: float | None = None,
) -> Workload:
    """All slots of `tokens_per_rank` tokens on each rank are routed."""
    live = ep_size * tokens_per_rank * top_k
    return Workload(routing, num_experts, top_k, ep_size, tokens_per_rank, live, seed, imbalance)


def by_rows(
    routing: RoutingName,
    rows_per_expert: int,
    *,
    num_experts: int,
    top_k: int,
    ep_size: int,
    seed: int,
    imbalance: float | None = None,
) -> Workload:
    """As many tokens as `rows_per_expert` rows per expert on average take (uniform: exactly); spare slots are -1."""
    if rows_per_expert < 0:
        raise MegaMoeConfigError(f"rows per expert must not be negative, got {rows_per_expert}")
    if routing in _UNEVEN_TOKENS:
        raise MegaMoeConfigError(f"routing {routing.value} is defined by tokens per rank; use --tokens-per-rank")
    live = num_experts * rows_per_expert
    tokens = math.ceil(live / (ep_size * top_k))
    return Workload(routing, num_experts, top_k, ep_size, tokens, live, seed, imbalance)


def tokens_by_rank(workload: Workload, step: int = 0) -> tuple[int, ...]:
    """T of every rank; equal but for `ragged` and `zero-rank`, which draw their order from (seed, step)."""
    size, most = workload.ep_size, workload.tokens_per_rank
    if workload.routing is RoutingName.RAGGED:
        counts = [math.ceil(most * (rank + 1) / size) for rank in range(size)]
    elif workload.routing is RoutingName.ZERO_RANK:
        counts = [0 if rank < size // 2 else most for rank in range(size)]
    else:
        return (most,) * size
    order = torch.randperm(size, generator=stream(workload.routing.value, workload.seed, step))
    return tuple(counts[int(index)] for index in order)


def route(workload: Workload, rank: int, step: int = 0) -> Batch:
    """Routes of one rank. Every rank draws from its own stream; only `uniform` follows a plan common to all ranks."""
    num_tokens = tokens_by_rank(workload, step)[rank]
    generator = stream(workload.routing.value, workload.seed, step, "rank", rank)
    shape = (num_tokens, workload.top_k)
    token, slot = torch.arange(num_tokens).unsqueeze(1), torch.arange(workload.top_k).unsqueeze(0)
    position = (token * workload.ep_size + rank) * workload.top_k + slot
    if workload.routing is RoutingName.UNIFORM:
        ids = _uniform_plan(workload, step)[position]
    elif workload.routing is RoutingName.ZIPF:
        ids = _zipf(workload, generator, num_tokens)
    elif workload.routing is RoutingName.HOT_EXPERT:
        ids = _distinct(generator, num_tokens, workload.num_experts, workload.top_k)
        hot = int(torch.randint(workload.num_experts, (), generator=stream("hot-expert", workload.seed)))
        absent = ~(ids == hot).any(dim=1)
        ids[absent, 0] = hot
    elif workload.routing is RoutingName.HOT_RANK:
        ids = _hot_rank(workload, generator, num_tokens)
    else:
        ids = _distinct(generator, num_tokens, workload.num_experts, workload.top_k)
    ids = torch.where(position < workload.live_routes, ids, -1)
    # the slot order of a token means nothing: shuffled, so that no slot is tied to a rank or to being spare
    ids = ids.gather(1, torch.rand(shape, generator=generator).argsort(dim=1))
    weights = torch.softmax(torch.randn(shape, generator=generator), dim=1)
    return Batch(ids, torch.where(ids < 0, torch.nan, weights))


def _distinct(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    """`top_k` distinct experts per token, equally likely, in random order."""
    return torch.rand((num_tokens, num_experts), generator=generator).topk(top_k, dim=1).indices


def _zipf(workload: Workload, generator: torch.Generator, num_tokens: int) -> torch.Tensor:
    """Zipf with exponent 1 over a popularity order that the seed fixes for all ranks and steps."""
    popularity = 1.0 / torch.arange(1, workload.num_experts + 1)
    order = torch.randperm(workload.num_experts, generator=stream("zipf order", workload.seed))
    if not num_tokens:
        return torch.empty((0, workload.top_k), dtype=torch.int64)
    draws = torch.multinomial(popularity, num_tokens * workload.top_k, replacement=True, generator=generator)
    return order[draws].view(num_tokens, workload.top_k)


def _hot_rank(workload: Workload, generator: torch.Generator, num_tokens: int) -> torch.Tensor:
    """Exactly the hot rank's share of this rank's slots (up to one) goes to its experts, spread evenly over the tokens.

    Ids of a token are distinct as far as the two groups have enough experts.
    """
    size, local, top_k = workload.ep_size, workload.num_local_experts, workload.top_k
    share = (workload.imbalance if workload.imbalance is not None else size) / size
    hot = int(torch.randint(size, (), generator=stream("hot-rank", workload.seed)))
    slots = torch.arange(num_tokens * top_k + 1, dtype=torch.float64)
    is_hot = (torch.floor(slots[1:] * share) > torch.floor(slots[:-1] * share)).view(num_tokens, top_k)
    inside = torch.arange(hot * local, (hot + 1) * local)
    outside = torch.cat([torch.arange(hot * local), torch.arange((hot + 1) * local, workload.num_experts)])
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64)
    for group, mask in ((inside, is_hot), (outside, ~is_hot)):
        if mask.any():
            order = torch.rand((num_tokens, group.numel()), generator=generator).argsort(dim=1)
            picks = group[order[:, torch.arange(top_k) % group.numel()]]
            nth = mask.long().cumsum(dim=1).sub(1).clamp_min(0)
            ids[mask] = picks.gather(1, nth)[mask]
    return ids


def _uniform_plan(workload: Workload, step: int) -> torch.Tensor:
    """Experts of all positions (flat): position p belongs to rank `order[p % R]`, whose experts come in rounds.

    A round visits every expert of the rank once, in random order. Cycling over the ranks makes every prefix of the plan
    balanced over ranks up to one row, rounds make it balanced over experts up to one row. A token takes K neighbouring
    positions, hence at most `window` neighbouring visits of a rank: rounds are joined so that those are distinct.
    """
    size, local = workload.ep_size, workload.num_local_experts
    generator = stream("uniform", workload.seed, step)
    order = torch.randperm(size, generator=generator)
    slots = size * workload.tokens_per_rank * workload.top_k
    window = math.ceil(workload.top_k / size)
    rounds = math.ceil(slots / workload.num_experts)
    plan = torch.empty((rounds * local, size), dtype=torch.int64)
    for index in range(size):
        owner = int(order[index])
        visits: list[int] = []
        for _ in range(rounds):
            shuffled = torch.randperm(local, generator=generator).tolist()
            for place in range(min(window - 1, local)):
                recent = visits[len(visits) - (window - 1) :] if len(visits) >= window - 1 else visits
                # at least one of the local - place left is not recent, because window <= local
                pick = next(i for i in range(place, local) if shuffled[i] not in recent)
                shuffled[place], shuffled[pick] = shuffled[pick], shuffled[place]
                visits.append(shuffled[place])
            visits.extend(shuffled[min(window - 1, local) :])
        plan[:, index] = owner * local + torch.tensor(visits, dtype=torch.int64)
    return plan.view(-1)


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that experts and ranks receive, from counts of all ranks: `sent` (R, E), routes of rank r to expert e."""

    sent: torch.Tensor

    @property
    def ep_size(self) -> int:
        """R."""
        return int(self.sent.shape[0])

    @property
    def rows_by_expert(self) -> torch.Tensor:
        """(E,) int64."""
        return self.sent.sum(dim=0)

    @property
    def rows_by_rank(self) -> torch.Tensor:
        """(R,) int64."""
        return self.rows_by_expert.view(self.ep_size, -1).sum(dim=1)

    @staticmethod
    def summary(rows: torch.Tensor) -> dict[str, float | None]:
        """Mean, largest, and their quotient; the quotient is None where nothing was received."""
        mean, most = float(rows.double().mean()), int(rows.max())
        return {"mean": mean, "max": most, "max_over_mean": most / mean if mean else None}


def count_routes(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Live routes per expert (E,) int64; ids outside [0, E) are not counted."""
    live = topk_ids[(topk_ids >= 0) & (topk_ids < num_experts)]
    return torch.bincount(live.flatten().long(), minlength=num_experts)
