# SPDX-License-Identifier: Apache-2.0
"""Named random streams: the same words give the same numbers on every rank and in every process.

Used by routing and by the synthetic weights; must never touch the global generator.
"""

from __future__ import annotations

import hashlib

import torch


def stream(*words: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator whose seed is a hash of `words`, for example `stream("tokens", seed, step, rank)`.

    A GPU draws other numbers from a seed than the CPU does, but the same on every GPU.
    """
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
