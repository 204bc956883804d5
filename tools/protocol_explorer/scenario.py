# SPDX-License-Identifier: Apache-2.0
"""A scenario: who sends which routes in which launch, and where they land. Pure facts; no protocol state.

Called by `protocol` (to build steps) and `study` (to enumerate families). The rules here are the kernel's: tokens are
split evenly over the CTAs, index rows are sorted by local expert, the pool holds experts in tile order at whole blocks
with sources rotated from rank + 1, and the tile stream interleaves fc1 and fc2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Token = tuple[int, ...]
"""K expert ids of one token; negative means masked."""

Launch = tuple[tuple[Token, ...], ...]
"""Tokens of every rank."""

TileOrder = Literal["row tile slow", "block slow", "grouped"]
"""Order of an expert's fc1 tiles: all blocks per row tile (the kernel's), all row tiles per block, or a mix of both."""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One route in the pool of its expert's owner."""

    source: int
    route: int
    index_position: int
    block: int
    row: int

    def token(self, top_k: int) -> int:
        """The source's token."""
        return self.route // top_k


@dataclass(frozen=True, slots=True)
class Tile:
    """One entry of the tile stream: a token tile and a `part`, an fc1 row tile or an fc2 column tile."""

    kind: Literal["fc1", "fc2"]
    token_tile: int
    part: int


@dataclass(frozen=True)
class Scenario:
    """Routing of consecutive launches, and the shape of the machine that runs them.

    `block_rows` is the unit of the pool, its ready counters and its ring; `tile_rows` (0: the same) that of the work.
    A tile of other width than a block touches parts of blocks, as the kernel's 24-row tiles do.
    """

    launches: tuple[Launch, ...]
    local_experts: int = 1
    top_k: int = 1
    ctas: int = 1
    block_rows: int = 1
    tile_rows: int = 0
    row_tiles: int = 1
    column_tiles: int = 1
    lag: int = 0
    order: TileOrder = "row tile slow"
    group: int = 1
    ring_slots: int | None = None

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.launches[0])

    @cached_property
    def max_tokens(self) -> int:
        """The cap T that strides are made for."""
        return max(1, max(len(tokens) for launch in self.launches for tokens in launch))

    def owner(self, expert: int) -> int:
        """The rank of a global expert id."""
        return expert // self.local_experts

    def routes(self, launch: int, rank: int) -> list[tuple[int, int]]:
        """Live (route, expert) of a rank in a launch (counted from 1), by token and slot."""
        tokens = self.launches[launch - 1][rank]
        flat = itertools.chain.from_iterable(tokens)
        return [(route, expert) for route, expert in enumerate(flat) if expert >= 0]

    def index_row(self, launch: int, source: int, owner: int) -> list[tuple[int, int]]:
        """(route, expert) in the order of `index_rows[source]` at the owner."""
        mine = [(route, expert) for route, expert in self.routes(launch, source) if self.owner(expert) == owner]
        return sorted(mine, key=lambda item: item[1])

    def count(self, launch: int, source: int, expert: int) -> int:
        """Routes of a source to a global expert: what its size cell says."""
        return sum(1 for _, e in self.routes(launch, source) if e == expert)

    def sent(self, launch: int, source: int, owner: int) -> int:
        """Routes of a source to an owner."""
        return len(self.index_row(launch, source, owner))

    def rotated(self, rank: int) -> list[int]:
        """All ranks, from rank + 1 round to the rank itself."""
        return [(rank + 1 + i) % self.ranks for i in range(self.ranks)]

    def share(self, launch: int, rank: int, cta: int) -> range:
        """Tokens that a CTA stages and reduces."""
        tokens = len(self.launches[launch - 1][rank])
        return range(tokens * cta // self.ctas, tokens * (cta + 1) // self.ctas)

    def staging_ctas(self, launch: int, rank: int) -> int:
        """CTAs with at least one token."""
        return sum(1 for cta in range(self.ctas) if self.share(launch, rank, cta))

    def experts_in_tile_order(self, launch: int, rank: int) -> list[tuple[int, list[PoolRow]]]:
        """Non-empty local experts, most rows first, with their rows; rows and blocks are numbered through."""
        found: list[tuple[int, list[tuple[int, int, int]]]] = []
        for expert in range(rank * self.local_experts, (rank + 1) * self.local_experts):
            rows = [
                (source, route, position)
                for source in self.rotated(rank)
                for position, (route, e) in enumerate(self.index_row(launch, source, rank))
                if e == expert
            ]
            if rows:
                found.append((expert, rows))
        found.sort(key=lambda item: (-len(item[1]), item[0]))
        block, result = 0, []
        for expert, rows in found:
            first = block * self.block_rows
            placed = [PoolRow(*row, block + i // self.block_rows, first + i) for i, row in enumerate(rows)]
            block = placed[-1].block + 1
            result.append((expert, placed))
        return result

    def blocks(self, launch: int, rank: int) -> list[list[PoolRow]]:
        """Rows of every pool block, in tile order."""
        rows = [row for _, placed in self.experts_in_tile_order(launch, rank) for row in placed]
        return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.block)]

    def token_tiles(self, launch: int, rank: int) -> list[list[PoolRow]]:
        """Rows of every token tile, in tile order; a tile ends with its expert."""
        size = self.tile_rows or self.block_rows
        experts = self.experts_in_tile_order(launch, rank)
        return [rows[i : i + size] for _, rows in experts for i in range(0, len(rows), size)]

    def stream(self, launch: int, rank: int, column_tiles: int) -> list[Tile]:
        """The tile stream: fc1 segments in expert order; an expert's fc2 once `lag` fc1 tiles follow its own fc1."""
        segments = []
        first, size = 0, self.tile_rows or self.block_rows
        for _, rows in self.experts_in_tile_order(launch, rank):
            token_tiles = range(first, first - (-len(rows) // size))
            first = token_tiles.stop
            fc1 = [Tile("fc1", *where) for where in self._fc1_order(token_tiles)]
            fc2 = [Tile("fc2", tile, c) for c in range(column_tiles) for tile in token_tiles]
            segments.append((fc1, fc2))
        tiles: list[Tile] = []
        waiting: list[tuple[int, list[Tile]]] = []
        done = 0
        for fc1, fc2 in segments:
            tiles += fc1
            done += len(fc1)
            waiting.append((done, fc2))
            while waiting and done - waiting[0][0] >= self.lag:
                tiles += waiting.pop(0)[1]
        return tiles + [tile for _, fc2 in waiting for tile in fc2]

    def _fc1_order(self, token_tiles: range) -> Iterator[tuple[int, int]]:
        """(token tile, row tile) of one expert: groups of consecutive token tiles, row tile slow inside a group."""
        size = {"row tile slow": len(token_tiles), "block slow": 1, "grouped": self.group}[self.order]
        for start in range(0, len(token_tiles), size):
            for row_tile in range(self.row_tiles):
                for token_tile in token_tiles[start : start + size]:
                    yield token_tile, row_tile


def token_choices(experts: int, top_k: int, masked: bool) -> list[Token]:
    """All tokens up to the order of their slots: duplicates allowed, masked slots if asked for."""
    ids = ([-1] if masked else []) + list(range(experts))
    return list(itertools.combinations_with_replacement(ids, top_k))


def rank_choices(experts: int, top_k: int, max_tokens: int, masked: bool) -> list[tuple[Token, ...]]:
    """All token lists of one rank in one launch, up to their order, T = 0 included."""
    tokens = token_choices(experts, top_k, masked)
    return [c for t in range(max_tokens + 1) for c in itertools.combinations_with_replacement(tokens, t)]


def rotate(launches: tuple[Launch, ...], by: int, experts: int, local_experts: int) -> tuple[Launch, ...]:
    """The same routing with every rank renamed; every loop over peers starts at rank + 1, so it is a symmetry."""
    ranks = len(launches[0])

    def rename(token: Token) -> Token:
        return tuple(sorted(-1 if e < 0 else (e + by * local_experts) % experts for e in token))

    return tuple(
        tuple(tuple(sorted(rename(token) for token in launch[(r - by) % ranks])) for r in range(ranks))
        for launch in launches
    )


def routings(
    ranks: int, launches: int, *, local_experts: int = 1, top_k: int = 1, max_tokens: int = 1, masked: bool = False
) -> Iterator[tuple[Launch, ...]]:
    """Every routing of a family, one of each class under rotation of the ranks."""
    experts = ranks * local_experts
    choices = rank_choices(experts, top_k, max_tokens, masked)
    for flat in itertools.product(choices, repeat=ranks * launches):
        routing = tuple(tuple(flat[n * ranks : (n + 1) * ranks]) for n in range(launches))
        if all(routing <= rotate(routing, by, experts, local_experts) for by in range(1, ranks)):
            yield routing
