# SPDX-License-Identifier: Apache-2.0
"""Steps with faults planted on purpose, which the self-check must find. Nothing else may use them.

Each faulty line of `FaultyStep` ends in a `planted` mark that names its family.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from trtllm_megamoe.graph.dynamic.step import StepUnderTest

_MARK = re.compile(r"# planted: (\w+)")


class FaultyStep:
    """Synchronises once in each family of the checklist that a running step can show."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.linspace(-1, 1, 32, device=device).view(4, 8)
        self.ids = torch.arange(4, device=device)

    def __call__(self) -> torch.Tensor:
        """Run one step."""
        y = self.x * 2
        scale = y.abs().amax().item()  # planted: transfer
        if (y > 0).any():  # planted: control
            y = y / scale
        positive = y[y > 0]  # planted: shape
        note = f"mean {positive.mean()}"  # planted: sneaky
        torch.cuda.synchronize()  # planted: sync
        return y * len(note)


class FrozenStep:
    """Reads a host number that changes between rounds: captured without any error, wrong at replay."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.linspace(1, 2, 32, device=device).view(4, 8)
        self.scale = 1.0

    def __call__(self) -> torch.Tensor:
        """Run one step."""
        return self.x * self.scale

    def follow(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take the host number from the round's inputs, as an engine takes a token count from its scheduler."""
        self.scale = float(values["x"][0, 0])


def planted_lines() -> dict[int, str]:
    """Line number in this file -> family of the fault on it."""
    lines, first = inspect.getsourcelines(FaultyStep)
    found = {first + offset: mark[1] for offset, line in enumerate(lines) if (mark := _MARK.search(line))}
    return found


def planted_path() -> str:
    """This file, as locations name it."""
    return str(Path(inspect.getsourcefile(FaultyStep) or __file__))


def faulty_step(device: torch.device) -> StepUnderTest:
    """The step with planted syncs."""
    step = FaultyStep(device)
    return StepUnderTest(step, {"x": step.x}, name="planted faults")


def frozen_step(device: torch.device) -> StepUnderTest:
    """The step whose host number a graph freezes."""
    step = FrozenStep(device)
    return StepUnderTest(step, {"x": step.x}, on_inputs=step.follow, name="frozen host number")
