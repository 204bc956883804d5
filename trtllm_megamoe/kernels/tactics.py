# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's tactics: what the tuner's plain numbers mean to it, which are legal, which are worth measuring.

Legality is the kernel's own check of a layer and a tile, asked once through `TacticSpace.why_illegal`; no rule is
repeated here. Pure: no GPU, no DSL.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace
from vendored_kernels.common.layer import KernelConfigError, LayerSpec
from vendored_kernels.sm90.config import TILES, KernelConfig, TileConfig, choose_tile, fc1_lag

KERNEL = "sm90"
"""Name of the family in tactic tables."""

LAGS = (2, 5)
"""Lags tried beside the heuristic's, on the heuristic's tile: fewer for short layers, more for skewed routing."""


def tactic_of(tile: TileConfig, lag: int) -> Tactic:
    """A tile configuration and a lag (fc1 tiles per multiprocessor) as a tactic."""
    return Tactic(
        token_widths=tile.token_widths,
        tile_rows=tile.rows,
        math_warpgroups=tile.math_warpgroups,
        math_registers=tile.math_registers,
        producer_registers=tile.producer_registers,
        max_stages=tile.max_stages,
        fc1_lag=lag,
    )


def tile_of(tactic: Tactic) -> TileConfig:
    """The tile configuration of a tactic: the named one with these numbers, else a new one named after them."""
    tile = TileConfig(
        name="",
        token_widths=tactic.token_widths,
        rows=tactic.tile_rows,
        math_warpgroups=tactic.math_warpgroups,
        math_registers=tactic.math_registers,
        producer_registers=tactic.producer_registers,
        max_stages=tactic.max_stages,
    )
    for known in TILES.values():
        if replace(known, name="") == tile:
            return known
    numbers = (tile.rows, *tile.token_widths, tile.math_warpgroups, tile.math_registers, tile.producer_registers)
    return replace(tile, name="t" + "x".join(map(str, (*numbers, tile.max_stages))))


def tactic_space(spec: LayerSpec, num_sms: int) -> TacticSpace:
    """The tactics of one layer on a GPU with `num_sms` multiprocessors."""

    def why_illegal(tactic: Tactic, bucket: int) -> str | None:
        try:
            KernelConfig(spec, tile_of(tactic))
        except KernelConfigError as err:
            return str(err)
        return None if tactic.fc1_lag >= 1 else f"fc1_lag {tactic.fc1_lag} must be at least 1 tile per multiprocessor"

    def heuristic(bucket: int) -> Tactic:
        tile = choose_tile(spec, bucket, num_sms)
        return tactic_of(tile, fc1_lag(spec, tile, num_sms) // num_sms)

    def candidates(bucket: int) -> list[Tactic]:
        default = heuristic(bucket)
        tiles = [tactic_of(tile, default.fc1_lag) for tile in TILES.values()]
        return tiles + [replace(default, fc1_lag=lag) for lag in LAGS]

    return TacticSpace(KERNEL, why_illegal, heuristic, candidates)
