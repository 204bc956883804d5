# SPDX-License-Identifier: Apache-2.0
"""Any order of warm-up, tuning, release, eviction, address reuse, failure, capture and replay against a device model.

The model knows no fences and no pairs: only words in memory, which resets and launches change, and which graphs live.
It says what must happen (launch, reset first, or refuse), and raises if a launch ever runs out of phase.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.fences import Device, Graph
from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.tuning.fences import FenceBook, Fencer, Workspace
from trtllm_megamoe.tuning.scratch import ProfilingScratch
from trtllm_megamoe.tuning.tactic import Tactic

LOCALS = [0x1000 + 0x100 * i for i in range(4)]
SHAREDS = [0x8000 + 0x100 * i for i in range(3)]
TACTICS = [Tactic((width,), 256, 4, 104, 56, 9, 3) for width in (8, 16)]

PICK = st.integers(0, 3)


class FenceMachine(RuleBasedStateMachine):
    """One rank of two; collectives succeed unless a rule makes them fail."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device(local=LOCALS, shared=SHAREDS)
        self.book = FenceBook(ep_size=2)
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

    @initialize(num_captured=st.integers(0, 2))
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

    @precondition(lambda self: self.device.free["local"])
    @rule(keeps=st.booleans())
    def allocate_local(self, keeps: bool) -> None:
        self.locals.append(self.device.allocate("local", keeps_old_words=keeps))

    @precondition(lambda self: self.device.free["shared"])
    @rule(keeps=st.booleans())
    def allocate_shared(self, keeps: bool) -> None:
        self.shareds.append(self.device.allocate("shared", keeps_old_words=keeps))

    @precondition(lambda self: self.locals)
    @rule(i=PICK)
    def drop_local(self, i: int) -> None:
        self.drop(self.locals, i)

    @precondition(lambda self: self.shareds)
    @rule(i=PICK)
    def drop_shared(self, i: int) -> None:
        self.drop(self.shareds, i)

    def drop(self, workspaces: list[Workspace], i: int) -> None:
        """Nobody tells the book; memory that a graph uses must stay where it is."""
        address = workspaces.pop(i % len(workspaces)).address
        is_free = any(address in pool for pool in self.device.free.values())
        assert is_free != self.is_captured(address)

    @precondition(lambda self: self.locals)
    @rule(i=PICK)
    def evict_local(self, i: int) -> None:
        local = self.locals[i % len(self.locals)]
        try:
            self.book.forget(local)
        except MegaMoeStateError as err:
            assert self.is_captured(local.address)
            assert str(local) in str(err)
        else:
            assert not self.is_captured(local.address)
            self.device.reset_for.pop(local.address, None)  # lent elsewhere: whatever it holds, it is fenced again

    # -- launches, graphs and failures

    @precondition(has_pair)
    @rule(i=PICK, j=PICK)
    def serve(self, i: int, j: int) -> None:
        self.launch(*self.pair(i, j))

    @precondition(has_pair)
    @rule(i=PICK, j=PICK)
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

    @precondition(has_pair)
    @rule(i=PICK, j=PICK)
    def serve_and_die(self, i: int, j: int) -> None:
        local, shared = self.pair(i, j)
        if not self.attempt(local, shared):
            self.device.die_in_launch(local.address)
            self.book.invalidate(local, shared)

    @precondition(has_pair)
    @rule(i=PICK, j=PICK)
    def capture(self, i: int, j: int) -> None:
        local, shared = self.pair(i, j)
        graph = self.graphs[-1] if self.graphs and i == j else Graph()
        in_step = self.device.is_in_step(local.address, shared.address)
        resets = self.device.num_resets
        refusal = self.attempt(local, shared, graph=graph)
        assert bool(refusal) != in_step
        assert self.device.num_resets == resets  # a capture never resets
        if in_step:
            graph.launches.append((local.address, shared.address))
            if graph not in self.graphs:
                self.graphs.append(graph)

    @precondition(lambda self: self.graphs)
    @rule(k=PICK)
    def replay(self, k: int) -> None:
        graph = self.graphs[k % len(self.graphs)]
        in_step = all(self.device.is_in_step(*pair) for pair in graph.launches)
        try:
            self.book.admit_replay(graph)
        except MegaMoeStateError as err:
            assert not in_step
            assert "out of step" in str(err)
        else:
            for local, shared in graph.launches:
                self.device.launch(local, shared)

    @precondition(lambda self: self.graphs)
    @rule(k=PICK)
    def delete_graph(self, k: int) -> None:
        self.graphs.pop(k % len(self.graphs))

    # -- tuning

    @precondition(lambda self: self.session is None and self.device.free["shared"])
    @rule(is_enabled=st.booleans())
    def begin_session(self, is_enabled: bool) -> None:
        self.session = ExitStack()
        self.session.enter_context(self.scratch.session(is_enabled=is_enabled))

    @precondition(lambda self: self.session is not None)
    @rule(keeps=st.sets(st.sampled_from(TACTICS)))
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

    @precondition(lambda self: self.book.is_tuning and len(self.device.free["local"]) >= 1)
    @rule(tactic=st.sampled_from(TACTICS))
    def profile(self, tactic: Tactic) -> None:
        self.launch(self.scratch.local_of(tactic), self.scratch.shared, is_profiling=True)

    @precondition(lambda self: self.book.is_tuning and self.locals)
    @rule(i=PICK)
    def profile_on_a_serving_local(self, i: int) -> None:
        """The ABA of R31: real, scratch, real."""
        self.launch(self.locals[i % len(self.locals)], self.scratch.shared, is_profiling=True)

    @precondition(has_pair)
    @rule(i=PICK, j=PICK)
    def profile_on_the_serving_workspace(self, i: int, j: int) -> None:
        expected = "not the profiling scratch" if self.book.is_tuning else "no tuning is open"
        assert expected in self.attempt(*self.pair(i, j), is_profiling=True)

    @precondition(lambda self: self.book.is_tuning and self.locals)
    @rule(i=PICK)
    def serve_on_the_scratch(self, i: int) -> None:
        assert "is the profiling scratch" in self.attempt(self.locals[i % len(self.locals)], self.scratch.shared)

    @precondition(lambda self: self.book.is_tuning and self.locals)
    @rule(i=PICK)
    def capture_on_the_scratch(self, i: int) -> None:
        local = self.locals[i % len(self.locals)]
        assert "capture after tuning" in self.attempt(local, self.scratch.shared, graph=Graph(), is_profiling=True)

    # -- always

    @invariant()
    def book_holds_the_pairs_in_step_and_nothing_else(self) -> None:
        in_step = sum(self.device.is_in_step(*pair) for pair in itertools.product(LOCALS, SHAREDS))
        assert self.book.num_pairs == in_step

    def teardown(self) -> None:
        if self.session is not None:
            self.session.close()


FenceMachineTest = FenceMachine.TestCase
FenceMachineTest.settings = settings(max_examples=120, stateful_step_count=30)
