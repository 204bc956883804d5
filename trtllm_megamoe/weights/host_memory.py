# SPDX-License-Identifier: Apache-2.0
"""Host memory on Linux: pages of their own for staged tensors, what the process may still take, giving back heap."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
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
_OWN_PAGES_FROM = 64 << 10
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def map_anonymous(num_bytes: int) -> mmap.mmap:
    """Private pages of their own."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGES_FROM:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class PageCache:
    """Pages of dead tensors, kept for the next tensor of the same size: touching fresh pages costs more than a read.

    Empty and closed (`limit_bytes` 0) except while a load window says how much it may keep.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._free: dict[int, list[mmap.mmap]] = {}
        self._held_bytes = 0
        # Ranks may be threads; a collector may run `give` inside `take`, so the lock is re-entrant.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> mmap.mmap:
        """Kept pages of that size, or new ones."""
        with self._lock:
            kept = self._free.get(num_bytes)
            if kept:
                self._held_bytes -= num_bytes
                return kept.pop()
        return map_anonymous(num_bytes)

    def give(self, pages: mmap.mmap) -> None:
        """Keep pages, or let them go to the system where the limit is reached."""
        with self._lock:
            if self._held_bytes + len(pages) <= self.limit_bytes:
                self._held_bytes += len(pages)
                self._free.setdefault(len(pages), []).append(pages)

    def close(self) -> None:
        """Give everything to the system and keep nothing more."""
        with self._lock:
            self.limit_bytes = self._held_bytes = 0
            self._free.clear()


PAGES = PageCache()
"""The process's cache; load windows open and close it."""


def host_bytes(shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised uint8 CPU tensor; a large one has pages of its own, which leave the heap alone when it dies.

    glibc before 2.38 seldom reuses freed aligned blocks below 32 MiB, which torch's CPU tensors are: staging there was
    measured to hold up to twice its bytes, and to keep them after the load.
    """
    num_bytes = math.prod(shape)
    if num_bytes < _OWN_PAGES_FROM:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")
    pages = PAGES.take(num_bytes)
    window = (ctypes.c_char * num_bytes).from_buffer(pages)
    weakref.finalize(window, PAGES.give, pages).atexit = False  # the tensor's storage is the window's only owner
    with torch.device("cpu"):
        return torch.frombuffer(window, dtype=torch.uint8).view(shape)


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
