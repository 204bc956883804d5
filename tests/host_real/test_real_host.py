# SPDX-License-Identifier: Apache-2.0
"""The plug-in in a real tensorrt_llm: its signatures, registration, and one NVFP4 layer against the oracle.

Skipped where no tensorrt_llm is importable. CI runs this file against the stand-in host too, so that the test itself is
known to work; only a real installation proves anything about a real one. One rank, one GPU or none (CPU engine).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from tests.helpers.golden import golden_layer
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.metrics import rel_l2
from trtllm_megamoe.reference.oracle import OracleOptions, OracleWeights, oracle_forward

pytestmark = pytest.mark.trtllm

GOLDEN = golden_layer("modelopt_nvfp4_qwen3_moe", 0)
NUM_TOKENS = 8
# fp32 sums of a kernel against the oracle's: codes within rounding of a tie may flip (docs/numerics.md 4)
REL_L2 = 2e-2


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    """The CUDA engine where it can run one rank, else the CPU engine; decided before registration reads it."""
    from trtllm_megamoe.engines.registry import choose_engine

    try:
        engine = choose_engine("cuda", 1).name
    except MegaMoeUnavailableError:
        engine = "cpu"
    os.environ["TRTLLM_MEGAMOE_ENGINE"] = engine
    importlib.import_module("trtllm_megamoe.host")


def test_real_host_differs_in_nothing_we_rely_on() -> None:
    compat = importlib.import_module("trtllm_megamoe.host.compat")
    assert [str(deviation) for deviation in compat.deviations(compat.locate())] == []


def test_real_host_accepts_the_literal() -> None:
    config = importlib.import_module("tensorrt_llm.llmapi.llm_args").MoeConfig
    assert config(backend="MEGAMOE_CUTEDSL").backend == "MEGAMOE_CUTEDSL"


def make_layer() -> Any:
    """What a model file does, with the host's own classes."""
    api = importlib.import_module("trtllm_megamoe.host.register").register().api
    quant_algo = importlib.import_module("tensorrt_llm.quantization.mode").QuantAlgo.NVFP4
    quant_config = importlib.import_module("tensorrt_llm.models.modeling_utils").QuantConfig(quant_algo=quant_algo)
    mapping = importlib.import_module("tensorrt_llm.mapping").Mapping(world_size=1, rank=0, tp_size=1)
    config_class = importlib.import_module("tensorrt_llm._torch.model_config").ModelConfig
    config = config_class(mapping=mapping, quant_config=quant_config, moe_backend="MEGAMOE_CUTEDSL", max_num_tokens=64)
    routing = api.get("routing", "RenormalizeMoeRoutingMethod")(top_k=GOLDEN.topk_ids.shape[1])
    return api.get("create_moe", "create_moe")(
        routing_method=routing,
        num_experts=16,
        hidden_size=GOLDEN.x.shape[1],
        intermediate_size=GOLDEN.tensors["0.w1.weight"].shape[0],
        dtype=torch.bfloat16,
        model_config=config,
        layer_idx=0,
    )


def test_real_host_layer_equals_the_oracle() -> None:
    moe = make_layer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert type(moe.backend).__name__ == "TrtllmMegamoeBackend"
    moe.load_weights([GOLDEN.tensors])
    moe.post_load_weights()
    moe = moe.to(device)
    x = GOLDEN.x[:NUM_TOKENS].bfloat16()
    logits = torch.randn(NUM_TOKENS, 16, generator=torch.Generator().manual_seed(0))
    out = moe.forward(x.to(device), logits.to(device), all_rank_num_tokens=[NUM_TOKENS]).cpu()
    values, ids = logits.topk(GOLDEN.topk_ids.shape[1], dim=1)
    mode = moe.backend.megamoe_layer.activation_mode
    expected = oracle_forward(
        OracleWeights.from_tensors(GOLDEN.tensors),
        x,
        ids,
        values.softmax(dim=1),
        OracleOptions.product(ActivationMode(mode)),
    )
    assert rel_l2(out, expected) < REL_L2
    assert moe.forward(x[:0].to(device), logits[:0].to(device), all_rank_num_tokens=[0]).shape == (0, x.shape[1])
