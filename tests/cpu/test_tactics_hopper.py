# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's tactic space: legality is the kernel's, heuristics are legal for every preset and bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.comm import single
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.kernels.tactics import tactic_of, tactic_space, tile_of
from trtllm_megamoe.presets import PRESETS, ModelShape
from trtllm_megamoe.tuning.tactic import DEFAULT_TACTIC, Tactic
from trtllm_megamoe.tuning.tuner import tune
from vendored_kernels.common.layer import LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig, TileConfig, choose_tile

NUM_SMS = 132
LADDER = BucketLadder.for_cap(8192)


def spec_of(shape: ModelShape, mode: str = "nvfp4", wire: str = "bf16") -> LayerSpec:
    return LayerSpec(
        shape.hidden_size, shape.intermediate_size, shape.num_experts // 8, shape.top_k, mode, wire
    )  # fmt: skip


SPEC = spec_of(PRESETS["deepseek-v3"])


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: tile.name)
def test_tile_survives_its_tactic(tile: TileConfig) -> None:
    tactic = tactic_of(tile, 3)
    assert tile_of(tactic) is tile
    assert tile_of(Tactic.from_json(tactic.to_json())) is tile


def test_tile_of_other_numbers_has_a_name_of_its_own() -> None:
    tactic = tactic_of(TILES["n16"], 3)
    tiles = [tile_of(tactic), tile_of(replace(tactic, max_stages=5)), tile_of(replace(tactic, token_widths=(16, 32)))]
    assert len({tile.name for tile in tiles}) == 3
    assert replace(tiles[1], name="n16", max_stages=9) == TILES["n16"]


@pytest.mark.parametrize("mode", ["nvfp4", "bf16"])
@pytest.mark.parametrize("wire", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("preset", PRESETS)
def test_heuristic_is_legal_for_every_bucket_and_is_the_kernels(preset: str, wire: str, mode: str) -> None:
    spec = spec_of(PRESETS[preset], mode, wire)
    space = tactic_space(spec, NUM_SMS)
    for bucket in LADDER.rungs:
        tactic = space.resolve(DEFAULT_TACTIC, bucket)
        assert tile_of(tactic) == choose_tile(spec, bucket, NUM_SMS)
        assert tactic.fc1_lag == 3
        candidates = space.legal_candidates(bucket)
        assert candidates[0] == tactic
        assert 5 <= len(candidates) == len(set(candidates)) <= len(TILES) + 2
        for candidate in candidates:
            KernelConfig(spec, tile_of(candidate))  # raises if the kernel would refuse it


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"token_widths": (8, 12)}, "multiples of 8"),
        ({"token_widths": ()}, "ascending numbers"),
        ({"token_widths": (256,)}, "in 8..128"),
        ({"tile_rows": 64}, "must be 128 or 256"),
        ({"math_registers": 240, "producer_registers": 240}, "setmaxnreg asks for"),
        ({"max_stages": 1}, "max_stages 1 must be at least 3"),
        ({"fc1_lag": 0}, "at least 1 tile"),
    ],
)
def test_illegal_tactic_is_refused_by_the_kernels_rule(change: dict[str, Any], rule: str) -> None:
    space = tactic_space(SPEC, NUM_SMS)
    with pytest.raises(MegaMoeConfigError, match=rule):
        space.resolve(replace(tactic_of(TILES["n16"], 3), **change), 64)


def test_buckets_below_256_choose_narrower_tiles() -> None:
    """Why 16 and 64 are rungs: without them a decode step would take the tile of 64 rows an expert (docs/tuning.md)."""
    space = tactic_space(SPEC, NUM_SMS)
    widest = [space.heuristic(bucket).token_widths[-1] for bucket in (16, 64, 256, 1024)]
    assert widest == sorted(widest)
    assert widest[1] < widest[2]


def test_tuner_measures_only_what_the_kernel_can_run() -> None:
    class Runner:
        def prepare(self, tactic: Tactic, bucket: int) -> None:
            KernelConfig(SPEC, tile_of(tactic))

        def measure(self, tactic: Tactic, bucket: int) -> float:
            return 100.0 - 10 * (tile_of(tactic).name == "n128") - tactic.fc1_lag

        def recover(self) -> None:
            raise AssertionError("nothing fails here")

    for tuned in tune(tactic_space(SPEC, NUM_SMS), LADDER.rungs, Runner(), single(), 10.0):
        assert tuned.failures == ()
        assert tile_of(tuned.tactic).name == "n128"
