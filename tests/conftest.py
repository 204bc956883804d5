# SPDX-License-Identifier: Apache-2.0
"""What every test shares: skips with a reason where the machine lacks something, thread limits, hypothesis profile.

A marker says what a test needs (pyproject.toml lists them); this file alone decides whether that is here. Tests that
need several GPUs also skip outside a launcher, so that a plain pytest never waits for peers that do not exist.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

from trtllm_megamoe.symmetric.devices import OVERLAP_VARIABLE

_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
_GPUS_NEEDED = {"gpu": 1, "gpu_2": 2, "gpu_4": 4, "gpu_8": 8}

# Deadlines measure the machine, not the code; a fixed seed in CI keeps a red run reproducible.
settings.register_profile("repo", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("repo")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread a process, here and in every rank a test starts: idle ones spin, and the cores are few."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def _missing(item: pytest.Item) -> str | None:
    """Why this machine cannot run the test, or None."""
    markers = {mark.name for mark in item.iter_markers()}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = max((count for name, count in _GPUS_NEEDED.items() if name in markers), default=0)
    if markers & {"arch_hopper", "arch_blackwell", "sanitizer"}:
        needed = max(needed, 1)
    if gpus and os.environ.get(OVERLAP_VARIABLE) == "1":
        gpus = max(gpus, needed)  # ranks take turns on the GPUs that there are
    if needed > gpus:
        return f"needs {needed} CUDA GPU(s), {gpus} visible"
    if needed > 1 and not any(name in os.environ for name in _LAUNCHER_VARIABLES):
        return f"needs {needed} ranks: run it under mpirun or torchrun"
    if "arch_hopper" in markers and torch.cuda.get_device_capability() != (9, 0):
        return f"needs compute capability 9.0, have {torch.cuda.get_device_capability()}"
    if "arch_blackwell" in markers and torch.cuda.get_device_capability()[0] != 10:
        return f"needs compute capability 10.x, have {torch.cuda.get_device_capability()}"
    if "trtllm" in markers and importlib.util.find_spec("tensorrt_llm") is None:
        return "needs tensorrt_llm, which is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as skipped, with its reason, what this machine cannot run."""
    for item in items:
        reason = _missing(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
