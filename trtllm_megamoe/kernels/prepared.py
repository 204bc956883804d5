# SPDX-License-Identifier: Apache-2.0
"""A launch that knows what it is and whether its GPU code is loaded.

Made by the kernel glue, called by the CUDA engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_megamoe.errors import MegaMoeStateError
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


class PreparedLaunch:
    """Refuses to be captured into a graph before it has run once: the first run loads GPU code, which a capture cannot.

    Args:
        choice: What is launched.
        launch: Puts one launch on the current stream.
        is_capturing: Whether the current stream is being captured; asked until the first run only.
    """

    def __init__(self, choice: LaunchChoice, launch: Callable[..., None], is_capturing: Callable[[], bool]) -> None:
        self.choice = choice
        self._launch = launch
        self._is_capturing = is_capturing
        self._has_run = False

    def __call__(self, **changing: int) -> None:
        """Launch.

        Raises:
            MegaMoeStateError: A graph is being captured and the kernel has never run; nothing was launched.
        """
        if self._has_run:
            self._launch(**changing)
            return
        if self._is_capturing():
            raise MegaMoeStateError(
                f"kernel {self.choice.kernel} has not run yet and a CUDA graph is being captured, which cannot load "
                "its code; call prepare() on the layer (or forward once in this bucket) before the capture"
            )
        self._launch(**changing)
        self._has_run = True
