# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine without a GPU: its host side over CPU memory, with launches recorded instead of made.

Everything around the kernel is the real thing: eligibility, workspaces, fences, tactics, weight layout, addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_megamoe.engines import registry
from trtllm_megamoe.kernels.family import FAMILIES, Family
from trtllm_megamoe.kernels.prepared import LaunchChoice, PreparedLaunch
from trtllm_megamoe.symmetric.workspace import Workspace
from trtllm_megamoe.tuning.table import ResolvedTactic


@dataclass
class Launched:
    """One recorded launch: what was bound when its kernel was loaded, and what the forward gave."""

    bucket: int
    bound: dict[str, int]
    given: dict[str, int]


@dataclass
class Recorder:
    """What the engine asked for."""

    loads: list[dict[int, ResolvedTactic]] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    is_capturing: bool = False

    def load(
        self,
        family: Family,
        spec: Any,
        tactics: Mapping[int, ResolvedTactic],
        num_ctas: int,
        anchor: torch.Tensor,
        addresses: Mapping[str, int],
    ) -> dict[int, PreparedLaunch]:
        self.loads.append(dict(tactics))
        bound = dict(addresses)

        def make(bucket: int) -> PreparedLaunch:
            def launch(**given: int) -> None:
                self.launches.append(Launched(bucket, bound, given))

            return PreparedLaunch(LaunchChoice("recorded", "none", tactics[bucket]), launch)

        return {bucket: make(bucket) for bucket in tactics}


def install(monkeypatch: pytest.MonkeyPatch, *, record: bool = True, arch: str = "sm_90a", sms: int = 132) -> Recorder:
    """Pretend that one GPU is visible and that its memory is the host's; `record` False loads real kernels."""
    recorder = Recorder()
    fits = Workspace.require_fits
    monkeypatch.setattr(registry, "why_not", lambda ep_size: None)
    monkeypatch.setattr(registry, "family_here", lambda: FAMILIES[arch])
    monkeypatch.setattr(registry, "choose_device", lambda comm, timeout_s: torch.device("cpu"))
    monkeypatch.setattr(Workspace, "require_fits", lambda self, geometry, comm, _: fits(self, geometry, comm, "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.is_capturing)
    if record:
        monkeypatch.setattr(Family, "load_launches", lambda *given: recorder.load(*given))
        monkeypatch.setattr(Family, "obtain", lambda family, spec, tiles, cache: {})
    return recorder
