# SPDX-License-Identifier: Apache-2.0
"""`--autotune` on real workspaces and layers of the CPU engine, which is given tactics for the occasion."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from microbench import autotune as autotune_module
from microbench.autotune import autotune
from tests.helpers.layer_cases import WATCHDOG_S, LayerCase, bits, forward_rank, make_case
from tests.helpers.tactics import SPACE, tactic
from trtllm_megamoe.comm import Communicator, run_threads, single
from trtllm_megamoe.engines.cpu.engine import CpuEngine
from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeVerificationError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.tactic import Tactic

EP = 3
WAIT_S = 20.0
CASE = make_case("random", ep_size=EP, num_tokens=30, num_experts=12, max_tokens_per_rank=40)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Tactic]]:
    """(engine, bucket, tactic) of every pin; width 24 cannot be prepared."""
    log: list[tuple[int, int, Tactic]] = []

    def pin(self: CpuEngine, bucket: int, chosen: Tactic) -> None:
        if chosen.token_widths[0] == 24:
            raise OSError("no such kernel")
        log.append((id(self), bucket, chosen))

    monkeypatch.setattr(CpuEngine, "pin_tactic", pin)
    return log


def scripted(log: list[tuple[int, int, Tactic]]) -> Callable[[Callable[[], object], Communicator, float], float]:
    def time(run: Callable[[], object], comm: Communicator, timeout_s: float) -> float:
        run()
        return 100.0 - log[-1][2].token_widths[0]

    return time


def prepared(case: LayerCase, comm: Communicator) -> tuple[Workspace, list[MegaMoELayer]]:
    workspace = build_workspace(case.config, comm)
    layers = [MegaMoELayer(case.config, comm, workspace=workspace) for _ in range(2)]
    for layer in layers:
        layer.load_weights(case.weights)
    return workspace, layers


def test_autotune_pins_the_best_on_all_layers_and_leaves_serving_as_it_was(
    pinned: list[tuple[int, int, Tactic]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratches: list[weakref.ref[Any]] = []
    build = autotune_module.build_workspace

    def watched(*arguments: Any) -> Workspace:
        workspace = build(*arguments)
        scratches.extend((weakref.ref(workspace), weakref.ref(workspace.local)))
        return workspace

    monkeypatch.setattr(autotune_module, "build_workspace", watched)

    def body(comm: Communicator) -> Any:
        workspace, layers = prepared(CASE, comm)
        before = bits(forward_rank(layers[0], CASE, comm.rank))

        def timer(run: Callable[[], object], comm: Communicator, timeout_s: float) -> float:
            run()
            return 100.0 - next(chosen for engine, _, chosen in reversed(pinned) if engine not in mine).token_widths[0]

        mine = {id(layer._engine) for layer in layers}
        found = autotune(
            workspace, layers, lambda layer: layer.load_weights(CASE.weights), SPACE, [16, 40], comm, WAIT_S, timer
        )
        log = [(bucket, chosen) for engine, bucket, chosen in pinned if engine in mine]
        after = [bits(forward_rank(layer, CASE, comm.rank)) for layer in layers]
        workspace.require_launchable()
        return {bucket: tuned.tactic for bucket, tuned in found.items()}, log, before, after

    results = run_threads(EP, body, WATCHDOG_S)
    for found, log, before, after in results:
        assert found == results[0][0] == {16: tactic(64), 40: tactic(64)}, "the widest that is legal"
        assert sorted(log, key=str) == sorted([(bucket, tactic(64)) for bucket in (16, 40)] * 2, key=str)
        assert all(torch.equal(out, before) for out in after), "tuning leaves no trace in serving"
    gc.collect()
    assert len(scratches) == 2 * EP and all(ref() is None for ref in scratches), "the scratch is gone"


def test_autotune_refuses_to_go_on_when_the_book_is_not_as_before(
    pinned: list[tuple[int, int, Tactic]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release forgets nothing: the pair of the scratch stays in the book."""
    case = make_case("random", ep_size=1, num_tokens=8)
    kept: list[object] = []

    def keeps(self: autotune_module.ScratchLayer) -> None:
        self._book.end_tuning()
        kept.append(self)

    monkeypatch.setattr(autotune_module.ScratchLayer, "close", keeps)
    workspace, layers = prepared(case, single())
    with pytest.raises(MegaMoeVerificationError, match="holds 2 pairs, expected 1"):
        autotune(
            workspace, layers, lambda layer: layer.load_weights(case.weights), SPACE, [8], workspace.comm, WAIT_S,
            scripted(pinned),
        )  # fmt: skip


def test_profiling_launch_outside_a_tuning_is_refused(pinned: list[tuple[int, int, Tactic]]) -> None:
    case = make_case("random", ep_size=1, num_tokens=8)
    workspace, _ = prepared(case, single())
    scratch = autotune_module.ScratchLayer(workspace, case.config, lambda layer: layer.load_weights(case.weights))
    workspace.fences.end_tuning()
    step = (case.x, case.routing.topk_ids, case.routing.topk_weights)
    with pytest.raises(MegaMoeStateError, match="no tuning is open"):
        scratch.forward(*step, 8)
    scratch.close()
    workspace.require_launchable()
