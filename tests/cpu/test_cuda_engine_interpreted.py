# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine's own packing and launch arguments drive the kernels' real PTX, and the layer equals the oracle.

What no GPU has run (Blackwell) and what has (Hopper) go the same way: `MegaMoELayer`, one rank or several in threads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import cuda_on_cpu
from tests.helpers.interpreted_gpu import install
from tests.helpers.synthetic import Routing, RoutingKind, make_layer_tensors, make_routing, make_tokens, seeded
from tools.ptxsim.layers import KernelFile
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cuda import engine
from trtllm_megamoe.engines.registry import choose_engine
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeStateError, MegaMoeTimeoutError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels.family import FAMILIES
from trtllm_megamoe.kernels.prepared import PreparedLaunch
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.reference.oracle import OracleWeights, oracle_forward
from trtllm_megamoe.selftest.checks import bits, oracle_options
from trtllm_megamoe.selftest.one_rank import poison
from vendored_kernels.sm100.config import TILES

DATA = Path(__file__).parent.parent / "data" / "ptx"
BLACKWELL = FAMILIES["sm_100a"]


@dataclass
class Call:
    """Inputs of one rank and the oracle's answer."""

    x: torch.Tensor
    routing: Routing
    expected: torch.Tensor


def make_call(
    config: MegaMoeConfig, tensors: dict[str, torch.Tensor], kind: RoutingKind, count: int, seed: int
) -> Call:
    generator = seeded(seed)
    x = make_tokens(generator, count, config.hidden_size)
    routing = make_routing(generator, kind, count, config.num_experts, config.top_k)
    options = oracle_options(config, ActivationMode(config.activations))
    expected = oracle_forward(OracleWeights.from_tensors(tensors), x, routing.topk_ids, routing.topk_weights, options)
    return Call(x, routing, expected)


def tensors_of(config: MegaMoeConfig) -> dict[str, torch.Tensor]:
    return make_layer_tensors(seeded(5), config.hidden_size, config.intermediate_size, config.num_experts)


@pytest.mark.parametrize(
    ("kernel", "kind", "counts"),
    [
        ("sm100_b32", RoutingKind.MASKED_30, (4, 1)),
        ("sm100_b64", RoutingKind.HOT_EXPERT, (6,)),
        ("sm100_pair", RoutingKind.MASKED_30, (5, 2)),
        ("sm90_nvfp4", RoutingKind.DUPLICATES, (5,)),
    ],
)
def test_engine_one_rank_drives_the_kernel_and_equals_the_oracle(
    kernel: str, kind: RoutingKind, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, on a poisoned workspace; a second launch has fewer tokens and 32-bit ids."""
    config, gpu = install(monkeypatch, KernelFile.load(DATA / f"{kernel}.ptx"), max(counts) + 1)
    tensors = tensors_of(config)
    workspace = build_workspace(config)
    poison(workspace)
    with MegaMoELayer(config, workspace=workspace) as layer:
        layer.load_weights(tensors)
        assert layer.engine_name == "cuda" and layer.weights.layout.name == gpu.family.layout
        for tokens, dtype in zip(counts, (torch.int64, torch.int32), strict=False):
            call = make_call(config, tensors, kind, tokens, 3)
            out = layer.forward(call.x, call.routing.topk_ids.to(dtype), call.routing.topk_weights)
            layer.raise_if_failed()
            assert torch.equal(bits(out), bits(call.expected))
    assert gpu.launches == len(counts)


@pytest.mark.parametrize("capturing", [False, True])
def test_unprepared_bucket_is_refused_by_name_before_any_launch(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch may load no code: a capture cannot, and peers would wait for it."""
    gpu = cuda_on_cpu.install(monkeypatch)
    load = gpu.load
    monkeypatch.setattr(
        gpu, "load", lambda *given: {bucket: one for bucket, one in load(*given).items() if bucket != 16}
    )
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4,
                                  max_tokens_per_rank=64, engine="cuda", activations="bf16")  # fmt: skip
    call = make_call(config, tensors := tensors_of(config), RoutingKind.RANDOM, 5, 3)
    layer = MegaMoELayer(config)
    layer.load_weights(tensors)
    layer.forward(call.x, call.routing.topk_ids, call.routing.topk_weights, 8)
    gpu.is_capturing = capturing
    with pytest.raises(MegaMoeStateError) as caught:
        layer.forward(call.x, call.routing.topk_ids, call.routing.topk_weights, 16)
    text = str(caught.value)
    assert "kernel sm_90a-h8-h256-i128-e16-k4-r1-bf16-bf16 of bucket 16 is not prepared" in text
    assert "buckets prepared: 8, 32, 64" in text and "call prepare()" in text
    assert ("in a graph capture" in text) == capturing
    assert [launched.bucket for launched in gpu.launches] == [8] and layer.last_bucket == 8


def test_failed_launch_is_raised_where_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs no Python: the caller asks after it. `prepare` asks by itself."""
    gpu = cuda_on_cpu.install(monkeypatch)
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4,
                                  max_tokens_per_rank=8, engine="cuda", activations="bf16")  # fmt: skip
    layer = MegaMoELayer(config)
    layer.load_weights(tensors_of(config))
    layer.raise_if_failed()
    layer._workspace.error_record[:] = torch.tensor([1, 0, 1, 0, 0, 5, 4, 0])
    with pytest.raises(MegaMoeTimeoutError, match=r"waited .* in launch 1: expected 5, seen 4"):
        layer.raise_if_failed()
    with pytest.raises(MegaMoeStateError, match="a launch on this workspace failed"):
        layer.prepare()
    assert not gpu.launches


def test_prepare_raises_what_its_launches_report(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = cuda_on_cpu.install(monkeypatch)
    load = gpu.load

    def failing(*given: Any) -> dict[int, PreparedLaunch]:
        def launch(**_: int) -> None:
            layer._workspace.error_record[:] = torch.tensor([1, 0, 1, 0, 0, 5, 4, 0])

        return {bucket: replace(one, launch=launch) for bucket, one in load(*given).items()}

    monkeypatch.setattr(gpu, "load", failing)
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=16, top_k=4,
                                  max_tokens_per_rank=8, engine="cuda", activations="bf16")  # fmt: skip
    layer = MegaMoELayer(config)
    layer.load_weights(tensors_of(config))
    with pytest.raises(MegaMoeTimeoutError, match="in launch 1"):
        layer.prepare()


def test_closed_layer_on_a_workspace_that_others_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, gpu = install(monkeypatch, KernelFile.load(DATA / "sm90_nvfp4.ptx"), 6)
    call = make_call(config, tensors := tensors_of(config), RoutingKind.RANDOM, 5, 3)
    layer = MegaMoELayer(config, workspace=build_workspace(config))
    layer.load_weights(tensors)
    layer.close()
    with pytest.raises(MegaMoeStateError, match=r"kernel sm_90a-\S+ of bucket 6 .* buckets prepared: none"):
        layer.forward(call.x, call.routing.topk_ids, call.routing.topk_weights)
    assert gpu.launches == 0


@pytest.mark.parametrize("kernel", ["sm90_ranks2", "sm100_ranks2", "sm100_pair_ranks2"])
def test_engine_two_ranks_drive_one_kernel_through_their_peers_memory(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, gpu = install(monkeypatch, KernelFile.load(DATA / f"{kernel}.ptx"), 3)
    counts = (2, 1)
    tensors = tensors_of(config)
    calls = [make_call(config, tensors, RoutingKind.RANDOM, count, 7 + rank) for rank, count in enumerate(counts)]

    def body(comm: Communicator) -> torch.Tensor:
        layer = MegaMoELayer(config, comm)
        layer.load_weights(tensors)
        call = calls[comm.rank]
        out = layer.forward(call.x, call.routing.topk_ids, call.routing.topk_weights)
        layer.raise_if_failed()
        return out

    outputs = run_threads(len(counts), body, 120.0)
    for out, call in zip(outputs, calls, strict=True):
        assert torch.equal(bits(out), bits(call.expected))
    assert gpu.launches == 1


def test_blackwell_is_taken_on_request_only_and_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.install(monkeypatch, arch="sm_100a")
    auto, asked = choose_engine("auto", 1), choose_engine("cuda", 1)
    assert auto.name == "cpu" and "not yet run on hardware" in auto.reason and "engine 'cuda'" in auto.reason
    assert asked.name == "cuda" and asked.arch == "sm_100a" and "not yet run on hardware" in asked.reason
    assert asked.pool_layout == "sm_100" and auto.pool_layout == "f16"


def test_blackwell_layer_warns_once_that_it_has_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_on_cpu.install(monkeypatch, arch="sm_103a")
    engine._warn_once.cache_clear()
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2,
                                  max_tokens_per_rank=8, engine="cuda")  # fmt: skip
    with caplog.at_level(logging.WARNING, "trtllm_megamoe"):
        MegaMoELayer(config)
        MegaMoELayer(config)
    assert len(caplog.records) == 1
    assert "not yet run on hardware" in caplog.text and "selftest" in caplog.text


def test_blackwell_layer_in_auto_mode_is_nvfp4_and_refuses_a_weight_only_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda_on_cpu.install(monkeypatch, arch="sm_100a")
    fields = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2, "max_tokens_per_rank": 8}
    config = MegaMoeConfig.create(**fields, engine="cuda")
    layer = MegaMoELayer(config)
    with pytest.raises(MegaMoeWeightError, match="input"):
        layer.load_weights(make_layer_tensors(seeded(1), 256, 128, 4, input_scales=False))
    layer.load_weights(make_layer_tensors(seeded(1), 256, 128, 4))
    assert layer.activation_mode is ActivationMode.NVFP4
    with pytest.raises(MegaMoeConfigError, match="must be 'nvfp4'"):
        MegaMoELayer(MegaMoeConfig.create(**fields, engine="cuda", activations="bf16"))


def test_blackwell_tactics_are_the_kernels_own_and_name_the_broken_rule() -> None:
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2,
                                  max_tokens_per_rank=64, activations="nvfp4")  # fmt: skip
    space = BLACKWELL.tactic_space(BLACKWELL.layer_spec(config, 1, ActivationMode.NVFP4), 148)
    legal = space.legal_candidates(64)
    assert {BLACKWELL.tile_of(tactic).name for tactic in legal} == {"b32", "b64", "b128", "b256", "b128x2", "b256x2"}
    assert {tactic.fc1_lag for tactic in legal} == {2, 3, 5}
    for change, words in (
        ({"token_widths": (32, 64)}, "one width"),
        ({"token_widths": (48,)}, "tokens 48"),
        ({"tile_rows": 192}, "fixed"),
        ({"tile_rows": 512}, "ctas 4"),
        ({"tile_rows": 256, "token_widths": (32,)}, "tokens 32 with 2 CTA"),
        ({"max_stages": 2}, "max_stages"),
        ({"fc1_lag": 0}, "fc1_lag"),
    ):
        reason = space.why_illegal(replace(legal[0], **change), 64)
        assert reason is not None and words in reason, change


def test_blackwell_pairs_take_whole_pairs_of_ctas_and_need_two() -> None:
    config = MegaMoeConfig.create(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2,
                                  max_tokens_per_rank=512, activations="nvfp4")  # fmt: skip
    spec = BLACKWELL.layer_spec(config, 1, ActivationMode.NVFP4)
    pair = BLACKWELL.tactic_space(spec, 37).heuristic(512)
    assert pair.tile_rows == 256 and BLACKWELL.tile_of(pair).name == "b256x2"
    assert [BLACKWELL.grid_of(BLACKWELL.tile_of(pair), ctas) for ctas in (148, 37, 2)] == [148, 36, 2]
    odd = BLACKWELL.tile_of(replace(pair, token_widths=(64,), max_stages=5))
    assert (odd.tokens, odd.max_stages, odd.ctas) == (64, 5, 2) and odd.name not in TILES
    alone = BLACKWELL.tactic_space(spec, 1)
    assert "need 2 multiprocessors" in (alone.why_illegal(pair, 512) or "")
    assert BLACKWELL.tile_of(alone.legal_candidates(512)[0]).name == "b256"
    assert BLACKWELL.grid_of(TILES["b256"], 37) == 37
