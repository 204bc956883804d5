# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine over GPUs: one rank per process and GPU, `mpirun -n R python -m pytest tests/multigpu` or torchrun.

Kernels come from the cache (`TRTLLM_MEGAMOE_CACHE_DIR`); `tools/needed_kernels.py ranks --ranks R --compile DIR` fills
it on a machine with the DSL.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.helpers.layer_cases import LayerCase, bits, oracle_of
from tests.helpers.rank_cases import OPTIONS, rank_case
from tests.helpers.symmetric_program import WAIT_S, communicator
from trtllm_megamoe.comm import Communicator, single
from trtllm_megamoe.layer import MegaMoELayer
from trtllm_megamoe.reference.metrics import rel_l2

pytestmark = [pytest.mark.gpu_2, pytest.mark.arch_hopper, pytest.mark.timeout(180)]

# fp32 sums in the tensor cores may move a value across one rounding boundary of the requantisation or of the wire
TOLERANCE = {"bf16": 3e-3, "fp8": 5e-3, "fp4": 1e-2}
KINDS = ("uniform", "zipf", "hot_expert", "hot_rank", "all_masked", "masked_30", "duplicates")
SOAK_LAUNCHES = int(os.environ.get("MEGAMOE_SOAK_LAUNCHES", "2000"))


@pytest.fixture(scope="module")
def comm() -> Communicator:
    return communicator()


def _inputs(case: LayerCase, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = case.rank_slice(rank)
    return case.x[rows].cuda(), case.routing.topk_ids[rows].cuda(), case.routing.topk_weights[rows].cuda()


@pytest.mark.parametrize(("mode", "fmt"), OPTIONS)
def test_layer_over_gpus_equals_one_gpu_bit_for_bit_and_meets_the_oracle(
    comm: Communicator, mode: str, fmt: str
) -> None:
    """Every routing, uneven token counts with zeros; this rank's rows against a one-rank layer with all experts."""
    first = rank_case(comm.size, "uniform", mode, fmt)
    with MegaMoELayer(first.config, comm) as layer, MegaMoELayer(first.config, single()) as alone:
        layer.load_weights(first.weights)
        alone.load_weights(first.weights)
        for index, kind in enumerate(KINDS):
            case = rank_case(comm.size, kind, mode, fmt, shift=index)
            inputs = _inputs(case, comm.rank)
            out = layer.forward(*inputs)
            assert torch.equal(bits(out), bits(alone.forward(*inputs))), kind
            if inputs[0].shape[0]:
                expected = oracle_of(case)[case.rank_slice(comm.rank)]
                assert rel_l2(out.cpu(), expected) < TOLERANCE[fmt], kind


def test_layer_over_gpus_graph_replays_changed_inputs_with_the_bits_of_eager(comm: Communicator) -> None:
    case = rank_case(comm.size, "uniform", "nvfp4", "bf16", shift=2)
    with MegaMoELayer(case.config, comm) as layer:
        layer.load_weights(case.weights)
        static = _inputs(case, comm.rank)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.forward(*static)
        for seed in (1, 30, 60):
            fresh = _inputs(rank_case(comm.size, "masked_30", "nvfp4", "bf16", shift=2, seed=seed), comm.rank)
            for old, new in zip(static, fresh, strict=True):
                old.copy_(new)
            torch.cuda.synchronize()
            comm.barrier(WAIT_S)
            graph.replay()
            eager = layer.forward(*fresh)
            assert torch.equal(bits(out), bits(eager)), seed


def test_layer_over_gpus_many_launches_with_random_tokens_and_delays(comm: Communicator) -> None:
    """Each launch's rows equal the one-rank layer's; delays of up to 50 us put ranks out of step."""
    variants = [
        rank_case(comm.size, kind, "nvfp4", "bf16", shift=shift, seed=shift + 1)
        for shift, kind in enumerate(
            ("uniform", "zipf", "hot_expert", "masked_30", "duplicates", "all_masked", "uniform")
        )
    ]
    rng = torch.Generator().manual_seed(comm.rank)
    with MegaMoELayer(variants[0].config, comm) as layer, MegaMoELayer(variants[0].config, single()) as alone:
        layer.load_weights(variants[0].weights)
        alone.load_weights(variants[0].weights)
        inputs = [_inputs(case, comm.rank) for case in variants]
        expected = [alone.forward(*given) for given in inputs]
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for launch in range(SOAK_LAUNCHES):
            which = (launch * 7 + launch // 11) % len(variants)
            if int(torch.randint(0, 4, (), generator=rng)) == 0:
                torch.cuda._sleep(int(torch.randint(1, 90_000, (), generator=rng)))
            out = layer.forward(*inputs[which])
            differing += (bits(out) != bits(expected[which])).sum()
        assert int(differing) == 0


def test_layer_over_gpus_late_ranks_are_waited_for(comm: Communicator) -> None:
    """Every rank in turn comes a quarter of a second late, on the host and on its stream; no result changes."""
    case = rank_case(comm.size, "zipf", "bf16", "bf16", shift=3)
    with MegaMoELayer(case.config, comm) as layer:
        layer.load_weights(case.weights)
        inputs = _inputs(case, comm.rank)
        expected = bits(layer.forward(*inputs)).clone()
        torch.cuda.synchronize()
        for late in range(comm.size):
            comm.barrier(WAIT_S)
            if comm.rank == late:
                time.sleep(0.25)
                torch.cuda._sleep(20_000_000)
            first, second = layer.forward(*inputs), layer.forward(*inputs)
            assert torch.equal(bits(first), expected) and torch.equal(bits(second), expected), late
