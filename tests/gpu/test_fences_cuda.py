# SPDX-License-Identifier: Apache-2.0
"""The fence sequences on a GPU: eight virtual ranks, every launch real, captures and replays as CUDA graphs.

Sequences are those of `tests/helpers/fence_sequences.py`: warm-up, tuning on a scratch that comes and goes, eviction,
address reuse, failed launches and resets, capture, replay. Kernels: those of `test_cuda_ranks.py`.
"""

from __future__ import annotations

import pytest

from tests.helpers.fence_devices import CudaDevice, launch_out_of_phase, require_everything_happened, run_sequences
from tests.helpers.layer_cases import LayerCase, make_case, oracle_of, with_splits
from trtllm_megamoe.reference.metrics import rel_l2

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper, pytest.mark.timeout(240)]

SPLITS = [0, 1, 7, 8, 16, 4, 3, 13]


def _case() -> LayerCase:
    case = make_case(
        "masked_30", ep_size=len(SPLITS), num_tokens=sum(SPLITS), engine="cuda", activations="nvfp4",
        max_tokens_per_rank=64, timeout_s=10.0,
    )  # fmt: skip
    return with_splits(case, SPLITS)


def test_fence_sequences_no_launch_is_out_of_phase_and_every_result_is_right() -> None:
    case = _case()
    expected, by_seed = run_sequences(case, CudaDevice, range(1, 7), 60)
    assert rel_l2(expected, oracle_of(case)) < 3e-3  # fp32 sums; see test_cuda_engine.py
    require_everything_happened(by_seed)
    print([(one[0].num_launches, one[0].num_resets, len(one[0].refusals)) for one in by_seed])


def test_launch_out_of_phase_waits_for_returns_that_never_come() -> None:
    """What the book keeps from happening, and why the test above can fail."""
    texts = launch_out_of_phase(_case(), CudaDevice)
    assert any("returned rows of rank" in text for text in texts), texts
