# SPDX-License-Identifier: Apache-2.0
"""A launch that knows what it is. Made by the kernel glue, called by the CUDA engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_megamoe.tuning.table import ResolvedTactic


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """What a bucket launches.

    Attributes:
        kernel: Name of the kernel, for people.
        object_hash: Identity of its compiled object in the store.
        resolved: Its tactic and who chose it.
    """

    kernel: str
    object_hash: str
    resolved: ResolvedTactic


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A launch whose GPU code is loaded: a capture can take it, and it never stands still while peers wait for it.

    Attributes:
        choice: What is launched.
        launch: Puts one launch on the current stream.
    """

    choice: LaunchChoice
    launch: Callable[..., None]
