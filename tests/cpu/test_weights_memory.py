# SPDX-License-Identifier: Apache-2.0
"""Peak memory of loading and reloading eight layers: one layer of sources plus one packing chunk above the weights.

Measured as docs/weights.md section 7 does it, with the same tool: allocator events are exact, the resident set is what
the system sees. The last test keeps one source tensor on purpose and must be caught.
"""

from __future__ import annotations

import pytest
import torch

from tools.measure_load_memory import (
    CASES,
    NUM_LAYERS,
    SHAPE,
    SPEC,
    AllocationMeter,
    ResidentMeter,
    chunk_bytes,
    growth,
)
from trtllm_megamoe.weights.layout_base import ExpertBulk
from trtllm_megamoe.weights.staging import ExpertStaging

LAYER_BYTES = SPEC.source_bytes
TENSOR_BYTES = SHAPE.intermediate_size * SHAPE.hidden_size // 2  # the caller's own tensor, in flight
SCALAR_BYTES = 64 << 10  # alphas and scalars; far below one bulk tensor
RESIDENT_BYTES = 3 << 20  # page tables and Python objects of a run, seen to be under 1 MiB
BY_NAME = {case.name: case for case in CASES}
BOUNDED = [case.name for case in CASES if "in memory" not in case.name]
assert TENSOR_BYTES > SCALAR_BYTES


def bound_bytes(layout: str) -> int:
    """One layer and one packing chunk. Packing to the reference layout allocates nothing: its chunk is one tensor."""
    chunk = TENSOR_BYTES if layout == "reference" else chunk_bytes(layout, "cpu", AllocationMeter)
    return LAYER_BYTES + chunk + SCALAR_BYTES


@pytest.mark.parametrize(("name", "layout"), [*((name, "reference") for name in BOUNDED), (BOUNDED[1], "sm90")])
def test_weights_allocations_stay_within_one_layer_and_one_chunk(name: str, layout: str) -> None:
    peak = growth(BY_NAME[name], layout, "cpu", AllocationMeter)
    assert peak <= bound_bytes(layout)
    assert peak > LAYER_BYTES // 2  # the meter sees staging at all


@pytest.mark.parametrize("name", BOUNDED)
def test_weights_resident_set_stays_within_one_layer_and_one_chunk(name: str) -> None:
    peak = growth(BY_NAME[name], "reference", "cpu", ResidentMeter)
    assert peak <= LAYER_BYTES + SHAPE.expert_bytes + RESIDENT_BYTES


def test_weights_suffix_order_in_memory_needs_what_was_computed_and_no_more() -> None:
    """The order itself keeps all layers incomplete until the end; the loader announces exactly that need."""
    name = "reload, suffix order, staged in memory"
    peak = growth(BY_NAME[name], "reference", "cpu", AllocationMeter)
    assert NUM_LAYERS * LAYER_BYTES <= peak <= NUM_LAYERS * LAYER_BYTES + SHAPE.expert_bytes + SCALAR_BYTES


def test_weights_memory_bound_notices_one_kept_source(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    calls = 0
    original = ExpertStaging.take_expert

    def leak(self: ExpertStaging, expert: int) -> ExpertBulk:
        nonlocal calls
        bulk = original(self, expert)
        calls += 1
        if calls == NUM_LAYERS * SPEC.num_local_experts + 1:  # the first expert of the reload, after the first load
            kept.append(bulk.gate_codes)
        return bulk

    monkeypatch.setattr(ExpertStaging, "take_expert", leak)
    peak = growth(BY_NAME["reload, layer by layer"], "reference", "cpu", AllocationMeter)
    assert len(kept) == 1
    assert peak > bound_bytes("reference")  # the bound of the tests above is broken by one tensor
