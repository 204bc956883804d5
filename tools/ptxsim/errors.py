# SPDX-License-Identifier: Apache-2.0
"""What the interpreter reports. Every message names the instruction, its line in the PTX file, and the warp.

Raised by all modules of this package; `step` in run.py adds the place.
"""

from __future__ import annotations


class SimError(RuntimeError):
    """The program did something that a GPU would not accept, or whose result it would not define."""


class UnsupportedInstruction(SimError):
    """An instruction or form that the interpreter does not model; it never guesses."""


class PartialWarp(SimError):
    """An instruction for a whole warp that some of its lanes never reach."""


class OrderError(SimError):
    """An access that nothing orders after the access it depends on: a missing wait, release, acquire or fence."""


class BarrierError(SimError):
    """Wrong arrival or byte counts, use of a barrier that is not set up, or one left in the middle of a phase."""


class DeadlockError(SimError):
    """No warp can go on, or warps poll for something that nobody will write."""
