# SPDX-License-Identifier: Apache-2.0
"""The dynamic methods on a real GPU: planted faults found in one pass, clean steps captured, facts behind the rules."""

from __future__ import annotations

import pytest
import torch

from trtllm_megamoe.graph import selfcheck
from trtllm_megamoe.graph.dynamic.backends import backend_for
from trtllm_megamoe.graph.dynamic.syncs import forbid_syncs

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(
    "check", [selfcheck.check_facts, selfcheck.check_frozen, selfcheck.check_clean], ids=lambda c: c.__name__
)
def test_selfcheck_passes(check, device: torch.device) -> None:
    result = check(device)
    assert result["passed"], result


def test_buckets_and_decode_replay_bit_equal_to_eager(device: torch.device) -> None:
    assert selfcheck.check_buckets(device, lambda: backend_for(device))["passed"]
    result = selfcheck.check_decode(device, 200, lambda: backend_for(device))
    assert result["passed"] and result["captured"] == [True, True], result


def test_forbid_syncs_raises_at_the_read(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="synchroniz"), forbid_syncs():
        x.sum().item()
    with forbid_syncs():
        x.add_(1)


def test_planted_faults_are_all_located_in_one_pass(device: torch.device) -> None:
    """Last in this file: its broken capture may leave the device's generator unusable."""
    result = selfcheck.check_planted(device)
    assert result["passed"], result
