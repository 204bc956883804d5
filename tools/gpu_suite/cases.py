# SPDX-License-Identifier: Apache-2.0
"""Inputs of the suite: those of the package's self-test, on the GPU."""

from __future__ import annotations

from trtllm_megamoe.selftest.inputs import (
    DEVICE,
    Tensors,
    generator,
    ids_from_counts,
    random_ids,
    random_tensors,
    tokens,
    uniform_ids,
    weights,
    zipf_counts,
)

__all__ = [
    "DEVICE",
    "Tensors",
    "generator",
    "ids_from_counts",
    "random_ids",
    "random_tensors",
    "tokens",
    "uniform_ids",
    "weights",
    "zipf_counts",
]
