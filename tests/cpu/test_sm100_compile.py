# SPDX-License-Identifier: Apache-2.0
"""Blackwell kernels compiled here, without a GPU: no spill, the promised instructions, PTX that equals the oracle.

The same interpreter runs the builds of tests/data/ptx without a compiler; here the sources of this tree are what runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.sm100_case import Sm100Case
from tests.helpers.synthetic import RoutingKind
from tools.check_kernels import check_kernel, find_cuobjdump
from tools.ptxsim.layers import KernelFile
from vendored_kernels.compile import compile_configs
from vendored_kernels.sm90.config import LayerSpec
from vendored_kernels.sm100.config import TILES, KernelConfig, TileConfig

pytest.importorskip("cutlass", reason="compiling kernels needs nvidia-cutlass-dsl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ARGUMENTS = json.loads((Path(__file__).parent.parent / "data" / "ptx" / "sm100_b32.json").read_text())["arguments"]
CONFIGS = {
    "sm_100a": KernelConfig(LayerSpec(352, 96, 4, 2, "nvfp4", "fp8", swiglu_limit=5.0), TileConfig("b32s4", 32, 4)),
    "sm_103a": KernelConfig(LayerSpec(416, 160, 3, 2, "nvfp4", "fp4", weigh_before_requant=True), TILES["b128"]),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One kernel per target, with its PTX and cubin beside it."""
    directory = tmp_path_factory.mktemp("kernels")
    return {
        arch: compile_configs(arch, [config], directory, keep_intermediates=True)[0] for arch, config in CONFIGS.items()
    }


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_compiled_kernel_has_no_fault(compiled: dict[str, Path], arch: str) -> None:
    assert check_kernel(compiled[arch].with_suffix(".json"), find_cuobjdump()) == []


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_compiled_kernel_ptx_equals_the_oracle(compiled: dict[str, Path], arch: str) -> None:
    text = compiled[arch].with_suffix(".ptx").read_text()
    assert f".target {arch}" in text and len(re.findall(r"kind::mxf4nvf4", text)) == 4
    kernel = KernelFile(text, {**CONFIGS[arch].facts(), "arguments": ARGUMENTS})
    case = Sm100Case(kernel, RoutingKind.MASKED_30, 37)
    case.check(case.run(seed=3, launches=2))
