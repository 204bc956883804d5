# SPDX-License-Identifier: Apache-2.0
"""The store under a real layer's kernels, with a stand-in compiler: how many compiles a layer costs, and whose."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.helpers.object_cache import FORK, PROCESSES, WATCHDOG_S, run_in_processes
from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from vendored_kernels import compile as kernel_compile

NUM_SMS = 132


@pytest.fixture
def compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line per compile, over all processes."""
    log = tmp_path / "compiles"
    log.touch()

    def fake(arch: str, configs: list[hopper.KernelConfig], out_dir: Path) -> list[Path]:
        with log.open("a") as file:
            file.write(f"{arch} {configs[0].tile.name} {configs[0].layer!r}\n")
        time.sleep(0.02)
        paths = [out_dir / f"{arch}-{config.tile.name}.so" for config in configs]
        for path in paths:
            path.write_bytes(b"object")
        return paths

    monkeypatch.setattr(kernel_compile, "compile_configs", fake)
    return log


def _spec_and_ladder(cap: int) -> tuple[hopper.LayerSpec, BucketLadder]:
    config = MegaMoeConfig.create(
        hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, max_tokens_per_rank=cap
    )
    return hopper.layer_spec(config, 8, ActivationMode.NVFP4), BucketLadder.for_cap(cap)


def test_layer_over_all_token_counts_compiles_at_most_once_per_bucket(tmp_path: Path, compiles: Path) -> None:
    """B44: the number of tokens is no part of a kernel's key."""
    spec, ladder = _spec_and_ladder(512)
    cache, used = ObjectCache(tmp_path / "cache"), set()
    tiles = hopper.tiles_of_ladder(spec, ladder, NUM_SMS)
    for num_tokens in range(1, 513):
        bucket = ladder.select(num_tokens)
        used.add(bucket)
        hopper.obtain(spec, [tiles[bucket]], cache)
    lines = compiles.read_text().splitlines()
    assert len(lines) == len(set(lines)) == len({tile.name for tile in tiles.values()}) <= len(used)


def test_layer_with_a_larger_cap_shares_the_kernels_of_a_smaller_one(tmp_path: Path, compiles: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    for cap in (8192, 256):
        spec, ladder = _spec_and_ladder(cap)
        hopper.obtain(spec, hopper.tiles_of_ladder(spec, ladder, NUM_SMS).values(), cache)
        if cap == 8192:
            num_compiles = len(compiles.read_text().splitlines())
    assert len(compiles.read_text().splitlines()) == num_compiles


def test_eight_ranks_that_start_at_once_compile_each_kernel_once(tmp_path: Path, compiles: Path) -> None:
    spec, ladder = _spec_and_ladder(8192)
    tiles = hopper.tiles_of_ladder(spec, ladder, NUM_SMS)
    gate = FORK.Event()

    def rank() -> None:
        gate.wait(WATCHDOG_S)
        found = hopper.obtain(spec, tiles.values(), ObjectCache(tmp_path / "cache"))
        assert all(list(directory.glob("*.so")) for directory in found.values())

    threading.Timer(0.3, gate.set).start()
    run_in_processes([rank] * PROCESSES)
    lines = compiles.read_text().splitlines()
    assert len(lines) == len(set(lines)) == len({tile.name for tile in tiles.values()})
