# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel on a GPU: the suite's checks that take seconds, as tests.

Kernels come from the directory in MEGAMOE_TEST_KERNELS (`tools/run_gpu_suite.py PART --compile --cache DIR` fills it);
without it they are compiled first, which needs the DSL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_suite import correctness, goldens, products, sanitized, sanitizer, stability
from tools.gpu_suite.kernels import needed
from vendored_kernels.compile import compile_configs

pytestmark = [pytest.mark.gpu, pytest.mark.arch_hopper, pytest.mark.timeout(1800)]
MODES = ("bf16", "nvfp4")
CASES = ("small-nvfp4", "small-bf16", "tiny-odd", "odd-nvfp4", "gpt-oss-120b")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every kernel these tests need."""
    if "MEGAMOE_TEST_KERNELS" in os.environ:
        return Path(os.environ["MEGAMOE_TEST_KERNELS"])
    directory = tmp_path_factory.mktemp("kernels")
    parts = ["products", "correctness", "goldens", *sanitized.CASES]
    compile_configs("sm_90a", needed(parts, [], list(MODES)), directory, jobs=os.cpu_count() or 1)
    return directory


def _assert_all_ok(results: Iterable[dict[str, Any]]) -> None:
    found = list(results)
    assert found
    assert [r for r in found if not r["ok"]] == []


@pytest.mark.parametrize("case", CASES)
def test_kernel_any_routing_and_tile_equals_the_oracle(kernels: Path, case: str) -> None:
    _assert_all_ok(correctness.run(kernels, case))


def test_kernel_every_product_of_code_and_scale_byte_is_exact(kernels: Path) -> None:
    _assert_all_ok(products.run(kernels))


def test_kernel_modelopt_checkpoints_equal_exporter_and_oracle(kernels: Path) -> None:
    _assert_all_ok(goldens.run(kernels))


def test_kernel_graph_replay_with_changed_inputs_equals_eager(kernels: Path) -> None:
    _assert_all_ok(stability.graph(kernels))


def test_kernel_wait_that_never_ends_is_reported_and_heals(kernels: Path) -> None:
    _assert_all_ok(stability.faults(kernels))


@pytest.mark.sanitizer
def test_kernel_sanitizer_finds_nothing(kernels: Path) -> None:
    for part in sanitized.CASES:
        _assert_all_ok(sanitizer.run(part, MODES, kernels, list(sanitizer.TOOLS)))
