# SPDX-License-Identifier: Apache-2.0
"""The microbench's GPU timers on work of known length: they time the GPU, in order, and repeat the first result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from microbench.timing import Mode, Timed, TimingSpec
from microbench.timing_cuda import time_eager, time_graph
from trtllm_megamoe.comm import single

pytestmark = pytest.mark.gpu

BYTES = 1 << 30


def make_forward() -> tuple[Callable[[int], torch.Tensor], list[int]]:
    """Doubles one of two buffers of 1 GiB: reads and writes 2 GiB, at least 0.2 ms on any GPU of today."""
    buffers = [torch.full((BYTES // 4,), float(value), device="cuda") for value in (1, 2)]
    calls: list[int] = []

    def forward(index: int) -> torch.Tensor:
        calls.append(index)
        return buffers[index % 2] * 2

    return forward, calls


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("timer", [time_eager, time_graph])
def test_timer_measures_the_gpu_and_repeats_the_first_result(timer: Callable[..., Timed], mode: Mode) -> None:
    forward, calls = make_forward()
    spec = TimingSpec(mode, warmup=2, iters=5, forwards_per_graph=4, timeout_s=10.0)
    timed = timer(forward, spec, single())
    samples = timed.samples.slowest_us
    assert len(samples) == 5
    # 2 GiB at no more than 10 TB/s; a host clock around an asynchronous launch would show far less
    assert min(samples) > 200
    # one forward, not a whole graph or run: a hundred times slower than memory is no longer this work
    assert max(samples) < 20_000
    assert torch.equal(timed.repeated, torch.full_like(timed.repeated, 2.0))
    if timer is time_graph:
        assert timed.iters_per_graph == 4
        assert calls == [0, 1, 2, 3, 0, 1, 2, 3]  # warm-up and capture; replays call nothing
    else:
        assert calls == [*range(7), 0]
