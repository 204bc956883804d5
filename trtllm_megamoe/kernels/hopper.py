# SPDX-License-Identifier: Apache-2.0
"""Kernels of one layer on Hopper: a tile configuration per bucket, objects from the cache or compiled into it.

Used by the `compile` command (no GPU) and by the CUDA engine. A process with a filled cache needs no DSL, no compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import ActivationMode, ScorePlacement
from trtllm_megamoe.kernels import objects
from trtllm_megamoe.kernels.objects import Progress
from vendored_kernels import registry
from vendored_kernels.common.layer import KernelConfigError, LayerSpec
from vendored_kernels.common.sites import (
    FAULT_PUBLISH,
    FAULT_PULL,
    FAULT_RETURN,
    FAULT_STAGED,
    SITE_CELLS,
    SITE_HEADER,
    SITE_NAMES,
    SITE_PEER,
)
from vendored_kernels.sm90.config import KernelConfig, TileConfig, choose_tile

__all__ = ["SITE_CELLS", "SITE_HEADER", "SITE_PEER", "KernelConfig", "Progress"]

ARCH = "sm_90a"

_FAULTS: dict[str, int] = {
    "staged tokens": FAULT_STAGED,
    "publish": FAULT_PUBLISH,
    "pull": FAULT_PULL,
    "return": FAULT_RETURN,
}


def layer_spec(config: MegaMoeConfig, ep_size: int, mode: ActivationMode) -> LayerSpec:
    """The facts of a layer that are compiled into its kernels.

    Raises:
        MegaMoeConfigError: The kernel does not support the layer; the text names the rule.
    """
    spec = LayerSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_local_experts=config.num_experts // ep_size,
        top_k=config.top_k,
        activation_mode=mode.value,
        combine_format=config.combine_format.value,
        weigh_before_requant=config.score_placement is ScorePlacement.BEFORE_REQUANT,
        swiglu_limit=config.swiglu_limit,
        swiglu_alpha=config.swiglu_alpha,
        swiglu_beta=config.swiglu_beta,
        ep_size=ep_size,
    )
    try:
        spec.check()
    except KernelConfigError as err:
        raise MegaMoeConfigError(str(err)) from None
    return spec


def tiles_of_ladder(spec: LayerSpec, ladder: BucketLadder, num_sms: int) -> dict[int, TileConfig]:
    """Bucket -> tile configuration of the heuristic; several buckets may share one."""
    return {rung: choose_tile(spec, rung, num_sms) for rung in ladder.rungs}


def describe_site(site: int, index: int) -> str:
    """What an error record's site and index mean, for people."""
    return f"{SITE_NAMES.get(site, f'site {site}')} {index}"


def fault_step(step: str) -> int:
    """The launch argument that makes a rank stop before a step.

    Raises:
        MegaMoeConfigError: No such step.
    """
    if step not in _FAULTS:
        raise MegaMoeConfigError(f"a launch cannot stop before {step!r}; allowed: {', '.join(_FAULTS)}")
    return _FAULTS[step]


def obtain(
    spec: LayerSpec,
    tiles: Iterable[TileConfig],
    cache: ObjectCache,
    progress: Progress | None = None,
    *,
    timestamps: bool = False,
) -> dict[str, Path]:
    """Directories that hold the objects of these tiles, by tile name; what the cache lacks is compiled first.

    Raises:
        MegaMoeUnavailableError: An object is missing and cannot be compiled here; the text says how to get it.
    """
    kernels = [KernelConfig(spec, tile, timestamps=timestamps) for tile in tiles]
    return objects.obtain(ARCH, kernels, object_key, cache, progress)


def kernel_name(kernel: KernelConfig) -> str:
    """What people call one kernel in lists and logs."""
    layer = kernel.layer
    return (
        f"{ARCH}-{kernel.tile.name}-h{layer.hidden_size}-i{layer.intermediate_size}-e{layer.num_local_experts}"
        f"-k{layer.top_k}-r{layer.ep_size}-{layer.activation_mode}-{layer.combine_format}"
        f"{'-timestamps' if kernel.timestamps else ''}"
    )


def object_key(kernel: KernelConfig) -> ObjectKey:
    """Identity of a kernel's object in the store."""
    facts = kernel.facts()
    return ObjectKey(
        name=kernel_name(kernel),
        sources=registry.source_digest(),
        dsl_version=registry.DSL_VERSION,
        arch=ARCH,
        geometry=facts["layer"],
        tactic={**facts["tile"], "all_ranks": facts["all_ranks"], "timestamps": facts["timestamps"]},
    )
