# SPDX-License-Identifier: Apache-2.0
"""Blackwell kernels compiled here, without a GPU: no spill, the promised instructions, PTX that equals the oracle.

The same interpreter runs the builds of tests/data/ptx without a compiler; here the sources of this tree are what runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.ranks_case import RanksCase
from tests.helpers.sm100_case import Sm100Case
from tests.helpers.synthetic import RoutingKind
from tools.check_kernels import check_kernel, find_cuobjdump
from tools.ptxsim.kept import facts
from tools.ptxsim.layers import KernelFile
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.common.sites import FAULT_RETURN, FAULT_STAGED
from vendored_kernels.compile import compile_configs
from vendored_kernels.sm100.config import TILES, KernelConfig, TileConfig

pytest.importorskip("cutlass", reason="compiling kernels needs nvidia-cutlass-dsl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIGS = {
    "sm_100a": KernelConfig(LayerSpec(352, 96, 4, 2, "nvfp4", "fp8", swiglu_limit=5.0), TileConfig("b32s4", 32, 4)),
    "sm_103a": KernelConfig(LayerSpec(416, 160, 3, 2, "nvfp4", "fp4", weigh_before_requant=True), TILES["b128"]),
}
RANKS = {
    "sm_100a": KernelConfig(LayerSpec(352, 96, 2, 2, "nvfp4", "bf16", ep_size=2), TileConfig("b32s4", 32, 4)),
    "sm_103a": KernelConfig(
        LayerSpec(2080, 32, 2, 2, "nvfp4", "fp8", ep_size=2, weigh_before_requant=True), TileConfig("b64s3", 64, 3)
    ),
}
"""The same for two ranks."""
PAIRS = {
    "sm_100a": KernelConfig(LayerSpec(672, 96, 2, 2, "nvfp4", "fp4", swiglu_limit=3.0), TileConfig("wide", 256, 3, 2)),
    "sm_103a": KernelConfig(LayerSpec(288, 160, 2, 2, "nvfp4", "fp8", ep_size=2), TileConfig("narrow", 64, 4, 2)),
}
"""Pairs of CTAs: one rank with the widest token block, whose accumulators overlap; two ranks with the narrowest."""


def _compile_each(configs: dict[str, KernelConfig], directory: Path) -> dict[str, Path]:
    """One kernel per target, with its PTX and cubin beside it."""
    return {
        arch: compile_configs(arch, [config], directory, keep_intermediates=True)[0] for arch, config in configs.items()
    }


@pytest.fixture(scope="module")
def compiled_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One kernel of two ranks per target."""
    return _compile_each(RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def compiled_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A kernel of pairs per target."""
    return _compile_each(PAIRS, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One kernel per target."""
    return _compile_each(CONFIGS, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_compiled_kernel_has_no_fault(compiled: dict[str, Path], arch: str) -> None:
    assert check_kernel(compiled[arch].with_suffix(".json"), find_cuobjdump()) == []


@pytest.mark.parametrize("arch", list(CONFIGS))
def test_compiled_kernel_ptx_equals_the_oracle(compiled: dict[str, Path], arch: str) -> None:
    text = compiled[arch].with_suffix(".ptx").read_text()
    assert f".target {arch}" in text and len(re.findall(r"kind::mxf4nvf4", text)) == 4
    kernel = KernelFile(text, facts(CONFIGS[arch], arch))
    case = Sm100Case(kernel, RoutingKind.MASKED_30, 37)
    case.check(case.run(seed=3, launches=2))


@pytest.mark.parametrize("arch", list(RANKS))
def test_compiled_kernel_of_two_ranks_has_no_fault(compiled_ranks: dict[str, Path], arch: str) -> None:
    assert check_kernel(compiled_ranks[arch].with_suffix(".json"), find_cuobjdump()) == []


@pytest.mark.parametrize(
    ("arch", "kind", "counts", "grid", "launches"),
    [
        ("sm_100a", RoutingKind.HOT_RANK, (9, 6), 2, 1),
        ("sm_100a", RoutingKind.DUPLICATES, (5, 1), 1, 3),
        ("sm_103a", RoutingKind.RANDOM, (3, 2), 2, 1),
    ],
)
def test_compiled_kernel_of_two_ranks_equals_the_oracle(
    compiled_ranks: dict[str, Path], arch: str, kind: RoutingKind, counts: tuple[int, ...], grid: int, launches: int
) -> None:
    text = compiled_ranks[arch].with_suffix(".ptx").read_text()
    case = RanksCase(KernelFile(text, facts(RANKS[arch], arch)), kind, counts)
    case.check(case.run(seed=1, grid=grid, launches=launches))


@pytest.mark.parametrize("step", [FAULT_STAGED, FAULT_RETURN])
def test_compiled_kernel_of_two_ranks_ends_when_one_stops(compiled_ranks: dict[str, Path], step: int) -> None:
    text = compiled_ranks["sm_100a"].with_suffix(".ptx").read_text()
    case = RanksCase(KernelFile(text, facts(RANKS["sm_100a"], "sm_100a")), RoutingKind.RANDOM, (3, 2))
    run = case.run(fault_steps=(0, step), timeout_ns=20_000, check_order=False, patience=4000)
    assert all(error[0] == 1 for error in run.errors)


@pytest.mark.parametrize("arch", list(PAIRS))
def test_compiled_kernel_of_pairs_has_no_fault(compiled_pairs: dict[str, Path], arch: str) -> None:
    assert check_kernel(compiled_pairs[arch].with_suffix(".json"), find_cuobjdump()) == []


def test_compiled_kernel_of_pairs_equals_the_oracle(compiled_pairs: dict[str, Path]) -> None:
    text = compiled_pairs["sm_100a"].with_suffix(".ptx").read_text()
    case = Sm100Case(KernelFile(text, facts(PAIRS["sm_100a"], "sm_100a")), RoutingKind.HOT_EXPERT, 45)
    case.check(case.run(seed=2, grid=4))


@pytest.mark.parametrize("step", [0, FAULT_STAGED])
def test_compiled_kernel_of_pairs_over_ranks_equals_the_oracle_and_ends_when_one_stops(
    compiled_pairs: dict[str, Path], step: int
) -> None:
    text = compiled_pairs["sm_103a"].with_suffix(".ptx").read_text()
    case = RanksCase(KernelFile(text, facts(PAIRS["sm_103a"], "sm_103a")), RoutingKind.HOT_RANK, (7, 0))
    if step == 0:
        case.check(case.run(seed=1, grid=4, launches=2))
        return
    run = case.run(grid=2, fault_steps=(step, 0), timeout_ns=20_000, check_order=False, patience=4000)
    assert all(error[0] == 1 for error in run.errors)
