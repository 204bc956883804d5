# SPDX-License-Identifier: Apache-2.0
"""Kernels of one layer on Blackwell: a token block and single CTAs or pairs per bucket, tactics, objects in the cache.

Used by the `compile` command, the CUDA engine (through `family`) and by checks. THESE KERNELS HAVE NEVER RUN ON
HARDWARE; whoever launches them is told so.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper, objects
from trtllm_megamoe.kernels.objects import Progress
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace
from vendored_kernels import registry
from vendored_kernels.common.layer import KernelConfigError, LayerSpec
from vendored_kernels.sm100.config import (
    ADDRESSES,
    ARCHITECTURES,
    MAX_REGISTERS,
    NUMBERS,
    TILE_ROWS,
    TILES,
    KernelConfig,
    TileConfig,
    check_layer,
    choose_tile,
)

__all__ = ["KernelConfig"]

ARCHS = ARCHITECTURES

ARGUMENTS = (*ADDRESSES, *NUMBERS)
"""Launch arguments in the objects' order."""

KERNEL = "sm100"
"""Name of the family in tactic tables."""

CAUTION = "Blackwell kernels are compiled, inspected and interpreted, but not yet run on hardware"

FC1_LAG = 3
"""fc1 tiles per multiprocessor between the end of an expert's fc1 and its fc2."""

LAGS = (2, 5)
"""Lags worth trying beside it."""


def layer_spec(config: MegaMoeConfig, ep_size: int, mode: ActivationMode = ActivationMode.NVFP4) -> LayerSpec:
    """The facts of a layer that are compiled into its kernels.

    Raises:
        MegaMoeConfigError: The kernel does not support the layer; the text names the rule.
    """
    spec = hopper.layer_spec(config, ep_size, mode)
    try:
        check_layer(spec)
    except KernelConfigError as err:
        raise MegaMoeConfigError(str(err)) from None
    return spec


def tactic_of(tile: TileConfig, lag: int = FC1_LAG) -> Tactic:
    """A tile configuration and a lag as a tactic; what this kernel does not choose has its one value."""
    return Tactic(
        token_widths=(tile.tokens,),
        tile_rows=TILE_ROWS * tile.ctas,
        math_warpgroups=1,
        math_registers=MAX_REGISTERS,
        producer_registers=MAX_REGISTERS,
        max_stages=tile.max_stages,
        fc1_lag=lag,
    )


def tile_of(tactic: Tactic) -> TileConfig:
    """The tile configuration of a tactic: the named one with these numbers, else a new one named after them."""
    tokens, stages, ctas = tactic.token_widths[-1], tactic.max_stages, tactic.tile_rows // TILE_ROWS
    for known in TILES.values():
        if (known.tokens, known.max_stages, known.ctas) == (tokens, stages, ctas):
            return known
    return TileConfig(f"t{TILE_ROWS * ctas}x{tokens}x{stages}", tokens, stages, ctas)


def grid_of(tile: TileConfig, num_ctas: int) -> int:
    """CTAs of a launch of this tile, of the `num_ctas` that may run: whole pairs of them."""
    ctas: int = tile.ctas
    return num_ctas // ctas * ctas


def tactic_space(spec: LayerSpec, num_sms: int) -> TacticSpace:
    """The tactics of one layer on `num_sms` multiprocessors; legality is the kernel's own check, and a CTA for each."""

    def why_illegal(tactic: Tactic, bucket: int) -> str | None:
        if len(tactic.token_widths) != 1:
            return f"token_widths {tactic.token_widths} must be one width"
        tile = tile_of(tactic)
        if tactic_of(tile, tactic.fc1_lag) != tactic:
            return f"warpgroups, registers and rows of a CTA are fixed: {tactic_of(tile, tactic.fc1_lag)}"
        if tile.ctas > num_sms:
            return f"tile_rows {tactic.tile_rows} need {tile.ctas} multiprocessors, there is {num_sms}"
        try:
            KernelConfig(spec, tile)
        except KernelConfigError as err:
            return str(err)
        return None if tactic.fc1_lag >= 1 else f"fc1_lag {tactic.fc1_lag} must be at least 1 tile per multiprocessor"

    def heuristic(bucket: int) -> Tactic:
        return tactic_of(choose_tile(spec, bucket, num_sms))

    def candidates(bucket: int) -> list[Tactic]:
        tiles = [tactic_of(tile) for tile in TILES.values()]
        return tiles + [tactic_of(choose_tile(spec, bucket, num_sms), lag) for lag in LAGS]

    return TacticSpace(KERNEL, why_illegal, heuristic, candidates)


def tiles_of_ladder(spec: LayerSpec, ladder: BucketLadder) -> dict[int, TileConfig]:
    """Bucket -> tile configuration of the heuristic; several buckets may share one."""
    return {rung: choose_tile(spec, rung) for rung in ladder.rungs}


def kernel_name(arch: str, kernel: KernelConfig) -> str:
    """What people call one kernel in lists and logs."""
    layer = kernel.layer
    return (
        f"{arch}-{kernel.tile.name}-h{layer.hidden_size}-i{layer.intermediate_size}-e{layer.num_local_experts}"
        f"-k{layer.top_k}-r{layer.ep_size}-{layer.activation_mode}-{layer.combine_format}"
    )


def object_key(arch: str, kernel: KernelConfig) -> ObjectKey:
    """Identity of a kernel's object in the store."""
    facts = kernel.facts()
    return ObjectKey(
        name=kernel_name(arch, kernel),
        sources=registry.source_digest(arch),
        dsl_version=registry.DSL_VERSION,
        arch=arch,
        geometry=facts["layer"],
        tactic=facts["tile"],
    )


def obtain(
    arch: str, spec: LayerSpec, tiles: Iterable[TileConfig], cache: ObjectCache, progress: Progress | None = None
) -> dict[str, Path]:
    """Directories that hold the objects of these tiles, by tile name; what the cache lacks is compiled first.

    Raises:
        MegaMoeUnavailableError: An object is missing and cannot be compiled here; the text says how to get it.
    """
    return objects.obtain(
        arch, [KernelConfig(spec, tile) for tile in tiles], partial(object_key, arch), cache, progress
    )
