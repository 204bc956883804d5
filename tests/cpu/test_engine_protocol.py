# SPDX-License-Identifier: Apache-2.0
"""The launch protocol on threads: no reset between launches, late and missing ranks, divergence, capacity."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch

from tests.helpers.layer_cases import WATCHDOG_S, LayerCase, bits, forward_rank, make_case, with_splits
from tests.helpers.synthetic import seeded
from trtllm_megamoe.comm import Communicator, run_threads
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.engines.cpu.engine import CpuEngine
from trtllm_megamoe.errors import (
    MegaMoeAbortedError,
    MegaMoeCapacityError,
    MegaMoeConfigError,
    MegaMoeRankDivergenceError,
    MegaMoeStateError,
    MegaMoeTimeoutError,
    MegaMoeWeightError,
)
from trtllm_megamoe.layer import MegaMoELayer

EP = 4


def _engine(layer: MegaMoELayer) -> CpuEngine:
    engine = layer._engine
    assert isinstance(engine, CpuEngine)
    return engine


def _cases(count: int, **options: object) -> list[LayerCase]:
    """Launches with other tokens, ids and shares, zeros included."""
    generator = seeded(99)
    cases = []
    for index in range(count):
        splits = torch.randint(0, 9, (EP,), generator=generator) * torch.randint(0, 2, (EP,), generator=generator)
        kind = ["random", "hot_rank", "masked_30", "all_masked", "duplicates"][index % 5]
        total = max(1, int(splits.sum()))
        case = make_case(kind, ep_size=1, num_tokens=total, max_tokens_per_rank=8, seed=1, **options)
        cases.append(with_splits(case, splits.tolist()))
    return cases


def _expected(cases: list[LayerCase]) -> list[torch.Tensor]:
    """Each case's rows from one rank in a fresh layer, run in pieces that fit the cap."""
    outputs = []
    with MegaMoELayer(cases[0].config) as layer:
        layer.load_weights(cases[0].weights)
        for case in cases:
            ids, weights = case.routing.topk_ids, case.routing.topk_weights
            total = sum(case.splits)
            parts = [layer.forward(case.x[i : i + 8], ids[i : i + 8], weights[i : i + 8]) for i in range(0, total, 8)]
            outputs.append(torch.cat(parts)[:total] if parts else torch.empty(0, case.config.hidden_size).bfloat16())
    return outputs


@pytest.mark.parametrize("first_epoch", [0, (1 << 32) - 2])
def test_launches_back_to_back_with_random_delays_and_poison_keep_their_bits(first_epoch: int) -> None:
    """No reset, no barrier: ranks drift apart by up to one launch, zero-token launches included, and everything but the
    documented counters may hold anything between launches (B17). Epochs cross 2^32."""
    cases = _cases(20)
    expected = _expected(cases)

    def body(comm: Communicator) -> list[torch.Tensor]:
        delays = seeded(comm.rank)
        with MegaMoELayer(cases[0].config, comm) as layer:
            layer.load_weights(cases[0].weights)
            engine = _engine(layer)
            engine._local["epoch"].fill_(first_epoch)
            outputs = []
            for case in cases:
                time.sleep(0.004 * float(torch.rand((), generator=delays)))
                for region in layer.table.regions("local"):
                    if not region.zero_at_start:
                        engine._local[region.name].view(torch.uint8).fill_(0xFF)
                # results and payload are this rank's between launches; a peer may already write its next index row
                for name in ("payload", "payload_scales", "route_weights", "result_data", "result_scales"):
                    engine._own[name].view(torch.uint8).fill_(0xFF)
                outputs.append(forward_rank(layer, case, comm.rank))
            return outputs

    per_rank = run_threads(EP, body, WATCHDOG_S)
    for index in range(len(cases)):
        got = torch.cat([outputs[index] for outputs in per_rank])
        assert torch.equal(bits(got), bits(expected[index])), f"launch {index}"


def test_launch_zero_tokens_everywhere_returns_empty_rows() -> None:
    case = with_splits(make_case("random", ep_size=1, num_tokens=1), [0] * EP)

    def body(comm: Communicator) -> torch.Tensor:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            return forward_rank(layer, case, comm.rank)

    assert all(out.shape == (0, 256) for out in run_threads(EP, body, WATCHDOG_S))


def test_launch_hot_rank_rotating_every_launch_terminates() -> None:
    """B01: all routes of all ranks to one rank's experts, full cap, the hot rank moving."""
    base = make_case("random", ep_size=EP, num_tokens=8 * EP, max_tokens_per_rank=8)

    def body(comm: Communicator) -> bool:
        with MegaMoELayer(base.config, comm) as layer:
            layer.load_weights(base.weights)
            for launch in range(8):
                ids = torch.full((8, 4), 4 * (launch % EP) + 3)
                out = layer.forward(base.x[:8], ids, torch.full((8, 4), 0.25))
                assert not out.isnan().any()
            return True

    assert all(run_threads(EP, body, WATCHDOG_S))


def test_launch_missing_rank_times_out_by_name_and_peers_are_told() -> None:
    case = make_case("random", ep_size=EP, timeout_s=1.0)

    def body(comm: Communicator) -> str:
        layer = MegaMoELayer(case.config, comm)
        layer.load_weights(case.weights)
        if comm.rank == 2:
            return "absent"
        try:
            forward_rank(layer, case, comm.rank)
        except MegaMoeTimeoutError as err:
            assert "for rank 2 in launch 1" in str(err) and "size_cells" in str(err)
            record = _engine(layer)._local["error_record"].tolist()
            assert record[:3] == [1, comm.rank, 2]
            first = "timeout"
        except MegaMoeAbortedError:
            first = "aborted"
        with pytest.raises(MegaMoeAbortedError, match="Build the layer anew"):
            forward_rank(layer, case, comm.rank)
        return first

    seen = run_threads(EP, body, WATCHDOG_S)
    assert seen[2] == "absent"
    assert "timeout" in seen and set(seen) <= {"absent", "timeout", "aborted"}


def test_launch_rank_that_publishes_and_never_offers_is_named_by_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("random", ep_size=EP, timeout_s=1.0)

    def body(comm: Communicator) -> str:
        layer = MegaMoELayer(case.config, comm)
        layer.load_weights(case.weights)
        if comm.rank == 2:

            def stop(epoch: int) -> None:
                raise RuntimeError(f"stopped in launch {epoch}")

            monkeypatch.setattr(_engine(layer), "_offer", stop)
            with pytest.raises(RuntimeError, match="stopped in launch 1"):
                forward_rank(layer, case, comm.rank)
            return ""
        with pytest.raises((MegaMoeTimeoutError, MegaMoeAbortedError)) as caught:
            forward_rank(layer, case, comm.rank)
        return str(caught.value)

    texts = run_threads(EP, body, WATCHDOG_S)
    assert any("at payload_tags for rank 2 in launch 1" in text for text in texts)


def test_launch_slow_rank_is_waited_for() -> None:
    case = make_case("random", ep_size=2, timeout_s=20.0)

    def body(comm: Communicator) -> torch.Tensor:
        with MegaMoELayer(case.config, comm) as layer:
            layer.load_weights(case.weights)
            time.sleep(1.0 * comm.rank)
            return forward_rank(layer, case, comm.rank)

    assert not torch.cat(run_threads(2, body, WATCHDOG_S)).isnan().any()


def test_construction_differing_facts_raise_the_same_error_on_every_rank() -> None:
    case = make_case("random", ep_size=EP)

    def body(comm: Communicator) -> str:
        changed = {"combine_format": "fp8", "max_tokens_per_rank": 5} if comm.rank == 3 else {}
        config = MegaMoeConfig.create(**(case.config.model_dump() | changed))
        with pytest.raises(MegaMoeRankDivergenceError) as caught:
            MegaMoELayer(config, comm)
        return str(caught.value)

    texts = run_threads(EP, body, WATCHDOG_S)
    assert len(set(texts)) == 1
    assert "combine_format" in texts[0] and "max_tokens_per_rank" in texts[0] and "[3]" in texts[0]


def test_forward_other_weights_on_one_rank_are_refused_everywhere() -> None:
    """Ranks that quantise with another scale than the owner undoes would be silently wrong."""
    case = make_case("random", ep_size=EP)
    other = {n: t * 2 if n.endswith(("w1.input_scale", "w3.input_scale")) else t for n, t in case.weights.items()}

    def body(comm: Communicator) -> bool:
        layer = MegaMoELayer(case.config, comm)
        layer.load_weights(other if comm.rank == 1 else case.weights)
        comm.barrier(10)
        with pytest.raises((MegaMoeRankDivergenceError, MegaMoeAbortedError)) as caught:
            forward_rank(layer, case, comm.rank)
        return caught.type is MegaMoeRankDivergenceError

    assert any(run_threads(EP, body, WATCHDOG_S))


def test_forward_above_the_cap_names_both_numbers_and_launches_nothing() -> None:
    """B19: 65 with cap 64 raises before any launch; 64 works afterwards."""
    case = make_case("random", ep_size=1, num_tokens=65, max_tokens_per_rank=64)
    with MegaMoELayer(case.config) as layer:
        layer.load_weights(case.weights)
        with pytest.raises(MegaMoeCapacityError, match="65 tokens exceed max_tokens_per_rank 64"):
            forward_rank(layer, case, 0)
        assert int(_engine(layer)._local["epoch"][0]) == 0
        forward_rank(layer, with_splits(case, [64]), 0)
        assert int(_engine(layer)._local["epoch"][0]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 256)}, "dtype torch.float32, expected torch.bfloat16"),
        ({"x": torch.zeros(3, 128, dtype=torch.bfloat16)}, r"shape \(3, 128\), expected \(T, 256\)"),
        ({"topk_ids": torch.zeros(3, 5, dtype=torch.int64)}, r"topk_ids has shape \(3, 5\), expected \(3, 4\)"),
        ({"topk_ids": torch.zeros(3, 4)}, "topk_ids has dtype torch.float32"),
        ({"topk_weights": torch.zeros(3, 4, dtype=torch.float64)}, "topk_weights has dtype torch.float64"),
        ({"topk_weights": torch.zeros(2, 4)}, r"topk_weights has shape \(2, 4\)"),
    ],
)
def test_forward_wrong_input_names_it(change: dict[str, torch.Tensor], words: str) -> None:
    case = make_case("random", ep_size=1)
    good = {
        "x": torch.zeros(3, 256, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(3, 4, dtype=torch.int32),
        "topk_weights": torch.ones(3, 4),
    }
    with MegaMoELayer(case.config) as layer:
        with pytest.raises(MegaMoeStateError, match="weights are empty, forward needs ready"):
            layer.forward(**good)
        layer.load_weights(case.weights)
        with pytest.raises(MegaMoeConfigError, match=words):
            layer.forward(**(good | change))
        layer.forward(**good)


def test_load_weight_only_checkpoint_in_nvfp4_mode_is_refused_with_advice() -> None:
    """B07: no input scale is ever made up."""
    case = make_case("random", ep_size=1, input_scales=False, activations="nvfp4")
    with (
        MegaMoELayer(case.config) as layer,
        pytest.raises(MegaMoeWeightError, match="activations='bf16'"),
    ):
        layer.load_weights(case.weights)


def test_layer_not_eligible_is_refused_before_anything_is_allocated() -> None:
    config = make_case("random", ep_size=1, num_experts=12).config

    def body(comm: Communicator) -> None:
        with pytest.raises(MegaMoeConfigError, match="12 is not divisible by ep_size 8"):
            MegaMoELayer(config, comm)

    run_threads(8, body, WATCHDOG_S)


def test_run_threads_first_own_fault_wins_over_followers() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise MegaMoeConfigError("the cause")
        comm.barrier(10)

    with pytest.raises(MegaMoeConfigError, match="the cause"):
        run_threads(3, body, WATCHDOG_S)


def test_run_threads_stuck_rank_is_named() -> None:
    def body(comm: Communicator) -> None:
        time.sleep(3.0 if comm.rank == 1 else 0.0)

    with pytest.raises(MegaMoeTimeoutError, match=r"ranks \[1\] of 2"):
        run_threads(2, body, 0.3)


def test_reload_is_atomic_and_seen_by_the_next_forward() -> None:
    """B09: A, B, A through one layer equals fresh layers; a failed reload leaves the old weights in use."""
    first = make_case("random", ep_size=1, seed=1)
    second = make_case("random", ep_size=1, seed=50)

    def fresh(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with MegaMoELayer(first.config) as layer:
            layer.load_weights(weights)
            return forward_rank(layer, first, 0)

    with MegaMoELayer(first.config) as layer:
        for weights in (first.weights, second.weights, first.weights, first.weights):
            layer.load_weights(weights)
            assert torch.equal(bits(forward_rank(layer, first, 0)), bits(fresh(weights)))
        before = forward_rank(layer, first, 0)
        damaged = dict(second.weights) | {"3.w2.weight": torch.zeros(7, 7, dtype=torch.uint8)}
        with pytest.raises(MegaMoeWeightError, match=r"w2.weight"):
            layer.load_weights(damaged)
        assert torch.equal(bits(forward_rank(layer, first, 0)), bits(before))
