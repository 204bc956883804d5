# SPDX-License-Identifier: Apache-2.0
"""Expert load balancing through the backend: static placements, and experts that change slots at run time (R25)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_host.install import installed_host
from tests.helpers.golden import golden_layer
from tests.helpers.host_layer import (
    REL_L2,
    finish_balancing,
    forward,
    load,
    load_balancer,
    make_moe,
    model_config,
    oracle_of,
)
from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeStateError, MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.reference.metrics import rel_l2

QWEN = golden_layer("modelopt_nvfp4_qwen3_moe", 0)


pytestmark = pytest.mark.usefixtures("cpu_host")


PLACEMENT = [5, 3, 0, 1, 2, 4, 6, 7, 15, 14, 13, 12, 8, 9, 10, 11, 0, 5, 5, 7, 1, 2, 3, 9]
"""24 slots for 16 experts in a shuffled order, some experts in two or three."""


def test_static_placement_with_redundant_slots_equals_the_oracle(base: str) -> None:
    """Ids are slots (R25), and the balancer is told where the experts are."""
    with load_balancer(base, 24, PLACEMENT) as (config, balancer):
        moe = make_moe(base, QWEN, model_config(moe_load_balancer=config))
    placed = balancer.single_layer_load_balancers[0]
    placed.assignments = None
    load(moe, QWEN)
    finish_balancing(balancer)
    assert placed.assignments == PLACEMENT and not placed.slots
    rows = slice(0, 8)
    assert rel_l2(forward(moe, QWEN, rows), oracle_of(QWEN, rows)) < REL_L2


def test_placement_that_leaves_an_expert_out_is_an_error() -> None:
    slots_of_expert = importlib.import_module("trtllm_megamoe.host.migration").slots_of_expert
    assert slots_of_expert(list(range(16)), 16) is None
    with pytest.raises(MegaMoeConfigError, match=r"unknown experts \[16\]; experts without a slot: \[11\]"):
        slots_of_expert([16, *PLACEMENT[:15], *[0] * 9], 16)


def test_experts_that_migrate_give_the_oracles_results_after_every_update(
    base: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several updates, as one can pass by luck; memory that the experts were moved out of is poisoned."""
    activations = "bf16" if "D1" in request.node.name else "nvfp4"
    monkeypatch.setenv("TRTLLM_MEGAMOE_ACTIVATIONS", activations)
    with load_balancer(base, 24, PLACEMENT, updates=1) as (config, balancer):
        moe = make_moe(base, QWEN, model_config(moe_load_balancer=config, moe_max_num_tokens=3))
    moe.load_weights([QWEN.tensors])
    for _ in range(2):
        moe.post_load_weights()
        moe.backend.process_weights_after_loading()
    finish_balancing(balancer)
    rows, seen = slice(0, 8), set()
    iteration = importlib.import_module(f"{base}.moe_load_balancer").MoeLoadBalancerIterContext
    placed = balancer.single_layer_load_balancers[0]
    before = {slot: t.data_ptr() for slot, t in placed.slots.items()}
    for _ in range(8):
        seen.add(tuple(placed.assignments))
        with iteration(balancer):
            out = forward(moe, QWEN, rows, all_rank_num_tokens=[8])
        assert rel_l2(out, oracle_of(QWEN, rows, ActivationMode(activations))) < REL_L2
    assert len(seen) == 8 and before == {slot: t.data_ptr() for slot, t in placed.slots.items()}
    assert moe.backend.megamoe_migration.store is None  # the host has the copies
    with pytest.raises((MegaMoeStateError, NotImplementedError), match="EPLB"):
        moe.pre_reload_weights()
    with iteration(balancer):
        forward(moe, QWEN, rows)  # the refusal changed nothing


def test_expert_that_is_written_into_a_slot_brings_all_its_numbers(newest: str) -> None:
    """Every registered tensor matters: leave one where it was and the moved experts are wrong."""
    iteration = importlib.import_module(f"{newest}.moe_load_balancer").MoeLoadBalancerIterContext
    rows = slice(0, 8)
    names: set[str] = set()
    left_out = iter(("", "megamoe_gate_codes", "megamoe_down_scales", "megamoe_fc1_alpha", "megamoe_fc2_alpha"))
    for name in left_out:
        with load_balancer(newest, 16, updates=1) as (config, balancer):
            moe = make_moe(newest, QWEN, model_config(moe_load_balancer=config))
        load(moe, QWEN)
        finish_balancing(balancer)
        placed = balancer.single_layer_load_balancers[0]
        names |= {registered for _, registered in placed.slots}
        placed.slots = {key: t for key, t in placed.slots.items() if key[1] != name}
        for _ in range(2):
            with iteration(balancer):
                out = forward(moe, QWEN, rows)
        assert (rel_l2(out, oracle_of(QWEN, rows)) < REL_L2) == (name == ""), name
    assert names == {
        *(f"megamoe_{part}_{what}" for part in ("gate", "up", "down") for what in ("codes", "scales")),
        *(f"megamoe_{what}" for what in ("fc1_alpha", "fc2_alpha", "fc1_norm_const", "fc2_input_scale")),
    }


def test_migration_refuses_a_balancer_it_does_not_know(newest: str, tmp_path: Path) -> None:
    migration = importlib.import_module("trtllm_megamoe.host.migration")

    class PerIteration:
        def is_dynamic_routing(self) -> bool:
            return False

        is_static_routing = is_dynamic_routing

    with pytest.raises(MegaMoeConfigError, match="load balancer PerIteration neither keeps experts"):
        migration.balancing_of(PerIteration())
    with load_balancer(newest, 16, updates=1) as (config, _):
        scattered = importlib.import_module(f"{newest}.moe_load_balancer").SingleLayerMoeLoadBalancer
        scattered.get_load_expert_ids = lambda self: [0, 2, 4]
        with pytest.raises(
            MegaMoeUnavailableError, match=r"layer 7: .* experts \[0, 2, 4\] .* layer_updates_per_iter: 0"
        ):
            make_moe(newest, QWEN, model_config(moe_load_balancer=config))


def test_migration_with_a_changed_host_is_refused_where_it_is_asked_for_only(tmp_path: Path) -> None:
    def rename(plan: Any) -> None:
        plan.edit(f"{plan.moe_base}.moe_load_balancer", "def finalize_layer_weights", "def finalise_layer_weights")

    with installed_host(tmp_path, "D2", rename) as name:
        importlib.import_module("trtllm_megamoe.host")
        make_moe(name, QWEN, model_config())
        with load_balancer(name, 16, updates=1) as (config, _):
            expected = r"experts that move at run time.*HostMoeTensorSharer: expected members finalize_layer_weights"
            with pytest.raises(MegaMoeUnavailableError, match=expected):
                make_moe(name, QWEN, model_config(moe_load_balancer=config))
