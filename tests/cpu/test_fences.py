# SPDX-License-Identifier: Apache-2.0
"""The fence book by hand: every rule of R31 and R32 once, its message, and what it forgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from tests.helpers.fences import Graph, Owner
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.errors import MegaMoeStateError
from trtllm_megamoe.tuning.fences import FenceBook, Fencer, Workspace, collective_reset
from trtllm_megamoe.tuning.scratch import ProfilingScratch
from trtllm_megamoe.tuning.tactic import Tactic

TACTICS = [Tactic((width,), 256, 4, 104, 56, 9, 3) for width in (8, 16, 24)]


def make(name: str, address: int) -> Workspace:
    return Workspace(name, address, Owner())


class Bench:
    """A book, a fencer that records its resets, two locals and two shareds."""

    def __init__(self, ep_size: int = 2) -> None:
        self.book = FenceBook(ep_size)
        self.resets: list[tuple[str, str]] = []
        self.fencer = Fencer(self.book, lambda local, shared: self.resets.append((local.name, shared.name)))
        self.local_a, self.local_b = make("local A", 0x1000), make("local B", 0x2000)
        self.shared_a, self.shared_b = make("shared A", 0x8000), make("shared B", 0x9000)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_fencer_first_launch_on_a_pair_resets_once(bench: Bench) -> None:
    for _ in range(3):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert bench.resets == [("local A", "shared A")]


@pytest.mark.parametrize("other", ["local", "shared", "both", "none"])
def test_fence_of_another_pair_forgets_pairs_that_share_a_side(bench: Bench, other: str) -> None:
    """ABA: real, scratch, real again."""
    local = bench.local_a if other in ("local", "both") else bench.local_b
    shared = bench.shared_a if other in ("shared", "both") else bench.shared_b
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(local, shared)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert len(bench.resets) == {"local": 3, "shared": 3, "both": 1, "none": 2}[other]


def test_fence_whose_reset_fails_leaves_the_pair_unfenced(bench: Bench) -> None:
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)

    def broken(local: Workspace, shared: Workspace) -> None:
        raise TimeoutError("a peer did not come")

    with pytest.raises(TimeoutError):
        Fencer(bench.book, broken).make_launchable(bench.local_a, bench.shared_b)
    assert bench.book.num_pairs == 0  # local A may hold zeros now, so its old partner is out of step too
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert len(bench.resets) == 2


def test_new_owner_at_an_old_address_is_fenced_again(bench: Bench) -> None:
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.local_a = make("local C", bench.local_a.address)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert bench.resets == [("local A", "shared A"), ("local C", "shared A")]


def test_second_owner_of_the_same_memory_takes_the_pair_over(bench: Bench) -> None:
    """Two living objects over one allocation: a fence through one forgets the pair of the other."""
    alias = make("alias of local A", bench.local_a.address)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert not bench.book.admit(alias, bench.shared_a)  # the book cannot know that it is the same allocation still
    bench.fencer.make_launchable(alias, bench.shared_b)
    assert not bench.book.admit(bench.local_a, bench.shared_a)


def test_freed_workspaces_leave_no_pairs_and_the_book_keeps_none_alive(bench: Bench) -> None:
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_b, bench.shared_b)
    owner = weakref.ref(bench.local_a.owner)
    del bench.local_a
    assert owner() is None
    assert bench.book.num_pairs == 1


def test_book_does_not_grow_with_launches_or_captures(bench: Bench) -> None:
    graph = Graph()
    for _ in range(100):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a)
        bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=graph)
        make_and_drop = make("local T", 0x7000)
        bench.fencer.make_launchable(make_and_drop, bench.shared_b)
    assert bench.book.num_pairs == 2
    assert len(bench.book._captures) == 1


# -- capture


def test_capture_of_an_unfenced_pair_names_the_pair_and_the_reason(bench: Bench) -> None:
    with pytest.raises(
        MegaMoeStateError,
        match=r"capture on the pair \(local A at 0x1000, shared A at 0x8000\) refused: it was never fenced.*launch",
    ):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=Graph())
    assert bench.resets == []


def test_capture_after_the_scratch_took_the_local_side_is_refused(bench: Bench) -> None:
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_a, bench.shared_b)
    with pytest.raises(MegaMoeStateError, match="one side was fenced with another partner"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=Graph())


@pytest.mark.parametrize("side", ["local", "shared"])
def test_fence_of_a_side_that_a_living_graph_uses_is_refused(bench: Bench, side: str) -> None:
    graph = Graph()
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=graph)
    pair = (bench.local_a, bench.shared_b) if side == "local" else (bench.local_b, bench.shared_a)
    with pytest.raises(MegaMoeStateError, match=rf"fence on the pair .* a captured graph launches {side} A at 0x"):
        bench.fencer.make_launchable(*pair)
    assert bench.resets == [("local A", "shared A")]
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)  # eager launches beside the graph stay fine
    del graph
    bench.fencer.make_launchable(*pair)
    assert len(bench.resets) == 2


def test_graph_keeps_its_workspaces_alive_and_its_death_frees_them(bench: Bench) -> None:
    graph = Graph()
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=graph)
    owner = weakref.ref(bench.local_a.owner)
    bench.local_a = bench.local_b
    assert owner() is not None
    del graph
    assert owner() is None
    assert bench.book.num_pairs == 0


def test_eviction_of_a_captured_workspace_is_refused(bench: Bench) -> None:
    graph = Graph()
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=graph)
    with pytest.raises(MegaMoeStateError, match="a captured graph launches shared A"):
        bench.book.forget(bench.shared_a)
    bench.book.admit_replay(graph)
    del graph
    bench.book.forget(bench.shared_a)
    assert bench.book.num_pairs == 0


def test_failed_launch_stops_replays_until_graphs_are_gone(bench: Bench) -> None:
    graph = Graph()
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a, graph=graph)
    bench.book.invalidate(bench.local_a, bench.shared_a)
    with pytest.raises(MegaMoeStateError, match=r"replay on the pair .* out of step; delete every graph"):
        bench.book.admit_replay(graph)
    with pytest.raises(MegaMoeStateError, match="delete the graph first"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    del graph
    bench.fencer.make_launchable(bench.local_a, bench.shared_a)
    assert len(bench.resets) == 2


# -- tuning


def test_profiling_launch_without_a_session_is_refused(bench: Bench) -> None:
    with pytest.raises(MegaMoeStateError, match=r"profiling launch on the pair .* no tuning is open"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a, is_profiling=True)


def test_tuning_over_several_ranks_without_scratch_is_refused() -> None:
    with pytest.raises(MegaMoeStateError, match="over 2 ranks needs a profiling scratch"):
        FenceBook(2).begin_tuning(None)


def test_tuning_of_one_rank_may_use_the_serving_workspace() -> None:
    bench = Bench(ep_size=1)
    bench.book.begin_tuning(None)
    bench.fencer.make_launchable(bench.local_a, bench.shared_a, is_profiling=True)
    bench.book.end_tuning()
    assert bench.resets == [("local A", "shared A")]


def test_tuning_with_scratch_separates_profiling_from_serving(bench: Bench) -> None:
    bench.book.begin_tuning(bench.shared_b)
    with pytest.raises(MegaMoeStateError, match="its shared side is not the profiling scratch"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_a, is_profiling=True)
    with pytest.raises(MegaMoeStateError, match="its shared side is the profiling scratch"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_b)
    bench.fencer.make_launchable(bench.local_a, bench.shared_b, is_profiling=True)
    with pytest.raises(MegaMoeStateError, match="capture after tuning"):
        bench.fencer.make_launchable(bench.local_a, bench.shared_b, is_profiling=True, graph=Graph())
    bench.fencer.make_launchable(bench.local_b, bench.shared_a)  # other layers serve on
    with pytest.raises(MegaMoeStateError, match="open already"):
        bench.book.begin_tuning(bench.shared_b)


class ScratchBench(Bench):
    """A scratch whose allocations can be counted and watched."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[str] = []
        self.owners: dict[str, weakref.ref[object]] = {}
        self.scratch = ProfilingScratch(
            self.book, lambda: self._make("scratch"), lambda shared: self.freed.append(shared.name),
            lambda tactic: self._make(f"local of {tactic.token_widths[0]}"),
        )  # fmt: skip

    def _make(self, name: str) -> Workspace:
        workspace = make(name, 0x10000 + 0x1000 * len(self.owners))
        self.owners[name] = weakref.ref(workspace.owner)
        return workspace

    def alive(self) -> set[str]:
        gc.collect()
        return {name for name, owner in self.owners.items() if owner() is not None}


def test_scratch_session_frees_the_losers_and_keeps_the_winner() -> None:
    bench = ScratchBench()
    with bench.scratch.session(is_enabled=True) as is_enabled:
        assert is_enabled
        for tactic in TACTICS:
            bench.fencer.make_launchable(bench.scratch.local_of(tactic), bench.scratch.shared, is_profiling=True)
            assert bench.scratch.local_of(tactic) is bench.scratch.local_of(tactic)
        winner = bench.scratch.keep(TACTICS[1])
        assert len(bench.resets) == 3
    assert bench.alive() == {"local of 16"}
    assert bench.freed == ["scratch"]
    assert bench.book.num_pairs == 0
    assert not bench.book.is_tuning
    bench.fencer.make_launchable(winner, bench.shared_a)
    assert bench.resets[-1] == ("local of 16", "shared A")


def test_scratch_session_with_tuning_disabled_allocates_nothing() -> None:
    bench = ScratchBench()
    with bench.scratch.session(is_enabled=False) as is_enabled:
        assert not is_enabled
        for call in (lambda: bench.scratch.shared, lambda: bench.scratch.local_of(TACTICS[0])):
            with pytest.raises(MegaMoeStateError, match="open a session"):
                call()
    assert bench.owners == {} and bench.freed == []


@pytest.mark.parametrize("way_out", ["return", "raise"])
def test_scratch_session_is_released_on_every_way_out(way_out: str) -> None:
    bench = ScratchBench()

    def tune() -> None:
        with bench.scratch.session(is_enabled=True):
            bench.scratch.local_of(TACTICS[0])
            if way_out == "return":
                return
            raise RuntimeError("the tuner failed")

    if way_out == "return":
        tune()
    else:
        with pytest.raises(RuntimeError, match="the tuner failed"):
            tune()
    assert bench.alive() == set()
    assert bench.freed == ["scratch"]
    assert not bench.book.is_tuning


def test_scratch_whose_allocation_fails_leaves_no_session_behind() -> None:
    bench = ScratchBench()

    def fail() -> Workspace:
        raise MemoryError("no room for a scratch")

    scratch = ProfilingScratch(bench.book, fail, lambda shared: None, lambda tactic: make("local", 1))
    with pytest.raises(MemoryError), scratch.session(is_enabled=True):
        raise AssertionError("unreachable")
    assert not bench.book.is_tuning
    with bench.scratch.session(is_enabled=True):
        assert bench.book.is_tuning


def test_scratch_sessions_follow_one_another_but_do_not_nest() -> None:
    bench = ScratchBench()
    with bench.scratch.session(is_enabled=True):
        for is_enabled in (True, False):
            with pytest.raises(MegaMoeStateError, match="do not nest"), bench.scratch.session(is_enabled=is_enabled):
                raise AssertionError("unreachable")
        assert bench.book.is_tuning and bench.scratch.shared.name == "scratch"
    with bench.scratch.session(is_enabled=True):  # a speculative draft asks later
        bench.fencer.make_launchable(bench.scratch.local_of(TACTICS[0]), bench.scratch.shared, is_profiling=True)
    assert bench.freed == ["scratch", "scratch"]


def test_scratch_keeps_only_what_was_measured_and_only_once() -> None:
    bench = ScratchBench()
    with bench.scratch.session(is_enabled=True):
        bench.scratch.local_of(TACTICS[0])
        bench.scratch.keep(TACTICS[0])
        for tactic in TACTICS[:2]:
            with pytest.raises(MegaMoeStateError, match="cannot be kept"):
                bench.scratch.keep(tactic)


# -- the reset


def test_collective_reset_lets_no_rank_zero_before_all_have_stopped() -> None:
    """Between a rank's two barriers there are its own zeros only; across ranks the order follows from that."""
    events: list[tuple[str, int]] = []

    def body(comm: Communicator) -> None:
        def log(what: str) -> Callable[..., None]:
            return lambda *_: events.append((what, comm.rank))

        reset = collective_reset(log("synchronize"), lambda: comm.barrier(30.0), log("zero"))
        reset(make("local", 0x1000), make("shared", 0x2000))

    run_threads(4, body, 60.0)
    kinds = [what for what, _ in events]
    assert kinds[:4] == ["synchronize"] * 4  # every device is idle before the first zero
    assert kinds.count("zero") == 8
    for rank in range(4):
        assert [what for what, who in events if who == rank] == ["synchronize", "zero", "zero", "synchronize"]
