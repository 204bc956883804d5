# SPDX-License-Identifier: Apache-2.0
"""Kernels of one layer on Blackwell, one rank: a token block per bucket, objects compiled into the cache.

Used by the `compile` command and by checks. NO ENGINE LAUNCHES THESE KERNELS YET: they have never run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import hopper
from trtllm_megamoe.kernels.objects import get_or_compile
from vendored_kernels import registry
from vendored_kernels.sm90.config import KernelConfigError, LayerSpec
from vendored_kernels.sm100.config import ARCHITECTURES, KernelConfig, TileConfig, check_layer, choose_tile

ARCHS = ARCHITECTURES

Progress = Callable[[str, str], None]
"""Called with (kernel name, "cached" or "compiled") per kernel."""


def layer_spec(config: MegaMoeConfig, ep_size: int) -> LayerSpec:
    """The facts of a layer that are compiled into its kernels; activations are always NVFP4.

    Raises:
        MegaMoeConfigError: The kernel does not support the layer; the text names the rule.
    """
    spec = hopper.layer_spec(config, ep_size, ActivationMode.NVFP4)
    try:
        check_layer(spec)
    except KernelConfigError as err:
        raise MegaMoeConfigError(str(err)) from None
    return spec


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
    found: dict[str, Path] = {}
    for tile in tiles:
        if tile.name in found:
            continue
        kernel = KernelConfig(spec, tile)
        entry, state = get_or_compile(arch, kernel, object_key(arch, kernel), cache)
        found[tile.name] = entry.directory
        if progress is not None:
            progress(kernel_name(arch, kernel), state)
    return found
