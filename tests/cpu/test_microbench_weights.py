# SPDX-License-Identifier: Apache-2.0
"""Cases and weights of the microbench: deterministic per expert, complete per rank, unequal where it matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microbench.cases import Case, checkpoint_case, preset_case
from microbench.sources import CheckpointSource, SyntheticSource, open_source
from microbench.synthetic import tokens
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.formats import ScorePlacement
from trtllm_megamoe.presets import PRESETS
from trtllm_megamoe.weights.build import build_expert_weights
from trtllm_megamoe.weights.spec import Component, LayerShape, Projection, TensorKey

DATA = Path(__file__).parents[1] / "data"
QWEN = DATA / "modelopt_nvfp4_qwen3_moe"


@pytest.fixture(scope="module")
def small() -> Case:
    return preset_case("deepseek-v4-pro", scale_experts=24, scale_channels=32)


def test_preset_case_keeps_the_models_shape_and_options() -> None:
    for name, shape in PRESETS.items():
        case = preset_case(name)
        assert (case.hidden_size, case.intermediate_size) == (shape.hidden_size, shape.intermediate_size)
        assert (case.num_experts, case.top_k, case.swiglu_alpha) == (shape.num_experts, shape.top_k, shape.swiglu_alpha)
        assert case.label == case.name == name
    assert preset_case("deepseek-v4-pro").score_placement is ScorePlacement.BEFORE_REQUANT


def test_preset_case_shrunk_says_so_and_stays_legal() -> None:
    case = preset_case("gpt-oss-120b", scale_experts=4, scale_channels=7)
    assert (case.num_experts, case.hidden_size, case.intermediate_size) == (32, 448, 448)  # 411 rounded up to 64
    assert case.name == "gpt-oss-120b"
    assert "SHRUNK (experts / 4, channels / 7)" in case.label


def test_share_has_local_experts_and_says_so() -> None:
    share = preset_case("deepseek-v4-pro").cut_to_share(8)
    assert (share.num_experts, share.hidden_size) == (48, 7168)
    assert "one rank's share of EP 8" in share.label


@pytest.mark.parametrize(
    "make",
    [
        lambda: preset_case("nonesuch"),
        lambda: preset_case("deepseek-v3", scale_experts=3),
        lambda: preset_case("deepseek-v3", scale_experts=64),  # 4 experts for top-8
        lambda: preset_case("deepseek-v3", scale_channels=0),
        lambda: preset_case("deepseek-v3").cut_to_share(7),
        lambda: preset_case("deepseek-v3", scale_experts=8).cut_to_share(8),  # 4 experts for top-8
    ],
)
def test_illegal_case_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(MegaMoeConfigError):
        make()


def test_checkpoint_case_reads_shape_and_names_the_layer() -> None:
    case = checkpoint_case(QWEN, 1)
    assert (case.hidden_size, case.intermediate_size, case.num_experts, case.top_k) == (256, 128, 16, 4)
    assert case.label == "modelopt_nvfp4_qwen3_moe, layer 1"
    assert case.weights_source == "checkpoint"
    with pytest.raises(MegaMoeWeightError, match="layer 7"):
        checkpoint_case(QWEN, 7)


def test_synthetic_expert_is_the_same_alone_and_with_others(small: Case) -> None:
    everything = dict(SyntheticSource(small, 3).for_rank(range(small.num_experts)))
    alone = SyntheticSource(small, 3)
    other_seed = SyntheticSource(small, 4)
    for component in Component:
        key = TensorKey(5, Projection.UP, component)
        assert torch.equal(everything[key.name].float(), alone.read(key).float())
        assert not torch.equal(everything[key.name].float(), other_seed.read(key).float())


@pytest.mark.parametrize("kind", ["synthetic", "checkpoint", "checkpoint share"])
def test_for_rank_delivers_what_a_rank_needs_and_no_other_bulk(small: Case, kind: str) -> None:
    case = small if kind == "synthetic" else checkpoint_case(QWEN, 0)
    case = case.cut_to_share(2) if kind == "checkpoint share" else case
    num_local = case.num_experts // 2
    shape = LayerShape(case.hidden_size, case.intermediate_size, case.num_experts, case.top_k)
    source = open_source(case, 0)
    named = list(source.for_rank(range(num_local, 2 * num_local)))
    # the strict loader refuses anything missing, extra or mis-shaped
    weights = build_expert_weights(named, shape, num_local, num_local)
    assert weights.has_input_scales
    bulk = [name for name, tensor in named if tensor.numel() > 1]
    assert len(bulk) == num_local * 3 * 2
    oracle = source.for_oracle()
    assert oracle.input_scale is not None
    assert float(oracle.input_scale) == weights.input_global
    assert oracle.down_input_scales is not None
    assert weights.down_input_global is not None
    assert torch.equal(oracle.down_input_scales[num_local:], weights.down_input_global)
    assert len(oracle.tensors) == case.num_experts * 12


def test_synthetic_scales_are_unequal_and_heavy_tailed(small: Case) -> None:
    source = SyntheticSource(small, 0)
    scalars = {
        (projection, component): [float(source.read(TensorKey(e, projection, component))) for e in range(16)]
        for projection in Projection
        for component in (Component.GLOBAL_SCALE, Component.INPUT_SCALE)
    }
    for values in scalars.values():
        assert len(set(values)) == 16
        assert min(values) > 0
        assert max(values) / min(values) > 1.5
    gate, up = (scalars[p, Component.GLOBAL_SCALE] for p in (Projection.GATE, Projection.UP))
    assert all(g != u for g, u in zip(gate, up, strict=True))
    block_scales = source.read(TensorKey(0, Projection.GATE, Component.BLOCK_SCALES)).float()
    assert not block_scales.isnan().any()
    assert float(block_scales.max()) == 448.0  # e4m3's largest occurs
    assert int((block_scales == 0).sum()) > 0  # and empty blocks
    codes = source.read(TensorKey(0, Projection.GATE, Component.CODES))
    assert len(torch.unique(codes)) == 256


def test_synthetic_tokens_have_a_stream_per_rank_and_step(small: Case) -> None:
    x = tokens(small, 64, seed=0, step=0, rank=0)
    assert x.dtype == torch.bfloat16
    assert torch.equal(x, tokens(small, 64, seed=0, step=0, rank=0))
    for other in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(x, tokens(small, 64, **{"seed": 0, "step": 0, "rank": 0, **other}))
    kurtosis = float((x.double() ** 4).mean() / (x.double() ** 2).mean() ** 2)
    assert kurtosis > 6  # a normal distribution has 3
    assert tokens(small, 0, seed=0, step=0, rank=0).shape == (0, small.hidden_size)


def test_checkpoint_source_without_a_layer_is_refused(small: Case) -> None:
    with pytest.raises(ValueError, match="no checkpoint layer"):
        CheckpointSource(small)
