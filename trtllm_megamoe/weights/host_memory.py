# SPDX-License-Identifier: Apache-2.0
"""Host memory on Linux: how much this process may still take, and giving back what it has freed."""

from __future__ import annotations

import ctypes
import math
import mmap
from pathlib import Path

import torch

_CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
    ),
)
_HUGE_PAGES_FROM = 4 << 20
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def map_anonymous(num_bytes: int) -> mmap.mmap:
    """Private pages of their own."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGES_FROM:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def host_bytes(shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised uint8 tensor in pages of its own, which go back to the system the moment the tensor dies.

    glibc before 2.38 seldom reuses freed aligned blocks below 32 MiB, which torch's CPU tensors are: staging there was
    measured to hold up to twice its bytes, and to keep them after the load.
    """
    num_bytes = math.prod(shape)
    if num_bytes == 0:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")
    with torch.device("cpu"):
        return torch.frombuffer(map_anonymous(num_bytes), dtype=torch.uint8).view(shape)


def return_freed_memory() -> None:
    """Ask the C library to give freed pages (a caller's tensors) back to the system; does nothing where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say (then nothing is refused).

    Page cache that the kernel would drop counts as available, in the machine's figure and in the group's alike.
    """
    candidates = [value for value in (_mem_available(root), _cgroup_available(root)) if value is not None]
    return min(candidates, default=None)


def _mem_available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available(root: Path) -> int | None:
    for limit_file, usage_file, stat_file in _CGROUP_FILES:
        try:
            limit = (root / limit_file).read_text().strip()
            usage = int((root / usage_file).read_text())
            stat = dict(line.split()[:2] for line in (root / stat_file).read_text().splitlines() if line)
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        cached = next((int(stat[key]) for key in _RECLAIMABLE if key in stat), 0)
        return max(0, int(limit) - usage + cached)
    return None
