# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a layer: the requested one, or for `auto` the best one this machine can run, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_megamoe.buckets import BucketLadder
from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.config import EngineName, MegaMoeConfig
from trtllm_megamoe.engines.base import Engine
from trtllm_megamoe.engines.cuda.availability import why_not
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.kernels.family import FAMILIES, Family, family_here
from trtllm_megamoe.regions import PoolLayout
from trtllm_megamoe.symmetric.devices import choose_device
from trtllm_megamoe.symmetric.workspace import Workspace


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Name of the engine, why it was taken, and the target whose kernels it launches (None: it has no kernels)."""

    name: str
    reason: str
    arch: str | None = None

    @property
    def pool_layout(self) -> PoolLayout:
        """What the engine keeps token rows as; fixes the workspace."""
        return "f16" if self.arch is None else FAMILIES[self.arch].pool_layout


def choose_engine(requested: EngineName, ep_size: int) -> EngineChoice:
    """Resolve an engine request. A named engine that cannot run is an error, never another engine (pitfall B30).

    Kernels that have not run on hardware are launched on request only: `auto` passes them by and says so.

    Raises:
        MegaMoeUnavailableError: `cuda` was asked for and cannot run this layer here.
    """
    if requested == "cpu":
        return EngineChoice("cpu", "asked for")
    obstacle = why_not(ep_size)
    if requested == "cuda":
        if obstacle is not None:
            raise MegaMoeUnavailableError(f"engine 'cuda' was asked for, but {obstacle}; allowed here: cpu, auto")
        return _cuda("asked for", family_here())
    if obstacle is not None:
        return EngineChoice("cpu", f"auto: not cuda, because {obstacle}")
    family = family_here()
    if family.caution is not None:
        return EngineChoice("cpu", f"auto: not cuda, because {family.caution}; ask for engine 'cuda' to run them")
    return _cuda(f"auto: a {family.name} GPU is visible", family)


def _cuda(reason: str, family: Family) -> EngineChoice:
    caution = f"; {family.caution}" if family.caution is not None else ""
    return EngineChoice("cuda", reason + caution, family.arch)


def engine_device(choice: EngineChoice, comm: Communicator, timeout_s: float) -> torch.device:
    """Where the chosen engine works on this rank; on a GPU the current device afterwards.

    Raises:
        MegaMoeUnavailableError: The ranks' GPUs do not form a group; see `symmetric.devices.choose_device`.

    Collective: yes.
    """
    return choose_device(comm, timeout_s) if choice.name == "cuda" else torch.device("cpu")


def build_engine(choice: EngineChoice, config: MegaMoeConfig, ladder: BucketLadder, workspace: Workspace) -> Engine:
    """Construct the chosen engine on a workspace of its device."""
    if choice.name == "cuda":
        from trtllm_megamoe.engines.cuda.engine import CudaEngine

        return CudaEngine(config, workspace, ladder, FAMILIES[choice.arch or family_here().arch])
    from trtllm_megamoe.engines.cpu.engine import CpuEngine

    return CpuEngine(config, workspace)
