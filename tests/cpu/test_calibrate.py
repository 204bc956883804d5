# SPDX-License-Identifier: Apache-2.0
"""Calibration of activation scales by a warm-up step (R27): through the layer over several ranks, and through `run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import DATA
from tests.helpers.cli import copy_checkpoint, invoke
from tests.helpers.layer_cases import WATCHDOG_S, LayerCase, bits, forward_rank, make_case, oracle_of
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.engines.cpu.engine import CpuEngine
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeWeightError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import rel_l2

QWEN = DATA / "modelopt_nvfp4_qwen3_moe"


def _calibrated(case: LayerCase) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """a1, a2 and the rows of each rank after calibrating on the case's own tokens."""

    def body(comm: Communicator) -> tuple[float, torch.Tensor, torch.Tensor]:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            rows = case.rank_slice(comm.rank)
            inputs = (case.x[rows], case.routing.topk_ids[rows], case.routing.topk_weights[rows])
            scales = layer.calibrate(*inputs)
            assert layer.activation_mode is ActivationMode.NVFP4
            return scales.input_global, scales.down_input_global, forward_rank(layer, case, comm.rank)

    return run_threads(len(case.splits), body, WATCHDOG_S)


def test_calibrate_weight_only_layer_equals_a_checkpoint_with_those_scales() -> None:
    """The same scales on every number of ranks, and the result of a checkpoint that carries them."""
    outputs = {}
    for ep_size in (1, 4):
        case = make_case("uniform", ep_size=ep_size, num_tokens=64, input_scales=False, max_tokens_per_rank=64)
        per_rank = _calibrated(case)
        assert len({a1 for a1, _, _ in per_rank}) == 1
        outputs[ep_size] = (
            per_rank[0][0],
            torch.cat([a2 for _, a2, _ in per_rank]),
            torch.cat([o for *_, o in per_rank]),
        )
    a1, a2, out = outputs[1]
    assert a1 == outputs[4][0] and torch.equal(a2, outputs[4][1])
    assert torch.equal(bits(out), bits(outputs[4][2]))
    assert a1 == pytest.approx(float(case.x.float().abs().max()) / 2688, rel=1e-6)
    scaled = dict(case.weights)
    for expert, scale in enumerate(a2):
        scaled |= {f"{expert}.w1.input_scale": torch.tensor(a1), f"{expert}.w3.input_scale": torch.tensor(a1)}
        scaled[f"{expert}.w2.input_scale"] = scale.clone()
    with_scales = LayerCase(case.config, scaled, case.x, case.routing, case.splits)
    assert rel_l2(out, oracle_of(with_scales)) < 1e-3  # same roundings (test_engine_oracle)


def test_calibrate_expert_without_tokens_fails_on_every_rank_and_changes_nothing() -> None:
    case = make_case("hot_rank", ep_size=4, input_scales=False, max_tokens_per_rank=64)

    def body(comm: Communicator) -> str:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            before = forward_rank(layer, case, comm.rank)
            rows = case.rank_slice(comm.rank)
            with pytest.raises(MegaMoeWeightError, match="calibration gave no scale") as caught:
                layer.calibrate(case.x[rows], case.routing.topk_ids[rows], case.routing.topk_weights[rows])
            assert layer.activation_mode is ActivationMode.BF16
            assert torch.equal(bits(forward_rank(layer, case, comm.rank)), bits(before))
            return str(caught.value)

    texts = run_threads(4, body, WATCHDOG_S)
    assert len(set(texts)) == 1
    assert "experts 0-3" in texts[0]  # the last eighth of 16 experts alone gets tokens


def test_calibrate_layer_built_for_one_mode_is_refused() -> None:
    case = make_case("uniform", ep_size=1, activations="bf16")
    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        with pytest.raises(MegaMoeConfigError, match="activations='auto'"):
            layer.calibrate(case.x, case.routing.topk_ids, case.routing.topk_weights)


def _without_input_scales(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name and name.endswith("input_scale")]:
        del tensors[name]


@pytest.mark.parametrize("transport", ["threads", "mpi"])
def test_run_calibrates_only_when_told_to(tmp_path: Path, transport: str) -> None:
    directory = copy_checkpoint(QWEN, tmp_path / "weight-only", _without_input_scales)
    arguments = (
        "run", "--checkpoint", directory, "--layer", 0, "--input", QWEN / "golden.safetensors", "--output",
        tmp_path / "out.safetensors", "--ep-size", 2, "--transport", transport, "--activations", "nvfp4",
    )  # fmt: skip
    if transport == "threads":
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert "--activations bf16" in refused.output and "calibrate" in refused.output
    report = tmp_path / "report.json"
    done = invoke(*arguments, "--on-missing-input-scale", "calibrate", "--json", report)
    assert done.exit_code == 0, done.output
    facts = json.loads(report.read_text())
    assert facts["activation_mode"] == "nvfp4"
    assert len(facts["calibrated"]["down_input_global"]) == 16
    assert facts["saturation"]["input_saturated"] == 0  # measured on this very input


def test_calibrate_refused_input_leaves_nothing_behind() -> None:
    """A warm-up that never ran must not keep watching later forwards."""
    case = make_case("uniform", ep_size=1, num_tokens=64, input_scales=False, max_tokens_per_rank=64)
    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        with pytest.raises(MegaMoeConfigError, match="dtype"):
            layer.calibrate(case.x.float(), case.routing.topk_ids, case.routing.topk_weights)
        engine = layer._engine
        assert isinstance(engine, CpuEngine)
        assert engine._math is not None and engine._math.observer is None
