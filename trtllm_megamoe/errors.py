# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose.

A message says what failed, what was got, what is allowed, what to do next, and on which rank.
"""

from __future__ import annotations


class MegaMoeError(Exception):
    """Base class: catch this to catch all of ours and nothing else."""


class MegaMoeConfigError(MegaMoeError, ValueError):
    """A configuration, argument or tensor that is not legal; raised before any launch or state change."""


class MegaMoeUnavailableError(MegaMoeError, RuntimeError):
    """A requirement of the machine (GPU, driver, library, launcher) is missing."""


class MegaMoeWeightError(MegaMoeError, ValueError):
    """A checkpoint or a delivery of weights that cannot be used as it is."""


class MegaMoeCapacityError(MegaMoeConfigError):
    """More tokens than the allocated per-rank bound; nothing was launched."""


class MegaMoeRankDivergenceError(MegaMoeError, RuntimeError):
    """Facts that must be identical on all ranks differ; raised with the same text on every rank."""


class MegaMoeTimeoutError(MegaMoeError, TimeoutError):
    """A bounded wait expired. The text names rank, site, peer, expected and seen."""


class MegaMoeAbortedError(MegaMoeError, RuntimeError):
    """A peer failed and told this rank to stop; the peer's own error says why."""


class MegaMoeStateError(MegaMoeError, RuntimeError):
    """A call that the object's present state does not allow; the text names the state."""


class MegaMoeVerificationError(MegaMoeError):
    """A result is outside its stated tolerance."""
