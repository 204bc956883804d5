# SPDX-License-Identifier: Apache-2.0
"""The backend over the CUDA engine, as far as a machine without a GPU can show it: launches are recorded, not made."""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import cuda_on_cpu
from tests.helpers.fake_host.install import installed_host
from tests.helpers.golden import golden_layer
from tests.helpers.host_layer import finish_balancing, forward, load, load_balancer, make_moe, model_config, run_context
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.envs import HOST_VARS
from trtllm_megamoe.errors import MegaMoeStateError, MegaMoeTimeoutError, MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels.family import Family
from trtllm_megamoe.kernels.selection import environment, tuning_target
from trtllm_megamoe.kernels.tactics import tactic_of
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.tuning.table import TacticTable
from trtllm_megamoe.tuning.tuner import TunedBucket
from vendored_kernels.sm90.config import TILES

QWEN = golden_layer("modelopt_nvfp4_qwen3_moe", 0)
ROWS = slice(0, 5)


@pytest.fixture(autouse=True)
def _default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in HOST_VARS:
        monkeypatch.setenv(variable.name, "")
        monkeypatch.delenv(variable.name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> cuda_on_cpu.Recorder:
    return cuda_on_cpu.install(monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    with installed_host(tmp_path, "D2") as name:
        importlib.import_module("trtllm_megamoe.host")
        yield name


def test_layers_take_turns_on_one_workspace_with_their_own_weights(gpu: cuda_on_cpu.Recorder, base: str) -> None:
    layers = [make_moe(base, QWEN, model_config(), layer_idx=index) for index in range(3)]
    for moe in layers:
        load(moe, QWEN)
        assert moe.backend.megamoe_layer.engine_name == "cuda"
        forward(moe, QWEN, ROWS, all_rank_num_tokens=[5])
    bound = [launched.bound for launched in gpu.launches if launched.given["ids_are_64"] == 0]
    assert len(bound) == 3
    own, shared = ("w1", "w2", "scales"), ("error", "pool", "counters", "epoch", "cells_at", "payload_at", "results_at")
    assert all(len({one[name] for one in bound}) == 3 for name in own)
    assert all(len({one[name] for one in bound}) == 1 for name in shared)


def test_hopper_quantises_by_itself_and_keeps_sixteen_bits_unless_asked(
    gpu: cuda_on_cpu.Recorder, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's activation quantiser is Blackwell code: the kernel gets the rows themselves, in 16 bits (R61)."""
    moe = make_moe(base, QWEN, model_config())
    load(moe, QWEN)
    backend = moe.backend
    x, x_sf = backend.quantize_input(QWEN.x[ROWS].bfloat16())
    assert x.dtype == torch.bfloat16 and x_sf is None
    assert backend.megamoe_layer.activation_mode is ActivationMode.BF16
    ids, weights = QWEN.topk_ids[ROWS].int(), QWEN.topk_weights[ROWS].float()
    out = backend.run_moe(run_context(base, token_selected_experts=ids, token_final_scales=weights, x=x, x_sf=x_sf))
    given = gpu.launches[-1].given
    assert (given["x"], given["ids"], given["route_weights"], given["y"]) == (
        x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
    )  # fmt: skip
    assert given["ids_are_64"] == 0 and out.shape == x.shape


def test_asked_for_nvfp4_activations_reach_the_kernel(
    gpu: cuda_on_cpu.Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_MEGAMOE_ACTIVATIONS", "nvfp4")
    with installed_host(tmp_path, "C") as name:
        importlib.import_module("trtllm_megamoe.host")
        moe = make_moe(name, QWEN, model_config())
        load(moe, QWEN)
        assert moe.backend.megamoe_layer.activation_mode is ActivationMode.NVFP4


def test_tactic_table_is_looked_up_bucket_by_bucket(
    gpu: cuda_on_cpu.Recorder, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = make_moe(base, QWEN, model_config())
    config = moe.backend.megamoe_layer.config
    _, facts = tuning_target(config, ActivationMode.BF16, 1, 132)
    tuned = TunedBucket(16, tactic_of(TILES["h8"], 5), 1.0, 2.0, 5)
    path = tmp_path / "tactics.json"
    TacticTable(environment("NVIDIA H200", 132)).put(facts, [tuned]).save(path)
    monkeypatch.setenv("TRTLLM_MEGAMOE_TACTICS", str(path))
    moe = make_moe(base, QWEN, model_config())
    load(moe, QWEN)
    (loaded,) = gpu.loads
    assert {16, 64} < set(loaded), "the tuned bucket, and others below the cap and at it"
    assert {bucket: one.source for bucket, one in loaded.items()} == dict.fromkeys(loaded, "heuristic") | {16: "tuned"}
    assert loaded[16].tactic == tuned.tactic


def test_warm_up_launches_every_bucket_and_a_capture_launches_without_asking_peers(
    gpu: cuda_on_cpu.Recorder, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = make_moe(base, QWEN, model_config(max_num_tokens=300))
    load(moe, QWEN)
    assert gpu.launches == []  # loading launches nothing that peers would wait for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu.is_capturing = True
    with pytest.raises(MegaMoeStateError, match="first launch of this layer is inside a graph capture"):
        forward(moe, QWEN, ROWS, all_rank_num_tokens=[5])
    assert gpu.launches == []
    gpu.is_capturing = False
    forward(moe, QWEN, ROWS, all_rank_num_tokens=[5])
    rungs = moe.backend.megamoe_layer.ladder.rungs
    assert [launched.bucket for launched in gpu.launches] == [*rungs, 8] and rungs[-1] == 300
    comm = moe.backend.megamoe_layer._comm
    monkeypatch.setattr(comm, "launch_together", lambda *_: pytest.fail("a capture waited for peers"))
    gpu.is_capturing = True
    forward(moe, QWEN, ROWS, all_rank_num_tokens=[5])
    assert len(gpu.launches) == len(rungs) + 2


def test_failed_launch_stops_all_layers_of_the_workspace_and_a_new_model_gets_a_new_one(
    gpu: cuda_on_cpu.Recorder, base: str
) -> None:
    """R31: counters that are out of step are never launched on again."""
    first, second = (make_moe(base, QWEN, model_config(), layer_idx=index) for index in range(2))
    for moe in (first, second):
        load(moe, QWEN)
        forward(moe, QWEN, ROWS)
    engine = first.backend.megamoe_layer._engine
    engine._workspace.error_record[:] = torch.tensor([1, 0, 1, 0, 4, 5, 4, 0])
    launches = len(gpu.launches)
    with pytest.raises(MegaMoeTimeoutError, match="in launch 5: expected 5, seen 4"):
        forward(second, QWEN, ROWS)  # whichever layer launches next: the record is the workspace's
    for moe in (first, second):
        with pytest.raises(MegaMoeStateError, match="a launch on this workspace failed"):
            forward(moe, QWEN, ROWS)
    with pytest.raises(MegaMoeTimeoutError, match="in launch 5"):
        first.backend.megamoe_layer.raise_if_failed()  # as often as it is asked
    assert len(gpu.launches) == launches
    third = make_moe(base, QWEN, model_config(), layer_idx=2)
    load(third, QWEN)
    forward(third, QWEN, ROWS)
    assert gpu.launches[-1].bound["pool"] != gpu.launches[0].bound["pool"]


def _not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_kernels_that_cannot_be_had_end_the_start_before_any_weights_are_read(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty store and no DSL: the error says which kernel, where it was looked for, and both ways out."""
    cuda_on_cpu.install(monkeypatch, record=False)
    store = tmp_path / "store"
    monkeypatch.setenv("TRTLLM_MEGAMOE_CACHE_DIR", str(store))
    monkeypatch.setattr("vendored_kernels.compile.metadata.version", _not_installed)
    with pytest.raises(MegaMoeUnavailableError) as caught:
        make_moe(base, QWEN, model_config())
    parts = ("kernel sm_90a-", "-h256-i128-e16-k4-r1-bf16-bf16", f"is not in {store}",
             "python -m trtllm_megamoe compile", "pip install 'nvidia-cutlass-dsl", "`cache import`")  # fmt: skip
    assert [part for part in parts if part not in str(caught.value)] == []


def test_rank_without_the_kernels_stops_all_ranks_with_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = cuda_on_cpu.install(monkeypatch)
    here = threading.local()

    def obtain(family: Family, spec: Any, tiles: Any, cache: Any) -> dict[str, Path]:
        if here.rank == 1:
            raise MegaMoeUnavailableError("kernel x is not in the store and cannot be compiled here")
        return {}

    monkeypatch.setattr(Family, "obtain", obtain)
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4,
                                  max_tokens_per_rank=16, engine="cuda")  # fmt: skip

    def body(comm: Communicator) -> str:
        here.rank = comm.rank
        with pytest.raises(MegaMoeUnavailableError) as caught:
            MegaMoELayer(config, comm)
        return str(caught.value)

    texts = run_threads(2, body, 60.0)
    assert len(set(texts)) == 1 and "kernel x is not in the store" in texts[0] and "ranks [1] of 2 failed" in texts[0]
    assert recorder.launches == []


def test_moved_slots_are_read_where_they_are_and_rows_hold_all_of_an_expert(
    gpu: cuda_on_cpu.Recorder, base: str
) -> None:
    with load_balancer(base, 16, updates=1) as (config, balancer):
        moe = make_moe(base, QWEN, model_config(moe_load_balancer=config))
    load(moe, QWEN)
    layer = moe.backend.megamoe_layer
    before = {name: t.data_ptr() for name, t in layer.slot_tensors().items()}
    fresh = {name: t.clone() for name, t in layer.slot_tensors().items()}
    finish_balancing(balancer)
    after = layer.slot_tensors()
    iteration = importlib.import_module(f"{base}.moe_load_balancer").MoeLoadBalancerIterContext
    with iteration(balancer):
        forward(moe, QWEN, ROWS)
    bound = gpu.launches[-1].bound
    assert set(after) == {"fc1_records", "fc2_records", "scale_rows"}
    for name, argument in (("fc1_records", "w1"), ("fc2_records", "w2"), ("scale_rows", "scales")):
        assert bound[argument] == after[name].data_ptr() != before[name]
        expected = torch.cat((fresh[name][5:16], fresh[name][:5]))  # the balancer moved every expert five slots down
        assert torch.equal(after[name][:16], expected), name
    assert torch.equal(after["scale_rows"][16], fresh["scale_rows"][16])  # the layer's own facts stay
