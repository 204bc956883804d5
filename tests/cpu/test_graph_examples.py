# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say: a vLLM-style runner over the real layer, and the worked decode step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from examples.decode_step import main as decode_main
from examples.decode_step import make_step
from examples.vllm_style_runner import ModelRunner
from trtllm_megamoe import Checkpoint, MegaMoeConfig, MegaMoELayer
from trtllm_megamoe.errors import MegaMoeCapacityError
from trtllm_megamoe.graph import check_capture, find_syncs
from trtllm_megamoe.graph.blocks import route_top_k
from trtllm_megamoe.graph.static.findings import Level
from trtllm_megamoe.graph.static.scan import scan

CHECKPOINT = Path(__file__).parents[1] / "data" / "modelopt_nvfp4_qwen3_moe"


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    runner = ModelRunner(
        Checkpoint.open(CHECKPOINT), [1], ep_size=2, capture_sizes=[1, 4], max_num_tokens=5, engine="cpu"
    )
    runner.capture_model()
    return runner


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)


def test_runner_ranks_add_up_to_the_layer_with_all_experts(runner: ModelRunner) -> None:
    checkpoint, x = Checkpoint.open(CHECKPOINT), _tokens(5)
    shape = checkpoint.layer_shape(1)
    config = MegaMoeConfig.create(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_experts=shape.num_experts,
        top_k=shape.top_k, max_tokens_per_rank=5, engine="cpu",
    )  # fmt: skip
    layer = MegaMoELayer(config)
    layer.load_weights(checkpoint.iter_layer(1))
    ids, weights = route_top_k(x.float() @ runner.routers[0], shape.top_k, torch.ones(5, dtype=torch.bool))
    expected = x.float() + layer.forward(x, ids, weights).float()
    found = runner.execute_eagerly(x).float()
    # Each rank's share, their sum and the residual are rounded to bf16 (2^-9) on their own: a few such roundings.
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    assert float((found - x.float()).norm() / x.float().norm()) > 0.05, "the experts must contribute"


@pytest.mark.parametrize("count", [3, 0, 4, 1, 5])
def test_runner_buckets_are_bit_equal_to_eager_whatever_ran_before(runner: ModelRunner, count: int) -> None:
    runner.hidden.fill_(float("nan"))  # what earlier, larger steps left behind
    runner.sum.fill_(float("nan"))
    out = runner.execute_model(_tokens(count))
    assert out.shape == (count, 256) and torch.equal(out, runner.execute_eagerly(_tokens(count)))
    assert out.isfinite().all()


def test_runner_refuses_more_tokens_than_its_buffers_hold(runner: ModelRunner) -> None:
    with pytest.raises(MegaMoeCapacityError, match="6 tokens exceed max_num_tokens 5"):
        runner.execute_model(_tokens(6))


def test_runner_hot_path_has_no_static_errors() -> None:
    report = scan(
        ["examples/vllm_style_runner.py", *(f"trtllm_megamoe/{p}" for p in ("__init__.py", "layer.py", "graph"))],
        hot=["vllm_style_runner:ModelRunner.forward"],
    )
    assert report.at_least(Level.ERROR) == ()
    assert {name.split(":")[1] for name in report.functions} >= {"ExpertRank.forward", "MegaMoELayer.forward"}


def test_decode_example_runs_and_its_step_passes_the_checks() -> None:
    result = CliRunner().invoke(decode_main, ["--device", "cpu", "--steps", "24"])
    assert result.exit_code == 0 and "passed: True" in result.output
    assert find_syncs(make_step(torch.device("cpu"))).passed
    report = check_capture(make_step(torch.device("cpu")))
    assert report.passed and not report.notes
