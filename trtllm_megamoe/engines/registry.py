# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a layer: the requested one, or for `auto` the best one this machine can run, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_megamoe.comm.base import Communicator
from trtllm_megamoe.config import EngineName, MegaMoeConfig
from trtllm_megamoe.engines.base import Engine
from trtllm_megamoe.errors import MegaMoeUnavailableError
from trtllm_megamoe.regions import RegionTable


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Name of the engine and why it was taken."""

    name: str
    reason: str


def choose_engine(requested: EngineName) -> EngineChoice:
    """Resolve an engine request. A named engine that cannot run is an error, never another engine (pitfall B30).

    Raises:
        MegaMoeUnavailableError: `cuda` was asked for and no CUDA engine can run here.
    """
    if requested == "cuda":
        raise MegaMoeUnavailableError(
            "engine 'cuda' was asked for, but this version has no CUDA engine yet; allowed here: cpu, auto"
        )
    if requested == "cpu":
        return EngineChoice("cpu", "asked for")
    return EngineChoice("cpu", "auto: the CPU engine is the only one this version has")


def build_engine(choice: EngineChoice, config: MegaMoeConfig, table: RegionTable, comm: Communicator) -> Engine:
    """Construct the chosen engine. Collective."""
    from trtllm_megamoe.engines.cpu.engine import CpuEngine

    return CpuEngine(config, table, comm)
