# SPDX-License-Identifier: Apache-2.0
"""`compile --arch sm_100a` without the DSL: what it builds, what it refuses, and that a filled cache needs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cli import invoke
from trtllm_megamoe.cache.store import ObjectCache
from vendored_kernels import compile as kernel_compile
from vendored_kernels import registry


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that a stand-in compiler fills: a file per kernel instead of an object."""

    def fake(arch: str, configs: list[registry.KernelConfig], out_dir: Path) -> list[Path]:
        paths = [out_dir / f"{arch}-{config.tile.name}.so" for config in configs]
        for path, config in zip(paths, configs, strict=True):
            path.write_bytes(b"object of " + repr(config).encode())
        return paths

    monkeypatch.setattr(kernel_compile, "compile_configs", fake)
    return tmp_path / "cache"


SHARE = ("compile", "--preset", "deepseek-v4-pro", "--share-of-ep", 8, "--max-tokens-per-rank", 8192)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_compile_for_blackwell_builds_each_needed_token_block_once(cache_dir: Path, arch: str) -> None:
    first = invoke(*SHARE, "--arch", arch, "--out", cache_dir)
    assert first.exit_code == 0, first.output
    names = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert sorted(name.split("-")[1] for name in names) == ["b128", "b256x2", "b32", "b64"]
    assert all(name.startswith(arch) and "-nvfp4-" in name for name in names)
    second = invoke(*SHARE, "--arch", arch, "--out", cache_dir)
    assert second.exit_code == 0 and "cached" in second.output and "compiled" not in second.output


def test_compile_for_blackwell_and_hopper_share_no_object(cache_dir: Path) -> None:
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        assert invoke(*SHARE, "--arch", arch, "--activations", "nvfp4", "--out", cache_dir).exit_code == 0
    names = [entry.name for _, entry in ObjectCache(cache_dir).entries()]
    assert len(names) == len(set(names))
    assert {name.split("-")[0] for name in names} == {"sm_90a", "sm_100a", "sm_103a"}


def test_compile_for_blackwell_of_several_ranks_compiles_kernels_with_an_exchange(cache_dir: Path) -> None:
    result = invoke("compile", "--preset", "deepseek-v4-pro", "--arch", "sm_100a", "--out", cache_dir)
    assert result.exit_code == 0, result.output
    assert all("-r8-" in entry.name for _, entry in ObjectCache(cache_dir).entries())


def test_compile_for_blackwell_with_bf16_activations_is_refused(cache_dir: Path) -> None:
    result = invoke(*SHARE, "--arch", "sm_100a", "--activations", "bf16", "--out", cache_dir)
    assert result.exit_code != 0
    assert "nvfp4 activations only" in result.output
