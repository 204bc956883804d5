# SPDX-License-Identifier: Apache-2.0
"""Global memory of all virtual GPUs, shared memory and TMEM of a CTA, poisoned. No instruction semantics."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import SimError
from .order import Record

GLOBAL_BASE = 1 << 40
SHARED_BASE = 0x400
"""First byte of dynamic shared memory; below it lies the part that the system reserves."""
SHARED_BYTES = 233472
CTA_SHIFT = 24
"""shared::cluster addresses: CTA rank in the cluster above this bit."""
GUARD_BYTES = 256
POISON = 0xFF
"""Unwritten bytes: NaN as a scale, as bf16, f16 and fp32; -1 as an integer."""
TMEM_LANES, TMEM_COLUMNS = 128, 512

Bytes = NDArray[np.uint8]


class GlobalMemory:
    """One flat address space; buffers are set apart by guard gaps and keep their contents from launch to launch."""

    def __init__(self, capacity: int = 1 << 22) -> None:
        self.data: Bytes = np.full(capacity, POISON, np.uint8)
        self.mapped = np.zeros(capacity, bool)
        self.racy = np.zeros(capacity, bool)
        self.record = Record(0, self.name_of)
        self._names: list[str] = []
        self._starts: list[int] = []
        self._end = GUARD_BYTES

    def add(self, name: str, contents: NDArray[Any] | int, *, racy: bool = False) -> int:
        """A buffer with these contents, or of so many poisoned bytes; returns its address.

        `racy`: see :meth:`allow_races`.
        """
        size = contents if isinstance(contents, int) else contents.nbytes
        start = self._end
        self._end = -(-(start + size + GUARD_BYTES) // 256) * 256
        if self._end > self.data.size:
            raise SimError(f"global memory of {self.data.size} bytes is too small for {name} ({size} bytes)")
        if not isinstance(contents, int):
            self.data[start : start + size] = np.ascontiguousarray(contents).reshape(-1).view(np.uint8)
        self.mapped[start : start + size] = True
        self.racy[start : start + size] = racy
        self._names.append(name)
        self._starts.append(start)
        return GLOBAL_BASE + start

    def allow_races(self, address: int, size: int) -> None:
        """Here a tensor load may touch bytes that others are writing (scale atoms hold rows of several tiles).

        Such a byte arrives as poison, so that using it shows.
        """
        start = address - GLOBAL_BASE
        self.racy[start : start + size] = True

    def view(self, name: str) -> Bytes:
        """The bytes of a buffer (not a copy)."""
        start = self._starts[self._names.index(name)]
        end = start + int(np.argmin(self.mapped[start:])) if not self.mapped[start:].all() else self.data.size
        return self.data[start:end]

    def begin_launch(self) -> None:
        """Stream order: everything before is visible."""
        self.record = Record(self._end, self.name_of)

    def locate(self, address: int) -> str:
        """`buffer+offset` for messages."""
        return self.name_of(address - GLOBAL_BASE)

    def name_of(self, offset: int) -> str:
        """`buffer+offset` of a byte of this memory."""
        i = bisect_right(self._starts, offset) - 1
        return f"{self._names[i]}+{offset - self._starts[i]:#x}" if i >= 0 else hex(offset)

    def index(self, addresses: NDArray[Any], size: int) -> Any:
        """(n, size) byte indices of n aligned accesses.

        Raises:
            SimError: outside every buffer, or misaligned.
        """
        offset = (addresses - np.uint64(GLOBAL_BASE)).astype(np.int64)
        index = offset[:, None] + np.arange(size)
        if offset.size and (offset.min() < 0 or offset.max() + size > self._end or not self.mapped[index].all()):
            for one in addresses.tolist():
                at = one - GLOBAL_BASE
                if at < 0 or at + size > self._end or not self.mapped[at : at + size].all():
                    place = f"global address {one:#x} ({size} bytes), near {self.locate(one)}"
                    raise SimError(f"{place}, lies outside every buffer")
        if (offset % size).any():
            raise SimError(f"global access of {size} bytes is not aligned")
        return index


class SharedMemory:
    """Shared memory of one CTA."""

    def __init__(self, name: str) -> None:
        self.data: Bytes = np.full(SHARED_BYTES, POISON, np.uint8)
        self.record = Record(SHARED_BYTES, lambda byte: f"shared memory of {name}+{byte:#x}")

    def index(self, addresses: NDArray[Any], size: int) -> Any:
        """(n, size) byte indices of n aligned accesses by addresses of this CTA."""
        offset = (addresses & np.uint64((1 << CTA_SHIFT) - 1)).astype(np.int64)
        if offset.size and (offset.min() < SHARED_BASE or offset.max() + size > SHARED_BYTES):
            raise SimError(f"shared address {offset.min():#x}..{offset.max():#x} lies outside shared memory")
        if (offset % size).any():
            raise SimError(f"shared access of {size} bytes is not aligned")
        return offset[:, None] + np.arange(size)


class TensorMemory:
    """TMEM of one CTA: 128 lanes x 512 columns of 32 bits; accesses are recorded by (quarter of lanes, column)."""

    def __init__(self, name: str) -> None:
        self.data = np.full((TMEM_LANES, TMEM_COLUMNS), 0xFFFFFFFF, np.uint32)
        self.record = Record(4 * TMEM_COLUMNS, lambda i: f"TMEM column {i % TMEM_COLUMNS} of {name}")
        self.columns = 0
        self.ever = False
        self.permit = True

    def check(self, column: int, count: int) -> None:
        """Raise unless the columns are allocated."""
        if column < 0 or column + count > self.columns:
            raise SimError(f"TMEM columns {column}..{column + count - 1} are not allocated ({self.columns} are)")
