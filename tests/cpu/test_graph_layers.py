# SPDX-License-Identifier: Apache-2.0
"""What `tests/gpu/test_graph_layers.py` rests on, on the CPU engine: ranks driven as one, and a check that fails."""

from __future__ import annotations

import torch

from tests.helpers.layer_cases import bits, make_case, oracle_of
from tests.helpers.rank_layers import build_over_ranks
from trtllm_megamoe.graph.layercheck import check_layers, layer_step

RANKS = 4
CPU = torch.device("cpu")


def test_over_ranks_each_layer_on_the_shared_workspace_equals_the_oracle() -> None:
    cases = [make_case("masked_30", ep_size=RANKS, num_tokens=4 * RANKS, seed=seed, engine="cpu") for seed in (1, 30)]
    layers = build_over_ranks(cases[0].config, [dict(case.weights) for case in cases], RANKS, 60.0)
    for turn in (0, 1, 0):
        case = cases[turn]
        out = layers[turn].forward(case.x, case.routing.topk_ids, case.routing.topk_weights, 4 * RANKS)
        assert torch.equal(bits(out), bits(oracle_of(case)))


def test_layer_step_values_stay_finite_through_three_layers() -> None:
    """Otherwise equal bits of replay and eager run would prove nothing."""
    cases = [make_case("random", ep_size=1, seed=seed, engine="cpu", max_tokens_per_rank=64) for seed in (1, 30, 60)]
    layers = build_over_ranks(cases[0].config, [dict(case.weights) for case in cases], 1, 60.0)
    step = layer_step(layers, 16, CPU)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for number in range(4):
        if number:
            step.write(step.draw(generator))
        seen.append(step.run())
        assert bool(seen[-1].isfinite().all())
    assert bool((seen[0] != 0).all()) and not bool(seen[1].any()), "live rows everywhere, then none"
    assert bool(seen[2].any()) and not torch.equal(seen[2], seen[3])


def test_check_layers_locates_the_host_reads_of_the_cpu_engine() -> None:
    """The CPU engine reads tensors on the host and says so in its documentation: the methods must all find it."""
    case = make_case("random", ep_size=1, engine="cpu", max_tokens_per_rank=16)
    (layer,) = build_over_ranks(case.config, [dict(case.weights)], 1, 60.0)
    found = check_layers([layer.layers[0]], [16], CPU)
    assert len(found["failures"]) == 2 and all("engines/cpu" in text for text in found["failures"])
