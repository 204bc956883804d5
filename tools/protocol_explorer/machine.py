# SPDX-License-Identifier: Apache-2.0
"""A small machine: named memory, straight programs of a few operations, one atomic move of one actor at a time.

Memory is sequentially consistent. Every datum holds the stamp of its writer's launch (or pool row), so a reader knows
whether it saw too early (an older stamp) or too late (a newer one). `protocol` writes the programs, `explore` picks who
moves. Knows no protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CELL_BITS = 6
"""A size cell is one word, {tag, count}, as in the kernel; states are bytes, so up to three launches and 63 routes."""

STAMP, CELL, COUNT = -1, (1 << 30) - 1, (1 << CELL_BITS) - 1
"""Masks of a read: a datum's stamp, a whole cell, a cell's count without its tag."""


WAIT, TAGS, READ, WRITE, ADD, CLAIM, TICKET, GOTO, END = range(9)
"""Operations; the arguments of one are applied at once.

WAIT    (address, value, base address or -1, exact)...    memory >= value (+ memory[base]), or equal to it
TAGS    (address, launch, or newer)...                    each cell's tag is the launch's
READ    (address, stamp, mask)...                         memory & mask must hold the stamp
WRITE   (address, value)...
ADD     (address, delta)...
CLAIM   address, tile starts                              take the next number; jump to its tile, or go on
TICKET  address, actors, on which one, adds               count the actors that leave; one of them does the adds
GOTO    program counter
"""


class Op(NamedTuple):
    """One operation: `boundary` ends a transaction, `local` says that no other rank can notice it."""

    code: int
    step: str
    args: tuple[Any, ...] = ()
    boundary: bool = False
    local: bool = False


Program = tuple[Op, ...]


class Memory:
    """Names and addresses of all words."""

    def __init__(self, first: int) -> None:
        self.size = first
        self._bases: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.initial: dict[int, int] = {}

    def add(self, name: str, *shape: int, value: int = 0) -> None:
        """Append an array, filled with a value."""
        words = 1
        for extent in shape:
            words *= extent
        self._bases[name] = (self.size, shape)
        if value:
            self.initial.update(dict.fromkeys(range(self.size, self.size + words), value))
        self.size += words

    def at(self, name: str, *index: int) -> int:
        """Address of an element."""
        address, shape = self._bases[name]
        offset = 0
        for i, extent in zip(index, shape, strict=True):
            if not 0 <= i < extent:
                raise IndexError(f"{name}{list(index)} lies outside {list(shape)}")
            offset = offset * extent + i
        return address + offset

    def name(self, address: int) -> str:
        """An address in words: `rank 1 index_rows[0][2]`."""
        base, array = max((b, n) for n, (b, _) in self._bases.items() if b <= address)
        index, offset = [], address - base
        for extent in reversed(self._bases[array][1]):
            index.append(offset % extent)
            offset //= extent
        return array + "".join(f"[{i}]" for i in reversed(index))


class Fault(NamedTuple):
    """What a reader found: `kind` is early read, overwritten or wrong count."""

    kind: str
    step: str
    address: int
    seen: int
    wanted: int


class Move(NamedTuple):
    """One transaction of one actor. `state` is what follows it (of no use after a fault)."""

    rank: int
    actor: int
    state: Any
    fault: Fault | None
    local: bool


@dataclass(frozen=True)
class Machine:
    """Programs of every launch, rank and actor over one memory.

    State: the launch that each rank runs, every actor's program counter, the memory. `fine` makes every operation its
    own move; otherwise a move is a transaction: waits, reads and writes up to the first operation that others may
    wait for, or up to a wait that is not satisfied.
    """

    ranks: int
    actors: int
    programs: tuple[tuple[tuple[Program, ...], ...], ...]
    memory: Memory
    fine: bool = False
    final: tuple[tuple[int, int], ...] = ()
    launches: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "launches", len(self.programs))

    def start(self) -> list[int]:
        """The initial state."""
        state = [0] * self.memory.size
        for address, value in self.memory.initial.items():
            state[address] = value
        state[: self.ranks] = [1] * self.ranks
        return state

    def finished(self, state: Sequence[int]) -> bool:
        """Every rank has ended its last launch."""
        return all(state[rank] > self.launches for rank in range(self.ranks))

    def op(self, state: Sequence[int], rank: int, actor: int) -> Op:
        """What an actor would do next."""
        pc = state[self.ranks + rank * self.actors + actor]
        return self.programs[state[rank] - 1][rank][actor][pc]

    def moves(self, state: Sequence[int]) -> list[Move]:
        """Every transaction that some actor can make."""
        found = []
        for rank in range(self.ranks):
            if state[rank] <= self.launches:
                for actor in range(self.actors):
                    move = self.move(state, rank, actor)
                    if move is not None:
                        found.append(move)
        return found

    def move(self, state: Sequence[int], rank: int, actor: int) -> Move | None:
        """One transaction of an actor, or None when it waits or has ended."""
        at = self.ranks + rank * self.actors + actor
        program = self.programs[state[rank] - 1][rank][actor]
        first = pc = state[at]
        memory: Any = state
        copied = False
        local = True
        while True:
            code, step, args, boundary, is_local = program[pc]
            if code == END:
                break
            if code == WAIT:
                if not _satisfied(memory, args):
                    break
            elif code == TAGS:
                if not _tagged(memory, args):
                    break
            elif code == READ:
                for address, stamp, mask in args:
                    seen = memory[address] & mask
                    if seen != stamp:
                        return Move(rank, actor, state, _fault(step, address, seen, stamp, mask), False)
            elif code == GOTO:
                pc = args[0]
                continue
            else:
                if not copied:
                    memory, copied = _copy(state), True
                if code == WRITE:
                    for address, value in args:
                        memory[address] = value
                elif code == ADD:
                    for address, delta in args:
                        memory[address] += delta
                elif code == CLAIM:
                    address, starts = args
                    tile = memory[address]
                    memory[address] = tile + 1
                    if tile < len(starts):
                        pc = starts[tile] - 1
                else:
                    _take_ticket(memory, *args)
            local = local and is_local
            pc += 1
            if boundary or self.fine:
                break
        if pc == first:
            return None
        if not copied:
            memory = _copy(state)
        while program[pc].code == GOTO:
            pc = program[pc].args[0]
        memory[at] = pc
        if program[pc].code == END:
            self._end_launch(memory, rank)
        return Move(rank, actor, memory if isinstance(state, list) else bytes(memory), None, local)

    def _end_launch(self, memory: Any, rank: int) -> None:
        """Stream order: when the last actor has ended, the rank's next launch begins."""
        at = self.ranks + rank * self.actors
        programs = self.programs[memory[rank] - 1][rank]
        if all(programs[a][memory[at + a]].code == END for a in range(self.actors)):
            memory[rank] += 1
            memory[at : at + self.actors] = type(memory)([0] * self.actors)


def _copy(state: Sequence[int]) -> Any:
    return list(state) if isinstance(state, list) else bytearray(state)


def _satisfied(memory: Sequence[int], conditions: tuple[Any, ...]) -> bool:
    for address, value, base, exact in conditions:
        wanted = value + memory[base] if base >= 0 else value
        if memory[address] != wanted if exact else memory[address] < wanted:
            return False
    return True


def _tagged(memory: Sequence[int], cells: tuple[Any, ...]) -> bool:
    for address, launch, newer in cells:
        tag = memory[address] >> CELL_BITS
        if tag < launch if newer else tag != launch:
            return False
    return True


def _take_ticket(memory: Any, address: int, actors: int, on: int, adds: tuple[tuple[int, int], ...]) -> None:
    memory[address] += 1
    if memory[address] == on:
        for target, delta in adds:
            memory[target] += delta
    if memory[address] == actors:
        memory[address] = 0


def _fault(step: str, address: int, seen: int, wanted: int, mask: int) -> Fault:
    if mask == COUNT or (mask == CELL and seen >> CELL_BITS == wanted >> CELL_BITS):
        return Fault("wrong count", step, address, seen, wanted)
    return Fault("early read" if seen < wanted else "overwritten", step, address, seen, wanted)
