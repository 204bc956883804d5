# SPDX-License-Identifier: Apache-2.0
"""The user's choices for the plug-in, read once from the environment and compared over ranks.

The host forwards only variables with its own prefixes to workers it spawns, so `adopt_aliases` copies the known short
names to ours in the parent process.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import get_args

from trtllm_megamoe import envs
from trtllm_megamoe.config import ActivationRequest, EngineName
from trtllm_megamoe.errors import MegaMoeConfigError
from trtllm_megamoe.formats import CombineFormat, ScorePlacement

_SWITCH = ("0", "1")


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What `docs/serving.md` lets a user set; equal on all ranks except the timeout."""

    engine: EngineName
    activations: ActivationRequest
    combine_format: CombineFormat
    score_placement: ScorePlacement | None
    """None follows the model's architecture."""
    strict: bool
    timeout_s: float

    @classmethod
    def from_environment(cls) -> HostSettings:
        """Read every variable.

        Raises:
            MegaMoeConfigError: A value is not legal, or a variable and its alias contradict each other.
        """
        engine = envs.ENGINE.choose(("cuda", "cpu"))
        activations = envs.ACTIVATIONS.choose(get_args(ActivationRequest))
        placement = envs.SCORE_PLACEMENT.choose(("auto", *(p.value for p in ScorePlacement)))
        try:
            combine = CombineFormat.parse(envs.COMBINE_FORMAT.get())
        except ValueError as err:
            raise MegaMoeConfigError(f"{envs.COMBINE_FORMAT.name}: {err}") from None
        return cls(
            engine=engine,  # type: ignore[arg-type]
            activations=activations,  # type: ignore[arg-type]
            combine_format=combine,
            score_placement=None if placement == "auto" else ScorePlacement(placement),
            strict=envs.STRICT.choose(_SWITCH) == "1",
            timeout_s=_positive(envs.TIMEOUT_S),
        )

    def rank_facts(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        facts = asdict(self)
        facts.pop("timeout_s")
        return facts


def adopt_aliases() -> None:
    """Copy values set under a short name to the forwarded name. Idempotent; raises as `EnvVar.get` does."""
    for variable in envs.HOST_VARS:
        if variable.alias is not None and variable.alias in os.environ:
            os.environ[variable.name] = variable.get()


def _positive(variable: envs.EnvVar) -> float:
    try:
        value = float(variable.get())
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise MegaMoeConfigError(f"{variable.name}={variable.get()!r} is not a positive number of seconds")
    return value
