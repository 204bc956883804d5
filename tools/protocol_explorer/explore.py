# SPDX-License-Identifier: Apache-2.0
"""Searches the machine's moves: all interleavings, the shortest way to a fault, or one random schedule.

Reductions, all switched off by `Machine.fine` and `reduce=False` and checked against that: a move is a transaction (see
`machine`), and a move that no other rank can notice is taken alone. The second is valid for the protocol, where such a
move commutes with all others, and used for it and the safe variants only.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from tools.protocol_explorer.machine import ADD, CELL_BITS, END, GOTO, TAGS, WAIT, WRITE, Fault, Machine, Move
from tools.protocol_explorer.protocol import Protocol
from tools.protocol_explorer.scenario import Scenario
from tools.protocol_explorer.variants import Variant


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one scenario: `verdict` is ok, early read, overwritten, wrong count, deadlock, miscount or limit.

    `miscount` is the weakest: nobody was misled, but a counter ends with arrivals too few or too many.
    """

    verdict: str
    states: int
    detail: str = ""
    trace: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No fault in any interleaving."""
        return self.verdict == "ok"


def explore(
    scenario: Scenario, variant: Variant, *, fine: bool = False, reduce: bool = False, limit: int = 5_000_000
) -> Outcome:
    """Visit every reachable state; stops at the first fault, or with `limit` when there are more states than that."""
    protocol = Protocol(scenario, variant)
    machine = protocol.machine(fine=fine)
    start = bytes(machine.start())
    seen, todo = {start}, [start]
    miscount = ""
    while todo:
        state = todo.pop()
        moves = machine.moves(state)
        bad = _judge(protocol, machine, state, moves)
        if bad is not None:
            return Outcome(bad[0], len(seen), bad[1])
        if not moves:
            miscount = miscount or _miscount(protocol, machine, state)
        if reduce:
            moves = next(([move] for move in moves if move.local), moves)
        for move in moves:
            if move.state not in seen:
                seen.add(move.state)
                todo.append(move.state)
        if len(seen) > limit:
            return Outcome("limit", len(seen))
    return Outcome("miscount" if miscount else "ok", len(seen), miscount)


def shortest_fault(scenario: Scenario, variant: Variant, *, limit: int = 500_000) -> Outcome:
    """Breadth first: the fault with the fewest moves before it, and these moves."""
    protocol = Protocol(scenario, variant)
    machine = protocol.machine()
    start = bytes(machine.start())
    parents: dict[bytes, tuple[bytes, Move] | None] = {start: None}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        moves = machine.moves(state)
        bad = _judge(protocol, machine, state, moves)
        if bad is not None:
            return Outcome(bad[0], len(parents), bad[1], tuple(_trace(protocol, machine, parents, state)))
        for move in moves:
            if move.state not in parents:
                parents[move.state] = (state, move)
                todo.append(move.state)
        if len(parents) > limit:
            return Outcome("limit", len(parents))
    return Outcome("ok", len(parents))


def walk(scenario: Scenario, variant: Variant, seed: int) -> Outcome:
    """One random schedule: random priorities of the actors, changed now and then, so that some are starved for long."""
    protocol = Protocol(scenario, variant)
    machine = protocol.machine()
    chance = random.Random(seed)
    change = chance.choice((0.02, 0.2, 1.0))
    priority: dict[tuple[int, int], float] = {}
    state: Any = machine.start()
    steps = 0
    while True:
        moves = machine.moves(state)
        bad = _judge(protocol, machine, state, moves)
        if bad is not None:
            return Outcome(bad[0], steps, bad[1])
        if not moves:
            miscount = _miscount(protocol, machine, state)
            return Outcome("miscount" if miscount else "ok", steps, miscount)
        if chance.random() < change:
            priority.clear()
        state = max(moves, key=lambda m: priority.setdefault((m.rank, m.actor), chance.random())).state
        steps += 1


def _judge(protocol: Protocol, machine: Machine, state: Any, moves: list[Move]) -> tuple[str, str] | None:
    """A fault of a state: a bad read, or no move before the end."""
    for move in moves:
        if move.fault is not None:
            return move.fault.kind, _describe_fault(protocol, move, move.fault, state)
    if moves or machine.finished(state):
        return None
    return "deadlock", "; ".join(_waiting(protocol, machine, state))


def _miscount(protocol: Protocol, machine: Machine, state: Any) -> str:
    """The first counter that is wrong at the end, in words."""
    for address, value in machine.final:
        if state[address] != value:
            return f"{protocol.memory.name(address)} ends with {state[address]}, not {value}"
    return ""


def _describe_fault(protocol: Protocol, move: Move, fault: Fault, state: Any) -> str:
    return (
        f"rank {move.rank} launch {state[move.rank]} {protocol.actor_name(move.actor)}: {fault.step} finds "
        f"{fault.seen} in {protocol.memory.name(fault.address)}, wants {fault.wanted}"
    )


def _waiting(protocol: Protocol, machine: Machine, state: Any) -> list[str]:
    """Who waits for what, of every actor that has not ended."""
    found = []
    for rank in range(machine.ranks):
        if state[rank] > machine.launches:
            continue
        for actor in range(machine.actors):
            op = machine.op(state, rank, actor)
            who = f"rank {rank} launch {state[rank]} {protocol.actor_name(actor)}: {op.step}"
            if op.code == WAIT:
                for address, value, base, exact in op.args:
                    wanted = value + (state[base] if base >= 0 else 0)
                    if state[address] != wanted if exact else state[address] < wanted:
                        found.append(f"{who} waits for {protocol.memory.name(address)} {wanted}, sees {state[address]}")
                        break
            elif op.code == TAGS:
                address = next(a for a, n, _ in op.args if state[a] >> CELL_BITS != n)
                found.append(f"{who} waits for {protocol.memory.name(address)}")
    return found


def _trace(
    protocol: Protocol, machine: Machine, parents: dict[bytes, tuple[bytes, Move] | None], state: bytes
) -> list[str]:
    lines = []
    link = parents[state]
    while link is not None:
        before, move = link
        lines.append(_describe_move(protocol, machine, before, move))
        link = parents[before]
    return lines[::-1]


def _describe_move(protocol: Protocol, machine: Machine, before: bytes, move: Move) -> str:
    """`rank 1 launch 2 dispatch 0: publish, rank 0 size_cells[0][1][0]`: the step, and what others may wait for."""
    rank, actor, launch = move.rank, move.actor, before[move.rank]
    at = machine.ranks + rank * machine.actors + actor
    program, pc = machine.programs[launch - 1][rank][actor], before[at]
    last = next(i for i in range(pc, len(program)) if program[i].boundary or program[i].code in (GOTO, END))
    blocked = move.state[rank] == launch and pc < move.state[at] <= last
    target = ""
    if program[last].code in (ADD, WRITE) and not blocked:
        target = ", " + protocol.memory.name(program[last].args[0][0])
    return f"rank {rank} launch {launch} {protocol.actor_name(actor)}: {program[pc].step}{target}"
