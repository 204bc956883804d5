# SPDX-License-Identifier: Apache-2.0
"""The protocol of one launch as programs of the machine; steps and objects are named like the kernel's.

Roles of a CTA, each an actor: `math` stages, runs tiles, reduces and leaves; `dispatch` publishes (CTA 0), waits for
the cells, offers what is staged (CTA 0), waits for all offers and pulls; `clear` (one per rank) zeroes the other bank.
A rank's next launch begins when all of them have ended. A `Variant` takes something away; without one this is the
protocol of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.protocol_explorer.builder import Builder, Word
from tools.protocol_explorer.machine import (
    CELL,
    CELL_BITS,
    CLAIM,
    COUNT,
    END,
    TAGS,
    TICKET,
    WAIT,
    WRITE,
    Machine,
    Memory,
    Op,
    Program,
)
from tools.protocol_explorer.scenario import PoolRow, Scenario, Tile
from tools.protocol_explorer.variants import Variant


class Protocol:
    """Builds the machine of a scenario under a variant."""

    def __init__(self, scenario: Scenario, variant: Variant) -> None:
        self.scenario = scenario
        self.variant = variant
        self._actors = 2 * scenario.ctas + 1
        launches, ranks = range(1, len(scenario.launches) + 1), range(scenario.ranks)
        self._blocks = [[scenario.blocks(n, r) for r in ranks] for n in launches]
        self._token_tiles = [[scenario.token_tiles(n, r) for r in ranks] for n in launches]
        self.memory = Memory(scenario.ranks * (1 + self._actors))
        for rank in range(scenario.ranks):
            self._add_regions(rank)

    def machine(self, *, fine: bool = False) -> Machine:
        """The machine; `fine` makes every operation a move of its own, without any reduction."""
        launches, ranks = range(1, len(self.scenario.launches) + 1), range(self.scenario.ranks)
        programs = tuple(tuple(self._launch(n, rank) for rank in ranks) for n in launches)
        return Machine(self.scenario.ranks, self._actors, programs, self.memory, fine, tuple(self._final_words()))

    def actor_name(self, actor: int) -> str:
        """`math 0`, `dispatch 1`, `clear`."""
        if actor == self._actors - 1:
            return "clear"
        return f"{('math', 'dispatch')[actor % 2]} {actor // 2}"

    # -- memory

    def _add_regions(self, rank: int) -> None:
        s, add = self.scenario, self.memory.add
        blocks = max(1, *(len(launch[rank]) for launch in self._blocks))
        tiles = max(1, *(len(launch[rank]) for launch in self._token_tiles))
        slots = s.ring_slots or blocks
        routes = s.max_tokens * s.top_k
        first_tag = 1 << CELL_BITS if "first tag equals initial tag" in self.variant.rules else 0
        for name, shape, value in (
            ("header", (2,), 0),
            ("size_cells", (2, s.ranks, s.local_experts), first_tag),
            ("payload_tags", (s.ranks,), 0),
            ("index_rows", (2, s.ranks, routes), 0),
            ("payload", (s.max_tokens,), 0),
            ("payload_scales", (s.max_tokens,), 0),
            ("result_data", (routes, 2 * s.column_tiles), 0),
            ("result_scales", (routes, 2 * s.column_tiles), 0),
            ("return_counters", (s.ranks,), 0),
            ("staged", (2,), 0),
            ("pool_ready", (2, blocks), 0),
            ("fc1_ready", (2, tiles), 0),
            ("claim", (2,), 0),
            ("credits", (slots,), 0),
            ("exit_ticket", (), 0),
            ("expected_returns", (s.ranks,), 0),
            ("epoch", (), 0),
            ("pool", (slots * s.block_rows,), 0),
            ("pool_scales", (slots * s.block_rows,), 0),
            ("pool_meta", (blocks * s.block_rows,), 0),
            ("fc1_out", (tiles, s.row_tiles), 0),
        ):
            add(f"rank {rank} {name}", *shape, value=value)

    def _at(self, rank: int, name: str, *index: int) -> int:
        return self.memory.at(f"rank {rank} {name}", *index)

    def _bank(self, name: str, n: int) -> int:
        if name == "index_rows":
            return n & 1 if "two banks of index_rows" in self.variant.rules else 0
        return 0 if name in self.variant.one_bank else n & 1

    def _final_words(self) -> Iterable[tuple[int, int]]:
        """Words whose value at the very end says that no arrival was lost and none came twice."""
        s, last = self.scenario, len(self.scenario.launches)
        for rank in range(s.ranks):
            yield self._at(rank, "epoch"), last
            for block, rows in enumerate(self._blocks[last - 1][rank]):
                yield self._at(rank, "pool_ready", self._bank("pool_ready", last), block), len(rows)
            for tile in range(len(self._token_tiles[last - 1][rank])):
                yield self._at(rank, "fc1_ready", self._bank("fc1_ready", last), tile), s.row_tiles
            for source in range(s.ranks):
                yield self._at(rank, "payload_tags", source), last
            if "one return counter" not in self.variant.rules and not self._zeroes_returns:
                for owner in range(s.ranks):
                    total = sum(self._expected(n, rank, owner) for n in range(1, last + 1))
                    yield self._at(rank, "return_counters", owner), total

    # -- numbers

    @property
    def _zeroes_returns(self) -> bool:
        return any(rule.startswith("return_counters zeroed") for rule in self.variant.rules)

    def _column_tiles(self, rank: int) -> int:
        """fc2 column tiles of an expert owner; `differ` rules give rank 0 half as many as the others."""
        halves = any("ranks differ" in rule for rule in self.variant.rules)
        return self.scenario.column_tiles * (2 if halves and rank > 0 else 1)

    def _unit(self, rank: int) -> int:
        """What one row of one column tile adds to a return counter."""
        by_columns = any("in columns" in rule for rule in self.variant.rules)
        return 2 * self.scenario.column_tiles // self._column_tiles(rank) if by_columns else 1

    def _expected(self, n: int, rank: int, owner: int) -> int:
        """What a token owner's launch adds to its expectation from an expert owner; it knows its own tiles only."""
        tiles = self._column_tiles(rank) * self._unit(rank)
        if "one return counter" in self.variant.rules:
            return tiles * sum(self.scenario.sent(n, rank, o) for o in range(self.scenario.ranks)) if owner == 0 else 0
        return tiles * self.scenario.sent(n, rank, owner)

    def _use(self, n: int, rank: int, block: int) -> tuple[int, int]:
        """(slot, number of the block's predecessors in that slot), over all launches: credits are never reset."""
        slots = self.scenario.ring_slots
        if slots is None:
            return block, 0
        before = sum(len(self._blocks[m - 1][rank]) for m in range(1, n))
        from_zero = "credits expected from zero in every launch" in self.variant.rules
        return (before + block) % slots, (block if from_zero else before + block) // slots

    def _pool_row(self, n: int, rank: int, row: PoolRow) -> int:
        slot, _ = self._use(n, rank, row.block)
        return slot * self.scenario.block_rows + row.row % self.scenario.block_rows

    def _row_stamp(self, n: int, rank: int, row: PoolRow) -> int:
        """Unique per pool row of all launches, ascending: a ring's slot holds many rows in one launch."""
        before = sum(len(self._blocks[m - 1][rank]) for m in range(1, n)) * self.scenario.block_rows
        return 1 + before + row.row

    # -- programs

    def _launch(self, n: int, rank: int) -> tuple[Program, ...]:
        v, ctas = self.variant, self.scenario.ctas
        if "a rank without tokens leaves at once" in v.rules and not self.scenario.launches[n - 1][rank]:
            leave = Builder(v)
            leave.op(TICKET, "exit", *self._ticket(n, rank, 1), boundary=True)
            return (leave.program(), *[(Op(END, "end"),)] * (self._actors - 1))
        programs = []
        for cta in range(ctas):
            math, dispatch = Builder(v), Builder(v)
            self._stage(math, n, rank, cta)
            math_pulls = "rows pulled before the tile loop" in v.rules
            if math_pulls:
                self._wait_for_cells(math, n, rank, "cells")
                self._pull(math, n, rank, cta)
            self._wait_for_cells(math, n, rank, "tiles", self._facts(n, rank) if cta == 0 else ())
            tiles = self._tiles(n, rank)
            claim = math.op(CLAIM, "claim", self._at(rank, "claim", self._bank("claim", n)), (), boundary=True)
            self._reduce(math, n, rank, cta)
            math.place_tiles(claim, tiles, local=ctas == 1)
            self._dispatch(dispatch, n, rank, cta, pulls=not math_pulls)
            early = "payload of the next launch staged before the reduction" in v.rules
            if early and cta == 0 and n < len(self._blocks):
                self._stage_early(dispatch, n + 1, rank)
            programs += [math.program(), dispatch.program()]
        clear = Builder(v)
        self._clear(clear, n, rank)
        return (*programs, clear.program())

    def _dispatch(self, code: Builder, n: int, rank: int, cta: int, *, pulls: bool) -> None:
        steps = ["publish", "cells", "offer", "pull"]
        if "payload offered before the wait for cells" in self.variant.rules:
            steps = ["publish", "offer", "cells", "pull"]
        if "size_cells sent after staging" in self.variant.rules:
            steps = ["offer", "publish", "cells", "pull"]
        for step in steps:
            if step == "publish" and cta == 0:
                self._publish(code, n, rank)
            elif step == "offer" and cta == 0:
                self._offer(code, n, rank)
            elif step == "cells" and pulls:
                self._wait_for_cells(code, n, rank, step)
            elif step == "pull" and pulls:
                self._pull(code, n, rank, cta)

    def _stage(self, code: Builder, n: int, rank: int, cta: int) -> None:
        writes = [
            word for word in self._staged_words(n, rank, cta) if ("payload_tags", word[0]) not in self.variant.early
        ]
        if self.scenario.share(n, rank, cta):
            staged = self._at(rank, "staged", self._bank("staged", n))
            code.step("stage", writes=writes, releases=[("staged", staged, 1)])

    def _staged_words(self, n: int, rank: int, cta: int) -> list[Word]:
        """What a CTA writes before its rank's payload tags."""
        share = self.scenario.share(n, rank, cta)
        words: list[Word] = [
            (name, self._at(rank, name, token), n) for token in share for name in ("payload", "payload_scales")
        ]
        for owner in self.scenario.rotated(rank):
            for position, (route, _) in enumerate(self.scenario.index_row(n, rank, owner)):
                if route // self.scenario.top_k in share:
                    at = self._at(owner, "index_rows", self._bank("index_rows", n), rank, position)
                    words.append(("index_rows", at, n))
        return words

    def _stage_early(self, code: Builder, n: int, rank: int) -> None:
        tokens = range(len(self.scenario.launches[n - 1][rank]))
        words = [(name, self._at(rank, name, t), n) for t in tokens for name in ("payload", "payload_scales")]
        code.step("stage", writes=words)

    def _publish(self, code: Builder, n: int, rank: int) -> None:
        s, v = self.scenario, self.variant
        zero = [(self._at(rank, "return_counters", o), 0) for o in range(s.ranks)]
        if "return_counters zeroed before publish" in v.rules:
            code.op(WRITE, "publish", *zero, boundary=True)
        cells: list[Word] = []
        own = [self._at(rank, "size_cells", self._bank("size_cells", n), rank, e) for e in range(s.local_experts)]
        for owner in s.rotated(rank):
            for local in range(s.local_experts):
                count = s.count(n, rank, owner * s.local_experts + local)
                if count or "size_cells" not in v.drop:
                    at = self._at(owner, "size_cells", self._bank("size_cells", n), rank, local)
                    cells.append(("size_cells", at, (n << CELL_BITS) + count))
        header = ("header", self._at(rank, "header", self._bank("header", n)), n)
        late = ("size_cells", "header") in v.early
        code.step("publish", writes=[] if late else [header])
        code.step("publish", writes=cells, each=True, unnoticed=own)
        code.step("publish", writes=[header] if late else [])
        if "return_counters zeroed after publish" in v.rules:
            code.op(WRITE, "publish", *zero, boundary=True)

    def _offer(self, code: Builder, n: int, rank: int) -> None:
        s, v = self.scenario, self.variant
        staged = self._at(rank, "staged", self._bank("staged", n))
        wait = ("offer: staged", WAIT, [(staged, s.staging_ctas(n, rank), -1, False)])
        only_receivers = "no payload tag where nothing was sent" in v.rules
        tags: list[Word] = []
        for owner in s.rotated(rank):
            if "payload_tags" not in v.drop and (s.sent(n, rank, owner) or not only_receivers):
                tags.append(("payload_tags", self._at(owner, "payload_tags", rank), n))
        code.step("offer", wait=wait, writes=tags, hoisted="writes", at_once=True)
        late = {obj for release, obj in v.early if release == "payload_tags"}
        words = [word for cta in range(s.ctas) for word in self._staged_words(n, rank, cta)]
        code.step("offer", writes=[word for word in words if word[0] in late])

    def _wait_for_cells(self, code: Builder, n: int, rank: int, step: str, reads: Sequence[Word] = ()) -> None:
        """All R * EL cells of this launch; each is read with its tag, as one word. A late acquire lets it be old."""
        s = self.scenario
        newer = "size_cells accepted when newer" in self.variant.rules
        tags, cells = [], []
        for source in s.rotated(rank):
            for local in range(s.local_experts):
                at = self._at(rank, "size_cells", self._bank("size_cells", n), source, local)
                count = s.count(n, source, rank * s.local_experts + local)
                tags.append((at, n, newer))
                cells.append((at, count, COUNT) if newer else (at, (n << CELL_BITS) + count, CELL))
        code.step(step, wait=(f"{step}: size_cells", TAGS, tags), reads=reads, raw_reads=cells)

    def _facts(self, n: int, rank: int) -> list[Word]:
        """What all ranks must launch with alike, read by warps that do not pull."""
        bank = self._bank("header", n)
        return [("header", self._at(peer, "header", bank), n) for peer in self.scenario.rotated(rank)]

    def _pull(self, code: Builder, n: int, rank: int, cta: int) -> None:
        s, v = self.scenario, self.variant
        rows = [row for block in self._blocks[n - 1][rank] for row in block]
        if "pull order against tile order" in v.rules:
            rows.reverse()
        rows = rows[cta :: s.ctas]
        hoisted = "pull: payload_tags" in v.hoist
        reads = [self._pull_reads(n, rank, row) for row in rows]
        exact = "payload_tags compared for equality" in v.rules
        only_senders = "payload_tags awaited where rows were sent" in v.rules
        tags = [
            (self._at(rank, "payload_tags", source), n, -1, exact)
            for source in s.rotated(rank)
            if s.sent(n, source, rank) or not only_senders
        ]
        first = [word for words in reads for word in words] if hoisted else []
        code.step("pull", wait=("pull: payload_tags", WAIT, tags), reads=first)
        for row, words in zip(rows, reads, strict=True):
            slot, uses = self._use(n, rank, row.block)
            wait = None
            if s.ring_slots is not None:
                wanted = uses * s.row_tiles
                if "credit of the first row tile is enough" in v.rules and uses:
                    wanted -= s.row_tiles - 1
                wait = ("pull: credits", WAIT, [(self._at(rank, "credits", slot), wanted, -1, False)])
            stamp, at = self._row_stamp(n, rank, row), self._pool_row(n, rank, row)
            meta = at if "pool_meta in the ring" in v.rules else row.row
            code.step(
                "pull",
                wait=wait,
                hoisted="writes",
                reads=[] if hoisted else words,
                writes=[
                    ("pool", self._at(rank, "pool", at), stamp),
                    ("pool_scales", self._at(rank, "pool_scales", at), stamp),
                    ("pool_meta", self._at(rank, "pool_meta", meta), stamp),
                ],
                releases=[("pool_ready", self._at(rank, "pool_ready", self._bank("pool_ready", n), row.block), 1)],
            )

    def _pull_reads(self, n: int, rank: int, row: PoolRow) -> list[Word]:
        token = row.token(self.scenario.top_k)
        index = self._at(rank, "index_rows", self._bank("index_rows", n), row.source, row.index_position)
        return [
            ("index_rows", index, n),
            ("payload", self._at(row.source, "payload", token), n),
            ("payload_scales", self._at(row.source, "payload_scales", token), n),
        ]

    def _tiles(self, n: int, rank: int) -> list[Builder]:
        stream = self.scenario.stream(n, rank, self._column_tiles(rank))
        if "fc2 before fc1 in the tile stream" in self.variant.rules:
            stream = [t for t in stream if t.kind == "fc2"] + [t for t in stream if t.kind == "fc1"]
        built = []
        for tile in stream:
            code = Builder(self.variant)
            (self._fc1 if tile.kind == "fc1" else self._fc2)(code, n, rank, tile)
            built.append(code)
        return built

    def _fc1(self, code: Builder, n: int, rank: int, tile: Tile) -> None:
        rows = self._token_tiles[n - 1][rank][tile.token_tile]
        reads = [
            (name, self._at(rank, name, self._pool_row(n, rank, row)), self._row_stamp(n, rank, row))
            for row in rows
            for name in ("pool", "pool_scales")
        ]
        releases = [("fc1_ready", self._at(rank, "fc1_ready", self._bank("fc1_ready", n), tile.token_tile), 1)]
        if self.scenario.ring_slots is not None:
            slot, _ = self._use(n, rank, rows[0].block)
            releases.insert(0, ("credits", self._at(rank, "credits", slot), 1))
        code.step(
            "fc1",
            wait=("fc1: pool_ready", WAIT, self._blocks_full(n, rank, rows)),
            reads=reads,
            writes=[("fc1_out", self._at(rank, "fc1_out", tile.token_tile, tile.part), n)],
            releases=releases,
            local=self.scenario.ring_slots is None,
        )

    def _blocks_full(self, n: int, rank: int, rows: Sequence[PoolRow]) -> list[tuple[int, int, int, bool]]:
        """Every block that a tile touches has all ITS rows, those of neighbouring tiles too."""
        touched = list(dict.fromkeys(row.block for row in rows))
        if "a tile waits for its first block only" in self.variant.rules:
            touched = touched[:1]
        conditions = []
        for block in touched:
            wanted = len(self._blocks[n - 1][rank][block])
            if "a tile counts its own rows of a block only" in self.variant.rules:
                wanted = sum(1 for row in rows if row.block == block)
            conditions.append((self._at(rank, "pool_ready", self._bank("pool_ready", n), block), wanted, -1, False))
        return conditions

    def _fc2(self, code: Builder, n: int, rank: int, tile: Tile) -> None:
        rows = self._token_tiles[n - 1][rank][tile.token_tile]
        ready = self._at(rank, "fc1_ready", self._bank("fc1_ready", n), tile.token_tile)
        parts = range(self.scenario.row_tiles)
        reads: list[Word] = [("fc1_out", self._at(rank, "fc1_out", tile.token_tile, part), n) for part in parts]
        in_ring = "pool_meta in the ring" in self.variant.rules
        for row in rows:
            meta = self._pool_row(n, rank, row) if in_ring else row.row
            reads.append(("pool_meta", self._at(rank, "pool_meta", meta), self._row_stamp(n, rank, row)))
        writes: list[Word] = [
            (name, self._at(row.source, name, row.route, tile.part), n)
            for row in rows
            for name in ("result_data", "result_scales")
        ]
        counter = 0 if "one return counter" in self.variant.rules else rank
        releases = []
        for source in dict.fromkeys(row.source for row in rows):
            amount = self._unit(rank) * sum(1 for row in rows if row.source == source)
            releases.append(("return_counters", self._at(source, "return_counters", counter), amount))
        wait = ("fc2: fc1_ready", WAIT, [(ready, self.scenario.row_tiles, -1, False)])
        code.step("fc2", wait=wait, reads=reads, writes=writes, releases=releases)

    def _reduce(self, code: Builder, n: int, rank: int, cta: int) -> None:
        s, v = self.scenario, self.variant
        share = s.share(n, rank, cta)
        ticket = self._ticket(n, rank, s.ctas)
        if "exit ticket before the wait for returns" in v.rules:
            code.op(TICKET, "exit", *ticket, boundary=True)
        if share:
            exact = "return_counters compared for equality" in v.rules
            waits = []
            for owner in range(s.ranks):
                base = -1 if self._zeroes_returns else self._at(rank, "expected_returns", owner)
                waits.append((self._at(rank, "return_counters", owner), self._expected(n, rank, owner), base, exact))
            reads: list[Word] = []
            for route, expert in s.routes(n, rank):
                if route // s.top_k in share:
                    for part in range(self._column_tiles(s.owner(expert))):
                        reads += [(o, self._at(rank, o, route, part), n) for o in ("result_data", "result_scales")]
            code.step("reduce", wait=("reduce: return_counters", WAIT, waits), reads=reads)
        if "exit ticket before the wait for returns" not in v.rules:
            code.op(TICKET, "exit", *ticket, boundary=True, local=s.ctas == 1)

    def _ticket(self, n: int, rank: int, ctas: int) -> tuple[object, ...]:
        """The last CTA out advances epoch and expectation."""
        adds = [(self._at(rank, "epoch"), 1)]
        if "exit" not in self.variant.drop:
            for owner in range(self.scenario.ranks):
                adds.append((self._at(rank, "expected_returns", owner), self._expected(n, rank, owner)))
        on = 1 if "first CTA out advances expected_returns" in self.variant.rules else ctas
        return self._at(rank, "exit_ticket"), ctas, on, tuple(adds)

    def _clear(self, code: Builder, n: int, rank: int) -> None:
        words = []
        own_extent = "clear covers only the blocks of the running launch" in self.variant.rules
        for name in ("staged", "pool_ready", "fc1_ready", "claim"):
            if f"clear: {name}" in self.variant.drop:
                continue
            bank = self._bank(name, n + 1)
            if name in ("staged", "claim"):
                words.append((self._at(rank, name, bank), 0))
            else:
                units = self._blocks if name == "pool_ready" else self._token_tiles
                words_used = [len(launch[rank]) for launch in units]
                extent = words_used[n - 1] if own_extent else max(1, *words_used)
                words += [(self._at(rank, name, bank, i), 0) for i in range(extent)]
        code.op(WRITE, "clear", *words, boundary=True, local=True)
