# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine over virtual ranks: R layers in R threads on one GPU, through the public interface.

Kernels come from the cache (`TRTLLM_MEGAMOE_CACHE_DIR`); `tools/needed_kernels.py layers --compile DIR` fills it on a
machine that has the DSL.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.layer_cases import LayerCase, bits, make_case, oracle_of, with_splits
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cuda.engine import CudaEngine
from trtllm_megamoe.errors import MegaMoeAbortedError, MegaMoeError, MegaMoeTimeoutError
from trtllm_megamoe.layer import MegaMoELayer, build_workspace
from trtllm_megamoe.reference.metrics import rel_l2
from vendored_kernels.common.sites import FAULT_PUBLISH

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper, pytest.mark.timeout(120)]

RANKS = 8
# fp32 sums in the tensor cores may move a value across one rounding boundary of the requantisation or of the wire
TOLERANCE = {"bf16": 3e-3, "fp8": 5e-3, "fp4": 1e-2}
OPTIONS = [("nvfp4", "bf16"), ("bf16", "fp8")]
SPLITS = [0, 1, 7, 8, 64, 40, 3, 13]
WATCHDOG_S = 60.0


def _case(kind: str = "random", seed: int = 1, **config: object) -> LayerCase:
    fields: dict[str, object] = {"engine": "cuda", "max_tokens_per_rank": 64, "timeout_s": 10.0}
    case = make_case(kind, ep_size=RANKS, num_tokens=sum(SPLITS), seed=seed, **(fields | config))
    return with_splits(case, SPLITS)


def configs() -> list[MegaMoeConfig]:
    """The layers of this file."""
    return [_case(activations=mode, combine_format=fmt).config for mode, fmt in OPTIONS]


def _inputs(case: LayerCase, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = case.rank_slice(rank)
    return case.x[rows].cuda(), case.routing.topk_ids[rows].cuda(), case.routing.topk_weights[rows].cuda()


def _over_ranks(case: LayerCase, launches: int = 1) -> torch.Tensor:
    def body(comm: Communicator) -> torch.Tensor:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            assert layer.engine_name == "cuda"
            inputs = _inputs(case, comm.rank)
            for _ in range(launches):
                out = layer.forward(*inputs)
            return out.cpu()

    return torch.cat(run_threads(RANKS, body, WATCHDOG_S, "cuda"))


@pytest.mark.parametrize(("mode", "fmt"), OPTIONS)
@pytest.mark.parametrize("kind", ["uniform", "hot_expert", "all_masked", "masked_30", "duplicates"])
def test_virtual_ranks_meet_the_oracle(kind: str, mode: str, fmt: str) -> None:
    case = _case(kind, activations=mode, combine_format=fmt)
    assert rel_l2(_over_ranks(case, launches=3), oracle_of(case)) < TOLERANCE[fmt]


def test_virtual_ranks_two_layers_take_turns_on_one_workspace() -> None:
    cases = [_case(activations="nvfp4", seed=seed) for seed in (1, 70)]
    alone = [_over_ranks(case) for case in cases]

    def body(comm: Communicator) -> list[torch.Tensor]:
        workspace = build_workspace(cases[0].config, comm)
        layers = [MegaMoELayer(case.config, comm, workspace=workspace) for case in cases]
        for layer, case in zip(layers, cases, strict=True):
            layer.load_weights(case.weights)
        outs = []
        for turn in range(6):
            outs.append(layers[turn % 2].forward(*_inputs(cases[turn % 2], comm.rank)).cpu())
        return outs

    results = run_threads(RANKS, body, WATCHDOG_S, "cuda")
    for turn in range(6):
        assert torch.equal(bits(torch.cat([r[turn] for r in results])), bits(alone[turn % 2])), turn


def test_virtual_ranks_one_that_stops_is_named_by_all_others() -> None:
    case = _case(activations="nvfp4", timeout_s=0.2)
    culprit = 5

    def body(comm: Communicator) -> str:
        layer = MegaMoELayer(case.config, comm)
        layer.load_weights(case.weights)
        engine = layer._engine
        assert isinstance(engine, CudaEngine)
        if comm.rank == culprit:
            for bucket, launch in list(engine._launches.items()):
                engine._launches[bucket] = replace(launch, launch=partial(launch.launch, fault_step=FAULT_PUBLISH))
        inputs = _inputs(case, comm.rank)
        layer.forward(*inputs)
        torch.cuda.current_stream().synchronize()
        comm.barrier(WATCHDOG_S)
        try:
            layer.forward(*inputs)
        except MegaMoeError as err:
            return f"{type(err).__name__}: {err}"
        return "no error"

    texts = run_threads(RANKS, body, WATCHDOG_S, "cuda")
    timeouts = [text for text in texts if text.startswith(MegaMoeTimeoutError.__name__)]
    aborted = [text for text in texts if text.startswith(MegaMoeAbortedError.__name__)]
    assert len(timeouts) + len(aborted) == RANKS, texts
    assert timeouts and all(f"size cells for rank {culprit}" in text for text in timeouts), texts
    fresh = _case(activations="nvfp4")  # the process can go on with a new layer
    assert rel_l2(_over_ranks(fresh), oracle_of(fresh)) < TOLERANCE["bf16"]
