# SPDX-License-Identifier: Apache-2.0
"""Layers that take turns on one workspace (R53): bits, memory, failures, refusals and fences (R31)."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from tests.helpers.layer_cases import WATCHDOG_S, LayerCase, bits, forward_rank, make_case, with_splits
from tests.helpers.synthetic import seeded
from trtllm_megamoe import build_workspace
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cpu.engine import CpuEngine
from trtllm_megamoe.errors import (
    MegaMoeAbortedError,
    MegaMoeConfigError,
    MegaMoeError,
    MegaMoeRankDivergenceError,
    MegaMoeStateError,
    MegaMoeTimeoutError,
)
from trtllm_megamoe.host.workspaces import WorkspacePool
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.regions import RegionTable
from trtllm_megamoe.symmetric.workspace import Workspace

EP = 4
KINDS = ["random", "hot_rank", "masked_30", "all_masked", "duplicates"]


def _layers(count: int) -> list[LayerCase]:
    """Layers of one shape whose weights differ, the last one in bf16 activation mode: no two have the same facts."""
    return [
        make_case("random", ep_size=1, num_tokens=8, seed=100 * index, input_scales=index < count - 1)
        for index in range(count)
    ]


def _launches(num_layers: int, count: int) -> list[tuple[int, LayerCase]]:
    """(layer, tokens and routing) of each launch: no fixed order of layers, every routing, ranks without tokens."""
    generator = seeded(7)
    launches = []
    for index in range(count):
        splits = torch.randint(0, 9, (EP,), generator=generator) * torch.randint(0, 2, (EP,), generator=generator)
        total = max(1, int(splits.sum()))
        case = make_case(KINDS[index % len(KINDS)], ep_size=1, num_tokens=total, max_tokens_per_rank=8, seed=index)
        launches.append(
            (int(torch.randint(0, num_layers, (), generator=generator)), with_splits(case, splits.tolist()))
        )
    return launches


def _run(cases: list[LayerCase], launches: list[tuple[int, LayerCase]], is_shared: bool) -> list[list[torch.Tensor]]:
    """Outputs per rank and launch; ranks drift apart by random delays."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        delays = seeded(comm.rank)
        with contextlib.ExitStack() as stack:
            workspace = build_workspace(cases[0].config, comm) if is_shared else None
            if workspace is not None:
                stack.callback(workspace.close)
            layers = [
                stack.enter_context(MegaMoELayer(case.config, comm, layer=index, workspace=workspace))
                for index, case in enumerate(cases)
            ]
            for layer, case in zip(layers, cases, strict=True):
                layer.load_weights(case.weights)
            outputs = []
            for index, case in launches:
                time.sleep(0.004 * float(torch.rand((), generator=delays)))
                outputs.append(forward_rank(layers[index], case, comm.rank))
            return outputs

    return run_threads(EP, body, WATCHDOG_S)


@pytest.mark.parametrize("num_layers", [2, 3])
def test_layers_taking_turns_on_one_workspace_have_the_bits_of_separate_ones(num_layers: int) -> None:
    cases, launches = _layers(num_layers), _launches(num_layers, 15)
    assert {layer for layer, _ in launches} == set(range(num_layers))
    shared, separate = _run(cases, launches, True), _run(cases, launches, False)
    for rank in range(EP):
        for index, (got, expected) in enumerate(zip(shared[rank], separate[rank], strict=True)):
            assert torch.equal(bits(got), bits(expected)), f"rank {rank}, launch {index}"


def test_reload_between_launches_is_seen_although_a_peer_is_one_launch_behind() -> None:
    """Facts belong to a launch, not to a rank: rank 1, which sends nothing, may be a launch ahead of rank 0."""
    first, second, _ = _layers(3)
    ids = torch.full((4, 4), 3)  # an expert of rank 0

    def body(comm: Communicator) -> list[int]:
        facts = []
        with MegaMoELayer(first.config, comm) as layer:
            layer.load_weights(first.weights)
            engine = layer._engine
            assert isinstance(engine, CpuEngine)
            if comm.rank == 0:
                check: Callable[[int], None] = engine._check_headers

                def late_check(epoch: int) -> None:
                    time.sleep(0.2)
                    check(epoch)

                engine._check_headers = late_check  # type: ignore[method-assign]
            rows = 4 if comm.rank == 0 else 0
            for case in (first, second, first):
                layer.load_weights(case.weights)
                facts.append(engine._facts)
                layer.forward(first.x[:rows], ids[:rows], torch.full((rows, 4), 0.25))
            return facts

    facts, of_the_other = run_threads(2, body, WATCHDOG_S)
    assert facts == of_the_other
    assert facts[0] == facts[2] != facts[1], "the loads must differ in the facts that ranks compare"


def _spaces_alive(table: RegionTable) -> dict[str, int]:
    """Distinct allocations of at least a space's size that this process holds."""
    gc.collect()
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if _is_bytes(t)}
    return {
        "local": sum(size == table.total_bytes("local") for size in sizes.values()),
        "shared": sum(
            table.total_bytes("shared") <= size < table.total_bytes("local") and size > 1 << 20
            for size in sizes.values()
        ),
    }


def _is_bytes(thing: object) -> bool:
    return type(thing) is torch.Tensor and thing.dtype == torch.uint8


def test_memory_of_sixty_layers_is_one_layers_worth() -> None:
    config = make_case("random", ep_size=1, num_tokens=1024).config

    def body(comm: Communicator) -> dict[str, int]:
        workspace = build_workspace(config, comm)
        layers = [MegaMoELayer(config, comm, workspace=workspace) for _ in range(60)]
        comm.barrier(WATCHDOG_S)
        alive = _spaces_alive(workspace.table)
        comm.barrier(WATCHDOG_S)
        engines = [layer._engine for layer in layers]
        assert all(isinstance(engine, CpuEngine) and engine._workspace is workspace for engine in engines)
        workspace.close()
        return alive

    assert run_threads(2, body, WATCHDOG_S) == [{"local": 2, "shared": 2}] * 2


def test_failed_layer_stops_every_layer_of_its_workspace_on_all_ranks_and_a_new_workspace_works() -> None:
    case = make_case("random", ep_size=EP, timeout_s=1.0)

    def forward_fresh(comm: Communicator) -> torch.Tensor:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            return forward_rank(layer, case, comm.rank)

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        workspace = build_workspace(case.config, comm)
        bystander = build_workspace(case.config, comm)
        first, second = (MegaMoELayer(case.config, comm, workspace=workspace) for _ in range(2))
        other = MegaMoELayer(case.config, comm, workspace=bystander)
        for layer in (first, second, other):
            layer.load_weights(case.weights)
        forward_rank(second, case, comm.rank)
        comm.barrier(WATCHDOG_S)
        if comm.rank != 2:  # rank 2 never launches
            with pytest.raises((MegaMoeTimeoutError, MegaMoeAbortedError)):
                forward_rank(first, case, comm.rank)
            assert workspace.fences.num_pairs == 0
        comm.barrier(WATCHDOG_S)
        for layer in (second, first):
            with pytest.raises(MegaMoeAbortedError, match="gave up"):
                forward_rank(layer, case, comm.rank)
        comm.barrier(WATCHDOG_S)
        unaffected = forward_rank(other, case, comm.rank)
        return unaffected, forward_fresh(comm)

    per_rank = run_threads(EP, body, WATCHDOG_S)
    fresh = torch.cat(run_threads(EP, forward_fresh, WATCHDOG_S))
    for index in range(2):
        assert torch.equal(bits(torch.cat([outputs[index] for outputs in per_rank])), bits(fresh))


def test_ranks_that_run_different_layers_of_a_workspace_are_told_which() -> None:
    case = make_case("random", ep_size=EP)

    def body(comm: Communicator) -> str:
        workspace = build_workspace(case.config, comm)
        layers = [MegaMoELayer(case.config, comm, workspace=workspace) for _ in range(2)]
        for layer in layers:
            layer.load_weights(case.weights)
        comm.barrier(WATCHDOG_S)
        with pytest.raises((MegaMoeRankDivergenceError, MegaMoeAbortedError)) as caught:
            forward_rank(layers[int(comm.rank == 1)], case, comm.rank)
        return str(caught.value)

    texts = run_threads(EP, body, WATCHDOG_S)
    assert any("rank 1 in launch 1: it runs layer 1 of the workspace, this rank runs layer 0" in text for text in texts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens_per_rank": 16}, "max_tokens_per_rank 16, the workspace has 8"),
        ({"top_k": 2}, "top_k 2, the workspace has 4"),
        ({"combine_format": "fp8"}, "combine_format"),
        ({"activations": "bf16", "hidden_size": 128}, "hidden_size 128.*activations bf16, the workspace has auto"),
    ],
)
def test_layer_of_another_geometry_is_refused_with_both_values(changes: dict[str, object], words: str) -> None:
    config = make_case("random", ep_size=1, num_tokens=8).config
    workspace = build_workspace(config)
    with pytest.raises(MegaMoeConfigError, match=words):
        MegaMoELayer(MegaMoeConfig.create(**(config.model_dump() | changes)), workspace=workspace)
    MegaMoELayer(config, workspace=workspace).close()
    workspace.require_launchable()  # the layer closed nothing that is not its own
    workspace.close()


def test_layer_on_a_workspace_of_another_communicator_rank_or_device_is_refused() -> None:
    config = make_case("random", ep_size=1).config
    workspace = build_workspace(config)
    with pytest.raises(MegaMoeConfigError, match="the communicator is another one"):
        MegaMoELayer(config, single(), workspace=workspace)
    with pytest.raises(MegaMoeConfigError, match="works on cuda, the workspace lies on cpu"):
        workspace.require_fits(workspace.table.geometry, workspace.comm, "cuda")

    handed_over: list[Workspace | None] = [None, None]

    def body(comm: Communicator) -> None:
        handed_over[comm.rank] = build_workspace(config, comm)
        comm.barrier(WATCHDOG_S)
        with pytest.raises(MegaMoeConfigError, match=f"rank {comm.rank} of 2.* belongs to rank {1 - comm.rank} of 2"):
            MegaMoELayer(config, comm, workspace=handed_over[1 - comm.rank])

    run_threads(2, body, WATCHDOG_S)


def test_rank_without_the_shared_workspace_is_the_same_error_on_every_rank() -> None:
    config = make_case("random", ep_size=1).config

    def body(comm: Communicator) -> str:
        workspace = build_workspace(config, comm)
        with pytest.raises(MegaMoeRankDivergenceError) as caught:
            MegaMoELayer(config, comm, workspace=None if comm.rank == 3 else workspace)
        return str(caught.value)

    texts = run_threads(EP, body, WATCHDOG_S)
    assert len(set(texts)) == 1 and "workspace: " in texts[0] and "None on ranks [3]" in texts[0]


def test_closed_workspace_refuses_launches_and_layers() -> None:
    case = make_case("random", ep_size=1)
    workspace = build_workspace(case.config)
    layer = MegaMoELayer(case.config, workspace=workspace)
    layer.load_weights(case.weights)
    forward_rank(layer, case, 0)
    workspace.close()
    workspace.close()
    with pytest.raises(MegaMoeStateError, match="the workspace is closed"):
        forward_rank(layer, case, 0)
    with pytest.raises(MegaMoeStateError, match="the workspace is closed"):
        MegaMoELayer(case.config, workspace=workspace)


def test_layers_own_workspace_is_closed_with_it() -> None:
    case = make_case("random", ep_size=1)
    layer = MegaMoELayer(case.config)
    layer.load_weights(case.weights)
    layer.close()
    layer.close()
    with pytest.raises(MegaMoeStateError, match="the workspace is closed"):
        forward_rank(layer, case, 0)


def test_fence_of_a_workspace_is_made_at_construction_and_leaves_no_key() -> None:
    """R31: the pair is fenced before first use; neither closing nor dropping a workspace leaves a key behind."""
    config = make_case("random", ep_size=1).config

    def body(comm: Communicator) -> None:
        workspace = build_workspace(config, comm)
        book = workspace.fences
        assert book.num_pairs == 1
        workspace.close()
        assert book.num_pairs == 0
        dropped = build_workspace(config, comm)
        book, memory = dropped.fences, weakref.ref(dropped.local)
        comm.barrier(WATCHDOG_S)
        del dropped
        gc.collect()
        assert book.num_pairs == 0 and memory() is None

    run_threads(2, body, WATCHDOG_S)


def test_workspace_a_graph_uses_cannot_be_closed_before_the_graph() -> None:
    class Graph:
        pass

    workspace = build_workspace(make_case("random", ep_size=1).config)
    graph = Graph()
    assert workspace.fences.admit(*workspace._sides, graph=graph)
    with pytest.raises(MegaMoeStateError, match="a captured graph launches"):
        workspace.close()
    workspace.require_launchable()
    del graph
    workspace.close()


def test_workspace_failure_inside_a_launch_is_remembered_until_it_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not a wait (here in the arithmetic) leaves the counters out of step as well."""
    case = make_case("random", ep_size=1)
    workspace = build_workspace(case.config)
    layer = MegaMoELayer(case.config, workspace=workspace)
    layer.load_weights(case.weights)
    with monkeypatch.context() as patch:
        patch.setattr(CpuEngine, "_compute_and_return", _raise)
        with pytest.raises(MegaMoeError, match="planted"):
            forward_rank(layer, case, 0)
    with pytest.raises(MegaMoeError, match="anew"):
        forward_rank(layer, case, 0)
    with pytest.raises(MegaMoeStateError, match="a launch on this workspace failed"):
        MegaMoELayer(case.config, workspace=workspace)
    workspace.close()


def _raise(*_: object) -> None:
    raise MegaMoeStateError("planted")


def test_pool_gives_layers_of_one_shape_one_workspace_and_closes_it_with_the_last() -> None:
    base = make_case("random", ep_size=1, num_tokens=8).config
    wider = MegaMoeConfig.create(**(base.model_dump() | {"max_tokens_per_rank": 16}))
    louder = MegaMoeConfig.create(**(base.model_dump() | {"swiglu_limit": 7.0}))
    pool, comm = WorkspacePool(), single()
    first, other_shape, same_shape = (pool.acquire(config, comm) for config in (base, wider, louder))
    assert first is same_shape and first is not other_shape
    assert pool.acquire(base, single()) is not first
    pool.release(first)
    first.require_launchable()
    pool.release(first)
    with pytest.raises(MegaMoeStateError, match="closed"):
        first.require_launchable()
    assert pool.acquire(base, comm) is not first
    other_shape.require_launchable()


def test_pool_does_not_hand_out_a_workspace_whose_launch_failed() -> None:
    config, comm, pool = make_case("random", ep_size=1).config, single(), WorkspacePool()
    failed = pool.acquire(config, comm)
    failed.invalidate()
    assert pool.acquire(config, comm) is not failed
    pool.release(failed)
