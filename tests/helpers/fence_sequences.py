# SPDX-License-Identifier: Apache-2.0
"""Any order of warm-up, tuning, release, eviction, address reuse, failure, capture and replay against a device model.

The model knows no fences and no pairs: only words in memory, which resets and launches change, and which graphs live.
It says what must happen (launch, reset first, or refuse), and raises if a launch ever runs out of phase. The device may
be the model alone, or the model with a real engine behind it (`tests/helpers/fence_devices.py`).

`RULES` holds every step with its arguments and when it is possible; hypothesis and a seeded generator draw from it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.helpers.fences import Device, Graph
from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.tuning.fences import FenceBook, Fencer, Workspace
from trtllm_megamoe.tuning.scratch import ProfilingScratch
from trtllm_megamoe.tuning.tactic import Tactic

LOCALS = [0x1000 + 0x100 * i for i in range(4)]
SHAREDS = [0x8000 + 0x100 * i for i in range(3)]
TACTICS = [Tactic((width,), 256, 4, 104, 56, 9, 3) for width in (8, 16)]


@dataclass(frozen=True)
class Rule:
    """One kind of step.

    Attributes:
        arguments: Name -> "index" (0 to 3), "flag", "tactic" or "tactics" (a set of them).
        is_possible: Whether the step makes sense now.
    """

    arguments: dict[str, str]
    is_possible: Callable[[Any], bool]


RULES: dict[str, Rule] = {}

LIKELY = ("serve", "capture", "replay", "profile", "profile_on_a_serving_local", "begin_session")
"""Rules that a seeded sequence draws four times as often: what is only built up and torn down shows little."""


def _rule(is_possible: Callable[[Any], bool], **arguments: str) -> Callable[[Any], Any]:
    def note(method: Any) -> Any:
        RULES[method.__name__] = Rule(arguments, is_possible)
        return method

    return note


class FenceSequence:
    """One rank; collectives succeed unless a rule makes them fail.

    Attributes:
        refusals: Texts of everything that was refused.
    """

    def __init__(self, device: Device, ep_size: int) -> None:
        self.device = device
        self.book = FenceBook(ep_size)
        self.fencer = Fencer(self.book, self.device.reset)
        self.scratch = ProfilingScratch(
            self.book,
            lambda: self.device.allocate("shared", keeps_old_words=True),
            lambda shared: None,
            lambda tactic: self.device.allocate("local", keeps_old_words=True),
        )
        self.locals: list[Workspace] = []
        self.shareds: list[Workspace] = []
        self.graphs: list[Graph] = []
        self.session: ExitStack | None = None
        self.refusals: list[str] = []

    def warm_up(self, num_captured: int) -> None:
        """Two serving pairs, launched once, some of them captured: most deep states start like this."""
        for i in range(2):
            self.locals.append(self.device.allocate("local", keeps_old_words=True))
            self.shareds.append(self.device.allocate("shared", keeps_old_words=True))
            self.serve(i, i)
        for i in range(num_captured):
            self.capture(i, i)

    # -- the model's verdicts

    def is_captured(self, *addresses: int) -> bool:
        return any(address in pair for graph in self.graphs for pair in graph.launches for address in addresses)

    def attempt(self, local: Workspace, shared: Workspace, **options: object) -> str:
        """Ask the fencer; the refusal's text, or "" if it allows the launch. No frame of it outlives this call."""
        try:
            self.fencer.make_launchable(local, shared, **options)  # type: ignore[arg-type]
        except MegaMoeStateError as err:
            text = str(err)
            assert f"the pair ({local}, {shared}) refused: " in text  # names the pair, then the reason
            self.refusals.append(text)
            return text
        return ""

    def launch(self, local: Workspace, shared: Workspace, **options: object) -> None:
        """An eager launch: refused, reset first, or neither, exactly as the words and the living graphs demand."""
        in_step = self.device.is_in_step(local.address, shared.address)
        is_stuck = not in_step and self.is_captured(local.address, shared.address)
        resets = self.device.num_resets
        refusal = self.attempt(local, shared, **options)
        assert bool(refusal) == is_stuck
        assert self.device.num_resets - resets == (not in_step and not is_stuck)
        if refusal:
            assert "a captured graph launches" in refusal
        else:
            self.device.launch(local.address, shared.address)

    def pair(self, i: int, j: int) -> tuple[Workspace, Workspace]:
        return self.locals[i % len(self.locals)], self.shareds[j % len(self.shareds)]

    def has_pair(self) -> bool:
        return bool(self.locals and self.shareds)

    # -- memory

    @_rule(lambda s: bool(s.device.free["local"]), keeps="flag")
    def allocate_local(self, keeps: bool) -> None:
        self.locals.append(self.device.allocate("local", keeps_old_words=keeps))

    @_rule(lambda s: bool(s.device.free["shared"]), keeps="flag")
    def allocate_shared(self, keeps: bool) -> None:
        self.shareds.append(self.device.allocate("shared", keeps_old_words=keeps))

    @_rule(lambda s: bool(s.locals), i="index")
    def drop_local(self, i: int) -> None:
        self.drop(self.locals, i)

    @_rule(lambda s: bool(s.shareds), i="index")
    def drop_shared(self, i: int) -> None:
        self.drop(self.shareds, i)

    def drop(self, workspaces: list[Workspace], i: int) -> None:
        """Nobody tells the book; memory that a graph uses must stay where it is."""
        address = workspaces.pop(i % len(workspaces)).address
        is_free = any(address in pool for pool in self.device.free.values())
        assert is_free != self.is_captured(address)

    @_rule(lambda s: bool(s.locals), i="index")
    def evict_local(self, i: int) -> None:
        local = self.locals[i % len(self.locals)]
        try:
            self.book.forget(local)
        except MegaMoeStateError as err:
            assert self.is_captured(local.address)
            assert str(local) in str(err)
            self.refusals.append(str(err))
        else:
            assert not self.is_captured(local.address)
            self.device.reset_for.pop(local.address, None)  # lent elsewhere: whatever it holds, it is fenced again

    # -- launches, graphs and failures

    @_rule(lambda s: s.has_pair(), i="index", j="index")
    def serve(self, i: int, j: int) -> None:
        self.launch(*self.pair(i, j))

    @_rule(lambda s: s.has_pair(), i="index", j="index")
    def serve_with_a_reset_that_fails(self, i: int, j: int) -> None:
        local, shared = self.pair(i, j)
        in_step = self.device.is_in_step(local.address, shared.address)
        failing = Fencer(self.book, lambda a, b: self.device.reset(a, b, dies_half_way=True))
        try:
            failing.make_launchable(local, shared)
        except TimeoutError:
            assert not in_step
            assert not self.is_captured(local.address, shared.address)
        except MegaMoeStateError:
            assert not in_step
            assert self.is_captured(local.address, shared.address)
        else:
            assert in_step
            self.device.launch(local.address, shared.address)

    @_rule(lambda s: s.has_pair(), i="index", j="index")
    def serve_and_die(self, i: int, j: int) -> None:
        local, shared = self.pair(i, j)
        if not self.attempt(local, shared):
            self.device.die_in_launch(local.address, shared.address)
            self.book.invalidate(local, shared)

    @_rule(lambda s: s.has_pair(), i="index", j="index")
    def capture(self, i: int, j: int) -> None:
        local, shared = self.pair(i, j)
        graph = self.graphs[-1] if self.graphs and i == j else Graph()
        in_step = self.device.is_in_step(local.address, shared.address)
        resets = self.device.num_resets
        refusal = self.attempt(local, shared, graph=graph)
        assert bool(refusal) != in_step
        assert self.device.num_resets == resets  # a capture never resets
        if in_step:
            self.device.capture(graph, local.address, shared.address)
            if graph not in self.graphs:
                self.graphs.append(graph)

    @_rule(lambda s: bool(s.graphs), k="index")
    def replay(self, k: int) -> None:
        graph = self.graphs[k % len(self.graphs)]
        in_step = all(self.device.is_in_step(*pair) for pair in graph.launches)
        try:
            self.book.admit_replay(graph)
        except MegaMoeStateError as err:
            assert not in_step
            assert "out of step" in str(err)
            self.refusals.append(str(err))
        else:
            self.device.replay(graph)

    @_rule(lambda s: bool(s.graphs), k="index")
    def delete_graph(self, k: int) -> None:
        self.graphs.pop(k % len(self.graphs))

    # -- tuning

    @_rule(lambda s: s.session is None and bool(s.device.free["shared"]), is_enabled="flag")
    def begin_session(self, is_enabled: bool) -> None:
        self.session = ExitStack()
        self.session.enter_context(self.scratch.session(is_enabled=is_enabled))

    @_rule(lambda s: s.session is not None, keeps="tactics")
    def end_session(self, keeps: set[Tactic]) -> None:
        assert self.session is not None
        for tactic in sorted(keeps, key=repr):
            if tactic in self.scratch._locals:
                self.locals.append(self.scratch.keep(tactic))
        num_free = {kind: len(pool) for kind, pool in self.device.free.items()}
        num_losers, is_held = len(self.scratch._locals), self.book.is_tuning
        self.session.close()
        self.session = None
        assert len(self.device.free["local"]) == num_free["local"] + num_losers
        assert len(self.device.free["shared"]) == num_free["shared"] + is_held

    @_rule(lambda s: s.book.is_tuning and bool(s.device.free["local"]), tactic="tactic")
    def profile(self, tactic: Tactic) -> None:
        self.launch(self.scratch.local_of(tactic), self.scratch.shared, is_profiling=True)

    @_rule(lambda s: s.book.is_tuning and bool(s.locals), i="index")
    def profile_on_a_serving_local(self, i: int) -> None:
        """The ABA of R31: real, scratch, real."""
        self.launch(self.locals[i % len(self.locals)], self.scratch.shared, is_profiling=True)

    @_rule(lambda s: s.has_pair(), i="index", j="index")
    def profile_on_the_serving_workspace(self, i: int, j: int) -> None:
        expected = "not the profiling scratch" if self.book.is_tuning else "no tuning is open"
        assert expected in self.attempt(*self.pair(i, j), is_profiling=True)

    @_rule(lambda s: s.book.is_tuning and bool(s.locals), i="index")
    def serve_on_the_scratch(self, i: int) -> None:
        assert "is the profiling scratch" in self.attempt(self.locals[i % len(self.locals)], self.scratch.shared)

    @_rule(lambda s: s.book.is_tuning and bool(s.locals), i="index")
    def capture_on_the_scratch(self, i: int) -> None:
        local = self.locals[i % len(self.locals)]
        assert "capture after tuning" in self.attempt(local, self.scratch.shared, graph=Graph(), is_profiling=True)

    # -- always

    def require_book_holds_the_pairs_in_step_and_nothing_else(self) -> None:
        in_step = sum(self.device.is_in_step(*pair) for pair in itertools.product(LOCALS, SHAREDS))
        assert self.book.num_pairs == in_step

    def close(self) -> None:
        """End an open session, and give every workspace back."""
        if self.session is not None:
            self.session.close()
        self.graphs.clear()
        self.locals.clear()
        self.shareds.clear()


def run_seeded(sequence: FenceSequence, seed: int, num_steps: int, agree: Callable[[str], None]) -> Counter[str]:
    """Random steps; the same on every rank that has the same seed. Returns how often each rule ran.

    Args:
        agree: Called with each step before it is made; raises where ranks are not about to do the same.
    """
    generator = random.Random(seed)
    draws: dict[str, Callable[[], Any]] = {
        "index": lambda: generator.randrange(4),
        "flag": lambda: generator.random() < 0.5,
        "tactic": lambda: generator.choice(TACTICS),
        "tactics": lambda: {tactic for tactic in TACTICS if generator.random() < 0.5},
    }
    ran: Counter[str] = Counter()
    sequence.warm_up(generator.randrange(3))
    for _ in range(num_steps):
        possible = [name for name, rule in RULES.items() if rule.is_possible(sequence)]
        name = generator.choices(possible, [4 if name in LIKELY else 1 for name in possible])[0]
        arguments = {argument: draws[kind]() for argument, kind in RULES[name].arguments.items()}
        agree(f"{name} {arguments} {sequence.book.num_pairs} pairs, {len(sequence.graphs)} graphs")
        getattr(sequence, name)(**arguments)
        sequence.require_book_holds_the_pairs_in_step_and_nothing_else()
        ran[name] += 1
    sequence.close()
    return ran
