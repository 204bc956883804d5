# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may still take: the machine's, bounded by its control group. Linux; read only."""

from __future__ import annotations

from pathlib import Path

_CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
    ),
)
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


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
