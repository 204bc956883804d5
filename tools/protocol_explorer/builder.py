# SPDX-License-Identifier: Apache-2.0
"""Writes one actor's program, and takes away what a variant says: waits, acquires, releases, their order.

Called by `protocol` alone. What a variant changes in banks and rules is decided there; what it changes inside a step
(wait, read, write, release) is decided here, once for all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tools.protocol_explorer.machine import ADD, CLAIM, END, GOTO, READ, STAMP, WAIT, WRITE, Op, Program
from tools.protocol_explorer.variants import Variant

Word = tuple[str, int, int]
"""An access: object, address, stamp or amount."""


class Builder:
    """One actor's program. Applies the general variants: dropped, early and late waits and releases."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.ops: list[Op] = []

    def op(self, code: int, step: str, *args: object, boundary: bool = False, local: bool = False) -> int:
        """Append one operation unless it has nothing to do; returns its place."""
        if args:
            self.ops.append(Op(code, step, args, boundary, local))
        return len(self.ops) - 1

    def step(
        self,
        step: str,
        *,
        wait: tuple[str, int, Sequence[tuple[int, ...]]] | None = None,
        reads: Sequence[Word] = (),
        raw_reads: Sequence[tuple[int, int, int]] = (),
        writes: Sequence[Word] = (),
        releases: Sequence[Word] = (),
        hoisted: str = "reads",
        each: bool = False,
        at_once: bool = False,
        unnoticed: Collection[int] = (),
        local: bool = False,
    ) -> None:
        """Wait, read, write, release, in that order unless the variant says otherwise.

        `hoisted` is what a missing acquire lets pass the wait; `each` publishes every write by itself, `at_once` all of
        them in one move (a word that only grows and comes late is a waiter that comes late); no other rank can notice
        writes to `unnoticed` addresses.
        """
        v = self._variant
        late = wait is not None and wait[0] in v.hoist
        all_reads = (*((address, stamp, STAMP) for _, address, stamp in reads), *raw_reads)
        kept = [release for release in releases if release[0] not in v.drop]
        early = {obj for name, obj in v.early if any(release[0] == name for release in kept)}
        first = [w for w in writes if w[0] not in early]
        if late and hoisted == "reads":
            self.op(READ, step, *all_reads, local=local)
        if late and hoisted == "writes":
            self._write(step, first, each, at_once, local, unnoticed)
        if wait is not None and wait[0] not in v.drop:
            short = wait[1] == WAIT and wait[0] in v.short
            self.op(wait[1], step, *[(c[0], c[1] - 1, *c[2:]) if short else c for c in wait[2]], local=local)
        early_credit = [r for r in kept if (r[0], "pool") in v.early and r[0] == "credits"]
        for _, address, amount in early_credit:
            self.op(ADD, step, (address, amount), boundary=True, local=local)
        if not (late and hoisted == "reads"):
            self.op(READ, step, *all_reads, local=local)
        if not (late and hoisted == "writes"):
            self._write(step, first, each, at_once, local, unnoticed)
        for release in kept:
            if release not in early_credit:
                self.op(ADD, step, (release[1], release[2]), boundary=True, local=local)
        self._write(step, [w for w in writes if w[0] in early], False, False, local)

    def _write(
        self,
        step: str,
        words: Sequence[Word],
        each: bool,
        at_once: bool,
        local: bool,
        unnoticed: Collection[int] = (),
    ) -> None:
        pairs = [(address, value) for _, address, value in words]
        if each or at_once:
            for pair in pairs:
                self.op(WRITE, step, pair, boundary=each or pair is pairs[-1], local=pair[0] in unnoticed)
        else:
            self.op(WRITE, step, *pairs, local=local)

    def place_tiles(self, claim: int, tiles: Sequence[Builder], *, local: bool) -> None:
        """Append the tiles behind the end; each goes back to the claim."""
        self.ops.append(Op(END, "end"))
        starts = []
        for tile in tiles:
            starts.append(len(self.ops))
            self.ops += [*tile.ops, Op(GOTO, "claim", (claim,))]
        address = self.ops[claim].args[0]
        self.ops[claim] = Op(CLAIM, "claim", (address, tuple(starts)), True, local)

    def program(self) -> Program:
        """The finished program; it ends at its first END."""
        if not any(op.code == END for op in self.ops):
            self.ops.append(Op(END, "end"))
        return tuple(self.ops)
