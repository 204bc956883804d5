# SPDX-License-Identifier: Apache-2.0
"""Which scenarios are explored: families for the protocol, witnesses for the variants, cases for the ring.

A family is every routing of its size up to rotation of the ranks, or a fixed random sample of them. Used by `study` and
the tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tools.protocol_explorer.scenario import Launch, Scenario, TileOrder, rank_choices, routings

SEED = 5
"""Of every sample."""


@dataclass(frozen=True, slots=True)
class Family:
    """Routings of one size on one shape of machine; `sample` 0 means all of them."""

    name: str
    ranks: int
    launches: int
    max_tokens: int
    sample: int = 0
    quick: int = 0
    masked: bool = False
    shape: tuple[tuple[str, Any], ...] = ()

    @property
    def base(self) -> Scenario:
        """The shape, with nothing routed."""
        nothing: Launch = ((),) * self.ranks
        return Scenario((nothing,) * self.launches, **dict(self.shape))

    @property
    def total(self) -> int:
        """Routings of this size, rotations included."""
        base = self.base
        choices = rank_choices(self.ranks * base.local_experts, base.top_k, self.max_tokens, self.masked)
        return int(len(choices) ** (self.ranks * self.launches))

    def scenarios(self, *, quick: bool = False) -> Iterator[Scenario]:
        """All of them, or the sample of the full or the quick study."""
        base = self.base
        wanted = self.quick if quick else self.sample
        if wanted:
            for launches in self._draw(wanted):
                yield replace(base, launches=launches)
            return
        for launches in routings(
            self.ranks,
            self.launches,
            local_experts=base.local_experts,
            top_k=base.top_k,
            max_tokens=self.max_tokens,
            masked=self.masked,
        ):
            yield replace(base, launches=launches)

    def _draw(self, wanted: int) -> list[tuple[Launch, ...]]:
        """Distinct random routings, the same in every run."""
        base, chance = self.base, random.Random(SEED)
        choices = rank_choices(self.ranks * base.local_experts, base.top_k, self.max_tokens, self.masked)
        found: dict[tuple[Launch, ...], None] = {}
        while len(found) < min(wanted, self.total):
            routing = tuple(tuple(chance.choice(choices) for _ in range(self.ranks)) for _ in range(self.launches))
            found[routing] = None
        return list(found)


def _shape(**facts: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(facts.items())


TWO_CTAS = _shape(ctas=2)
TILED = _shape(block_rows=2, row_tiles=2, column_tiles=2)
STRADDLING = _shape(block_rows=2, tile_rows=3)
RING = _shape(ring_slots=1, row_tiles=2, order="block slow")
TWO_EXPERTS_IN_A_RING = _shape(ring_slots=2, row_tiles=2, order="block slow", local_experts=2)
TWO_CTAS_IN_A_RING = _shape(ring_slots=2, row_tiles=2, order="block slow", ctas=2)

PROTOCOL_FAMILIES = (
    Family("two launches", 2, 2, 2, masked=True, quick=120),
    Family("three launches", 2, 3, 1, masked=True, quick=120),
    Family("three launches, more tokens", 2, 3, 2, 3000, 60),
    Family("top-2, duplicates", 2, 2, 1, masked=True, quick=60, shape=_shape(top_k=2)),
    Family("top-2, two experts a rank", 2, 2, 1, 3000, 40, True, _shape(top_k=2, local_experts=2)),
    Family("two CTAs", 2, 2, 2, 150, 6, shape=TWO_CTAS),
    Family("two CTAs, three launches", 2, 3, 2, 40, 2, shape=TWO_CTAS),
    Family("blocks of 2, 2 row and column tiles", 2, 2, 2, quick=30, shape=TILED),
    Family("tiles of 3 rows over blocks of 2", 2, 2, 3, 1000, 20, shape=STRADDLING),
    Family("three ranks", 3, 2, 1, quick=16),
    Family("three ranks, masked, top-2", 3, 2, 1, 200, 4, True, _shape(top_k=2)),
    Family("three ranks, three launches", 3, 3, 1, 400, 3),
    Family("ring of one slot", 2, 2, 2, quick=30, shape=RING),
    Family("ring of one slot, three launches", 2, 3, 1, quick=30, shape=RING),
    Family("ring of two slots, two CTAs", 2, 2, 2, 16, 1, shape=TWO_CTAS_IN_A_RING),
)
"""What the protocol itself is explored on."""

WITNESSES = (
    Family("one rank, two CTAs, three launches", 1, 3, 2, 6, shape=TWO_CTAS),
    Family("one rank, tiles of 3 rows over blocks of 2", 1, 3, 4, 6, shape=STRADDLING),
    Family("two launches", 2, 2, 2, 20),
    Family("three launches", 2, 3, 1, 24),
    Family("two CTAs", 2, 2, 2, 6, shape=TWO_CTAS),
)
"""Scenarios a variant is tried on until some show its fault; the cheap ones first."""

RING_WITNESSES = (
    Family("one rank, one slot", 1, 2, 3, 8, shape=RING),
    Family(
        "one rank, two slots, two experts",
        1,
        2,
        3,
        8,
        shape=TWO_EXPERTS_IN_A_RING,
    ),
    Family("two ranks, one slot", 2, 2, 2, 12, shape=RING),
)

CHECKED_FAMILIES = (
    Family("two launches, T <= 1", 2, 2, 1, 16, 1, True),
    Family("two launches, T <= 2", 2, 2, 2, 4, 1),
    Family("three launches", 2, 3, 1, 6, 1),
    Family("tiles of 3 rows over blocks of 2", 2, 2, 3, 2, 1, shape=STRADDLING),
    Family("one rank, two CTAs, three launches", 1, 3, 2, 12, 1, shape=TWO_CTAS),
    Family("ring of one slot", 2, 2, 2, 20, 3, shape=RING),
)
"""Small enough to be explored without any reduction, for the protocol and for every variant."""

QUICKLY_CHECKED = (CHECKED_FAMILIES[0], CHECKED_FAMILIES[-1])


@dataclass(frozen=True, slots=True)
class RingCase:
    """One rank, one expert with many blocks: the worst that a ring meets."""

    order: TileOrder
    group: int
    ctas: int
    slots: int
    blocks: int

    def scenario(self, launches: int = 1) -> Scenario:
        """Every token to the one expert; two fc1 row tiles a block."""
        tokens = tuple((0,) for _ in range(self.blocks))
        return Scenario(
            ((tokens,),) * launches,
            ctas=self.ctas,
            row_tiles=2,
            order=self.order,
            group=self.group,
            ring_slots=self.slots,
        )

    @property
    def stuck_blocks(self) -> int:
        """Blocks of one group whose first row tile needs a slot that only a later tile of the stream gives back."""
        size = {"row tile slow": self.blocks, "block slow": 1, "grouped": self.group}[self.order]
        return min(size, self.blocks) - self.slots

    @property
    def predicted(self) -> str:
        """The rule: deadlock when such blocks can occupy every CTA."""
        return "deadlock" if self.stuck_blocks >= self.ctas else "ok"


def ring_cases(*, quick: bool) -> list[RingCase]:
    """Orders x CTAs x slots x blocks."""
    orders: tuple[tuple[TileOrder, int], ...] = (
        ("row tile slow", 1),
        ("block slow", 1),
        ("grouped", 2),
        ("grouped", 3),
    )
    return [
        RingCase(order, group, ctas, slots, blocks)
        for order, group in orders
        for ctas in ((1, 2) if quick else (1, 2, 3))
        for slots in (1, 2, 3)
        for blocks in range(1, 5 if quick else 7)
    ]
