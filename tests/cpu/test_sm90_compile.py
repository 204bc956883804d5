# SPDX-License-Identifier: Apache-2.0
"""A kernel compiled here, without a GPU: no spill, no serialised wgmma, the memory order that its header promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_kernels import check_kernel, find_cuobjdump, lint_ptx
from vendored_kernels import registry
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.compile import compile_configs
from vendored_kernels.sm90.config import TILES, KernelConfig

pytest.importorskip("cutlass", reason="compiling kernels needs nvidia-cutlass-dsl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = KernelConfig(LayerSpec(256, 128, 16, 4, "nvfp4"), TILES["h8"])
RANKS_CONFIG = KernelConfig(LayerSpec(256, 128, 2, 4, "nvfp4", ep_size=8), TILES["n64"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object of one kernel, with its PTX and cubin beside it."""
    directory = tmp_path_factory.mktemp("kernels")
    (path,) = compile_configs("sm_90a", [CONFIG], directory, keep_intermediates=True)
    return path


@pytest.fixture(scope="module")
def compiled_for_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel with dispatch and combine between ranks."""
    directory = tmp_path_factory.mktemp("kernels")
    (path,) = compile_configs("sm_90a", [RANKS_CONFIG], directory, keep_intermediates=True)
    return path


def test_compiled_kernel_has_no_fault(compiled: Path) -> None:
    assert check_kernel(compiled.with_suffix(".json"), find_cuobjdump()) == []


def test_compiled_kernel_for_ranks_has_no_fault(compiled_for_ranks: Path) -> None:
    assert check_kernel(compiled_for_ranks.with_suffix(".json"), find_cuobjdump()) == []


@pytest.mark.parametrize(
    "instruction",
    [
        "red.release.sys.global.add.u64",
        "ld.acquire.sys.global.b64",
        "st.relaxed.sys.global.b64",
        "fence.acq_rel.sys;",
    ],
)
def test_compiled_kernel_for_ranks_without_an_order_instruction_fails_the_lint(
    compiled_for_ranks: Path, instruction: str
) -> None:
    lines = compiled_for_ranks.with_suffix(".ptx").read_text().splitlines()
    assert any(instruction in line for line in lines)
    assert lint_ptx("\n".join(line for line in lines if instruction not in line), True)


@pytest.mark.parametrize(
    "instruction",
    [
        "fence.proxy.async;",
        "red.release.gpu.global.add.u32",
        "ld.acquire.gpu.global.b32",
        "ld.acquire.sys.global.b32",
        "st.release.sys.global.b32",
        "atom.acq_rel.gpu.global.add.u32",
    ],
)
def test_compiled_kernel_without_an_order_instruction_fails_the_lint(compiled: Path, instruction: str) -> None:
    lines = compiled.with_suffix(".ptx").read_text().splitlines()
    assert any(instruction in line for line in lines)
    assert lint_ptx("\n".join(line for line in lines if instruction not in line), False)


def test_compiled_kernel_is_found_again_and_not_rebuilt(compiled: Path) -> None:
    states: list[str] = []
    compile_configs("sm_90a", [CONFIG], compiled.parent, progress=lambda _, state: states.append(state))
    assert states == ["cached"]
    assert compiled == registry.object_path(CONFIG, "sm_90a", compiled.parent)
