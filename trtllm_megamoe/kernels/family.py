# SPDX-License-Identifier: Apache-2.0
"""Kernel families by GPU: what each supports, its tactics and its objects, behind one interface.

Used by the CUDA engine, the `compile` and `selftest` commands. Families themselves are `hopper` and `blackwell`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_megamoe.cache.keys import ObjectKey
from trtllm_megamoe.cache.store import ObjectCache
from trtllm_megamoe.config import MegaMoeConfig
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.formats import ActivationMode
from trtllm_megamoe.kernels import blackwell, hopper, tactics
from trtllm_megamoe.kernels.objects import get_or_compile
from trtllm_megamoe.tuning.tactic import Tactic, TacticSpace
from vendored_kernels import registry

Progress = Callable[[str, str], None]
"""Called with (kernel name, "cached" or "compiled") per kernel."""


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels for one GPU target.

    Attributes:
        arch: The target, e.g. `sm_90a`.
        name: What people call the GPUs.
        layout: Weight layout that the kernels read (`trtllm_megamoe.weights.layouts`).
        modes: Activation modes that the kernels have.
        caution: What a user must know before trusting a result; None where there is nothing.
        layer_spec: (config, ep_size, mode) -> compiled-in facts of a layer; refuses what the kernels do not support.
        tactic_space: (spec, multiprocessors) -> the layer's tactics.
        tile_of: tactic -> tile configuration.
        kernel: (spec, tile) -> one compiled kernel's facts.
        object_key: kernel -> identity of its object in the store.
    """

    arch: str
    name: str
    layout: str
    modes: tuple[ActivationMode, ...]
    caution: str | None
    layer_spec: Callable[[MegaMoeConfig, int, ActivationMode], Any]
    tactic_space: Callable[[Any, int], TacticSpace]
    tile_of: Callable[[Tactic], Any]
    kernel: Callable[[Any, Any], registry.KernelConfig]
    object_key: Callable[[registry.KernelConfig], ObjectKey]

    def obtain(
        self, spec: Any, tiles: Iterable[Any], cache: ObjectCache, progress: Progress | None = None
    ) -> dict[str, Path]:
        """Directories that hold the objects of these tiles, by tile name; what the cache lacks is compiled first.

        Raises:
            MegaMoeUnavailableError: An object is missing and cannot be compiled here; the text says how to get it.
        """
        found: dict[str, Path] = {}
        for tile in tiles:
            if tile.name not in found:
                kernel = self.kernel(spec, tile)
                key = self.object_key(kernel)
                entry, state = get_or_compile(self.arch, kernel, key, cache)
                found[tile.name] = entry.directory
                if progress is not None:
                    progress(key.name, state)
        return found


HOPPER = Family(
    arch=hopper.ARCH,
    name="Hopper",
    layout="sm90",
    modes=tuple(ActivationMode),
    caution=None,
    layer_spec=hopper.layer_spec,
    tactic_space=tactics.tactic_space,
    tile_of=tactics.tile_of,
    kernel=hopper.KernelConfig,
    object_key=hopper.object_key,
)


def _blackwell(arch: str) -> Family:
    return Family(
        arch=arch,
        name="Blackwell",
        layout="sm100",
        modes=(ActivationMode.NVFP4,),
        caution=blackwell.CAUTION,
        layer_spec=blackwell.layer_spec,
        tactic_space=blackwell.tactic_space,
        tile_of=blackwell.tile_of,
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
    import torch

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
