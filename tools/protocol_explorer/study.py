# SPDX-License-Identifier: Apache-2.0
"""Runs the studies and judges them: protocol, reductions, variants, ring, random schedules.

Called by the command line and the tests. A study gives rows of plain facts; `ok` says whether a row is what it must be.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tools.protocol_explorer.explore import Outcome, explore, shortest_fault, walk
from tools.protocol_explorer.families import (
    CHECKED_FAMILIES,
    QUICKLY_CHECKED,
    RING_WITNESSES,
    WITNESSES,
    Family,
    ring_cases,
)
from tools.protocol_explorer.scenario import Scenario, rank_choices
from tools.protocol_explorer.variants import PROTOCOL, Variant, all_variants

FAULTS_WANTED = 8
"""A variant's witnesses are tried until so many have shown a fault: enough to see its kinds."""

TRACE_STATES = 60_000
"""States searched for a variant's shortest fault."""

Tick = Callable[[int], None]
"""Told after each piece of work how many are done."""


@dataclass(frozen=True, slots=True)
class ProtocolRow:
    """The protocol on one family. `explored` of `total` routings; all of them up to rotation when `complete`."""

    family: str
    ranks: int
    launches: int
    max_tokens: int
    complete: bool
    explored: int
    total: int
    states: int
    seconds: float
    verdicts: dict[str, int]
    first_fault: str = ""

    @property
    def ok(self) -> bool:
        """No fault anywhere."""
        return set(self.verdicts) == {"ok"}


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One variant: how many witnesses were tried, what they showed, and the shortest way to a fault."""

    name: str
    group: str
    safe: str
    tried: int
    states: int
    verdicts: dict[str, int]
    example: str = ""
    trace: tuple[str, ...] = ()

    @property
    def faulty(self) -> bool:
        """Some witness shows a fault."""
        return any(verdict not in ("ok", "limit") for verdict in self.verdicts)

    @property
    def ok(self) -> bool:
        """Faulty if it must be, and completely explored if it is safe."""
        return set(self.verdicts) == {"ok"} if self.safe else self.faulty


@dataclass(frozen=True, slots=True)
class ReductionRow:
    """A family explored with and without reductions, for the protocol and every variant."""

    family: str
    comparisons: int
    fine_states: int
    reduced_states: int
    disagreements: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """The same verdicts."""
        return not self.disagreements


@dataclass(frozen=True, slots=True)
class RingRow:
    """One ring: explored and predicted verdict."""

    order: str
    group: int
    ctas: int
    slots: int
    blocks: int
    verdict: str
    predicted: str
    states: int

    @property
    def ok(self) -> bool:
        """The rule holds."""
        return self.verdict == self.predicted


@dataclass(slots=True)
class Report:
    """All rows of a run."""

    protocol: list[ProtocolRow] = field(default_factory=list)
    reductions: list[ReductionRow] = field(default_factory=list)
    variants: list[VariantRow] = field(default_factory=list)
    ring: list[RingRow] = field(default_factory=list)
    walks: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Everything is what it must be."""
        rows: Iterable[Any] = itertools.chain(self.protocol, self.reductions, self.variants, self.ring)
        return all(row.ok for row in rows) and set(self.walks) <= {"ok"}


class Workers:
    """Maps over scenarios, on several processes or in this one."""

    def __init__(self, jobs: int) -> None:
        self._pool = ProcessPoolExecutor(jobs) if jobs > 1 else None

    def map(self, fn: Callable[[Any], Any], items: Iterable[Any], chunk: int = 4) -> Iterator[Any]:
        """Results in order."""
        return self._pool.map(fn, items, chunksize=chunk) if self._pool else map(fn, items)

    def close(self) -> None:
        """End the processes."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


def _explore_protocol(scenario: Scenario) -> Outcome:
    return explore(scenario, PROTOCOL, reduce=True)


def study_family(family: Family, workers: Workers, *, quick: bool, tick: Tick = lambda _: None) -> ProtocolRow:
    """Every interleaving of every scenario of a family."""
    started = time.monotonic()
    verdicts: Counter[str] = Counter()
    states, first_fault = 0, ""
    for outcome in workers.map(_explore_protocol, family.scenarios(quick=quick)):
        verdicts[outcome.verdict] += 1
        states += outcome.states
        first_fault = first_fault or outcome.detail
        tick(1)
    explored = sum(verdicts.values())
    return ProtocolRow(
        family.name,
        family.ranks,
        family.launches,
        family.max_tokens,
        not (family.quick if quick else family.sample),
        explored,
        family.total,
        states,
        round(time.monotonic() - started, 1),
        dict(verdicts),
        first_fault,
    )


def family_size(family: Family, *, quick: bool) -> int:
    """Scenarios of a study, for progress bars."""
    return sum(1 for _ in family.scenarios(quick=quick))


def study_variant(variant: Variant, *, quick: bool) -> VariantRow:
    """Try a variant on the witnesses; a safe one on all of them."""
    wanted = 1 if quick else FAULTS_WANTED
    verdicts: Counter[str] = Counter()
    states, example = 0, Outcome("ok", 0)
    faulty: Scenario | None = None
    for family in RING_WITNESSES if variant.ring else WITNESSES:
        for scenario in itertools.islice(family.scenarios(), 2 if quick and variant.safe else None):
            outcome = explore(scenario, variant, reduce=bool(variant.safe))
            verdicts[outcome.verdict] += 1
            states += outcome.states
            if not outcome.ok and faulty is None:
                faulty, example = scenario, outcome
            if sum(verdicts.values()) - verdicts["ok"] >= wanted:
                break
        else:
            continue
        break
    if faulty is not None and not quick:
        shortest = shortest_fault(faulty, variant, limit=TRACE_STATES)
        example = shortest if shortest.trace else example
    tried = sum(verdicts.values())
    kinds = {kind: count for kind, count in verdicts.items() if count}
    return VariantRow(variant.name, variant.group, variant.safe, tried, states, kinds, example.detail, example.trace)


def _variant_quick(variant: Variant) -> VariantRow:
    return study_variant(variant, quick=True)


def _variant_full(variant: Variant) -> VariantRow:
    return study_variant(variant, quick=False)


def study_variants(workers: Workers, *, quick: bool, tick: Tick = lambda _: None) -> list[VariantRow]:
    """All variants."""
    rows = []
    for row in workers.map(_variant_quick if quick else _variant_full, all_variants(), chunk=1):
        rows.append(row)
        tick(1)
    return rows


def compare(scenario: Scenario) -> tuple[int, int, int, list[str]]:
    """(comparisons, states without reduction, states with, disagreements) of one scenario."""
    ring = scenario.ring_slots is not None
    comparisons = fine_states = reduced_states = 0
    wrong = []
    for variant in (PROTOCOL, *all_variants()):
        if variant is not PROTOCOL and variant.ring != ring:
            continue
        fine = explore(scenario, variant, fine=True)
        reduced = explore(scenario, variant, reduce=bool(variant.safe))
        comparisons += 1
        fine_states += fine.states
        reduced_states += reduced.states
        if fine.ok != reduced.ok or "limit" in (fine.verdict, reduced.verdict):
            wrong.append(f"{variant.name} on {scenario.launches}: {fine.verdict} without, {reduced.verdict} with")
    return comparisons, fine_states, reduced_states, wrong


def study_reductions(workers: Workers, *, quick: bool, tick: Tick = lambda _: None) -> list[ReductionRow]:
    """The protocol and every variant with and without reductions: the same scenarios must be faulty."""
    rows = []
    for family in QUICKLY_CHECKED if quick else CHECKED_FAMILIES:
        comparisons, fine_states, reduced_states = 0, 0, 0
        wrong: list[str] = []
        for compared, fine, reduced, found in workers.map(compare, family.scenarios(quick=quick), chunk=1):
            comparisons += compared
            fine_states += fine
            reduced_states += reduced
            wrong += found
            tick(1)
        rows.append(ReductionRow(family.name, comparisons, fine_states, reduced_states, tuple(wrong)))
    return rows


def study_ring(*, quick: bool, tick: Tick = lambda _: None) -> list[RingRow]:
    """Which rings, orders and CTA counts deadlock under the worst routing, against the rule."""
    rows = []
    for case in ring_cases(quick=quick):
        outcome = explore(case.scenario(), PROTOCOL)
        shape = (case.order, case.group, case.ctas, case.slots, case.blocks)
        rows.append(RingRow(*shape, outcome.verdict, case.predicted, outcome.states))
        tick(1)
    return rows


def random_scenario(chance: random.Random) -> Scenario:
    """Larger than what can be explored: 4 ranks, top-2, several experts, a few launches."""
    local_experts = chance.choice((1, 2, 3))
    ring = chance.choice((None, None, 1, 2))
    choices = rank_choices(4 * local_experts, 2, 1, True)
    hot = [(e, e) for e in range(local_experts)]

    def tokens() -> tuple[tuple[int, ...], ...]:
        pool = hot if chance.random() < 0.2 else [token for choice in choices for token in choice]
        return tuple(chance.choice(pool) for _ in range(chance.choice((0, 0, 1, 2, 4))))

    launches = tuple(tuple(tokens() for _ in range(4)) for _ in range(chance.choice((2, 3, 4))))
    return Scenario(
        launches,
        local_experts=local_experts,
        top_k=2,
        ctas=chance.choice((1, 2, 3)),
        block_rows=chance.choice((1, 2, 4)),
        tile_rows=0 if ring else chance.choice((0, 3)),
        row_tiles=chance.choice((1, 2)),
        column_tiles=chance.choice((1, 2)),
        lag=chance.choice((0, 2, 5)),
        order="block slow" if ring else "row tile slow",
        ring_slots=ring,
    )


def walk_once(seed: int) -> Outcome:
    """One random schedule of one random larger scenario."""
    return walk(random_scenario(random.Random(seed)), PROTOCOL, seed)


def study_walks(workers: Workers, count: int, tick: Tick = lambda _: None) -> dict[str, int]:
    """Random schedules of random larger scenarios."""
    verdicts: Counter[str] = Counter()
    for outcome in workers.map(walk_once, range(count), chunk=8):
        verdicts[outcome.verdict] += 1
        tick(1)
    return dict(verdicts)
