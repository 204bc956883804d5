# SPDX-License-Identifier: Apache-2.0
"""The fence sequences with the CPU engine's real protocol behind the model, on virtual ranks.

`tests/gpu/test_fences_cuda.py` runs the same on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.fence_devices import CpuDevice, launch_out_of_phase, require_everything_happened, run_sequences
from tests.helpers.layer_cases import LayerCase, bits, make_case, oracle_of, with_splits
from trtllm_megamoe.errors import MegaMoeError
from trtllm_megamoe.tuning.fences import Workspace

SPLITS = [2, 1, 3]


def _case() -> LayerCase:
    case = make_case(
        "masked_30", ep_size=3, num_tokens=sum(SPLITS), hidden_size=64, intermediate_size=32, num_experts=6, top_k=2,
        engine="cpu", timeout_s=5.0,
    )  # fmt: skip
    return with_splits(case, SPLITS)


def test_fence_sequences_no_launch_is_out_of_phase_and_every_result_is_right() -> None:
    case = _case()
    expected, by_seed = run_sequences(case, CpuDevice, range(1, 6), 50)
    assert torch.equal(bits(expected), bits(oracle_of(case)))
    require_everything_happened(by_seed)


def test_launch_out_of_phase_waits_for_returns_that_never_come() -> None:
    """What the book keeps from happening."""
    texts = launch_out_of_phase(_case(), CpuDevice)
    assert any("return_counters" in text for text in texts), texts


class _Forgetful(CpuDevice):
    """Says that it has reset both sides and leaves the shared one as it was."""

    def reset(self, local: Workspace, shared: Workspace, *, dies_half_way: bool = False) -> None:
        self._zero_both = lambda a, b: (self.settle(), self._zero(a), self.settle())
        super().reset(local, shared, dies_half_way=dies_half_way)


@pytest.mark.parametrize("seed", [1, 2])
def test_fence_sequences_a_reset_that_does_half_is_noticed(seed: int) -> None:
    with pytest.raises((AssertionError, MegaMoeError)):
        run_sequences(_case(), _Forgetful, [seed], 50)
