# SPDX-License-Identifier: Apache-2.0
"""Kernel families by GPU: what each supports, its tactics and its objects, behind one interface.

Used by the CUDA engine, the `compile` and `selftest` commands. Families themselves are `hopper` and `blackwell`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import blackwell, hopper, objects, tactics
from trtllm_megamoe.kernels.objects import Progress
from trtllm_megamoe.kernels.prepared import LaunchChoice, PreparedLaunch
from trtllm_megamoe.regions import PoolLayout
from trtllm_megamoe.tuning.table import ResolvedTactic
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace
from vendored_kernels import launch, registry


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels for one GPU target.

    Attributes:
        arch: The target, e.g. `sm_90a`.
        name: What people call the GPUs.
        kernel_name: Name of the kernels in tactic tables.
        layout: Weight layout that the kernels read (`trtllm_megamoe.weights.layouts`).
        pool_layout: What the kernels keep token rows as (`trtllm_megamoe.regions`).
        modes: Activation modes that the kernels have.
        auto_mode: The one that `auto` takes.
        accumulator_scale: Factor of an accumulator over the sum of code and scale products; the host divides it out.
        caution: What a user must know before trusting a result; None where there is nothing.
        arguments: Names of the launch arguments in the objects' order.
        layer_spec: (config, ep_size, mode) -> compiled-in facts of a layer; refuses what the kernels do not support.
        tactic_space: (spec, multiprocessors) -> the layer's tactics.
        tile_of: tactic -> tile configuration.
        grid_of: (tile, CTAs that may run) -> CTAs of a launch.
        kernel: (spec, tile) -> one compiled kernel's facts.
        object_key: kernel -> identity of its object in the store.
    """

    arch: str
    name: str
    kernel_name: str
    layout: str
    pool_layout: PoolLayout
    modes: tuple[ActivationMode, ...]
    auto_mode: ActivationMode
    accumulator_scale: float
    caution: str | None
    arguments: Sequence[str]
    layer_spec: Callable[[MegaMoeConfig, int, ActivationMode], Any]
    tactic_space: Callable[[Any, int], TacticSpace]
    tile_of: Callable[[Tactic], Any]
    grid_of: Callable[[Any, int], int]
    kernel: Callable[..., registry.KernelConfig]
    object_key: Callable[[Any], ObjectKey]

    def obtain(
        self, spec: Any, tiles: Iterable[Any], cache: ObjectCache, progress: Progress | None = None, **options: Any
    ) -> dict[str, Path]:
        """Directories that hold the objects of these tiles, by tile name; what the cache lacks is compiled first.

        Raises:
            MegaMoeUnavailableError: An object is missing and cannot be compiled here; the text says how to get it.
        """
        kernels = [self.kernel(spec, tile, **options) for tile in tiles]
        return objects.obtain(self.arch, kernels, self.object_key, cache, progress)

    def load_launches(
        self,
        spec: Any,
        tactics: Mapping[int, ResolvedTactic],
        num_ctas: int,
        anchor: torch.Tensor,
        arguments: Mapping[str, int],
        cache: ObjectCache | None = None,
        **options: Any,
    ) -> dict[int, PreparedLaunch]:
        """Bucket -> launch whose code is loaded; objects come from the cache, missing ones are compiled first.

        Args:
            spec: From `layer_spec`.
            tactics: Bucket -> what it runs; legal ones (see :mod:`trtllm_megamoe.kernels.selection`).
            num_ctas: CTAs of a launch; all must be resident, so no more than this rank has multiprocessors for itself.
            anchor: Any tensor of the device.
            arguments: Values of launch arguments that do not change between launches.
            cache: Object cache; None takes the user's.
            options: Of the kernels, e.g. `timestamps`.

        Raises:
            MegaMoeUnavailableError: As :meth:`obtain`.
        """
        tiles = {bucket: self.tile_of(resolved.tactic) for bucket, resolved in tactics.items()}
        directories = self.obtain(spec, tiles.values(), cache if cache is not None else ObjectCache(), **options)
        prepared: dict[ResolvedTactic, PreparedLaunch] = {}
        for bucket, resolved in tactics.items():
            if resolved in prepared:
                continue
            kernel = self.kernel(spec, tiles[bucket], **options)
            grid = self.grid_of(tiles[bucket], num_ctas)
            numbers = {"grid": grid, "ctas_per_rank": grid, "lag": resolved.tactic.fc1_lag * grid}
            fixed = {**arguments, **{name: value for name, value in numbers.items() if name in self.arguments}}
            function = registry.load_kernel(kernel, self.arch, directories[kernel.tile.name])
            bound = launch.Launch(function, anchor, fixed, self.arguments)
            key = self.object_key(kernel)
            bound(dry=1)  # loads the code, which neither a capture nor a launch that waits for peers should do
            prepared[resolved] = PreparedLaunch(LaunchChoice(key.name, key.digest, resolved), bound)
        return {bucket: prepared[resolved] for bucket, resolved in tactics.items()}


HOPPER = Family(
    arch=hopper.ARCH,
    name="Hopper",
    kernel_name=tactics.KERNEL,
    layout="sm90",
    pool_layout="f16",
    modes=tuple(ActivationMode),
    auto_mode=ActivationMode.BF16,  # costs no tensor time here, and is far more accurate
    accumulator_scale=2.0**-14,  # weights decode to code * scale * 2^-14, an exact f16 value
    caution=None,
    arguments=(*launch.ADDRESSES, *launch.NUMBERS),
    layer_spec=hopper.layer_spec,
    tactic_space=tactics.tactic_space,
    tile_of=tactics.tile_of,
    grid_of=lambda _, num_ctas: num_ctas,
    kernel=hopper.KernelConfig,
    object_key=hopper.object_key,
)


def _blackwell(arch: str) -> Family:
    return Family(
        arch=arch,
        name="Blackwell",
        kernel_name=blackwell.KERNEL,
        layout="sm100",
        pool_layout="sm_100",
        modes=(ActivationMode.NVFP4,),
        auto_mode=ActivationMode.NVFP4,
        accumulator_scale=1.0,
        caution=blackwell.CAUTION,
        arguments=blackwell.ARGUMENTS,
        layer_spec=blackwell.layer_spec,
        tactic_space=blackwell.tactic_space,
        tile_of=blackwell.tile_of,
        grid_of=blackwell.grid_of,
        kernel=blackwell.KernelConfig,
        object_key=partial(blackwell.object_key, arch),
    )


_BY_CAPABILITY = {(9, 0): HOPPER, (10, 0): _blackwell("sm_100a"), (10, 3): _blackwell("sm_103a")}
FAMILIES = {family.arch: family for family in _BY_CAPABILITY.values()}
"""Target -> its family."""


def family_of_capability(capability: tuple[int, int]) -> Family | None:
    """The family whose kernels run on a GPU of this compute capability, or None."""
    return _BY_CAPABILITY.get(capability)


def family_here() -> Family:
    """The family of the current GPU.

    Raises:
        MegaMoeUnavailableError: No GPU, or one without kernels.
    """
    if not torch.cuda.is_available():
        raise MegaMoeUnavailableError("no CUDA device is visible to torch; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    capability = torch.cuda.get_device_capability()
    family = family_of_capability(capability)
    if family is None:
        known = ", ".join(f"{major}.{minor} ({family.name})" for (major, minor), family in _BY_CAPABILITY.items())
        raise MegaMoeUnavailableError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; there are kernels "
            f"for {known}"
        )
    return family
